"""`tilewise tune` in Triton's interpreter, with a fake timer: what is chosen, kept and used."""

import contextlib
import dataclasses
import functools
import pkgutil
from concurrent.futures import ThreadPoolExecutor
from concurrent.futures.process import BrokenProcessPool

import pytest
import torch
from tests.kernels.interpreted import IN_THE_INTERPRETER
from typer.testing import CliRunner

from tilewise.kernels import tuned_file
from tilewise.kernels.spec import Pair, PairSpec
from tilewise.kernels.triton_impl import scores, sizes
from tilewise.kernels.triton_impl import tune as jobs_of
from tilewise.kernels.triton_impl.scores import Scores
from tilewise.kernels.triton_impl.two_pass.saved import SavedColumns
from tilewise.tools import tune, tune_check, tune_cli
from tilewise.train.cli import app

pytestmark = IN_THE_INTERPRETER
CPU, CARD, WIDTH = torch.device("cpu"), "A card", 16
SMALL = jobs_of.Extent(rows=32, filter_rows=32, filter_columns=64)
FIELDS = "forward", "gradient", "filter_masses", "filter_pairs"
TWO = {  # candidates in the order in which they are measured
    field: tuple(dict.fromkeys(getattr(sizes.TABLE[card, 4], field) for card in ("other", "sm_90"))) for field in FIELDS
}


@pytest.fixture(autouse=True)
def few(monkeypatch, tmp_path):
    """Two candidates for each field, and small problems."""
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    monkeypatch.setattr(jobs_of, "candidates", lambda field, item: TWO[field])
    monkeypatch.setattr(jobs_of, "COMPILED", SMALL)
    small = {"rows": 16, "filter_rows": 16, "filter_columns": 512}
    monkeypatch.setattr(tune_check, "cases", functools.partial(tune_check.cases, **small))
    sizes.forget_tuned()
    yield
    sizes.forget_tuned()


class Timer:
    """Later calls are faster; calls with a number in ``broken`` fail."""

    def __init__(self, broken=()):
        self.calls, self.broken = 0, broken

    def __call__(self, call):
        self.calls += 1
        if self.calls in self.broken:
            raise RuntimeError("out of resource: shared memory")
        call()
        return 1.0 / self.calls


class Shown(list):
    def __call__(self, phase, done, total, job):
        self.append((phase, done, total, job))


def todo():
    return jobs_of.jobs(CPU, torch.float32, [WIDTH])


def test_the_fastest_sizes_are_kept_and_used_from_then_on():
    shown, timer = Shown(), Timer()
    rates, failed = tune.measure_all(todo(), CPU, timer, shown, SMALL)
    assert len(rates) == timer.calls == len(shown) == 3 * 2 + 3 * 2 + 2 + 2
    assert failed == {}
    found = tune.keep_best(CPU, CARD, rates, failed, [WIDTH], shown)
    for field in FIELDS:  # the second one was measured later
        assert getattr(found.after[4], field) == TWO[field][1]
    assert found.before[4] == sizes.row_of(CPU, 4)
    assert found.path.is_file()
    assert sizes.tuned(CARD) == {4: {field: TWO[field][1] for field in FIELDS}}
    assert [phase for phase, done, _, _ in shown if done == 1] == ["measuring", "checking"]
    text = "\n".join(tune_cli.report(found, table=True))
    assert "4-byte types, gradient: rows=64" in text
    assert '("other", 4): KernelSizes(' in text
    assert str(found.path) in text


def test_what_was_tuned_earlier_stays(monkeypatch):
    kept = sizes.MORE["gradient"][0]
    tuned_file.write(CARD, {"2": {"gradient": list(dataclasses.astuple(kept))}})
    monkeypatch.setattr(tune, "why_not_all", lambda *args: None)
    rates = dict.fromkeys(todo(), 1.0)
    tune.keep_best(CPU, CARD, rates, {}, [WIDTH], Shown())
    assert set(sizes.tuned(CARD)) == {2, 4}
    assert sizes.tuned(CARD)[2] == {"gradient": kept}


def test_sizes_that_fail_in_one_case_are_skipped(monkeypatch):
    order = todo()
    second = [at for at, job in enumerate(order, start=1) if (job.field, job.sizes) == ("forward", TWO["forward"][1])]
    monkeypatch.setattr(tune, "why_not_all", lambda *args: None)
    rates, failed = tune.measure_all(order, CPU, Timer(broken=second[:1]), Shown(), SMALL)
    assert list(failed.values()) == ["RuntimeError: out of resource: shared memory"]
    found = tune.keep_best(CPU, CARD, rates, failed, [WIDTH], Shown())
    assert found.after[4].forward == TWO["forward"][0]
    assert "1 failed" in tune_cli.report(found, table=False)[0]


def test_sizes_with_which_another_kernel_fails_are_skipped(monkeypatch):
    """And the user learns which ones, and why."""

    def reason(device, item, row, widths):
        return "WrongNumbers: info_nce" if row.gradient == TWO["gradient"][1] else None

    monkeypatch.setattr(tune, "why_not_all", reason)
    rates = {job: float(at) for at, job in enumerate(todo(), start=1)}
    found = tune.keep_best(CPU, CARD, rates, {}, [WIDTH], Shown())
    assert found.after[4].gradient == TWO["gradient"][0]
    assert found.after[4].forward == TWO["forward"][1]
    lines = [line for line in tune_cli.report(found, table=False) if line.startswith("not taken")]
    assert lines == [f"not taken, 4-byte types, gradient: {TWO['gradient'][1]}: WrongNumbers: info_nce"]


def test_every_kind_of_call_is_checked(monkeypatch):
    row = sizes.TABLE["sm_90", 4]
    assert row != sizes.row_of(CPU, 4)
    assert tune.why_not_all(CPU, 4, row, [WIDTH]) is None
    monkeypatch.setattr("tilewise.kernels.triton_impl.ranks.FusedScorer.__init__", None)
    assert "TypeError" in tune.why_not_all(CPU, 4, row, [WIDTH])


def add_to_first(values, change):
    """Change the first number, or all of the first row."""
    values[:1] += change


# A function that launches kernels or adds them to a program; what is wrong, of its arguments and its result; and by how
# much the first of it is
FAULTS = {
    "two_pass.forward.Forward.run": (lambda args, found: found.get("row_lse"), 0.3),
    "two_pass.backward.Backward.run": (lambda args, found: found[1], 1e-2),
    "two_pass.strategy.guided_forward": (lambda args, found: found[0]["row_lse"], 0.3),
    "two_pass.gradient_sum.row_product": (lambda args, found: args[1], 7.0),
    "one_pass.softmax.Softmax.losses_and_grads": (lambda args, found: found[0], 0.5),
    "one_pass.sigmoid.Sigmoid.losses_and_grads": (lambda args, found: found[0], 0.5),
    "ranks.FusedScorer.count_better": (lambda args, found: found[0], 1),
    "ranks.FusedScorer.find_best": (lambda args, found: args[4].score, 7.0),
    "filtered.forward.FilterForward.run": (lambda args, found: found[0].row_lse, 0.3),
    "filtered.backward.FilterBackward.run": (lambda args, found: found.a, 0.2),
}


@pytest.mark.parametrize("name", FAULTS)
def test_sizes_with_wrong_numbers_are_refused(name, monkeypatch):
    """Of every kernel whose sizes are tuned. Wrong are those that the row gives, not those with the sizes in use."""
    row = sizes.TABLE["sm_90", 4]
    owner, _, last = name.rpartition(".")
    owner = pkgutil.resolve_name(f"tilewise.kernels.triton_impl.{owner}")
    plain, (wrong_of, change) = getattr(owner, last), FAULTS[name]

    def wrong(*args, **more):
        found = plain(*args, **more)
        values = wrong_of(args, found) if sizes.row_of(CPU, 4) == row else None
        if isinstance(values, torch.Tensor):
            add_to_first(values, change)
        elif values is not None:
            holder = args[0] if isinstance(args[0], Scores) else args[0].scores
            holder.program.call(add_to_first, values, change)
        return found

    monkeypatch.setattr(owner, last, wrong)
    assert tune.why_not_all(CPU, 4, row, [WIDTH]).startswith("WrongNumbers: ")
    assert not scores._programs


@pytest.mark.parametrize("width", [1024, 2048, 4096, 8192])
def test_a_large_head_with_saved_columns_is_checked(width):
    for dtype in (torch.bfloat16, torch.float16):
        names = [case.name for case in tune_check.cases(dtype, width)]
        assert ("a large head" in names) == (dtype == torch.bfloat16)
    rows, classes = tune_check.HEAD_ROWS, tune_check.head_classes(width)
    a, b = (torch.empty(n, width, dtype=torch.bfloat16, device="meta") for n in (rows, classes))
    pair = Pair(a=a, b=b, scale=torch.empty((), device="meta"), row_key=torch.empty(rows, device="meta"))
    assert SavedColumns.of(pair, PairSpec(row_lse=True, positive="one")) is not None


def test_compiling_reports_what_cannot_be_compiled(monkeypatch):
    shown, some = Shown(), todo()[:3]
    monkeypatch.setattr(jobs_of, "once", Timer(broken=[2]))
    with ThreadPoolExecutor(1) as pool:
        failed = tune.compile_all(some, CPU, pool, shown)
    assert failed == {some[1]: "RuntimeError: out of resource: shared memory"}
    assert [done for _, done, _, _ in shown] == [1, 2, 3]


def test_a_pool_that_breaks_while_jobs_are_submitted_fails_nothing():
    class Pool:
        def submit(self, *unused):
            raise BrokenProcessPool

    assert tune.compile_all(todo()[:3], CPU, Pool(), Shown()) == {}


def test_large_tiles_are_not_compiled_in_vain(monkeypatch):
    card = type("Card", (), {"shared_memory_per_block_optin": 101376})
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda device: card)
    cuda = torch.device("cuda", 0)
    assert not jobs_of.may_fit(sizes.Sizes(128, 256, 64, 8, 4, 1, 8), 2, cuda)
    assert jobs_of.may_fit(sizes.TABLE["other", 2].forward, 2, cuda)
    assert jobs_of.may_fit(sizes.TABLE["other", 2].filter_pairs, 2, cuda)


@pytest.fixture
def current(monkeypatch):
    """Two cards, of which the first is the current one; a list with the current device at each job."""
    at, seen = [0], []

    @contextlib.contextmanager
    def device_of(device):
        before, at[0] = at[0], device.index
        yield
        at[0] = before

    def run_job(*args):
        seen.append(at[0])
        return 1.0

    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 2)
    monkeypatch.setattr(torch.cuda, "current_device", lambda: at[0])
    monkeypatch.setattr(torch.cuda, "device", device_of)
    monkeypatch.setattr(jobs_of, "run_job", run_job)
    return seen


def test_another_card_than_the_first_is_current_while_it_is_tuned(current, monkeypatch):
    some, kept = todo()[:2], []
    monkeypatch.setattr(jobs_of, "jobs", lambda device, *args: some if device.index == 1 else [])
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda device: CARD)
    monkeypatch.setattr(tune, "ProcessPoolExecutor", lambda *args: ThreadPoolExecutor(1))
    monkeypatch.setattr(tune, "keep_best", lambda device, *args: kept.append((device, torch.cuda.current_device())))
    tune.tune(["float32"], [WIDTH], 1, Shown(), "cuda:1")
    assert current == [1] * 4  # two compiled, two measured
    assert kept == [(torch.device("cuda", 1), 1)]
    assert torch.cuda.current_device() == 0


def test_a_job_in_a_process_of_its_own_runs_on_its_device(monkeypatch):
    """There the first card is the current one."""
    seen, inside = [], []

    @contextlib.contextmanager
    def watched(features):
        seen.append(features.device)
        inside.append(1)
        yield
        inside.pop()

    def timer(call):
        assert inside
        return 1.0

    monkeypatch.setattr(jobs_of, "on_device", watched)
    jobs_of.run_job(todo()[0], CPU, SMALL, timer)
    assert seen == [CPU]


@pytest.mark.parametrize("name", ["cuda:2", "cpu", "gpu"])
def test_a_device_that_is_not_there(name, current):
    with pytest.raises(tune.Untunable, match=f"one of cuda:0 to cuda:1, got {name}"):
        tune.check_tunable(name)
    assert tune.check_tunable("cuda:1") == torch.device("cuda", 1)
    assert tune.check_tunable() == tune.check_tunable("cuda") == torch.device("cuda", 0)


def test_without_a_card_there_is_one_sentence_and_exit_code_2():
    done = CliRunner().invoke(app, ["tune"])
    assert done.exit_code == 2
    assert done.stderr.strip().count("\n") == 0
    assert "needs a CUDA device, and torch sees none" in done.stderr


def test_the_command_tunes_and_reports(monkeypatch, tmp_path):
    row = sizes.TABLE["other", 4]
    job = jobs_of.Job("forward", "clip", row.forward, 64, torch.float32)
    found = tune.Tuning(CARD, tmp_path / "file.json", {job: 5.0}, {}, {4: row}, {4: row}, ["a row"])
    wanted = {}

    def fake(types, widths, processes, show, device):
        wanted.update(types=types, widths=widths, processes=processes, device=device)
        show("compiling", 1, 2, "a job")
        return found

    monkeypatch.setattr(tune_cli, "check_tunable", lambda device: CPU)
    monkeypatch.setattr(tune_cli, "tune", fake)
    done = CliRunner().invoke(
        app, ["tune", "--dtype", "float32", "--width", "64", "--jobs", "3", "--table", "--device", "cuda:1"]
    )
    assert done.exit_code == 0, done.output
    assert wanted == {"types": ["float32"], "widths": [64], "processes": 3, "device": "cuda:1"}
    assert "the sizes in use are the fastest of those measured" in done.stdout
    assert "a row" in done.stdout


def test_a_tuning_in_which_everything_fails_is_no_success(monkeypatch, tmp_path):
    row = sizes.TABLE["other", 4]
    job = jobs_of.Job("forward", "clip", row.forward, 64, torch.float32)
    found = tune.Tuning(CARD, tmp_path / "file.json", {}, {job: "RuntimeError: no"}, {4: row}, {4: row}, [])
    monkeypatch.setattr(tune_cli, "check_tunable", lambda device: CPU)
    monkeypatch.setattr(tune_cli, "tune", lambda *_: found)
    done = CliRunner().invoke(app, ["tune"])
    assert done.exit_code == 1
    assert "0 measured, 1 failed (--table shows why" in done.stdout
    assert "nothing could be measured, so the sizes in use stay" in done.stdout
    assert "saved" not in done.stdout
    assert "RuntimeError: no" in CliRunner().invoke(app, ["tune", "--table"]).stdout


def test_sizes_that_cannot_be_saved_are_shown_and_are_no_success(monkeypatch):
    rates, failed = tune.measure_all(todo(), CPU, Timer(), Shown(), SMALL)
    tuned_file.path_for(CARD).mkdir(parents=True)  # a folder in the place of the file
    found = tune.keep_best(CPU, CARD, rates, failed, [WIDTH], Shown())
    monkeypatch.setattr(tune_cli, "check_tunable", lambda device: CPU)
    monkeypatch.setattr(tune_cli, "tune", lambda *_: found)
    done = CliRunner().invoke(app, ["tune"])
    assert done.exit_code == 1
    assert f"cannot write {found.path}: Is a directory. Free some space" in done.stdout
    assert all(row in done.stdout for row in found.rows)
    assert "saved" not in done.stdout


def test_an_unknown_type_is_an_error():
    done = CliRunner().invoke(app, ["tune", "--dtype", "int8"])
    assert "one of bfloat16, float32, got int8" in str(done.exception)
