"""Programs as data: steps, memory and text, with launches replaced by nothing."""

import functools
import time
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch

pytest.importorskip("triton", reason="triton is not installed on this platform")

from tests.kernels.interpreted import scores_of
from torch.multiprocessing.reductions import StorageWeakRef

from tilewise.kernels.backend import SmallKey
from tilewise.kernels.spec import Needs, Pair, PairShape, PairSpec
from tilewise.kernels.triton_impl.buffers import Buffer
from tilewise.kernels.triton_impl.one_pass.softmax import Softmax
from tilewise.kernels.triton_impl.program import Launch, Loop, Product, Program, Total
from tilewise.kernels.triton_impl.small import programs, stats
from tilewise.kernels.triton_impl.two_pass.backward import Backward
from tilewise.kernels.triton_impl.two_pass.forward import Forward
from tilewise.options import TileOptions

SPECS = {
    "info_nce": PairSpec(row_lse=True, positive="one"),
    "clip": PairSpec(row_lse=True, col_lse=True, positive="one"),
    "siglip": PairSpec(softplus=True, positive="one"),
    "nt_xent": PairSpec(row_lse=True, positive="one", mask_self=True, symmetric=True, in_range=True),
}


def key(name, n=64, m=64, dtype=torch.bfloat16, needs=None, **more):
    has_key = name == "nt_xent"
    shape = PairShape(n, m, 32, dtype, torch.device("cuda"), has_row_key=has_key)
    return SmallKey(shape, SPECS[name], needs or Needs(), "torch", frozenset(), False, more.get("kept", False))


def names(program):
    return [step.kernel.fn.__name__ if isinstance(step, Launch) else type(step).__name__ for step in program.steps]


def test_the_steps_of_each_loss():
    assert names(programs.loss_program(key("info_nce"))) == ["Product", "rows_kernel", "Product", "Product", "Total"]
    rows = ["Product", "rows_kernel", "rows_kernel", "both_kernel", "Product", "Product", "finish_kernel"]
    assert names(programs.loss_program(key("clip", needs=Needs(scale=True)))) == rows
    assert names(programs.loss_program(key("nt_xent"))) == ["Product", "rows_kernel", "both_kernel", "Product", "Total"]
    only_loss = programs.loss_program(key("siglip", needs=Needs(a=False, b=False)))
    assert names(only_loss) == ["Product", "rows_kernel", "Total"]


def test_ignored_rows_of_a_few_are_counted_without_a_step():
    spec, steps = replace(SPECS["info_nce"], drop_rows=True, ignored=-100), []
    for n in (1024, 4096):
        shape = PairShape(n, 512, 32, torch.bfloat16, torch.device("cuda"), has_row_key=True)
        steps.append(names(programs.loss_program(SmallKey(shape, spec, Needs(), "torch", frozenset(), False, True))))
    assert steps[0] == ["Product", "rows_kernel", "Product", "Product", "Total"]
    assert steps[1] == ["share_kernel", *steps[0]]


def test_the_steps_of_statistics():
    """Nothing of the size of the scores is held between the two programs."""
    spec = PairSpec(row_lse=True, row_entropy=True, row_top=True, positive="one", drop_rows=True)
    shape = PairShape(64, 512, 32, torch.bfloat16, torch.device("cuda"), has_row_key=True)
    kind = SmallKey(shape, spec, Needs(), "torch", frozenset(), False, False, scalar=False)
    forward = stats.stats_program(kind, own_shift=True)
    assert names(forward) == ["Product", "stats_kernel"]
    assert all(buffer.shape == (64,) for buffer in forward.outputs)
    backward = stats.stats_gradient_program(kind, ("row_lse", "row_pos"), Needs())
    assert names(backward) == ["Product", "stats_gradient_kernel", "Product", "Product"]
    learned = Needs(scale=True, bias=True)
    assert names(stats.stats_gradient_program(kind, ("row_lse",), learned)) == [
        *("Product", "stats_gradient_kernel", "Product", "Product", "gradient_kernel", "Total", "columns_kernel"),
    ]


def test_a_frozen_side_costs_no_product():
    program = programs.loss_program(key("info_nce", needs=Needs(a=True, b=False)))
    assert names(program).count("Product") == 2
    assert [buffer.name for buffer in program.outputs] == ["loss", "dA"]


def test_the_text_names_every_step_and_the_peak():
    text = str(programs.loss_program(key("info_nce", n=64, m=64)))
    assert "x = a @ b'" in text
    assert "rows_kernel x 64: x" in text
    assert "dB = G' @ a" in text
    assert "peak: " in text


def test_the_documentation_shows_this_program():
    shape = PairShape(1024, 1024, 512, torch.bfloat16, torch.device("cuda"))
    program = programs.loss_program(SmallKey(shape, SPECS["info_nce"], Needs(), "torch", frozenset(), False, False))
    page = (Path(__file__).parents[2] / "docs" / "concepts" / "gpu.md").read_text()
    assert page.split("<!-- program: info_nce -->\n\n```\n")[1].split("\n```")[0] == str(program)


CARD = torch.device("cuda", 7)


@pytest.fixture
def card(monkeypatch):
    """A card that only answers questions."""
    answers = {"get_device_properties": SimpleNamespace(multi_processor_count=132), "get_device_capability": (9, 0)}
    for name, answer in (answers | {"get_device_name": "a card"}).items():
        monkeypatch.setattr(torch.cuda, name, lambda device, answer=answer: answer)


def on_card(kind, name, n, *, bias=False):
    """The program of forward or backward in two passes, or of one pass, of bfloat16 features."""
    spec, empty = SPECS[name], functools.partial(torch.empty, device="meta")
    a, b = (empty(n, 512, dtype=torch.bfloat16) for _ in range(2))
    more = {"row_key": empty(n, dtype=torch.int64)} if spec.symmetric else {}
    more |= {"bias": empty(n)} if bias else {}
    scores = scores_of(Pair(a=a, b=a if spec.symmetric else b, scale=empty(()), **more), spec, TileOptions(), CARD)
    program = scores.program
    if kind == "forward":
        program.outputs = list(Forward(scores).run().values())
        return program.done()
    if kind == "one pass":
        program.outputs = list(Softmax(scores, {"weight": program.given("weight", empty(n))}).losses_and_grads(Needs()))
        return program.done()
    columns = ("col_lse", "grad_col") if spec.col_lse else ()
    given = {part: program.given(part, empty(n)) for part in ("row_lse", "own", "grad_row", "grad_pos", *columns)}
    program.outputs = list(Backward(scores, given, Needs(scale=True, bias=bias), torch.bfloat16).run())
    return program.done()


def several():
    """Programs with much scratch, in loops and out of them."""
    yield programs.loss_program(key("clip", n=97, m=97, needs=Needs(scale=True)))
    for name in ("clip", "nt_xent"):
        yield on_card("forward", name, 300_000)
        yield on_card("backward", name, 300_000)
    yield on_card("one pass", "info_nce", 70_000)
    yield on_card("backward", "info_nce", 70_000, bias=True)


@pytest.mark.usefixtures("card")
def test_the_peak_is_that_of_the_allocations(monkeypatch):
    """Every allocation of a run is counted, while steps do nothing but allocate their results."""
    plain = torch.empty_strided

    def allocated(step, values):
        out = step.out
        if step.makes:
            values.tensors[out.place] = torch.empty_strided(out.shape, out.strides, dtype=out.dtype)

    for step in (Product, Total):
        monkeypatch.setattr(step, "run", allocated)
    monkeypatch.setattr(Program, "_step", lambda *_: None)
    for program in several():
        sizes = []

        def counted(*size, sizes=sizes, **how):
            made = plain(*size, **how)
            now = sum(-(-bytes // 512) * 512 for memory, bytes, _ in sizes if not memory.expired()) + made.nbytes
            sizes.append((StorageWeakRef(made.untyped_storage()), made.nbytes, -(-now // 512) * 512))
            return made

        monkeypatch.setattr(torch, "empty_strided", counted)
        given = program.buffers[: program.count]
        program.run(
            torch.device("cpu"),
            *[0 if one.is_number else plain(one.shape, one.strides, dtype=one.dtype) for one in given],
        )
        assert max(now for *_, now in sizes) == program.peak_bytes


def lifetimes(program):
    """The first and the last step of each buffer that the program allocates, by place."""
    found = {}
    for number, step in enumerate(program.steps):
        for operand in step.operands:
            buffer = Buffer.under(operand)
            if buffer is not None and buffer.made:
                found[buffer.place] = found.get(buffer.place, (number,))[0], number
    return found


@pytest.mark.usefixtures("card")
def test_scratch_in_the_block_does_not_overlap():
    """Two parts of the block lie apart if some step lies within both lifetimes; others share memory."""
    shared = 0
    for program in several():
        alive = lifetimes(program)
        end = {place: at + program.buffers[place].bytes for place, at in program.block.items()}
        assert max(end.values(), default=0) == program.block_bytes
        for place, start in program.block.items():
            assert start % 512 == 0
            for other in program.block.keys() - {place}:
                together = alive[place][0] <= alive[other][1] and alive[other][0] <= alive[place][1]
                apart = end[place] <= program.block[other] or end[other] <= start
                assert apart or not together
                shared += not apart
    assert shared


@pytest.mark.usefixtures("card")
def test_memory_is_freed_after_its_last_step():
    for program in several():
        alive, kept = lifetimes(program), {out.place for out in program.outputs if isinstance(out, Buffer)}
        freed = {place: number for number, (_, _, places) in enumerate(program.turns) for place in places}
        assert freed == {place: alive[place][1] for place in alive.keys() - program.block.keys() - kept}
        of_g = [place for place in freed if program.buffers[place].name == "G"]
        assert all(freed[place] < len(program.steps) - 1 for place in of_g)
    assert of_g
    parts = [alive[buffer.place] for buffer in program.buffers if buffer.name == "bias_part"]
    assert len(parts) > 4, "macro-tiles have sums of their own, which go as they come"
    assert max(sum(low <= number <= high for low, high in parts) for number in range(len(program.steps))) <= 3


def test_only_scores_and_g_are_of_the_size_of_the_block():
    program = programs.loss_program(key("info_nce", n=512, m=512))
    block = 512 * 512
    assert program.peak_bytes < 6 * block + 64 * 1024 + 2 * 512 * 32 * 2 + 8 * 512


def test_programs_are_built_in_milliseconds():
    start = time.perf_counter()
    for n in range(100, 120):
        programs.loss_program(key("clip", n=n, m=n, needs=Needs(scale=True)))
    assert time.perf_counter() - start < 20 * 0.05


def test_launches_replaced_by_nothing(monkeypatch):
    """The host code of a program runs alone, in the order of its steps, and returns what it allocated."""
    seen = []
    monkeypatch.setattr(
        "tilewise.kernels.triton_impl.program.compiled_launch",
        lambda kernel, *_: lambda *arguments: seen.append(kernel.fn.__name__),
    )
    program = programs.loss_program(key("clip", n=8, m=8, dtype=torch.float32, needs=Needs(scale=True)))
    x = torch.randn(8, 32)
    found = program.run(torch.device("cpu"), x, x, 2.0, 0.5)
    assert seen == ["rows_kernel", "rows_kernel", "both_kernel", "finish_kernel"]
    assert [tuple(value.shape) for value in found] == [(), (8, 32), (8, 32), ()]
    assert isinstance(program.steps[0], Product)
    assert not any(isinstance(step, Total) for step in program.steps)


def steps_of(steps):
    """How many there are, with those inside of loops."""
    return sum(1 + steps_of(step.steps) if isinstance(step, Loop) else 1 for step in steps)


@pytest.mark.usefixtures("card")
@pytest.mark.parametrize("name", ["clip", "nt_xent"])
@pytest.mark.parametrize("kind", ["forward", "backward"])
def test_the_program_of_four_million_rows_is_short(kind, name):
    """Its launches, up to a million, are loops, also in the text."""
    seconds = []
    for _ in range(3):
        start = time.thread_time()
        program = on_card(kind, name, 4_194_304)
        seconds.append(time.thread_time() - start)
    assert min(seconds) < 0.05
    assert steps_of(program.steps) <= 200
    lines = str(program).split("\n")
    assert len(lines) == steps_of(program.steps) + 2
    turns = [int(line.split()[-2]) for line in lines if line.endswith(" times:")]
    assert max(turns) > 100
    assert any(line.startswith(" " * 8) for line in lines), "a loop in a loop"
