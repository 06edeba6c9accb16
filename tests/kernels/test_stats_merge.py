"""Statistics are a monoid: blocks in any grouping give what the whole gives. That is all a ring needs."""

import dataclasses
import itertools
import math

import pytest
import torch
from tests.compare import assert_close
from tests.kernels.dense import dense_stats
from tests.kernels.pair_cases import CASES, make_case
from tests.kernels.pair_checks import dense_grads, finite, incoming_gradients, leaves_of, stats_asked

from tilewise.kernels.spec import GradStats, Needs, Pair, Stats, largest_gradient, saved_names
from tilewise.kernels.tensors import COL_TENSORS
from tilewise.kernels.torch_impl.backend import TorchBackend
from tilewise.options import TileOptions

BACKEND, OPTIONS = TorchBackend(), TileOptions()
pytestmark = pytest.mark.usefixtures("small_tiles")
WHOLE = ("guide_jsd_without_norms",)  # its log-sum-exps are those of all columns in the pair
BLOCKED = [name for name in CASES if name not in WHOLE and not make_case(name, torch.float64)[1].symmetric]
EDGES = (0, 30, 30, 71)  # an empty block, and uneven ones


def column_block(pair: Pair, part: slice) -> Pair:
    def cut(values):
        return None if values is None else values[part]

    return dataclasses.replace(
        pair,
        b=pair.b[part],
        **{name: cut(getattr(pair, name)) for name in COL_TENSORS},
        col_start=pair.col_start + part.start,
    )


def column_blocks(pair: Pair):
    m = pair.b.shape[0]
    edges = [*(min(edge, m) for edge in EDGES), m]
    return [slice(start, stop) for start, stop in itertools.pairwise(edges)]


def same(one: Stats, other: Stats, tolerance: float = 1e-12) -> None:
    assert stats_asked(one).keys() == stats_asked(other).keys()
    for name, value in stats_asked(other).items():
        mine = getattr(one, name)
        assert torch.equal(mine == -torch.inf, value == -torch.inf), name
        assert_close(finite(mine, value), finite(value, value), tolerance, name)


def some_stats(seed: int) -> Stats:
    generator = torch.Generator().manual_seed(seed)

    def vector():
        return 300 * torch.randn(7, generator=generator, dtype=torch.float64)

    lse = vector()
    lse[2:4] = -torch.inf
    return Stats(
        **{name: vector() for name in ("row_pos", "num_positives", "row_softplus", "row_sum", "col_lse")},
        row_lse=lse,
        row_entropy=torch.where(lse == -torch.inf, 0.0, vector().abs() / 100),
        row_sum_sq=torch.where(lse == -torch.inf, 0.0, -vector().abs() / 100),
        row_top=lse.round(decimals=-2),  # some are equal
        row_top_col=torch.randint(0, 9, (7,), generator=generator),
        row_picked=torch.randn(7, 3, generator=generator, dtype=torch.float64),
    )


def test_merge_is_associative_and_commutative_with_identity():
    a, b, c = (some_stats(seed) for seed in range(3))
    same(a.merge(b).merge(c), a.merge(b.merge(c)), 1e-14)
    same(a.merge(b), b.merge(a), 1e-15)
    same(Stats().merge(a), a, 0.0)
    same(a.merge(Stats()), a, 0.0)
    assert stats_asked(Stats().merge(Stats())) == {}


def test_merge_keeps_the_maximum():
    """Scores of +-1000: a plain sum of exponentials would be inf or 0."""
    high, low = (Stats(row_lse=torch.tensor([x, -x, -torch.inf])) for x in (1000.0, -1000.0))
    assert torch.equal(high.merge(low).row_lse, torch.tensor([1000.0, 1000.0, -torch.inf]))


def test_entropy_of_far_apart_and_of_equal_parts():
    """Two halves of the same weight have a bit more; one that weighs nothing changes nothing."""
    lse = torch.tensor([5.0, 1000.0, -torch.inf, -torch.inf], dtype=torch.float64)
    other = torch.tensor([5.0, -1000.0, 3.0, -torch.inf], dtype=torch.float64)
    one = Stats(row_lse=lse, row_entropy=torch.tensor([1.0, 1e-9, 0.0, 0.0], dtype=torch.float64))
    two = Stats(row_lse=other, row_entropy=torch.tensor([1.0, 2.0, 0.5, 0.0], dtype=torch.float64))
    want = torch.tensor([1.0 + math.log(2), 1e-9, 0.5, 0.0], dtype=torch.float64)
    torch.testing.assert_close(one.merge(two).row_entropy, want, rtol=1e-15, atol=0.0)


def test_squares_of_far_apart_and_of_equal_parts():
    """Two halves of the same weight: the sum of squares halves. A part that weighs nothing changes nothing."""
    lse = torch.tensor([5.0, 1000.0, -torch.inf, -torch.inf], dtype=torch.float64)
    other = torch.tensor([5.0, -1000.0, 3.0, -torch.inf], dtype=torch.float64)
    one = Stats(row_lse=lse, row_sum_sq=torch.tensor([-1.0, -1e-9, 0.0, 0.0], dtype=torch.float64))
    two = Stats(row_lse=other, row_sum_sq=torch.tensor([-1.0, -2.0, -0.5, 0.0], dtype=torch.float64))
    want = torch.tensor([-1.0 - math.log(2), -1e-9, -0.5, 0.0], dtype=torch.float64)
    torch.testing.assert_close(one.merge(two).row_sum_sq, want, rtol=1e-14, atol=0.0)


def test_of_equal_largest_scores_the_lower_column_wins():
    one = Stats(row_top=torch.tensor([1.0, 2.0, 3.0]), row_top_col=torch.tensor([7, 7, 7]))
    two = Stats(row_top=torch.tensor([1.0, 1.0, 4.0]), row_top_col=torch.tensor([3, 3, 9]))
    for merged in (one.merge(two), two.merge(one)):
        assert merged.row_top.tolist() == [1.0, 2.0, 4.0]
        assert merged.row_top_col.tolist() == [3, 7, 9]


@pytest.mark.parametrize("order", list(itertools.permutations(range(3))), ids=str)
@pytest.mark.parametrize("guide, excluded", [("kl", "bias"), ("reverse_kl", "guide_bias")])
def test_an_infinite_divergence_merges_in_any_order(guide, excluded, order):
    """One block of columns is excluded by one side, so that this side has no column there: the whole is infinite."""
    pair, spec = make_case("guide_kl", torch.float64)
    spec = dataclasses.replace(spec, guide=guide, softcap=0.0, guide_softcap=0.0, positive="none", hot=0.0)
    edges = (0, 20, 45, pair.b.shape[0])
    blocks = [slice(*part) for part in itertools.pairwise(edges)]
    values = getattr(pair, excluded).clone()
    values[blocks[1]] = -torch.inf
    for name, block in ((excluded, values), (excluded, values.masked_fill(values == -torch.inf, 0.0))):
        one = dataclasses.replace(pair, **{name: block})
        want, merged = getattr(dense_stats(one, spec), f"row_{guide}"), Stats()
        for place in order:
            merged = merged.merge(BACKEND.forward(column_block(one, blocks[place]), spec, OPTIONS))
        found = getattr(merged, f"row_{guide}")
        assert torch.equal(found.isposinf(), want.isposinf())
        assert want.isposinf().all() == (block is values)
        if block is not values:
            assert_close(found, want, 1e-12)


def test_rows_takes_only_rows():
    assert stats_asked(some_stats(0).rows()).keys() == stats_asked(some_stats(0)).keys() - {"col_lse"}


def rows_only(name):
    pair, spec = make_case(name, torch.float64)
    return pair, dataclasses.replace(spec, col_lse=False)


@pytest.mark.parametrize("name", [name for name in BLOCKED if stats_asked(dense_stats(*rows_only(name)))])
def test_blocks_of_columns_give_the_whole(name):
    pair, spec = rows_only(name)
    merged = Stats()
    for part in column_blocks(pair):
        merged = merged.merge(BACKEND.forward(column_block(pair, part), spec, OPTIONS))
    same(merged, BACKEND.forward(pair, spec, OPTIONS))


@pytest.mark.parametrize("name", BLOCKED)
def test_gradients_of_blocks_give_the_whole(name):
    """With the statistics over all blocks, each block gives its columns' gradient and its share of the rows'."""
    pair, spec = make_case(name, torch.float64)
    stats = BACKEND.forward(pair, spec, OPTIONS)
    grad = incoming_gradients(stats)
    needs = Needs(a=True, b=True, scale=True, bias=pair.bias is not None)
    total_a, total_scale, columns, biases = 0.0, 0.0, [], []
    for part in column_blocks(pair):
        rows = {name: getattr(stats, name) for name in saved_names(spec) if name not in ("col_lse", "row_pos")}
        own = Stats(**rows, col_lse=None if stats.col_lse is None else stats.col_lse[part])
        incoming = dataclasses.replace(grad, col_lse=None if grad.col_lse is None else grad.col_lse[part])
        grads = BACKEND.backward(column_block(pair, part), own, incoming, needs, spec, OPTIONS)
        total_a, total_scale = total_a + grads.a, total_scale + grads.scale
        columns.append(grads.b)
        biases.append(grads.bias)
    want = dense_grads(leaves_of(pair), spec, grad)
    assert_close(total_a, want.a, 1e-12)
    assert_close(torch.cat(columns), want.b, 1e-12)
    assert_close(total_scale, want.scale, 1e-10)
    if pair.bias is not None:
        assert_close(torch.cat(biases), want.bias, 1e-12)


def test_largest_gradient():
    assert largest_gradient(GradStats()).item() == 1.0
    assert largest_gradient(GradStats(row_lse=torch.zeros(3))).item() == 1.0
    assert largest_gradient(GradStats(row_lse=torch.zeros(0))).item() == 1.0
    assert largest_gradient(
        GradStats(row_lse=torch.tensor([1e-8, -3e-7]), row_pos=torch.tensor([2e-8]))
    ).item() == pytest.approx(3e-7)
