"""`pair_stats` over a ring of virtual ranks against the dense oracle: every statistic, every gradient."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from tests.compare import assert_close, assert_no_worse, relative_error
from tests.kernels.dense import dense_stats
from tests.ring.virtual import run_virtual
from torch import Tensor

from tilewise.errors import GroupError
from tilewise.kernels.spec import Pair, PairSpec, Stats, wanted_stats
from tilewise.ops.autograd import pair_stats
from tilewise.ops.call import PairKeys
from tilewise.options import DEFAULT_OPTIONS, TileOptions

SPECS = {
    "rows": PairSpec(row_lse=True),
    "both": PairSpec(row_lse=True, col_lse=True, positive="one"),
    "columns": PairSpec(col_lse=True),
    "capped": PairSpec(row_lse=True, col_lse=True, positive="many", softcap=5.0),
    "sum": PairSpec(row_lse=True, row_sum=True),
    "tokens": PairSpec(row_lse=True, row_entropy=True, row_top=True, positive="one", softcap=9.0),
    "picked": PairSpec(row_lse=True, row_picked=True, positive="one", softcap=9.0),
    "softplus": PairSpec(softplus=True, positive="one"),
    "symmetric-one": PairSpec(row_lse=True, positive="one", mask_self=True, symmetric=True),
    "symmetric-many": PairSpec(row_lse=True, positive="many", mask_self=True, symmetric=True),
}
SHARDS = ([4, 3], [3, 0, 5], [2, 1, 4, 3])
LEAVES = ("a", "b", "scale", "bias")


def whole(spec: PairSpec, rows: Sequence[int], cols: Sequence[int], dtype: torch.dtype, size: float = 4.0) -> Pair:
    """A pair of all rows and all columns, with keys of every kind."""
    random = torch.Generator().manual_seed(len(rows))
    n, m = sum(rows), sum(rows) if spec.symmetric else sum(cols)

    def normal(*shape: int) -> Tensor:
        return torch.randn(*shape, generator=random, dtype=torch.float64).to(dtype)

    def integers(high: int, count: int) -> Tensor:
        return torch.randint(high, (count,), generator=random)

    stat = torch.float64 if dtype == torch.float64 else torch.float32
    a = normal(n, 6)
    partner = torch.randperm(n, generator=random)
    mutual = torch.empty(n, dtype=torch.long)  # x is the other's other: what a symmetric spec promises
    for left, right in zip(partner[0::2], partner[1::2], strict=False):
        mutual[left], mutual[right] = right, left
    if n % 2:
        mutual[partner[-1]] = -1
    one = mutual if spec.symmetric else integers(m, n)
    labels = integers(4, n)
    with_skip = not spec.symmetric and not spec.row_sum and not spec.row_picked  # -inf has no sum and is not picked
    return Pair(
        a=a,
        b=a if spec.symmetric else normal(m, 6),
        scale=torch.tensor(size, dtype=stat),
        bias=None if spec.symmetric else normal(m).to(stat),
        row_key=one if spec.positive == "one" else labels,
        col_key=None if spec.positive == "one" else labels if spec.symmetric else integers(4, m),
        row_skip=integers(5, n) if with_skip else None,
        col_skip=integers(5, m) if with_skip else None,
        row_shift=normal(n).to(stat) if spec.row_lse else None,
        col_shift=normal(m).to(stat) if spec.col_lse else None,
        col_weight=normal(m).to(stat) if spec.row_sum else None,
        pick=integers(m + 2, 4 * n).reshape(n, 4) - 1 if spec.row_picked else None,  # -1 and m are none
        row_scale=normal(n).to(stat).exp() if spec.row_picked else None,
    )


def stats_and_gradients(pair: Pair, spec: PairSpec, stats_of: Any, incoming: dict[str, Tensor]) -> dict[str, Tensor]:
    leaves = {name: getattr(pair, name) for name in LEAVES if getattr(pair, name) is not None}
    leaves = {name: value.detach().clone().requires_grad_() for name, value in leaves.items()}
    if spec.symmetric:
        leaves["b"] = leaves["a"]
    stats = stats_of(dataclasses.replace(pair, **leaves))
    found = {stat.name: getattr(stats, stat.name) for stat in wanted_stats(spec)}
    smooth = [stat.name for stat in wanted_stats(spec) if stat.gradient]
    loss = sum((found[name] * incoming[name]).nan_to_num(neginf=0.0).sum() for name in smooth)
    if spec.symmetric:
        del leaves["b"]
    grads = torch.autograd.grad(loss, list(leaves.values()))
    return {
        **{name: value.detach() for name, value in found.items()},
        **{f"grad {name}": grad for name, grad in zip(leaves, grads, strict=True)},
    }


def over_ring(
    pair: Pair,
    spec: PairSpec,
    rows: Sequence[int],
    cols: Sequence[int],
    incoming: dict[str, Tensor],
    options: TileOptions = DEFAULT_OPTIONS,
) -> dict[str, Tensor]:
    """The results of all ranks of a virtual ring, put together."""
    if spec.symmetric:
        cols = rows

    def cut(name: str, value: Tensor | None, rank: int) -> Tensor | None:
        if not isinstance(value, Tensor) or name == "scale":
            return value
        sizes = rows if name in ("a", "pick") or name.startswith("row") else cols
        return value[sum(sizes[:rank]) : sum(sizes[: rank + 1])]

    def work(group: Any) -> dict[str, Tensor]:
        rank = group.rank()
        mine = dataclasses.replace(pair, **{name: cut(name, value, rank) for name, value in vars(pair).items()})

        def stats_of(part: Pair) -> Stats:
            keys = {name: getattr(part, name) for name in PairKeys._fields}
            return pair_stats(
                part.a,
                None if spec.symmetric else part.b,
                part.scale,
                part.bias,
                keys=PairKeys(**keys),
                spec=spec,
                options=options,
                group_name=group.group_name,
            )

        mine_in = {name: cut(name, value, rank) for name, value in incoming.items()}
        return stats_and_gradients(mine, spec, stats_of, mine_in)

    parts = run_virtual(len(rows), work, timeout_s=300)
    return {
        name: sum(part[name] for part in parts) if name == "grad scale" else torch.cat([p[name] for p in parts])
        for name in parts[0]
    }


def incoming_for(pair: Pair, spec: PairSpec) -> dict[str, Tensor]:
    random = torch.Generator().manual_seed(9)
    sizes = {stat.name: stat.size(pair.shape) for stat in wanted_stats(spec)}
    return {
        name: torch.randn(size, generator=random, dtype=torch.float64).to(pair.stat_dtype)
        for name, size in sizes.items()
    }


@pytest.mark.usefixtures("nan_filled_empty")
@pytest.mark.parametrize("name", SPECS)
@pytest.mark.parametrize("rows", SHARDS, ids=str)
def test_ring_equals_the_oracle(name, rows):
    spec, cols = SPECS[name], [size + 1 if size else 0 for size in reversed(rows)]
    pair = whole(spec, rows, cols, torch.float64)
    incoming = incoming_for(pair, spec)
    want = stats_and_gradients(pair, spec, lambda part: dense_stats(part, spec), incoming)
    got = over_ring(pair, spec, rows, cols, incoming)
    assert got.keys() == want.keys()
    for key, value in want.items():
        finite = value.isfinite()
        assert torch.equal(finite, got[key].isfinite()), key
        assert_close(got[key][finite], value[finite], 1e-12, f"{name} {key}")


@settings(max_examples=25, deadline=None)
@given(
    st.lists(st.tuples(st.integers(0, 5), st.integers(0, 5)), min_size=1, max_size=4),
    st.sampled_from(["both", "softplus"]),
)
def test_any_split_gives_the_same(sizes, name):
    spec, rows, cols = SPECS[name], [r for r, _ in sizes], [c for _, c in sizes]
    if sum(rows) == 0 or sum(cols) == 0:
        return
    pair = whole(spec, rows, cols, torch.float64)
    pair = dataclasses.replace(pair, row_skip=None, col_skip=None)
    incoming = incoming_for(pair, spec)
    want = stats_and_gradients(pair, spec, lambda part: dense_stats(part, spec), incoming)
    got = over_ring(pair, spec, rows, cols, incoming)
    for key, value in want.items():
        assert_close(got[key], value, 1e-12, key)


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
@pytest.mark.parametrize("name", ["both", "softplus", "symmetric-many"])
def test_low_precision_is_no_worse_over_the_ring_than_dense(name, dtype):
    spec, rows = SPECS[name], [6, 9, 5]
    pair = whole(spec, rows, rows, dtype, size=1.0)
    pair = dataclasses.replace(pair, row_skip=None, col_skip=None)
    exact = dataclasses.replace(
        pair, **{k: v.double() for k, v in vars(pair).items() if isinstance(v, Tensor) and v.is_floating_point()}
    )
    incoming = incoming_for(pair, spec)
    double = {key: value.double() for key, value in incoming.items()}
    want = stats_and_gradients(exact, spec, lambda part: dense_stats(part, spec), double)
    # Dense in this type: features as they are, vectors in float32.
    dense = stats_and_gradients(pair, spec, lambda part: _dense_low(part, spec), incoming)
    got = over_ring(pair, spec, rows, rows, incoming)
    for key in want:
        assert_no_worse(got[key], dense[key], want[key], f"{name} {key}")


def _dense_low(pair: Pair, spec: PairSpec) -> Stats:
    """Scores rounded to the type of the features, as a dense loss under autocast has them."""
    low = pair.a.dtype
    casts = {name: getattr(pair, name) for name in ("scale", "bias") if getattr(pair, name) is not None}
    return dense_stats(dataclasses.replace(pair, **{name: value.to(low) for name, value in casts.items()}), spec)


def test_scores_of_a_thousand_merge_without_overflow():
    spec, rows = SPECS["both"], [5, 4, 6]
    pair = whole(spec, rows, rows, torch.float32, size=400.0)
    pair = dataclasses.replace(pair, bias=torch.full((15,), -900.0), row_skip=None, col_skip=None)
    exact = dataclasses.replace(
        pair, **{k: v.double() for k, v in vars(pair).items() if isinstance(v, Tensor) and v.is_floating_point()}
    )
    incoming = incoming_for(pair, spec)
    double = {key: value.double() for key, value in incoming.items()}
    want = stats_and_gradients(exact, spec, lambda part: dense_stats(part, spec), double)
    got = over_ring(pair, spec, rows, rows, incoming)
    assert want["row_lse"].abs().max() > 1000
    for key in ("row_lse", "col_lse", "row_pos"):
        assert_close(got[key], want[key], 1e-6, key)
    for key in ("grad a", "grad b", "grad scale"):
        assert_close(got[key], want[key], 2e-3, key)  # float32 scores near 1,000 are known to 1e-4


def test_two_runs_give_the_same_bits():
    spec, rows = SPECS["both"], [7, 2, 5, 4]
    pair = whole(spec, rows, rows, torch.float32)
    incoming = incoming_for(pair, spec)
    first, second = (over_ring(pair, spec, rows, rows, incoming) for _ in range(2))
    assert all(torch.equal(first[key], second[key]) for key in first)


def test_gradients_that_travel_in_the_features_type_are_rounded_once_per_rank():
    spec, rows = SPECS["both"], [6, 5, 7]
    pair = whole(spec, rows, rows, torch.bfloat16, size=1.0)
    incoming = incoming_for(pair, spec)
    full = over_ring(pair, spec, rows, rows, incoming)
    light = over_ring(pair, spec, rows, rows, incoming, TileOptions(ring_gradients="features"))
    assert torch.equal(light["grad a"], full["grad a"])  # rows do not travel
    error = relative_error(light["grad b"], full["grad b"])
    assert 0 < error < len(rows) * torch.finfo(torch.bfloat16).eps


@pytest.mark.parametrize("name", ["both", "softplus"])
@pytest.mark.parametrize("frozen", [("a",), ("b",), ("a", "scale", "bias"), ("b", "scale")], ids=str)
def test_frozen_inputs_leave_the_other_gradients_as_they_are(name, frozen):
    spec, rows = SPECS[name], [4, 3]
    pair = whole(spec, rows, rows, torch.float64)
    pair = dataclasses.replace(pair, row_skip=None, col_skip=None)
    incoming = incoming_for(pair, spec)
    want = over_ring(pair, spec, rows, rows, incoming)

    def work(group: Any) -> dict[str, Tensor]:
        own = slice(sum(rows[: group.rank()]), sum(rows[: group.rank() + 1]))
        cut = {
            key: value[own] if isinstance(value, Tensor) and value.dim() else value for key, value in vars(pair).items()
        }
        leaves = {key: cut[key].clone().requires_grad_(key not in frozen) for key in LEAVES}
        keys = PairKeys(row_key=cut["row_key"], row_shift=cut["row_shift"], col_shift=cut["col_shift"])
        stats = pair_stats(*leaves.values(), keys=keys, spec=spec, options=TileOptions(), group_name=group.group_name)
        names = [key for key in incoming if key != "num_positives"]
        sum((getattr(stats, key) * incoming[key][own]).sum() for key in names).backward()
        return {key: leaf.grad for key, leaf in leaves.items() if leaf.grad is not None}

    parts = run_virtual(2, work, timeout_s=300)
    assert parts[0].keys() == set(LEAVES) - set(frozen)
    for key in parts[0]:
        got = sum(p[key] for p in parts) if key == "scale" else torch.cat([p[key] for p in parts])
        assert_close(got, want[f"grad {key}"], 1e-12, key)


def test_a_rank_whose_loss_uses_nothing_still_takes_part():
    spec = PairSpec(row_lse=True, col_lse=True)
    a = torch.randn(6, 4, dtype=torch.float64)
    b = torch.randn(6, 4, dtype=torch.float64)

    def work(group: Any) -> Tensor:
        own = slice(3 * group.rank(), 3 * group.rank() + 3)
        left, right = a[own].clone().requires_grad_(), b[own].clone().requires_grad_()
        scale = torch.tensor(2.0, dtype=torch.float64)
        stats = pair_stats(left, right, scale, spec=spec, options=TileOptions(), group_name=group.group_name)
        # Rank 1 uses only the column statistics, rank 0 only those of the rows.
        (stats.row_lse if group.rank() == 0 else stats.col_lse).sum().backward()
        return right.grad

    got = torch.cat(run_virtual(2, work, timeout_s=300))
    leaf = b.clone().requires_grad_()
    scores = 2.0 * a @ leaf.T
    (scores.logsumexp(1)[:3].sum() + scores.logsumexp(0)[3:].sum()).backward()
    assert_close(got, leaf.grad, 1e-12)


def test_virtual_ranks_that_disagree_or_fail_end_together():
    def disagree(group: Any) -> None:
        spec = PairSpec(row_lse=True)
        x = torch.randn(3, 4 + group.rank())
        pair_stats(x, x, torch.tensor(1.0), spec=spec, options=TileOptions(), group_name=group.group_name)

    with pytest.raises(GroupError, match="width: 4 on rank 0 but 5 on rank 1"):
        run_virtual(2, disagree, timeout_s=5)

    def fail(group: Any) -> None:
        if group.rank() == 1:
            raise MemoryError("mine")
        disagree(group)

    with pytest.raises(MemoryError, match="mine"):
        run_virtual(2, fail, timeout_s=5)
