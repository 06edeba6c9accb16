"""Every loss and statistic over sharded tensors (DTensor) equals one process on the whole tensors: float64, gloo.

The results and all gradients are compared, and the placements of both. Shards are uneven, and some are empty.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from typing import Any

import pytest
import torch
from tests.compare import assert_close
from tests.ring.cases import CASES, make_tensors
from tests.ring.cases import LEAVES as PAIR_LEAVES
from tests.ring.crew import Crew, crew  # noqa: F401
from torch import Tensor
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor, Partial, Replicate, Shard, distribute_tensor
from torch.distributed.tensor.debug import CommDebugMode
from torch.distributed.tensor.placement_types import _StridedShard

import tilewise as tw
from tilewise.ops import limits

pytestmark = pytest.mark.group
R, S0, S1 = Replicate(), Shard(0), Shard(1)
B, T, D, V, E = 5, 6, 4, 5, 3  # over four ranks, the last has no rows and no classes
Tensors = dict[str, Tensor]
Case = Callable[..., Any]


def head_tensors() -> Tensors:
    random = torch.Generator().manual_seed(5)

    def floats(*shape: int) -> Tensor:
        return torch.randn(*shape, generator=random, dtype=torch.float64)

    target = torch.randint(V, (B, T), generator=random)
    target[0, 2] = target[3, 5] = -100
    target[1:3] = torch.tensor([-100, 1]).repeat(3)  # one shard of the rows is poor, and one of the classes is rich
    ids = torch.stack([torch.randperm(V, generator=random)[:2] for _ in range(B * T)]).view(B, T, 2)
    ids[0, 1, 1] = -1
    return {
        "hidden": floats(B, T, D),
        "states": floats(9, D),
        "weight": floats(V, D),
        "bias": floats(V),
        "scale": torch.tensor(0.7, dtype=torch.float64),
        "target": target,
        "class_weight": floats(V).abs(),
        "teacher_hidden": floats(B, T, E),
        "teacher_weight": floats(V, E),
        "mask": torch.rand(B, T, generator=random) > 0.3,
        "ids": ids,
        "log_probs": floats(B, T, 2).log_softmax(-1) - 0.3,
        "temperature": floats(B, T).abs() + 0.5,
    }


ROWS = ("hidden", "states", "target", "teacher_hidden", "mask", "ids", "log_probs", "temperature")
COLUMNS = ("weight", "bias", "class_weight", "teacher_weight")
LEAVES = ("hidden", "states", "weight", "bias", "scale")


def cross_entropy(x: Tensors, **how: Any) -> Any:
    head = {"linear_bias": x["bias"], "logit_scale": x["scale"], "softcap": 5.0}
    return tw.linear_cross_entropy(x["hidden"], x["weight"], x["target"], **head, **how)


def distillation(x: Tensors, **how: Any) -> Any:
    teacher = x["teacher_hidden"], x["teacher_weight"], x["target"]
    return tw.linear_distillation_loss(x["hidden"], x["weight"], *teacher, linear_bias=x["bias"], **how)


def token_stats(x: Tensors, **how: Any) -> Any:
    everything = ("log_prob", "entropy", "log_sum_sq_prob", "mean_logit", "argmax", "correct", "logsumexp")
    more = {
        "want": everything,
        "pick": x["ids"].clamp(min=0),
        "temperature": x["temperature"],
        "linear_bias": x["bias"],
    }
    return tw.linear_token_stats(x["hidden"], x["weight"], x["target"], **more, logit_scale=x["scale"], **how)


def sparse(x: Tensors, **how: Any) -> Any:
    teacher = x["ids"], x["log_probs"]
    return tw.linear_sparse_distillation_loss(x["hidden"], x["weight"], *teacher, mask=x["mask"], tail="bucket", **how)


HEADS: dict[str, Case] = {
    "mean": cross_entropy,
    "sum": lambda x: cross_entropy(x, reduction="sum", z_loss=0.1),
    "none": lambda x: cross_entropy(x, reduction="none", label_smoothing=0.2),
    "weighted": lambda x: cross_entropy(x, weight=x["class_weight"], label_smoothing=0.1),
    "return_lse": lambda x: cross_entropy(x, return_lse=True, z_loss=0.1),
    "stats": token_stats,
    "kl": lambda x: distillation(x, target_weight=0.5),
    "jsd": lambda x: distillation(x, beta=0.4, mask=x["mask"], temperature=2.0),
    "sparse": sparse,
    "sparse, none": lambda x: sparse(x, reduction="none", divergence="reverse"),
    "logsumexp": lambda x: tw.linear_logsumexp(x["states"], x["weight"], bias=x["bias"], scale=x["scale"]),
}
# Shape of the mesh, placements of the rows and of the columns, and whether a classifier may move in a ring.
LAYOUTS: dict[str, tuple[tuple[int, ...], list[Any], list[Any], bool]] = {
    "replicated": ((4,), [R], [R], False),
    "data parallel": ((4,), [S0], [R], False),
    "rows, gathered": ((4,), [S0], [S0], False),
    "rows, ring": ((4,), [S0], [S0], True),
    "vocabulary": ((4,), [R], [S0], True),
    "features": ((4,), [R], [S1], False),
    "sequence parallel": ((4,), [S1], [S0], True),
    "context parallel": ((4,), [S1], [R], False),
    "data and tensor parallel": ((2, 2), [S0, R], [_StridedShard(0, split_factor=2), S0], False),
    "replicas of vocabulary shards": ((2, 2), [S0, S1], [R, S0], False),
    "hybrid": ((2, 2), [S0, S0], [R, S0], True),
    "all": ((2, 2), [R, R], [S0, S0], False),
}


def parts_of(result: Any) -> dict[str, Tensor]:
    if dataclasses.is_dataclass(result):
        return {
            field.name: value
            for field in dataclasses.fields(result)
            if (value := getattr(result, field.name)) is not None
        }
    return dict(enumerate(result)) if isinstance(result, tuple) else {"loss": result}


def results(case: Case, x: Tensors) -> dict[str, Tensor]:
    """Results and gradients, weighted so that no gradient is zero by symmetry."""
    leaves = {name: x[name].detach().requires_grad_() for name in LEAVES}
    parts = parts_of(case({**x, **leaves}))
    total = 0.0
    for value in parts.values():
        if value.requires_grad:
            whole = value.full_tensor() if isinstance(value, DTensor) else value
            total = (
                total
                + (
                    whole
                    * torch.linspace(1, 2, whole.numel(), dtype=whole.dtype, device=whole.device).view(whole.shape)
                ).sum()
            )
    grads = torch.autograd.grad(total, list(leaves.values()), allow_unused=True)
    found = {name: value.detach() for name, value in parts.items()}
    return found | {f"grad {name}": grad for name, grad in zip(leaves, grads, strict=True) if grad is not None}


def whole(value: Tensor) -> Tensor:
    return value.full_tensor() if isinstance(value, DTensor) else value


def strided(value: Tensor, mesh: Any, placements: list[Any]) -> DTensor:
    """`distribute_tensor` makes no strided shards: the inner dimension of the mesh is cut first."""
    if not any(isinstance(placement, _StridedShard) for placement in placements):
        return distribute_tensor(value, mesh, placements)
    local = value
    for dim in reversed(range(mesh.ndim)):
        local = list(local.chunk(mesh.size(dim)))
        empty = local[0][:0]
        local = (local + [empty] * mesh.size(dim))[mesh.get_local_rank(dim)]
    return DTensor.from_local(local, mesh, placements, run_check=False, shape=value.shape, stride=value.stride())


def run_heads(group: Any, shape: tuple[int, ...]) -> dict[str, dict[str, dict[str, tuple[Tensor, str]]]]:
    mesh = init_device_mesh("cpu", shape)
    found: dict[str, dict[str, dict[str, tuple[Tensor, str]]]] = {}
    for layout, (of, rows, columns, ring) in LAYOUTS.items():
        x, found[layout] = head_shards(mesh, rows, columns, head_tensors()) if of == shape else {}, {}
        with limits.changed(ring_head=0 if ring else 2**30):
            for name, case in HEADS.items() if x else ():
                got = results(case, x)
                found[layout][name] = {key: (whole(value), placed(value)) for key, value in got.items()}
    return found


def placed(value: Tensor) -> str:
    return str(getattr(value, "placements", None))


def head_shards(mesh: Any, rows: list[Any], columns: list[Any], tensors: Tensors) -> Tensors:
    sides, x = dict.fromkeys(ROWS, rows) | dict.fromkeys(COLUMNS, columns), {}
    for name, value in tensors.items():
        place = sides.get(name, [R] * mesh.ndim)
        if value.dim() == 1 or name == "states":  # without a second dimension that can be sharded
            place = [R if p == S1 else p for p in place]
        x[name] = strided(value, mesh, place)
    return x


def expected(name: str, key: str, want: Tensor, rows: list[Any], columns: list[Any]) -> tuple[Any, ...]:
    """The placements of a result or a gradient."""
    scalar, leaf = tuple(R for _ in rows), key.removeprefix("grad ")
    if key in ("grad states", "grad bias") or (name == "logsumexp" and key == "loss"):
        return tuple(R if p == S1 else p for p in (columns if key == "grad bias" else rows))
    if leaf != key:
        return {"hidden": tuple(rows), "weight": tuple(columns), "scale": scalar}[leaf]
    if want.dim():
        return tuple(rows)
    # Along a dimension with sequence parallelism, the hidden states are gathered.
    sides = zip(rows, columns, strict=True)
    return (
        tuple(R if row == R or (row, col) == (S1, S0) else Partial() for row, col in sides) if name == "sum" else scalar
    )


@pytest.mark.parametrize("shape", [(4,), (2, 2)])
def test_heads_over_sharded_tensors_equal_one_process(crew: Crew, shape):  # noqa: F811
    one_process = {name: results(case, head_tensors()) for name, case in HEADS.items()}
    for found in crew.run(run_heads, shape):
        for layout in (name for name in LAYOUTS if LAYOUTS[name][0] == shape):
            _, rows, columns, _ = LAYOUTS[layout]
            for name, wants in one_process.items():
                for key, want in wants.items():
                    got, placements = found[layout][name][key]
                    assert_close(got, want, 1e-12, f"{layout}, {name}, {key}")
                    assert placements == str(expected(name, str(key), want, rows, columns)), (layout, name, key)


TEACHERS: dict[str, tuple[tuple[int, ...], list[Any], list[Any]]] = {
    "whole beside shards": ((4,), [S0], [R]),
    "features beside classes": ((4,), [S0], [S1]),
    "classes beside a whole student": ((4,), [R], [S0]),
    "the other dimension of the mesh": ((2, 2), [R, S0], [S0, R]),
    "both dimensions": ((2, 2), [R, S0], [S0, S1]),
}


def run_other_teachers(group: Any) -> dict[tuple[str, str], dict[str, Tensor]]:
    found = {}
    for layout, (shape, student, teacher) in TEACHERS.items():
        mesh = init_device_mesh("cpu", shape)
        x = head_shards(mesh, [R] * len(shape), student, head_tensors())
        plain = head_tensors()["teacher_weight"]
        for kind, weight in (("DTensor", distribute_tensor(plain, mesh, teacher)), ("plain", plain)):
            got = results(HEADS["jsd"], x | {"teacher_weight": weight})
            found[layout, kind] = {key: whole(value) for key, value in got.items()}
    return found


def test_a_teacher_that_is_sharded_otherwise_than_the_student(crew: Crew):  # noqa: F811
    """Its classes over other ranks, its features, or not at all; its width is another one, too."""
    want = results(HEADS["jsd"], head_tensors())
    for found in crew.run(run_other_teachers):
        assert len(found) == 2 * len(TEACHERS)
        for name, got in found.items():
            for key, value in want.items():
                assert_close(got[key], value, 1e-12, f"{name}, {key}")


def shifted(x: Tensors) -> Any:
    return cross_entropy(x, shift=1, return_lse=True)


def run_sequence_parallel(group: Any) -> tuple[dict[str, Tensor], dict[str, int]]:
    """A loss with its gradients, and the collectives of forward and backward."""
    mesh = init_device_mesh("cpu", (4,))
    x = head_shards(mesh, [S1], [S0], head_tensors())
    got = {key: whole(value) for key, value in results(shifted, x).items()}
    counts: dict[str, int] = {}
    leaf = x["hidden"].detach().requires_grad_()
    with CommDebugMode() as forward:
        loss = tw.linear_cross_entropy(leaf, x["weight"], head_tensors()["target"])
    with CommDebugMode() as backward:
        loss.backward()
    for phase, mode in (("forward", forward), ("backward", backward)):
        counts |= {f"{phase} {str(name).split('.')[-1]}": n for name, n in mode.get_comm_counts().items() if n}
    return got, counts


def test_sequence_parallel_gathers_once_and_reduce_scatters_once(crew: Crew):  # noqa: F811
    """`allgather_` is that of the small numbers by which the ranks compare their calls."""
    want = results(shifted, head_tensors())
    for got, counts in crew.run(run_sequence_parallel):
        for key, value in want.items():
            assert_close(got[key], value, 1e-12, str(key))
        assert counts == {
            "forward allgather_": 3,
            "forward all_gather_into_tensor": 1,  # the hidden states
            "forward allreduce_": 2,  # the targets' scores, and the statistics
            "backward allgather_": 1,
            "backward _reduce_scatter_base_": 1,  # their gradient
        }


PAIR_LAYOUTS: dict[str, tuple[tuple[int, ...], list[Any]]] = {
    "rows": ((4,), [S0]),
    "replicated": ((4,), [R]),
    "rows of one dimension": ((2, 2), [R, S0]),
}
# Left out: the ids of shared negatives are plain tensors there, torch gathers what it stacks, and a head is above.
NOT_HERE = ("info_nce-shared", "info_nce-shared-only", "info_nce-hardness", "info_nce-decoupled", "nt_xent")
NOT_HERE += ("nt_xent-decoupled-queue", "logsumexp", "pair_stats")
PAIRS: dict[str, Case] = {name: case for name, case in CASES.items() if name not in NOT_HERE}
PAIRS["nt_xent"] = lambda x: tw.nt_xent(x["a"], temperature=1 / x["scale"])
PAIRS["none"] = lambda x: tw.info_nce(x["a"], x["b"], x["c"], key_ids=x["ids"], reduction="none")


def pair_results(name: str, x: Tensors) -> dict[str, Tensor]:
    leaves = {key: x[key].detach().requires_grad_() for key in PAIR_LEAVES}
    loss = PAIRS[name]({**x, **leaves})
    grads = torch.autograd.grad(whole(loss).square().sum(), list(leaves.values()), allow_unused=True)
    found = {f"grad {key}": grad for key, grad in zip(leaves, grads, strict=True) if grad is not None}
    return {"loss": loss.detach(), **found}


def run_pairs(group: Any, shape: tuple[int, ...]) -> dict[str, dict[str, dict[str, tuple[Tensor, str]]]]:
    mesh = init_device_mesh("cpu", shape)
    found: dict[str, dict[str, dict[str, tuple[Tensor, str]]]] = {}
    for layout, (of, rows) in PAIR_LAYOUTS.items():
        if of == shape:
            tensors = make_tensors(10, 6, torch.float64)
            x = {
                name: distribute_tensor(value, mesh, rows if value.dim() else [R] * mesh.ndim)
                for name, value in tensors.items()
            }
            got = {name: pair_results(name, x) for name in PAIRS}
            found[layout] = {
                name: {key: (whole(value), placed(value)) for key, value in values.items()}
                for name, values in got.items()
            }
    return found


@pytest.mark.parametrize("shape", [(4,), (2, 2)])
def test_contrastive_losses_over_sharded_tensors_equal_one_process(crew: Crew, shape):  # noqa: F811
    tensors = make_tensors(10, 6, torch.float64)
    one_process = {name: pair_results(name, tensors) for name in PAIRS}
    for found in crew.run(run_pairs, shape):
        for layout in (name for name in PAIR_LAYOUTS if PAIR_LAYOUTS[name][0] == shape):
            rows = PAIR_LAYOUTS[layout][1]
            for name, wants in one_process.items():
                for key, want in wants.items():
                    got, placements = found[layout][name][key]
                    assert_close(got, want, 1e-11, f"{layout}, {name}, {key}")
                    scalar = tuple(Partial() if name == "clip-sum" and key == "loss" and r != R else R for r in rows)
                    assert placements == str(tuple(rows) if want.dim() else scalar), (layout, name, key)
