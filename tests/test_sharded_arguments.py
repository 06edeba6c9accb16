"""A sharded head beside plain hidden states: loss and gradients are those of one process.

Each rank has tokens of its own, as with FSDP2, and a mean is over them. So moving the head into a unit of its own
changes nothing. Wrong sums of gradients fail the same assertions: `full_tensor()` alone is one.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator
from functools import partial
from typing import Any, NamedTuple
from unittest import mock

import pytest
import torch
import torch.distributed as dist
from tests.compare import assert_close, relative_error
from tests.ring.crew import Crew, crew  # noqa: F401
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor, Replicate, Shard, distribute_tensor
from torch.distributed.tensor.debug import CommDebugMode
from torch.distributed.tensor.parallel import ColwiseParallel, parallelize_module
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

import tilewise as tw
from tilewise.errors import ConfigError, DtypeError, GroupError
from tilewise.ops import limits
from tilewise.ops.distributed import dtensors
from tilewise.ring.exchange import GroupExchange

pytestmark = pytest.mark.group
RANKS, V, D, STEPS = 4, 11, 8, 3


class Place(NamedTuple):
    """Where a model is, and its type."""

    device: str = "cpu"
    dtype: torch.dtype = torch.float64


EXACT = Place()


class Model(nn.Module):
    """A language model without attention. With ``inside``, its forward computes the loss."""

    def __init__(self, *, inside: bool = False, tied: bool = False, place: Place = EXACT) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.embed = nn.Embedding(V, D, dtype=torch.float32)
        self.body = nn.Linear(D, D, dtype=torch.float32)
        self.norm = nn.LayerNorm(D, dtype=torch.float32)
        self.head = nn.Linear(D, V, bias=not tied, dtype=torch.float32)
        self.inside = inside
        self.bfloat16().to(*place)  # so that it has the same weights in every type
        if tied:
            self.head.weight = self.embed.weight

    def forward(self, words: Tensor, target: Tensor, read: Callable[[Tensor], Tensor]) -> Any:
        hidden = self.norm(torch.tanh(self.body(self.embed(words))))
        return self.loss(hidden, target, read) if self.inside else hidden

    def loss(self, hidden: Tensor, target: Tensor, read: Callable[[Tensor], Tensor]) -> Tensor:
        bias = None if self.head.bias is None else read(self.head.bias)
        return tw.linear_cross_entropy(hidden, read(self.head.weight), target, linear_bias=bias)


def tokens(part: int, step: int, device: str = "cpu") -> tuple[Tensor, Tensor]:
    """Each part has another number of targets."""
    draw = torch.Generator().manual_seed(100 * step + part)
    words, target = torch.randint(V, (6,), generator=draw), torch.randint(V, (6,), generator=draw)
    target[:part] = -100
    return words.to(device), target.to(device)


def one_process(parts: int, *, tied: bool = False, place: Place = EXACT) -> tuple[list[Tensor], list[Tensor]]:
    """The loss of each part in the last step, and the gradients of all steps: means over the parts."""
    model, losses = Model(tied=tied, place=place), []
    for step in range(STEPS):
        losses = []
        for words, target in (tokens(part, step, place.device) for part in range(parts)):
            logits = model.head(model.norm(torch.tanh(model.body(model.embed(words)))))
            losses.append(nn.functional.cross_entropy(logits, target))
        (sum(losses) / parts).backward()
    return [loss.detach() for loss in losses], [p.grad for p in model.parameters()]


def steps(
    wrap: Callable[[Model], object],
    part: int,
    *,
    inside: bool = False,
    tied: bool = False,
    accumulate: bool = False,
    place: Place = EXACT,
    read: Callable[[Tensor], Tensor] = lambda weight: weight,
) -> tuple[Tensor, list[Tensor]]:
    """The last loss, and the gradients that ``STEPS`` steps sum."""
    model = Model(inside=inside, tied=tied, place=place)
    wrap(model)
    for step in range(STEPS):
        if accumulate:
            model.set_requires_gradient_sync(step == STEPS - 1)  # type: ignore[operator]
        words, target = tokens(part, step, place.device)
        loss = model(words, target, read)
        if not inside:
            loss = model.loss(loss, target, read)
        loss.backward()
    grads = [p.grad for p in model.parameters()]
    for grad in grads:
        if not isinstance(grad, DTensor):  # of a parameter that nothing wraps
            dist.all_reduce(grad)
            grad /= dist.get_world_size()
    return loss.detach(), [grad.full_tensor() if isinstance(grad, DTensor) else grad for grad in grads]


def units(model: Model, mesh: DeviceMesh, reshard: bool | int = True) -> None:
    fully_shard(model.head, mesh=mesh, reshard_after_forward=reshard)
    fully_shard(model, mesh=mesh)


def tied_units(model: Model, mesh: DeviceMesh) -> None:
    """The embedding and the head share a weight, which is in the unit of both."""
    fully_shard([model.embed, model.head], mesh=mesh)
    fully_shard(model, mesh=mesh)


def norm_and_head(model: Model, mesh: DeviceMesh) -> None:
    """A unit of both, as accelerate makes it. With a tied weight the embedding is in it too."""
    tied = model.head.weight is model.embed.weight
    tail = [model.norm, *[model.embed] * tied, model.head]
    fully_shard(tail, mesh=mesh, reshard_after_forward=False)
    fully_shard(model, mesh=mesh)


def on_two_axes(model: Model, mesh: DeviceMesh) -> None:
    """Data parallel over one axis of the mesh, tensor parallel over the other, whose ranks have the same tokens."""
    parallelize_module(model.head, mesh["tp"], ColwiseParallel())
    fully_shard(model.head, mesh=mesh["dp"])


Run = Callable[..., tuple[Tensor, list[Tensor]]]


def cases(line: DeviceMesh, square: DeviceMesh | None) -> Iterator[tuple[str, Run, int, bool]]:
    """Name, loss and gradients of a part, the number of parts of the batch, and whether the weight is tied."""
    world = line.size()
    for reshard in (True, False, 2) if world == RANKS else (True, False):
        yield f"unit, {reshard}", partial(steps, partial(units, mesh=line, reshard=reshard)), world, False
        more = {"accumulate": True}
        yield (
            f"accumulation, {reshard}",
            partial(steps, partial(units, mesh=line, reshard=reshard), **more),
            world,
            False,
        )
    yield "norm and head", partial(steps, partial(norm_and_head, mesh=line)), world, False
    yield "norm and head, inside", partial(steps, partial(norm_and_head, mesh=line), inside=True), world, False
    yield "unit, inside", partial(steps, partial(units, mesh=line), inside=True), world, False
    yield "lone unit", partial(steps, lambda model: fully_shard(model.head, mesh=line)), world, False
    yield "tied", partial(steps, partial(tied_units, mesh=line), tied=True), world, True
    yield "tied, norm and head", partial(steps, partial(norm_and_head, mesh=line), tied=True), world, True
    if square is not None:
        yield "HSDP", partial(steps, partial(units, mesh=square)), world, False
        yield "dp and tp", partial(steps, partial(on_two_axes, mesh=square)), 2, False


def unit_results(place: Place = EXACT) -> Iterator[tuple[str, Tensor, Callable[[Place], Tensor]]]:
    """Name and value of each loss and gradient of this rank, and the same of one process, by its place."""
    rank, world = dist.get_rank(), dist.get_world_size()
    line, square = init_device_mesh(place.device, (world,)), None
    if world == RANKS:
        square = init_device_mesh(place.device, (2, 2), mesh_dim_names=("dp", "tp"))
    known: dict[Any, tuple[list[Tensor], list[Tensor]]] = {}

    def want(parts: int, tied: bool, which: int, of: Place) -> Tensor:
        """The loss of this rank's part, or a gradient."""
        if (parts, tied, of) not in known:
            known[parts, tied, of] = one_process(parts, tied=tied, place=of)
        losses, grads = known[parts, tied, of]
        return losses[rank * parts // world] if which < 0 else grads[which]

    for ring_head in (0, 2**30):
        with limits.changed(ring_head=ring_head):
            for name, run, parts, tied in cases(line, square):
                loss, got = run(rank * parts // world, place=place)
                names = [which for which, _ in Model(tied=tied).named_parameters()]
                for which, value in enumerate((loss, *got), -1):
                    what = "loss" if which < 0 else names[which]
                    yield f"{name}, {ring_head}, {what}", value, partial(want, parts, tied, which)
    _, got = steps(partial(units, mesh=line), rank, place=place, read=lambda weight: weight.full_tensor())
    naive, right = got[-1], want(world, False, len(got) - 1, EXACT)
    assert relative_error(naive, right) > 0.1, "full_tensor() is right here"


def check_units(group: Any) -> None:
    for what, got, want in unit_results():
        assert_close(got, want(EXACT), 1e-12, what)


def test_a_sharded_head_has_the_gradients_of_one_process(crew: Crew):  # noqa: F811
    crew.run(check_units)


def counted(loss: Callable[[], Tensor]) -> tuple[dict[str, int], list[int]]:
    """The collectives of a loss and its gradients by name, and the bytes of each send of a ring."""
    sent: list[int] = []
    real = GroupExchange.shift

    def shift(self: GroupExchange, send: Any, receive: Any, *peers: Any) -> Any:
        sent.append(sum(part.numel() * part.element_size() for part in send))
        return real(self, send, receive, *peers)

    with mock.patch.object(GroupExchange, "shift", shift), CommDebugMode() as mode:
        loss().backward()
    return {getattr(op, "__name__", str(op)): n for op, n in mode.get_comm_counts().items()}, sent


def check_traffic(group: Any) -> None:
    """One gather and one reduce-scatter per pass, whatever the number of chunks; a ring never gathers it."""
    rank, mesh = dist.get_rank(), init_device_mesh("cpu", (RANKS,))
    draw = torch.Generator().manual_seed(rank)
    hidden, target = torch.randn(700, D, generator=draw), torch.randint(4 * V, (700,), generator=draw)
    weight = distribute_tensor(torch.randn(4 * V, D), mesh, [Shard(0)]).requires_grad_()

    def loss() -> Tensor:
        return tw.linear_cross_entropy(hidden, weight, target, options=tw.TileOptions(workspace_mib=1))

    loss()  # the first call of a weight also compares the rows of the ranks
    with limits.changed(ring_head=2**30, small_cpu=0):
        calls, sent = counted(loss)
    assert (calls, sent) == ({"all_gather_into_tensor": 1, "reduce_scatter_tensor": 1}, [])
    shard = V * D * 4
    with limits.changed(ring_head=0, small_cpu=0, ring_columns=0):
        calls, sent = counted(loss)
    assert not {"all_gather_into_tensor", "reduce_scatter_tensor"} & calls.keys()
    # Forward sends W - 1 shards, backward W - 1 shards and W gradients: the last hop returns the last gradient.
    hops = [shard] * (RANKS - 1)
    assert sent[: RANKS - 1] == hops
    assert sum(sent[RANKS - 1 :]) == (RANKS - 1) * shard + RANKS * shard


class Largest(TorchDispatchMode):
    """The largest tensor that an operation returns."""

    numel = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = func(*args, **(kwargs or {}))
        self.numel = max(self.numel, *(part.numel() for part in tree_leaves(result) if type(part) is Tensor), 0)
        return result


def check_sizes(group: Any) -> None:
    """In a ring no tensor of the size of the whole classifier is made; a gathered one is seen."""
    mesh, classes = init_device_mesh("cpu", (RANKS,)), 4096
    hidden, target = torch.randn(16, D) + dist.get_rank(), torch.randint(classes, (16,))
    weight = distribute_tensor(torch.randn(classes, D), mesh, [Shard(0)]).requires_grad_()
    tw.linear_cross_entropy(hidden, weight, target)
    largest = {}
    for ring_head in (0, 2**30):
        with limits.changed(ring_head=ring_head, ring_columns=0), Largest() as seen:
            tw.linear_cross_entropy(hidden, weight, target).backward()
        largest[ring_head] = seen.numel
    assert largest[0] < classes * D <= largest[2**30]


def test_a_ring_never_holds_the_whole_classifier(crew: Crew):  # noqa: F811
    crew.run(check_sizes)


def test_the_collectives_of_a_sharded_head(crew: Crew):  # noqa: F811
    crew.run(check_traffic)


def check_equal_rows(group: Any) -> None:
    """Ranks with equal rows are refused, on all ranks, and the advice is tensor parallelism."""
    mesh, hidden = init_device_mesh("cpu", (RANKS,)), torch.linspace(-1, 1, 6 * D, dtype=torch.float64).view(6, D)
    whole, target = torch.linspace(2, -1, V * D, dtype=torch.float64).sin().view(V, D), torch.arange(6)
    weight = distribute_tensor(whole, mesh, [Shard(0)]).requires_grad_()
    dtensors._checked.clear()  # a weight of this shape and mesh may have been in an earlier test
    with pytest.raises(ConfigError, match="got the same ones on all ranks") as caught:
        tw.linear_cross_entropy(hidden, weight, target)
    (advice,) = re.findall(r"pass (DTensor.from_local\(.*\]\)),", str(caught.value))
    names = {"DTensor": DTensor, "Replicate": Replicate, "hidden": hidden.requires_grad_(), "mesh": mesh}
    loss = tw.linear_cross_entropy(eval(advice, names), weight, target)
    loss.backward()
    assert weight.grad is not None
    ours = loss.detach().to_local(), hidden.grad, weight.grad.full_tensor()
    leaves = [value.detach().requires_grad_() for value in (hidden, whole)]
    want = nn.functional.cross_entropy(leaves[0] @ leaves[1].T, target)
    want.backward()
    for got, dense in zip(ours, (want.detach(), *(leaf.grad for leaf in leaves)), strict=True):
        assert_close(got, dense, 1e-12)
    # Only sharded dimensions are compared: replicas of a head have its whole gradient in any case.
    square = distribute_tensor(whole, init_device_mesh("cpu", (2, 2)), [Replicate(), Shard(0)])
    tw.linear_cross_entropy(hidden.detach() + dist.get_rank() % 2, square, target)


def test_equal_rows_are_refused_on_all_ranks(crew: Crew):  # noqa: F811
    crew.run(check_equal_rows)


def check_mixed_precision(group: Any) -> None:
    """A float32 weight beside bfloat16 hidden states, as FSDP2 with a policy leaves it."""
    rank, mesh = dist.get_rank(), init_device_mesh("cpu", (RANKS,))
    draw = torch.Generator().manual_seed(1)
    weight = torch.randn(V, D, generator=draw)
    rows = torch.randn(RANKS, 32, D, generator=draw).bfloat16()
    target = torch.randint(V, (RANKS, 32), generator=draw)

    def gradient(leaf: Tensor, dtype: torch.dtype) -> Tensor:
        losses = [
            nn.functional.cross_entropy(x.to(dtype) @ leaf.to(dtype).T, y) for x, y in zip(rows, target, strict=True)
        ]
        (sum(losses) / RANKS).backward()
        assert leaf.grad is not None
        return leaf.grad

    want = gradient(weight.double().requires_grad_(), torch.float64)
    dense = relative_error(gradient(weight.clone().requires_grad_(), torch.bfloat16), want)
    for ring_head in (0, 2**30):
        shard = distribute_tensor(weight, mesh, [Shard(0)]).requires_grad_()
        with limits.changed(ring_head=ring_head):
            tw.linear_cross_entropy(rows[rank], shard, target[rank]).backward()
        assert shard.grad is not None
        assert shard.grad.dtype == torch.float32
        assert relative_error(shard.grad.full_tensor(), want) <= 1.5 * dense + 1e-6


def test_a_float32_weight_beside_half_types(crew: Crew):  # noqa: F811
    crew.run(check_mixed_precision)


def check_refusals(group: Any) -> None:
    mesh, other = init_device_mesh("cpu", (RANKS,)), init_device_mesh("cpu", (2, 2))
    plain, ids = torch.randn(8, 3), torch.arange(8)
    rows, rows_2d = distribute_tensor(plain, mesh, [Shard(0)]), distribute_tensor(plain, other, [Shard(0), Shard(0)])
    head, labels, both = (distribute_tensor(value, mesh, [Shard(0)]) for value in (plain, ids, ids.repeat(2)))
    grad = plain.clone().requires_grad_()
    entropy, lse = tw.linear_cross_entropy, tw.linear_logsumexp
    refused: list[tuple[Callable[[], object], type[Exception], str]] = [
        (lambda: entropy(rows, plain, ids), DtypeError, r"Pass DTensor.from_local\(linear_weight, mesh"),
        (lambda: entropy(rows, head, ids, linear_bias=grad[:, 0]), DtypeError, r"from_local\(linear_bias, mesh"),
        (lambda: lse(rows, head, scale=grad.sum()), DtypeError, r"from_local\(scale, mesh"),
        (
            lambda: entropy(plain, head, rows[:, 0].long()),
            DtypeError,
            r"Pass target.to_local\(\)",
        ),
        (lambda: entropy(rows, head, ids, group=group), ConfigError, "Pass group=None"),
        (lambda: entropy(rows_2d, head, ids), ConfigError, "all sharded arguments are on one mesh"),
        (lambda: entropy(rows, head, ids[:2], shift=1), ConfigError, "Shift the whole targets before they are sharded"),
        (
            lambda: entropy(rows, head, ids[:2], weight=plain[:, 0].abs(), z_loss=0.1),
            ConfigError,
            "Pass return_lse=True and z_loss=0",
        ),
        (lambda: tw.clip_loss(rows, grad, 1.0), DtypeError, r"from_local\(text_features, mesh"),
        (lambda: tw.clip_loss(rows_2d, rows_2d, 1.0), ConfigError, "got 2 dimensions. Make them one"),
        (
            lambda: tw.info_nce(rows, rows, rows, query_ids=ids[:2], key_ids=both),
            ConfigError,
            "Pass the numbers of this rank's keys",
        ),
        (lambda: tw.pair_stats(rows, rows), ConfigError, r"Redistribute all of them to \[Shard\(0\)\], and pass"),
        (lambda: tw.margin_softmax_loss(rows, plain, ids), ConfigError, r"linear_weight to \[Shard\(0\)\], and pass"),
        (lambda: tw.nt_xent(rows, queue=plain), ConfigError, r"Pass features.to_local\(\) and"),
        (lambda: tw.nt_xent(rows, decoupled=True), ConfigError, r"Pass features.to_local\(\) and"),
        (
            lambda: tw.supcon_loss(plain, labels),
            DtypeError,
            r"Pass labels.full_tensor\(\)",
        ),
    ]
    backwards = distribute_tensor(plain, DeviceMesh("cpu", [3, 2, 1, 0]), [Shard(0)])
    assert torch.equal(backwards.full_tensor(), plain)
    refused.append((lambda: tw.clip_loss(backwards, backwards, 1.0), ConfigError, "Make the mesh with sorted ranks"))
    refused.append((lambda: tw.siglip_loss(plain, head.requires_grad_(), 1.0, 0.0), DtypeError, "DTensors too"))
    for call, error, message in refused:
        with pytest.raises(error, match=message):
            call()


def test_refusals_say_what_to_do(crew: Crew):  # noqa: F811
    crew.run(check_refusals)


def check_advice(group: Any) -> None:
    """What the refusals of `pair_stats` and `margin_softmax_loss` advise, and Matryoshka: one process, in float64."""
    mesh, draw = init_device_mesh("cpu", (RANKS,)), torch.Generator().manual_seed(2)
    a, b = (torch.randn(8, 6, generator=draw, dtype=torch.float64) for _ in range(2))
    ids = torch.arange(8).flip(0)

    def gradients(call: Callable[[Tensor, Tensor], Tensor], sides: list[Any]) -> list[Tensor]:
        leaves = [side.detach().requires_grad_() for side in sides]
        call(*leaves).backward()
        return [leaf.grad.full_tensor() if isinstance(leaf.grad, DTensor) else leaf.grad for leaf in leaves]

    def shards(*placements: Any) -> list[Any]:
        return [distribute_tensor(x, mesh, [placed]) for x, placed in zip((a, b), placements, strict=True)]

    def own(x: Any) -> Tensor:
        return x.to_local() if isinstance(x, DTensor) else x

    how, world = {"group": mesh.get_group()}, dist.get_world_size()
    target = ids.chunk(world)[dist.get_rank()]
    matryoshka = tw.Matryoshka(tw.ClipLoss(), [3, 6])
    cases: list[tuple[Callable[..., Tensor], Callable[..., Tensor], list[Any]]] = [
        (
            lambda x, y: tw.pair_stats(own(x), own(y), target=target, **how).logsumexp.square().sum(),
            lambda x, y: tw.pair_stats(x, y, target=ids).logsumexp.square().sum(),
            shards(Shard(0), Shard(0)),
        ),
        (
            lambda x, y: tw.margin_softmax_loss(own(x), own(y), ids, **how),
            lambda x, y: tw.margin_softmax_loss(x, y, ids),
            shards(Replicate(), Shard(0)),
        ),
        (lambda x, y: matryoshka(x, y, 2.0), lambda x, y: matryoshka(x, y, 2.0), shards(Shard(0), Shard(0))),
    ]
    for call, dense, sides in cases:
        for got, want in zip(gradients(call, sides), gradients(dense, [a, b]), strict=True):
            assert_close(got, want, 1e-11, "gradient")


def check_sub_mesh(group: Any) -> None:
    """The ranks 0 and 2, and 1 and 3: each pair has a classifier of its own. Ranks that disagree raise on both."""
    mesh, draw = init_device_mesh("cpu", (2, 2), mesh_dim_names=("far", "near"))["far"], torch.Generator()
    draw.manual_seed(dist.get_rank() % 2)
    hidden, head = (torch.randn(n, D, generator=draw, dtype=torch.float64) for n in (5, V))
    target, want = torch.randint(V, (5,), generator=draw), head.clone().requires_grad_()
    tw.linear_cross_entropy(hidden, want, target).backward()
    for rows, ring_head in ((Shard(0), 0), (Shard(0), 2**30), (Replicate(), 0)):
        x, y = (distribute_tensor(value, mesh, [rows]) for value in (hidden, target))
        shard = distribute_tensor(head, mesh, [Shard(0)]).requires_grad_()
        with limits.changed(ring_head=ring_head):
            tw.linear_cross_entropy(x, shard, y).backward()
            assert_close(shard.grad.full_tensor(), want.grad, 1e-12, f"{rows}, {ring_head}")
            if ring_head == 0:  # the shards are not gathered
                smoothing = 0.1 if mesh.get_local_rank() == 0 else 0.2
                with pytest.raises(GroupError, match=r"disagree on loss: label_smoothing=0\.1 on rank 0 but "):
                    tw.linear_cross_entropy(x, shard, y, label_smoothing=smoothing)


@pytest.mark.parametrize("check", [check_advice, check_sub_mesh])
def test_other_meshes_and_losses(crew: Crew, check):  # noqa: F811
    crew.run(check)


def check_explain(group: Any) -> None:
    mesh = init_device_mesh("cpu", (RANKS,), mesh_dim_names=("dp",))
    weight = distribute_tensor(torch.randn(V, D), mesh, [Shard(0)]).requires_grad_()
    found = tw.explain(tw.linear_cross_entropy, torch.randn(6, D), weight, torch.arange(6))
    assert "dp (4 ranks)  rows: the classifier is gathered once per pass" in str(found)
    assert [(call.rows, call.cols) for call in found.calls] == [(6, V)]


def test_explain_prints_the_plan(crew: Crew):  # noqa: F811
    crew.run(check_explain)
