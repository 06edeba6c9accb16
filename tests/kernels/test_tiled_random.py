"""Random shapes, layouts, types, keys and statistics against the oracle: what no table thought of."""

import dataclasses

import torch
from hypothesis import assume, given, settings
from hypothesis import strategies as st
from tests.kernels.pair_checks import check_backward, check_forward

from tilewise.kernels.spec import Pair, PairSpec, stat_dtype
from tilewise.kernels.torch_impl import tiles
from tilewise.kernels.torch_impl.backend import TorchBackend

BACKEND = TorchBackend()
LAYOUTS = {
    "plain": lambda x: x,
    "transposed": lambda x: x.T.contiguous().T,
    "sliced": lambda x: torch.cat([x, torch.full_like(x, torch.nan)], 1)[:, : x.shape[1]],
    "reversed": lambda x: x.repeat_interleave(2, 0)[::2],
    "offset": lambda x: torch.cat([torch.full_like(x[:1], torch.nan), x])[1:],
}


@st.composite
def pairs(draw, dtype):
    """Any pair that the contract permits."""
    picks = draw(st.sampled_from([0, 1, 3, 8]))
    symmetric = draw(st.booleans()) and not picks
    n = draw(st.integers(0, 24))
    m = n if symmetric else draw(st.integers(0, 24))
    d = draw(st.integers(1, 9))
    make = torch.Generator().manual_seed(draw(st.integers(0, 2**31)))
    stat = stat_dtype(dtype)
    length = draw(st.sampled_from([0.1, 1.0, 10.0] if dtype == torch.float64 else [0.1, 1.0]))

    def normal(*shape):
        return torch.randn(*shape, generator=make, dtype=torch.float64)

    def integers(size, high):
        return torch.randint(0, high, (size,), generator=make)

    def maybe(value):
        return value if draw(st.booleans()) else None

    a = LAYOUTS[draw(st.sampled_from(list(LAYOUTS)))]((length * normal(n, d)).to(dtype))
    b = a if symmetric else LAYOUTS[draw(st.sampled_from(list(LAYOUTS)))](normal(m, d).to(dtype))
    positive = draw(st.sampled_from(["none", "one", "many"]))
    softplus = draw(st.booleans()) and not symmetric and not picks
    softcap = draw(st.sampled_from([0.0, 20.0])) if length <= 1.0 else 0.0
    scale = 1.0 if softcap else draw(st.sampled_from([1.0, 7.5, -2.0]))  # a cap far below the scores leaves no slope
    row_start, col_start = (draw(st.integers(0, 50)) for _ in range(2))
    if symmetric:
        col_start = row_start
    spec = PairSpec(
        row_lse=not softplus and draw(st.booleans()),
        col_lse=not softplus and not symmetric and not picks and draw(st.booleans()),
        softplus=softplus,
        positive=positive,
        mask_self=draw(st.booleans()) and not softplus and not picks,
        symmetric=symmetric,
        softcap=softcap,
    )
    if spec.row_lse and not spec.col_lse and not symmetric and not picks:
        spec = dataclasses.replace(
            spec, row_entropy=draw(st.booleans()), row_sum_sq=draw(st.booleans()), row_top=draw(st.booleans())
        )
    high = draw(st.sampled_from([2, 7, 1000]))
    row_key = integers(n, high)
    if positive == "one":
        row_key = row_key + col_start - 3 if not symmetric else col_start + torch.arange(n).flip(0)
    pair = Pair(
        a=a,
        b=b,
        scale=torch.tensor(scale, dtype=stat),
        bias=None if symmetric else maybe(normal(m).to(stat)),
        row_key=None if positive == "none" else row_key,
        col_key=(row_key if symmetric else integers(m, high)) if positive == "many" else None,
        row_shift=None if softplus else maybe(normal(n).to(stat)),
        col_shift=maybe(normal(m).to(stat)),
        row_start=row_start,
        col_start=col_start,
    )
    excludes = spec.mask_self
    if draw(st.booleans()) and not softplus and not symmetric and not picks:
        ids = draw(st.sampled_from([3, 50]))
        pair = dataclasses.replace(pair, row_skip=integers(n, ids), col_skip=integers(m, ids))
        excludes = True
    if not symmetric and not excludes and draw(st.booleans()):  # -inf has no weighted sum
        pair = dataclasses.replace(pair, col_weight=normal(m).to(stat))
        spec = dataclasses.replace(spec, row_sum=True)
    if not symmetric and not softplus:
        pair = dataclasses.replace(pair, row_scale=maybe(torch.exp2(normal(n).clamp(-2.0, 2.0)).to(stat)))
    if picks:
        pick = integers(n * picks, m + 4).reshape(n, picks) + (col_start - 2)
        pair, spec = dataclasses.replace(pair, pick=pick), dataclasses.replace(spec, row_picked=True)
    # Symmetric keys: a positive "one" that is its own mirror image, and none that is the sample itself.
    assume(not (symmetric and positive == "one" and n % 2))
    return pair, spec


def with_tiles(rows, cols, work):
    before = tiles.TILE_ROWS, tiles.TILE_COLS, tiles.SYMMETRIC_TILE
    tiles.TILE_ROWS, tiles.TILE_COLS, tiles.SYMMETRIC_TILE = rows, cols, max(rows, 4)
    try:
        work()
    finally:
        tiles.TILE_ROWS, tiles.TILE_COLS, tiles.SYMMETRIC_TILE = before


def check(pair, spec, rows, cols):
    def both():
        check_forward(BACKEND, pair, spec, hard=True)
        if any((spec.row_lse, spec.col_lse, spec.softplus, spec.row_sum, spec.row_picked, spec.positive != "none")):
            check_backward(BACKEND, pair, spec, hard=True)

    with_tiles(rows, cols, both)


SIDES = st.sampled_from([1, 3, 16, 64])


@settings(max_examples=200)
@given(pairs(torch.float64), SIDES, SIDES)
def test_float64(made, rows, cols):
    check(*made, rows, cols)


@settings(max_examples=100)
@given(pairs(torch.float32), SIDES, SIDES)
def test_float32(made, rows, cols):
    check(*made, rows, cols)


@settings(max_examples=60)
@given(pairs(torch.bfloat16), SIDES, SIDES)
def test_bfloat16(made, rows, cols):
    pair, spec = made
    with_tiles(rows, cols, lambda: check_forward(BACKEND, pair, spec))
