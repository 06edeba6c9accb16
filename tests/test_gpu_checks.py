"""The questions that tests/gpu asks, asked here of the torch backend on the CPU: a wrong question fails here first."""

import json
import random
import signal
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from tests import random_calls
from tests.gpu import checks, parallel, sanitize
from tests.gpu.checks import Place
from tests.losses.loss_cases import Problem
from tests.random_programs import DROP_INS
from tests.random_settings import FAMILIES

from tilewise.cache.randomness import RandomState

CPU = Place("cpu", "torch")
pytestmark = pytest.mark.usefixtures("small_tiles")


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=["float32", "bfloat16"])
@pytest.mark.parametrize("name", ["clip", "nt_xent", "siglip", "cross_entropy"])
def test_cases(name, dtype):
    checks.check_case(CPU, name, dtype, 1, 3, workspace_mib=1)
    checks.check_layout(CPU, name, dtype, 4)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16], ids=["float32", "bf16", "fp16"])
@pytest.mark.parametrize("name", ["clip", "siglip", "supcon", "cross_entropy_everything"])
def test_losses(name, dtype):
    checks.check_loss(CPU, name, dtype, n=150, d=40, seed=5)


@pytest.mark.parametrize("beta", [0.0, 0.03, 0.5, 1.0])
def test_a_good_student(beta):
    checks.check_good_student(CPU, beta)


def test_behaviour():
    checks.check_same_twice(CPU, "clip", torch.bfloat16, 1, 3)
    checks.check_frozen(CPU, torch.float32, n=90, d=12)
    checks.check_autocast(CPU, n=90, d=12)
    checks.check_tf32(CPU, n=100, d=32, seed=3)
    checks.check_tf32_errors(CPU, "nt_xent", n=64, d=32, seed=3)
    checks.check_search_in_tf32(CPU, n=64, m=200, d=32, seed=3)
    checks.check_never_negative(CPU, torch.bfloat16, -1e-4, n=300, d=64)
    checks.check_never_negative(CPU, torch.float32, -1e-5, n=300, d=64)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32], ids=["bf16", "fp16", "fp32"])
@pytest.mark.parametrize("picks", [0, 5])
def test_statistics_of_tokens(dtype, picks):
    checks.check_tokens(CPU, dtype, n=150, d=40, seed=5, picks=picks)


def test_ignored_rows(monkeypatch):
    checks.check_ignored(CPU, torch.float32, n=90, d=12, seed=5, patch=monkeypatch)


@pytest.mark.parametrize("columns", [True, False])
@pytest.mark.parametrize("n, m", [(300, 300), (700, 40), (40, 700)])
def test_large_sizes_are_asked_in_chunks(n, m, columns, monkeypatch):
    monkeypatch.setattr(checks, "CHUNK", 64)
    checks.check_large(CPU, n, m, 16, torch.bfloat16, samples=20, columns=columns)
    checks.check_large(CPU, n, m, 16, torch.float32, samples=20, columns=columns)


@pytest.mark.parametrize("spoil", ["row_lse", "col_lse", "row_pos", "a", "b"])
def test_a_wrong_answer_at_the_far_end_is_found(spoil, monkeypatch):
    backend = checks.load_backend("torch")

    class Wrong:
        def forward(self, *args):
            stats = backend.forward(*args)
            if spoil in vars(stats):
                getattr(stats, spoil)[-1] += 1.0
            return stats

        def backward(self, *args):
            grads = backend.backward(*args)
            if spoil in vars(grads):
                getattr(grads, spoil)[-1] *= -1.0
            return grads

    monkeypatch.setattr(checks, "load_backend", lambda name: Wrong())
    with pytest.raises(AssertionError, match="relative error"):
        checks.check_large(CPU, 200, 180, 16, torch.float32, samples=10)


def test_sanitize(capsys):
    sanitize.main("cpu", "torch", torch.float32)
    assert capsys.readouterr().out.count(":") == len(sanitize.CALLS) + 2


SOME_TESTS = """
import pytest
@pytest.mark.parametrize("i", range(9))
def test_some(i):
    assert i != 7
def test_skipped():
    pytest.skip("no reason")
"""


@pytest.mark.parametrize("processes", [2])
def test_processes_share_the_tests_and_one_summary_tells_of_all(processes, tmp_path):
    """Every test runs once, whoever takes it; a failure is named and ends with 1."""
    (tmp_path / "conftest.py").write_text((Path(__file__).parent / "gpu" / "conftest.py").read_text())
    (tmp_path / "test_some_of_many.py").write_text(SOME_TESTS)
    command = [sys.executable, "-m", "tests.gpu.parallel", str(processes), "--json", str(tmp_path / "out" / "it.json")]
    command += ["--commit", "abc", "--", str(tmp_path), "-c", str(tmp_path / "none.ini"), "--rootdir", str(tmp_path)]
    (tmp_path / "none.ini").write_text("[pytest]\n")
    done = subprocess.run(command, cwd=parallel.ROOT, capture_output=True, text=True)
    assert done.returncode == 1, done.stdout + done.stderr
    summary = json.loads((tmp_path / "out" / "it.json").read_text())
    assert (summary["passed"], summary["failed"], summary["skipped"], summary["errors"]) == (8, 1, 1, 0)
    assert summary["failures"] == ["test_some_of_many::test_some[7]: assert 7 != 7"]
    assert summary["commit"] == "abc"
    assert summary["processes"] == processes
    assert "assert 7 != 7" in done.stdout


HANGS = """
import time
def test_quick():
    pass
def test_hangs():
    time.sleep(60)
"""


def test_a_test_that_hangs_is_named_with_where_it_is(tmp_path):
    there = (Path(__file__).parent / "gpu" / "conftest.py").read_text()
    (tmp_path / "conftest.py").write_text(there.replace("LONG_S = 100.0", "LONG_S = 0.5"))
    (tmp_path / "test_hangs.py").write_text(HANGS)
    (tmp_path / "none.ini").write_text("[pytest]\n")
    command = [sys.executable, "-m", "tests.gpu.parallel", "1", "--max-seconds", "8"]
    command += ["--", str(tmp_path), "-c", str(tmp_path / "none.ini"), "--rootdir", str(tmp_path)]
    done = subprocess.run(command, cwd=parallel.ROOT, capture_output=True, text=True)
    assert done.returncode == 1, done.stdout + done.stderr
    summary = json.loads(done.stdout[done.stdout.rindex("\n{") :])
    assert (summary["passed"], summary["failed"]) == (1, 0)
    assert "test_hangs.py::test_hangs did not end" in summary["failures"]
    assert "process 0 was long at" in done.stdout
    assert "in test_hangs" in done.stdout


def test_a_process_that_dies_is_a_failure(tmp_path):
    summary = parallel.merge(tmp_path, [0, -9])
    assert summary["errors"] == 2  # neither left results
    assert "process 1 ended with -9" in summary["failures"]


def test_what_takes_too_long_is_interrupted():
    """As pytest, which then writes its results; one that ignores it is killed, and one that ended is left alone."""
    wait = "import time; print(1, flush=True); time.sleep(60)"
    codes = {
        "raise SystemExit(5)": 5,
        wait: -signal.SIGINT,
        "import signal; signal.signal(2, signal.SIG_IGN); " + wait: -9,
    }
    how = {"stdout": subprocess.PIPE, "preexec_fn": parallel.hear_interrupts}
    running = [subprocess.Popen([sys.executable, "-c", code], **how) for code in codes]
    running[0].wait()
    for process in running[1:]:
        process.stdout.read(1)
    grace, parallel.GRACE_S = parallel.GRACE_S, 2.0
    try:
        assert parallel.wait_for(running, 0.2) == (list(codes.values()), True)
        assert parallel.wait_for(running[:1], None) == ([5], False)
    finally:
        parallel.GRACE_S = grace
        for process in running:
            process.stdout.close()


def test_random_calls(capsys):
    assert random_calls.ask(CPU, range(40, 46), seconds=300.0) == 0
    assert capsys.readouterr().out == "6 calls, 0 wrong\n"
    assert random_calls.draw(3) == random_calls.draw(3) != random_calls.draw(4)
    assert random_calls.ask(CPU, range(9), seconds=0.0) == 0  # the time is up


@pytest.mark.parametrize("name", sorted(FAMILIES))
def test_losses_with_random_settings(name):
    for seed in range(6):
        settings = FAMILIES[name].draw(random.Random(seed))
        call = random_calls.Call(name, torch.float64, 21, 6, "mean", 0.0, {}, settings)
        assert random_calls.wrong(call, CPU, seed) == []


@pytest.mark.parametrize("name", sorted(DROP_INS))
def test_every_drop_in_with_random_settings(name):
    settings = {"name": name, "temperature": 0.5}
    call = random_calls.Call("a drop-in", torch.float64, 21, 6, "mean", 0.0, {}, settings)
    assert random_calls.wrong(call, CPU, 3) == []


def test_a_cached_step_with_other_dropout_in_backward_is_told(monkeypatch):
    settings = {"loss": "clip", "dropout": 0.3, "chunks": (2, 1), "shared": False, "function": False}
    call = random_calls.Call("a cached step", torch.float64, 21, 6, "mean", 0.0, {}, settings)
    assert random_calls.wrong(call, CPU, 3) == []
    monkeypatch.setattr(RandomState, "restore", lambda self: None)
    assert {line.split(":")[0] for line in random_calls.wrong(call, CPU, 3)} >= {"x", "a_in", "a_out"}


def test_dense_errors_of_random_calls_are_finite_and_of_leaves_nearby():
    def dense(p, reduction):
        return p.x.square().sum()  # infinite in float16

    made = Problem({"x": torch.full((3,), 300.0, dtype=torch.float16).requires_grad_()}, dense, dense)
    call = random_calls.Call("clip", torch.float16, 3, 1, "mean", 0.0, {}, {})
    errors = [random_calls.dense_errors(call, made, torch.ones(()), draw)["loss"] for draw in (0, 1, 2)]
    assert len(set(errors)) == 3
    assert all(0 < error < 0.125 * 2**-7 * 3 * 300.0**2 for error in errors)


@pytest.mark.parametrize("spoil", ["value", "failure", 1.1, -1.0, 0.0])
@pytest.mark.parametrize(
    "seed, leaves",
    [
        (13, {"hidden", "classifier", "scale", "bias"}),
        (12, {"query", "key", "temperature"}),
        (139, {"x", "y", "scale", "a_in", "a_out", "b_in", "b_out"}),  # a cached step
        (229, {"a", "b", "t"}),  # a drop-in
    ],
)
def test_a_random_call_that_is_wrong_is_told(seed, leaves, spoil, monkeypatch, capsys):
    def spoiled(loss, arguments, upstream=None, **how):
        value, grads = solve(loss, arguments, upstream, **how)
        if "options" not in how:
            return value, grads
        if spoil == "failure":
            raise RuntimeError("out of luck\nand more")
        return (1.1 * value, grads) if spoil == "value" else (value, {name: spoil * x for name, x in grads.items()})

    solve = random_calls.solve
    monkeypatch.setattr(random_calls, "solve", spoiled)
    assert random_calls.ask(CPU, range(seed, seed + 1), seconds=300.0) == 1
    said = capsys.readouterr().out
    assert said.startswith(f"seed {seed}: RuntimeError: out of luck: Call(" if spoil == "failure" else f"seed {seed}: ")
    assert said.endswith("1 calls, 1 wrong\n")
    if isinstance(spoil, float):  # every leaf, numbers too
        assert {line.split(": ")[1] for line in said.splitlines()[:-1]} == leaves
