"""Programs as data: steps, memory and text, with launches replaced by nothing."""

import itertools
import time
from dataclasses import replace
from pathlib import Path

import pytest
import torch

pytest.importorskip("triton", reason="triton is not installed on this platform")

from tilewise.errors import BackendError
from tilewise.kernels.backend import SmallKey
from tilewise.kernels.spec import Needs, PairShape, PairSpec
from tilewise.kernels.triton_impl.launch.compiled import compiled_launch
from tilewise.kernels.triton_impl.program import Launch, Product, Program, Total
from tilewise.kernels.triton_impl.small import kernels, programs, stats

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


def test_the_peak_is_that_of_the_allocations(monkeypatch):
    """Every allocation is counted while a program runs with launches that do nothing."""
    alive = {"now": 0, "peak": 0}
    program = programs.loss_program(key("clip", n=96, m=96, needs=Needs(scale=True)))
    sizes = {place: -(-size // 512) * 512 for place, size in _sizes(program)}
    for made, step, freed in program.turns:
        new = [place for place, *_ in made] + ([] if isinstance(step, Launch) else [step.out.place])
        alive["now"] += sum(sizes[place] for place in new)
        alive["peak"] = max(alive["peak"], alive["now"])
        alive["now"] -= sum(sizes[place] for place in freed)
    assert program.peak_bytes == alive["peak"] + program.block_bytes


def _sizes(program):
    return [(buffer.place, buffer.bytes) for buffer in program.buffers if buffer.dtype is not None]


def test_scratch_in_the_block_does_not_overlap():
    program = programs.loss_program(key("clip", n=97, m=97, needs=Needs(scale=True)))
    places = sorted((offset, torch.Size(shape).numel() * dtype.itemsize) for _, offset, shape, dtype in program.block)
    assert len(places) > 8
    for (start, size), (following, _) in itertools.pairwise(places):
        assert start + size <= following
        assert following % 16 == 0
    assert places[-1][0] + places[-1][1] <= program.block_bytes


def test_only_scores_and_g_are_of_the_size_of_the_block():
    program = programs.loss_program(key("info_nce", n=512, m=512))
    block = 512 * 512
    assert program.peak_bytes < 6 * block + 64 * 1024 + 2 * 512 * 32 * 2 + 8 * 512


def test_an_unknown_argument_raises():
    with pytest.raises(AssertionError, match="has no parameter other"):
        Program().launch(kernels.share_kernel, 1, other=1)


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
    found = program.run(torch.device("cpu"), x, x, torch.tensor(2.0), None, None, *(None,) * 6, 0.5)
    assert seen == ["rows_kernel", "rows_kernel", "both_kernel", "finish_kernel"]
    assert [tuple(value.shape) for value in found] == [(), (8, 32), (8, 32), ()]
    assert isinstance(program.steps[0], Product)
    assert not any(isinstance(step, Total) for step in program.steps)


def test_no_kernel_is_loaded_while_a_graph_is_captured(monkeypatch):
    """Loading would end the capture with an error of the driver that names no cause."""
    monkeypatch.setattr(torch.cuda, "is_current_stream_capturing", lambda: True)
    with pytest.raises(BackendError) as raised:
        compiled_launch(kernels.share_kernel, 1, (), torch.device("cuda", 0), 4)
    assert str(raised.value) == (
        "kernels cannot be loaded while a CUDA graph is captured. Call the loss once with tensors of these shapes "
        "before capturing"
    )
