"""How programs run: loops, steps of pairs with themselves, addresses on a card, and threads."""

from concurrent.futures import ThreadPoolExecutor

import pytest
import torch

pytest.importorskip("triton", reason="triton is not installed on this platform")

from tests.kernels.test_program import steps_of
from triton.tools.tensor_descriptor import TensorDescriptor

from tilewise.kernels.triton_impl import buffers
from tilewise.kernels.triton_impl import program as programming
from tilewise.kernels.triton_impl.buffers import Descriptor
from tilewise.kernels.triton_impl.launch import kernel
from tilewise.kernels.triton_impl.program import Program
from tilewise.kernels.triton_impl.small import kernels


@kernel(dynamic=("n", "m", "ahead"))
def self_kernel(g, n, m, ahead):
    pass


@kernel(dynamic=("number",))
def address_kernel(part, scratch, out, desc, number):
    pass


def noted(write, least_turns, monkeypatch):
    """What the steps that ``write(program, step)`` adds get, in order; ``step(*places)`` adds one for a macro-tile."""
    monkeypatch.setattr(programming, "LEAST_TURNS", least_turns)
    program, seen = Program(), []
    x = program.given("x", torch.empty(100, 3))
    ahead = program.given("ahead")

    def note(out, number, *parts):
        seen.append((number, *[part.tolist() for part in parts]))
        out.fill_(number)

    def step(*places):
        start = places[0].start - places[-1].start
        out = program.scratch("out", (len(places), 2), torch.float32)
        program.call(note, out[1:], ahead + start, *[x[place, 1:] for place in places])
        program.call(lambda out, size: seen.append((out.tolist(), size)), out[1:], places[-1].stop)

    write(program, step)
    program.done().run(torch.device("cpu"), torch.arange(300.0).view(100, 3), 1000)
    return program, seen


def cut(size, step=3):
    return [slice(start, min(start + step, size)) for start in range(0, size, step)]


def two_levels(program, step):
    program.over(cut(20), lambda i: program.over(cut(31), lambda j: step(i, j)))


WRITTEN = {
    "flat": lambda program, step: program.over(cut(100), step),
    "two levels": two_levels,
    "regions": lambda program, step: program.over([*cut(21), slice(21, 31), *cut(100)[11:]], step, (9, 21)),
    "triangle": lambda program, step: program.above_diagonal(cut(38), step),
    "triangle with diagonal": lambda program, step: program.above_diagonal(cut(49), step, diagonal=True),
    "three levels": lambda program, step: program.over(cut(18), lambda i: two_levels(program, step)),
}


@pytest.mark.parametrize("write", WRITTEN.values(), ids=WRITTEN)
def test_a_loop_is_its_steps_written_out(write, monkeypatch):
    program, seen = noted(write, programming.LEAST_TURNS, monkeypatch)
    plain, want = noted(write, 1000, monkeypatch)
    assert seen == want
    assert len(want) == len(plain.steps) == steps_of(plain.steps)
    assert steps_of(program.steps) < 0.8 * len(plain.steps)


@pytest.mark.parametrize("count", range(16))
@pytest.mark.parametrize("diagonal", [False, True])
def test_a_triangle_of_any_size_has_every_pair_once(count, diagonal, monkeypatch):
    def write(program, step):
        program.above_diagonal(cut(3 * count), step, diagonal=diagonal)

    _, seen = noted(write, programming.LEAST_TURNS, monkeypatch)
    assert seen == noted(write, 1000, monkeypatch)[1]
    assert len(seen) == 2 * (count * (count - 1) // 2 + diagonal * count)


def other_steps(program, turn, x):
    for _ in range(turn + 1):
        program.call(print, x)


DIFFERENT = {
    "the number of steps": other_steps,
    "the kind of steps": lambda p, turn, x: p.total(x, x) if turn else p.call(print, x),
    "the shape of a part": lambda p, turn, x: p.call(print, x[: turn + 1]),
    "the buffer": lambda p, turn, x: p.call(print, x if turn else p.scratch("other", (4,), torch.float32)),
    "a factor": lambda p, turn, x: p.call(print, x, 0.5 * turn),
    "a switch": lambda p, turn, x: p.call(print, x, turn > 0),
    "None": lambda p, turn, x: p.call(print, x, None if turn else x),
    "whether it adds": lambda p, turn, x: p.product(x, x, x, add=turn > 0),
    "the grid": lambda p, turn, x: p.launch(kernels.share_kernel, 1 + turn),
    "the kernel": lambda p, turn, x: p.launch(kernels.share_kernel if turn else kernels.both_kernel, 1),
    "how it is compiled": lambda p, turn, x: p.launch(kernels.share_kernel, 1, warps=4 + turn),
    "a constant": lambda p, turn, x: p.launch(kernels.rows_kernel, 1, R=1 + turn),
    "a number that is part of the compiled kernel": lambda p, turn, x: p.launch(kernels.rows_kernel, 1, n=16 + turn),
}


@pytest.mark.parametrize("body", DIFFERENT.values(), ids=DIFFERENT)
def test_turns_that_differ_otherwise_are_no_loop(body):
    program = Program()
    x = program.scratch("x", (4,), torch.float32)
    with pytest.raises((AssertionError, ValueError)):  # zip raises the second
        program.loop(5, lambda turn: body(program, turn, x))


@pytest.mark.parametrize("far", [None, {"g": 2}], ids=["nothing", "another launch"])
def test_steps_of_pairs_with_themselves(far, monkeypatch):
    """With rows i and columns j of the whole, no row is a column unless -n < ahead < m; ``ahead`` is given in a run."""
    seen = []
    monkeypatch.setattr(programming, "compiled_launch", lambda *_: lambda *arguments: seen.append(arguments[-4:]))
    program = Program()
    ahead = program.given("ahead")

    def tile(turn):
        here = ahead + 10 * turn
        values = {"n": 10, "m": 30, "near": (here, 10, 30), "far": far, "ahead": here}
        program.launch(self_kernel, 1, g=1, **values)

    program.loop(6, tile)
    program.done()
    for start in (-25, -10, -9, 29, 30):
        seen.clear()
        program.run(torch.device("cpu"), start)
        where = [start + 10 * turn for turn in range(6)]
        want = [(1 if -10 < at < 30 else 2, 10, 30, at) for at in where]
        assert seen == [one for one in want if far or one[0] == 1]


def test_threads_run_one_program_side_by_side():
    """Turns of loops, scratch and arguments belong to a run."""
    program = Program()
    x, number = program.given("x", torch.empty(40)), program.given("number")
    out = program.output("out", (40,), torch.float32)

    def turn(here):
        part = program.scratch("part", (4,), torch.float32)
        program.call(
            lambda part, x, number: torch.add(x, number, out=part), part, x[4 * here : 4 * here + 4], number + here
        )
        program.call(lambda out, part: out.copy_(part), out[4 * here : 4 * here + 4], part)

    program.loop(10, turn)
    program.done()

    def work(seed):
        given = torch.full((40,), float(seed))
        want = given + seed + torch.arange(40) // 4
        return all(torch.equal(program.run(torch.device("cpu"), given, seed)[0], want) for _ in range(100))

    with ThreadPoolExecutor(4) as pool:
        assert all(pool.map(work, range(4)))


def test_launches_on_a_card_take_addresses(monkeypatch):
    """Those of their run, which are not those of the first one; in a loop they move."""
    seen = []
    monkeypatch.setattr(buffers, "is_card", lambda device: True)
    monkeypatch.setattr(programming, "compiled_launch", lambda *_: lambda *given: seen.append(given))
    program = Program()
    x = program.given("x", torch.empty(64, 16))
    scratch = program.scratch("scratch", (64,), torch.float32)
    out = program.output("out", (64, 16), torch.float32)

    def turn(here):
        rows = slice(8 * here, 8 * here + 8)
        desc = Descriptor(x[rows], (8, 16))
        program.launch(address_kernel, 1, part=x[rows], scratch=scratch[8:], out=out, desc=desc, number=5 + here)

    program.loop(6, turn)
    program.done()
    held = []
    for _ in range(3):
        seen.clear()
        given = torch.randn(64, 16)
        (made,) = program.run(torch.device("cpu"), given)
        held += [given, made]
        assert len({launched[1] for launched in seen}) == 1
        for here, (part, _, whole, desc, number) in enumerate(seen):
            assert (part, whole, number) == (given.data_ptr() + 8 * 64 * here, made.data_ptr(), 5 + here)
            assert isinstance(desc, TensorDescriptor)
            assert (desc.base.data_ptr(), list(desc.block_shape)) == (part, [8, 16])
