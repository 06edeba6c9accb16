"""Every loss over real processes (gloo) equals one process on the whole batch in float64: values and all gradients."""

from __future__ import annotations

import functools
from typing import Any

import pytest
import torch
from tests.compare import assert_close, relative_error
from tests.ring.cases import CASES, LEAVES, Tensors, cut, joined, loss_and_gradients, make_tensors
from tests.ring.crew import Crew, crew  # noqa: F401
from torch import Tensor
from torch.utils.checkpoint import checkpoint

import tilewise as tw
from tilewise.errors import GradientError
from tilewise.ops import limits

pytestmark = pytest.mark.group
SPLITS = {  # rows and shared negatives of each rank
    "one": ([9], [5]),
    "two": ([6, 6], [4, 4]),
    "two-uneven": ([11, 4], [1, 6]),
    "three-uneven": ([5, 1, 8], [2, 7, 3]),
    "three-empty": ([6, 0, 7], [0, 4, 0]),
    "four": ([5, 5, 5, 5], [3, 3, 3, 3]),
    "four-uneven": ([1, 9, 0, 4], [5, 0, 2, 6]),
}


def run_cases(
    group: Any, names: list[str], rows: list[int], negatives: list[int], dtype: torch.dtype, columns: int = 8192
) -> dict[str, Tensors]:
    tensors = make_tensors(sum(rows), sum(negatives), dtype)
    mine = cut(tensors, group.rank(), rows, negatives)
    with limits.changed(ring_columns=columns):
        return {name: loss_and_gradients(name, mine, group=group) for name in names}


@pytest.mark.parametrize("dtype, tolerance", [(torch.float32, 4e-6), (torch.float64, 1e-12)])
@pytest.mark.parametrize("split", SPLITS)
def test_every_loss_over_a_group_equals_one_process(crew: Crew, split, dtype, tolerance):  # noqa: F811
    rows, negatives = SPLITS[split]
    names = list(CASES)
    largest = max(one + other for one, other in zip(rows, negatives, strict=True))
    # Blocks move alone, in teams of two of four ranks, and in one team of all.
    columns = {"two": 0, "four-uneven": 2 * largest}.get(split, 8192)
    parts = crew.run(run_cases, names, rows, negatives, dtype, columns, world=len(rows))
    whole = make_tensors(sum(rows), sum(negatives), dtype)  # rounded first, so that only the arithmetic is compared
    whole = {key: value.double() if value.is_floating_point() else value for key, value in whole.items()}
    for name in names:
        want, got = loss_and_gradients(name, whole), joined([part[name] for part in parts])
        assert got.keys() == want.keys()
        for key, value in want.items():
            assert_close(got[key], value, tolerance, f"{name} {key} over {split}")


def test_rows_keep_their_own_losses_without_a_reduction(crew: Crew):  # noqa: F811
    rows = [4, 0, 3]
    parts = crew.run(clip_rows, rows, world=3)
    tensors = make_tensors(7, 2, torch.float64)
    want = tw.clip_loss(tensors["a"], tensors["b"], tensors["scale"], reduction="none")
    assert [len(part) for part in parts] == rows
    assert_close(torch.cat(parts), want, 1e-12)


def clip_rows(group: Any, rows: list[int]) -> torch.Tensor:
    mine = cut(make_tensors(sum(rows), 2, torch.float64), group.rank(), rows, [1, 1, 0])
    return tw.clip_loss(mine["a"], mine["b"], mine["scale"], reduction="none", group=group)


HEADS = {
    "plain": {},
    "everything": {"label_smoothing": 0.1, "softcap": 8.0, "z_loss": 1e-2, "shift": 1, "weight": True, "bias": True},
    "sum": {"reduction": "sum", "bias": True},
    "none": {"reduction": "none", "label_smoothing": 0.3},
    "kl": {"distils": True, "reduction": "none", "shift": 1, "bias": True, "softcap": 8.0},
    "reverse kl": {"distils": True, "beta": 1.0, "temperature": 2.0},
    "jsd": {"distils": True, "beta": 0.3, "temperature": 0.5},
    "margin": {"margin": True, "m2": 0.4, "m3": 0.1},
    "statistics": {"statistics": True, "reduction": "none"},
    # The part that each rank samples has at least as many classes as there are rows: here, all of them.
    "margin, sampled": {"margin": True, "sample_rate": 0.1, "reduction": "none"},
}


def _distil(hidden: Tensor, head: Tensor, target: Tensor, **how: Any) -> Tensor:
    return tw.linear_distillation_loss(hidden, head, how.pop("teacher_input"), how.pop("teacher_weight"), target, **how)


def _statistics(hidden: Tensor, head: Tensor, target: Tensor, logit_scale: Tensor, **how: Any) -> Tensor:
    """An entropy, a picked class, and the log-sum-exp of the others."""
    x, y = hidden.flatten(0, 1), target.flatten()
    shard = {"scale": logit_scale, "shard": "columns", "group": how["group"]}
    one = tw.pair_stats(x, head, want=["entropy"], target=y, **shard)
    other = tw.pair_stats(x, head, pick=y[:, None], exclude_picked=True, **shard)
    return one.entropy - one.positive_sum + other.logsumexp - 2 * other.picked[:, 0]


def head_call(kind: str, slices: list[int], rank: int | None, group: Any, dtype: torch.dtype) -> Tensors:
    """Loss and gradients of a classifier: whole (``rank=None``) or the shard of a rank."""
    random = torch.Generator().manual_seed(3)
    classes = sum(slices)
    hidden = torch.randn(2, 6, 8, generator=random, dtype=torch.float64)
    head = torch.randn(classes, 8, generator=random, dtype=torch.float64)
    bias, weight = (torch.rand(classes, generator=random, dtype=torch.float64) for _ in range(2))
    target = torch.randint(classes, (2, 6), generator=random)
    target[0, 2] = target[1, 5] = -100
    own = slice(0, classes) if rank is None else slice(sum(slices[:rank]), sum(slices[: rank + 1]))
    how = dict(HEADS[kind])
    leaves = {"hidden": hidden, "head": head[own], "bias": bias[own], "scale": torch.tensor(1.3)}
    leaves = {name: value.to(dtype).clone().requires_grad_() for name, value in leaves.items()}
    if how.pop("bias", False):
        how["linear_bias"] = leaves["bias"]
    if how.pop("weight", False):
        how["weight"] = weight[own].to(dtype)
    if how.pop("distils", False):
        teacher = torch.randn(2, 6, 5, generator=random, dtype=torch.float64).to(dtype)
        teacher_head = torch.randn(classes, 5, generator=random, dtype=torch.float64)[own].to(dtype)
        call = functools.partial(_distil, teacher_input=teacher, teacher_weight=teacher_head)
    elif how.pop("statistics", False):
        call = _statistics
    elif how.pop("margin", False):
        call = tw.margin_softmax_loss
        if rank is None:
            how.pop("sample_rate", None)
    else:
        call = tw.linear_cross_entropy
    loss = call(leaves["hidden"], leaves["head"], target, logit_scale=leaves["scale"], group=group, **how)
    mixed = (loss * torch.linspace(1, 2, loss.numel(), dtype=loss.dtype).view(loss.shape)).sum()
    found = torch.autograd.grad(mixed, list(leaves.values()), allow_unused=True)
    grads = {name: grad for name, grad in zip(leaves, found, strict=True) if grad is not None}
    return {"loss": loss.detach(), **grads}


def run_heads(group: Any, slices: list[int], dtype: torch.dtype) -> dict[str, Tensors]:
    return {kind: head_call(kind, slices, group.rank(), group, dtype) for kind in HEADS}


@pytest.mark.parametrize("dtype, tolerance", [(torch.float32, 1e-6), (torch.float64, 1e-12)])
@pytest.mark.parametrize("slices", [[7], [5, 5], [9, 2, 4], [3, 0, 8, 1]], ids=str)
def test_vocabulary_parallel_head(crew: Crew, slices, dtype, tolerance):  # noqa: F811
    parts = crew.run(run_heads, slices, dtype, world=len(slices))
    for kind in HEADS:
        want = head_call(kind, slices, None, None, dtype)
        for name in ("loss", "hidden", "scale"):  # whole on every rank
            for part in parts:
                assert_close(part[kind][name], want[name], tolerance, f"{kind} {name}")
        for name in {"head", "bias"} & want.keys():
            got = torch.cat([part[kind][name] for part in parts])
            assert_close(got, want[name], tolerance, f"{kind} {name}")


def margin_step(group: Any) -> Tensors:
    """Gradients of an encoder over the rank's own rows and of the rank's classes; ``group=None``: of the whole."""
    random = torch.Generator().manual_seed(4)
    rows, head, encoder = (torch.randn(n, 5, generator=random, dtype=torch.float64) for n in (6, 9, 5))
    target, rank = torch.randint(9, (6,), generator=random), 0 if group is None else group.rank()
    own = slice(None) if group is None else slice(3 * rank, 3 * rank + 3)
    leaves = [encoder.requires_grad_(), head[own].clone().requires_grad_()]
    if group is None:
        z = rows @ encoder
    else:
        z = torch.cat(torch.distributed.nn.functional.all_gather(rows[2 * rank : 2 * rank + 2] @ encoder, group=group))
    loss = tw.margin_softmax_loss(z, leaves[1], target, logit_scale=8.0, group=group)
    return dict(zip(("encoder", "head"), torch.autograd.grad(loss, leaves), strict=True))


def test_gathered_rows_and_sharded_classes_give_the_gradients_of_one_process(crew: Crew):  # noqa: F811
    """As the page shows it. DDP averages those of the encoder."""
    parts, want = crew.run(margin_step, world=3), margin_step(None)
    assert_close(sum(part["encoder"] for part in parts) / 3, want["encoder"], 1e-12)
    assert_close(torch.cat([part["head"] for part in parts]), want["head"], 1e-12)


def test_ranks_of_a_vocabulary_parallel_head_return_the_same_bits(crew: Crew):  # noqa: F811
    parts = crew.run(run_heads, [4, 3, 2, 5], torch.float32)
    for kind in HEADS:
        assert all(torch.equal(part[kind]["loss"], parts[0][kind]["loss"]) for part in parts)


def several_groups(group: Any) -> list[torch.Tensor]:
    """The same losses over two groups at once, and over a group that starts at rank 2."""
    import torch.distributed as dist

    tail = dist.new_group([2, 3])
    halves = {"world": group, "tail": tail if group.rank() >= 2 else None}
    found = {}
    for name, where in halves.items():
        if where is None:
            continue
        sizes = [3, 2, 4, 3][: where.size()] if name == "world" else [4, 5]
        tensors = make_tensors(sum(sizes), 2, torch.float64, seed=where.size())
        mine = cut(tensors, where.rank(), sizes, [1, 1, 0, 0])
        leaf = mine["a"].requires_grad_()
        found[name] = (leaf, tw.clip_loss(leaf, mine["b"], mine["scale"], group=where))
    total = sum(loss for _, loss in found.values())  # one backward runs both rings
    total.backward()
    dist.destroy_process_group(tail) if group.rank() >= 2 else None
    return [found["tail"][0].grad] if "tail" in found else []


def test_two_groups_in_one_backward(crew: Crew):  # noqa: F811
    parts = crew.run(several_groups)
    tensors = make_tensors(9, 2, torch.float64, seed=2)
    want = loss_and_gradients("clip", tensors)
    got = torch.cat([parts[2][0], parts[3][0]]) / 2
    assert relative_error(got, want["a"]) < 1e-12


def compiled(group: Any, kind: str) -> list[float]:
    """Errors of a compiled loss and of its gradient against the same loss run eagerly."""
    tensors = make_tensors(5 + group.rank(), 2, torch.float32, seed=group.rank())
    hidden = make_tensors(6, 2, torch.float32)["a"]
    a, b = (tensors[name].requires_grad_() for name in "ab")

    def loss(a: torch.Tensor, b: torch.Tensor) -> torch.Tensor:
        if kind == "clip":
            return tw.clip_loss(a, b, 3.0, group=group)
        if kind == "nt_xent":
            return tw.nt_xent(torch.cat([a, b]), group=group)
        target = torch.arange(len(hidden))
        return tw.linear_cross_entropy(hidden, b, target, label_smoothing=0.1, group=group) + 0 * a.sum()

    found = [torch.autograd.grad(f(a, b), [a, b]) for f in (loss, _compile(loss))]
    return [relative_error(got, want) for want, got in zip(*found, strict=True)]


def _compile(loss: Any) -> Any:
    return torch.compile(loss, fullgraph=True, backend="aot_eager")


@pytest.mark.parametrize("kind", ["clip", "nt_xent", "head"])
def test_a_loss_over_a_group_compiles_into_one_graph(crew: Crew, kind):  # noqa: F811
    for errors in crew.run(compiled, kind, world=2):
        assert max(errors) < 1e-6


def some_compiled(group: Any) -> float:
    """Rank 1 runs a compiled layer and a compiled loss, rank 0 runs the same eagerly."""
    tensors = make_tensors(5, 2, torch.float64, seed=group.rank())
    a, b = (tensors[name].requires_grad_() for name in "ab")

    def loss(a: torch.Tensor, b: torch.Tensor) -> torch.Tensor:
        return tw.clip_loss(2 * a, b.detach(), 3.0, group=group)

    want = torch.autograd.grad(loss(a, b), a)[0]
    got = torch.autograd.grad((_compile(loss) if group.rank() else loss)(a, b), a)[0]
    return relative_error(got, want)


def test_compiled_ranks_agree_with_the_others_on_what_requires_a_gradient(crew: Crew):  # noqa: F811
    assert max(crew.run(some_compiled, world=2)) < 1e-12


def checkpointed(
    group: Any, names: list[str], rows: list[int], negatives: list[int], reentrant: bool
) -> dict[str, Tensors]:
    """Losses that all ranks recompute in backward."""
    mine = cut(make_tensors(sum(rows), sum(negatives), torch.float64), group.rank(), rows, negatives)
    found = {}
    for name in names:
        leaves = {key: mine[key].clone().requires_grad_() for key in LEAVES}

        def loss(*values: torch.Tensor, name: str = name) -> torch.Tensor:
            return CASES[name]({**mine, **dict(zip(LEAVES, values, strict=True))}, group=group)

        value = checkpoint(loss, *leaves.values(), use_reentrant=reentrant)
        value.backward()
        grads = {key: leaf.grad for key, leaf in leaves.items() if leaf.grad is not None}
        found[name] = {"loss": value.detach(), **grads}
    return found


@pytest.mark.parametrize("reentrant", [False, True])
def test_a_checkpointed_loss_over_a_group_equals_one_process(crew: Crew, reentrant):  # noqa: F811
    names, (rows, negatives) = ["clip", "info_nce-shared", "nt_xent"], SPLITS["three-empty"]
    parts = crew.run(checkpointed, names, rows, negatives, reentrant, world=3)
    for name in names:
        want = loss_and_gradients(name, make_tensors(sum(rows), sum(negatives), torch.float64))
        got = joined([part[name] for part in parts])
        assert got.keys() == want.keys()
        for key, value in want.items():
            assert_close(got[key], value, 1e-12, f"{name} {key}")


def derivative_errors(group: Any) -> list[str]:
    """The errors of the derivatives of a gradient, with respect to grad_output and to the leaves."""
    tensors = cut(make_tensors(8, 2, torch.float64), group.rank(), [4, 4], [1, 1])
    a, b = tensors["a"].requires_grad_(), tensors["b"]
    found = []
    for reduction in ("mean", "none"):
        loss = tw.clip_loss(a, b, 3.0, group=group, reduction=reduction)
        coming = torch.ones_like(loss, requires_grad=True)
        (grad,) = torch.autograd.grad(loss, a, coming, create_graph=True)
        for leaf in (coming, a):
            try:
                torch.autograd.grad(grad.square().sum(), leaf, retain_graph=True)
            except GradientError as error:
                found.append(str(error))
    return found


def test_derivatives_of_a_gradient_over_a_group_raise_errors(crew: Crew):  # noqa: F811
    for errors in crew.run(derivative_errors, world=2):
        assert len(errors) == 4
        assert all("over a process group, tilewise losses have first derivatives only" in text for text in errors)
