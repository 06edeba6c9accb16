"""Sharded tensors (DTensor) are refused, and the advice in the message gives the gradients of one process.

Each rank has its own tokens. The advice is taken from the message and executed.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator
from functools import partial

import pytest
import torch
import torch.distributed as dist
from tests.compare import assert_close, relative_error
from tests.processes import run_ranks
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor, Shard, distribute_tensor
from torch.distributed.tensor.parallel import ColwiseParallel, parallelize_module

import tilewise as tw
from tilewise.errors import DtypeError

RANKS, V, D, STEPS = 4, 11, 8, 2
Whole = Callable[[nn.Linear], Tensor]


class Model(nn.Module):
    """A language model without attention. ``whole`` gets the weight from the head, inside of forward or after it."""

    def __init__(self, whole: Whole | None = None) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.body = nn.Linear(D, D, dtype=torch.float64)
        self.head = nn.Linear(D, V, bias=False, dtype=torch.float64)
        self.whole = whole

    def forward(self, x: Tensor, target: Tensor) -> tuple[Tensor, Tensor | None]:
        hidden = torch.tanh(self.body(x))
        return hidden, None if self.whole is None else tw.linear_cross_entropy(hidden, self.whole(self.head), target)


def tokens(part: int, step: int) -> tuple[Tensor, Tensor]:
    draw = torch.Generator().manual_seed(100 * step + part)
    return torch.randn(6, D, generator=draw, dtype=torch.float64), torch.randint(V, (6,), generator=draw)


def one_process(parts: int) -> tuple[list[Tensor], list[Tensor]]:
    """The loss of each part in the last step, and the gradients of all steps: means over the parts."""
    model, losses = Model(), []
    for step in range(STEPS):
        losses = []
        for x, target in (tokens(part, step) for part in range(parts)):
            logits = model.head(model(x, target)[0])
            losses.append(nn.functional.cross_entropy(logits, target))
        (sum(losses) / parts).backward()
    return [loss.detach() for loss in losses], [p.grad for p in model.parameters()]


def refusal(call: Callable[[], object]) -> str:
    with pytest.raises(DtypeError) as caught:
        call()
    return str(caught.value)


def as_the_message_says(head: nn.Linear) -> Tensor:
    """Execute the statements of the message."""
    state = torch.zeros(2, D, dtype=torch.float64)
    message = refusal(lambda: tw.linear_cross_entropy(state, head.weight, torch.zeros(2).long()))
    assert "linear_weight is a plain tensor, got a DTensor, of which this rank holds one shard" in message
    (statements,) = re.findall(r"(whole = .*); then pass whole\.", message)
    names = {"linear_weight": head.weight, "torch": torch}
    exec(statements, names)
    return names["whole"]


def unsharded(head: nn.Linear) -> Tensor:
    head.unshard()
    return head.weight


def plain(head: nn.Linear) -> Tensor:
    return head.weight.full_tensor()


def inside(wrap: Callable[[Model], object], whole: Whole, part: int) -> tuple[Tensor, list[Tensor]]:
    return steps(wrap, Model(whole), part)


def after(wrap: Callable[[Model], object], whole: Whole, part: int) -> tuple[Tensor, list[Tensor]]:
    return steps(wrap, Model(), part, whole)


def steps(
    wrap: Callable[[Model], object], model: Model, part: int, whole: Whole | None = None
) -> tuple[Tensor, list[Tensor]]:
    """The last loss, and the gradients that ``STEPS`` steps sum."""
    wrap(model)
    for step in range(STEPS):
        x, target = tokens(part, step)
        hidden, loss = model(x, target)
        if whole is not None:
            loss = tw.linear_cross_entropy(hidden, whole(model.head), target)
        loss.backward()
    grads = [p.grad for p in model.parameters()]
    for grad in grads:
        if not isinstance(grad, DTensor):  # of a parameter that nothing wraps
            dist.all_reduce(grad)
            grad /= dist.get_world_size()
    return loss.detach(), [grad.full_tensor() if isinstance(grad, DTensor) else grad for grad in grads]


def units(model: Model, mesh: DeviceMesh, reshard: bool) -> None:
    fully_shard(model.head, mesh=mesh, reshard_after_forward=reshard)
    fully_shard(model, mesh=mesh)


def on_two_axes(model: Model, mesh: DeviceMesh) -> None:
    """Data parallel over one axis of the mesh, tensor parallel over the other, whose ranks have the same tokens."""
    parallelize_module(model.head, mesh["tp"], ColwiseParallel())
    fully_shard(model.head, mesh=mesh["dp"])


Case = tuple[str, Callable[[], tuple[Tensor, list[Tensor]]], int]


def cases(rank: int, whole: Whole) -> Iterator[Case]:
    """Name, gradients, and the number of parts of the batch."""
    line = init_device_mesh("cpu", (RANKS,))
    square = init_device_mesh("cpu", (2, RANKS // 2), mesh_dim_names=("dp", "tp"))
    for run in (inside, after):
        for reshard in (True, False):
            wrap = partial(units, mesh=line, reshard=reshard)
            yield f"unit, {run.__name__}, {reshard}", partial(run, wrap, whole, rank), RANKS
    if whole is unsharded:
        return
    yield "lone unit", lambda: after(lambda model: fully_shard(model.head, mesh=line), whole, rank), RANKS
    yield "HSDP", lambda: after(lambda model: fully_shard(model.head, mesh=square), whole, rank), RANKS
    yield "dp and tp", lambda: after(lambda model: on_two_axes(model, square), whole, rank // 2), 2


def check_rank(rank: int, path: str) -> None:
    torch.set_num_threads(1)
    dist.init_process_group("gloo", init_method=f"file://{path}", rank=rank, world_size=RANKS)
    try:
        wants = {parts: one_process(parts) for parts in (2, RANKS)}
        for whole in (unsharded, as_the_message_says, plain):
            for name, run, parts in cases(rank, whole):
                losses, want = wants[parts]
                loss, got = run()
                assert_close(loss, losses[rank * parts // RANKS], 1e-12, f"{name}, loss")
                for (which, _), one, other in zip(Model().named_parameters(), got, want, strict=True):
                    if whole is plain and which == "head.weight":
                        assert relative_error(one, other) > 0.1, f"{name}: full_tensor() is right here"
                    else:
                        assert_close(one, other, 1e-12, f"{whole.__name__}, {name}, {which}")
        check_constants()
    finally:
        dist.destroy_process_group()


def check_constants() -> None:
    """Tensors without gradient are whole after full_tensor()."""
    x, mesh = torch.randn(4, 3), init_device_mesh("cpu", (RANKS,))
    constants: dict[str, tuple[Callable[[Tensor], object], Tensor]] = {
        "logit_scale": (lambda scale: tw.clip_loss(x, x, scale), torch.ones(1)),
        "labels": (lambda labels: tw.supcon_loss(x, labels), torch.arange(4)),
        "target": (lambda target: tw.linear_cross_entropy(x, x, target), torch.arange(4)),
        "linear_weight": (lambda weight: tw.linear_cross_entropy(x, weight, torch.arange(4)), x.detach()),
    }
    for name, (call, values) in constants.items():
        sharded = distribute_tensor(values, mesh, [Shard(0)])
        assert refusal(lambda call=call, sharded=sharded: call(sharded)).endswith(f"Pass {name}.full_tensor()")
        assert torch.equal(sharded.full_tensor(), values)


@pytest.mark.group
def test_the_advice_for_a_sharded_weight_gives_the_gradients_of_one_process(tmp_path):
    """And full_tensor() without grad_placements, which was the advice before, does not."""
    run_ranks(check_rank, (str(tmp_path / "store"),), RANKS)
