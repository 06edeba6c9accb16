"""Derivatives of the statistics along a direction, against forward-mode derivatives of the dense oracle."""

import dataclasses

import pytest
import torch
from tests.compare import assert_close
from tests.kernels.dense import dense_stats
from tests.kernels.pair_cases import CASES, make_case
from tests.kernels.pair_checks import STATS, leaves_of, stats_asked

from tilewise.kernels.registry import directional_derivatives
from tilewise.kernels.spec import Grads
from tilewise.options import TileOptions

OPTIONS = TileOptions()
LEAVES = ("a", "b", "scale", "bias")
TOLERANCE = {torch.float64: 1e-11, torch.float32: 3e-5, torch.bfloat16: 3e-5, torch.float16: 3e-5}
# Differences of logarithms. Where they are near 0 their derivatives are all rounding, so the derivative of the
# log-sum-exp is added to them before they are compared.
DIFFERENCES = ("row_entropy", "row_sum_sq", "row_kl", "row_reverse_kl", "row_jsd")

pytestmark = pytest.mark.usefixtures("small_tiles", "nan_filled_empty")


def random_direction(pair, symmetric):
    generator = torch.Generator().manual_seed(4)
    draw = {name: getattr(pair, name) for name in LEAVES if not (symmetric and name == "b")}
    return Grads(
        **{
            name: torch.randn(value.shape, generator=generator, dtype=torch.float64).to(value.dtype)
            for name, value in draw.items()
            if value is not None
        }
    )


def dense_derivatives(pair, along, spec):
    """Forward mode through the oracle, in float64."""
    pair = leaves_of(pair, torch.float64)
    names = [name for name in LEAVES if getattr(along, name) is not None]

    def stats_of(*values):
        given = dict(zip(names, values, strict=True))
        moved = dataclasses.replace(pair, **given, **({"b": given.get("a", pair.a)} if spec.symmetric else {}))
        return {name: value for name, value in stats_asked(dense_stats(moved, spec)).items() if name in STATS}

    leaves, tangents = ([getattr(x, name).detach().double() for name in names] for x in (pair, along))
    return torch.func.jvp(stats_of, tuple(leaves), tuple(tangents))


@pytest.mark.parametrize("dtype", TOLERANCE)
@pytest.mark.parametrize("name", [name for name in CASES if make_case(name, torch.float64)[0].row_norm is None])
def test_derivative_of_each_statistic(name, dtype):
    pair, spec = make_case(name, dtype)
    along = random_direction(pair, spec.symmetric)
    values, want = dense_derivatives(pair, along, spec)
    _, got = directional_derivatives(pair, along, tuple(want), spec, OPTIONS)
    assert stats_asked(got).keys() == want.keys()
    for stat, right in want.items():
        finite = values[stat].isfinite()  # a row without a score that counts has no derivative
        found = getattr(got, stat)
        assert found.isfinite().all(), stat
        base = want["row_lse"] if stat in DIFFERENCES else 0.0
        found, right = (torch.where(finite, x + base, 0.0) for x in (found, right))
        assert_close(found, right, TOLERANCE[dtype], stat)


@pytest.mark.parametrize("leaf", LEAVES)
def test_directions_may_be_missing(leaf):
    pair, spec = make_case("cross_entropy_smoothed_and_capped", torch.float64)
    along = random_direction(pair, False)
    alone = Grads(**{leaf: getattr(along, leaf)})
    _, want = dense_derivatives(pair, alone, spec)
    _, got = directional_derivatives(pair, alone, ("row_lse",), spec, OPTIONS)
    assert_close(got.row_lse, want["row_lse"], 1e-11)
