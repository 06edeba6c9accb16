"""Numbers and functions that the kernels share. Inside a kernel scores are in units of log2, because the hardware has exp2.

Axes: R, C rows and columns of a tile; D features, K of them at a time.

Parameters of kernels have this order: scores (features, scale, bias, softcap), keys, shifts and weights, statistics,
gradients of statistics, outputs, numbers, and after all of these the compile-time constants.

Constants stand on the left of `&` and `==`, because Triton's interpreter passes switches as plain numbers.
"""

from typing import Any, NamedTuple

import triton
import triton.language as tl

from tilewise.kernels.triton_impl.bits import BIAS, DIAGONAL, MANY, MASK_SELF, ONE_BIAS, SKIP, SOFTCAP

LOG2E = tl.constexpr(1.4426950408889634)
LN2 = tl.constexpr(0.6931471805599453)
# Exponentials below 2**-126 become 0. Those of a tile's 256 columns are together less than 2**-38 of such a sum.
SMALLEST_SUM = tl.constexpr(2.0**-80)
LARGEST_SUM = tl.constexpr(2.0**120)
NO_SHARE = tl.constexpr(-300.0)  # 2**NO_SHARE is 0
SOME_PICKS = tl.constexpr(8)  # picked columns that `without_picks` reads at once
LARGEST_SCORE = tl.constexpr(3.4028234663852886e38)  # the largest finite number of float32


class ScoreInputs(NamedTuple):
    """All that scores depend on besides the features, and where the macro-tile lies. Each kernel over scores builds it.

    Switches are not among the fields: Triton would make numbers of a run out of constants that are assigned in a tuple.
    """

    scale: Any  # the number, loaded
    bias: Any
    softcap: Any
    row_key: Any
    col_key: Any
    row_skip: Any
    col_skip: Any
    n: Any
    m: Any
    first: Any  # the index of the first column
    ahead: Any  # the index of row 0 less that of column 0: row i and column i + ahead are the same sample
    row_scale: Any = None
    picked: Any = None  # columns to leave out: see `without_picks`
    picks: Any = 0


@triton.jit
def with_rank(x):
    """Scores with the order of torch.argmax, in which NaN is the largest: inf stands for NaN, LARGEST_SCORE for inf."""
    return tl.where(x == x, tl.minimum(x, LARGEST_SCORE), float("inf"))


@triton.jit
def without_rank(best, value):
    """``value``, or inf or NaN if that is the largest score; ``best`` is the largest of the scores of `with_rank`."""
    return tl.where(best == float("inf"), float("nan"), tl.where(best == LARGEST_SCORE, float("inf"), value))


@triton.jit
def shifts(shift, at, ok):
    """The shifts of rows or columns in units of log2; 0 without shifts."""
    start = tl.zeros_like(at).to(tl.float32)
    if shift is not None:
        start = tl.load(shift + at, mask=ok, other=0.0) * LOG2E
    return start


@triton.jit
def finite(top):
    """A maximum that can be subtracted: 0 instead of -inf, the maximum of no scores."""
    return tl.where(top == float("-inf"), 0.0, top)


@triton.jit
def in_units(stride, UNIT: tl.constexpr):
    """The stride, written so that the compiler knows that UNIT divides it and reads as much at once."""
    return stride // UNIT * UNIT


@triton.jit
def row_stride(features, stride):
    """The stride of features whose rows start at 16-byte addresses."""
    return in_units(stride, 128 // features.dtype.element_ty.primitive_bitwidth)


@triton.jit
def tile_place(tile, row_tiles, col_tiles, GROUP: tl.constexpr):
    """Row and column of a tile. GROUP row tiles share their column tiles, which are then in the cache."""
    per_group = GROUP * col_tiles
    first = (tile // per_group) * GROUP
    row_count = tl.minimum(row_tiles - first, GROUP)
    return first + (tile % per_group) % row_count, (tile % per_group) // row_count


@triton.jit
def tile_dot(
    a_desc, b_desc, row, col, D: tl.constexpr, R: tl.constexpr, C: tl.constexpr, K: tl.constexpr, EXACT: tl.constexpr
):
    """Products of one tile: (R, C) float32. Rows, columns and features out of bounds are read as zeros."""
    acc = tl.zeros((R, C), dtype=tl.float32)
    for k in range(0, (D + K - 1) // K):
        a = a_desc.load([row, k * K])
        b = b_desc.load([col, k * K])
        acc = tl.dot(a, b.T, acc, input_precision=EXACT)
    return acc


@triton.jit
def tanh(x):
    """tanh by one exponential; its absolute error is that of float32."""
    e = tl.exp2(-2.0 * 1.4426950408889634 * tl.abs(x))
    t = (1.0 - e) / (1.0 + e)
    return tl.where(x < 0, -t, t)


@triton.jit
def own_column(rows, n, m, row_key, first, ahead, SCORE: tl.constexpr, POSITIVE: tl.constexpr):
    """The column of each row's only positive in this macro-tile, whose columns start at ``first``; -1 if it lies outside.

    ``ahead`` is the global index of row 0 less that of column 0, so row i and column i + ahead are the same sample.
    """
    if DIAGONAL == POSITIVE:
        key = rows.to(tl.int64) + ahead
    else:
        key = tl.load(row_key + rows, mask=rows < n, other=-1) - first
    if MASK_SELF & SCORE:
        key = tl.where(key == rows + ahead, -1, key)
    return tl.where((rows < n) & (key >= 0) & (key < m), key, -1).to(tl.int32)


@triton.jit
def positives(rows, cols, s, SCORE: tl.constexpr, POSITIVE: tl.constexpr):
    """Where the positives of a tile are: (R, C) bool."""
    if MANY == POSITIVE:
        key = tl.load(s.row_key + rows, mask=rows < s.n, other=-1)
        other = tl.load(s.col_key + cols, mask=cols < s.m, other=-3)
        hit = key[:, None] == other[None, :]  # a row of rank -1 matches no column
    else:
        own = own_column(rows, s.n, s.m, s.row_key, s.first, s.ahead, SCORE, POSITIVE)
        hit = own[:, None] == cols[None, :]
    if MASK_SELF & SCORE:
        hit = hit & ((rows[:, None] + s.ahead) != cols[None, :])
    return hit


@triton.jit
def any_here(rows, s, first_row, first_col, R: tl.constexpr, C: tl.constexpr, POSITIVE: tl.constexpr):
    """Whether the only positive of any of these rows lies in this tile."""
    if DIAGONAL == POSITIVE:
        return (first_row + s.ahead < first_col + C) & (first_row + s.ahead + R > first_col)
    key = own_column(rows, s.n, s.m, s.row_key, s.first, s.ahead, 0, POSITIVE)
    return tl.max(((key >= first_col) & (key < first_col + C)).to(tl.int32), 0) > 0


@triton.jit
def row_scales(row_scale, rows, ok):
    """The factor of each row's scores; 1 for rows past the end."""
    return tl.load(row_scale + rows, mask=ok, other=1.0)


@triton.jit
def score_tile(acc, rows, cols, s, SCORE: tl.constexpr, POSITIVE: tl.constexpr, shift=0.0):
    """Scores less ``shift``, one number, both in units of log2; -inf in columns past the end and for excluded pairs."""
    inside = cols < s.m
    # A column past the end gets an offset of -inf. It is added to the product, so no `tl.where` over the tile is needed.
    if BIAS & SCORE:
        offset = tl.load(s.bias + cols, mask=inside, other=float("-inf"))
    elif ONE_BIAS & SCORE:
        offset = tl.where(inside, tl.load(s.bias), float("-inf"))
    else:
        offset = tl.where(inside, 0.0, float("-inf"))
    if SOFTCAP & SCORE:
        # By its equation the cap turns a bias of -inf into -softcap. Only columns past the end stay at -inf.
        x = (s.softcap * LOG2E) * tanh((acc * s.scale + offset[None, :]) / s.softcap)
        if s.row_scale is not None:
            x = x * row_scales(s.row_scale, rows, rows < s.n)[:, None]
        x = tl.where(inside[None, :], x, float("-inf")) - shift
    elif s.row_scale is not None:
        x = acc * (s.scale * LOG2E) + (offset * LOG2E)[None, :]
        x = x * row_scales(s.row_scale, rows, rows < s.n)[:, None] - shift
    else:
        x = acc * (s.scale * LOG2E) + (offset * LOG2E - shift)[None, :]
    if SKIP & SCORE:
        one = tl.load(s.row_skip + rows, mask=rows < s.n, other=-2)
        excluded = one[:, None] == tl.load(s.col_skip + cols, mask=inside, other=-3)[None, :]
        if POSITIVE != 0:
            excluded = excluded & (positives(rows, cols, s, SCORE, POSITIVE) == 0)
        x = tl.where(excluded, float("-inf"), x)
    if MASK_SELF & SCORE:
        x = tl.where((rows[:, None] + s.ahead) == cols[None, :], float("-inf"), x)
    return x


@triton.jit
def scored_tile(a_desc, b_desc, s, tile_row, tile_col, D: tl.constexpr, SCORE: tl.constexpr, POSITIVE: tl.constexpr,
                R: tl.constexpr, C: tl.constexpr, K: tl.constexpr, EXACT: tl.constexpr, shift=0.0):  # fmt: skip
    """Rows and columns of a tile, and its scores as in `score_tile`, -inf in picked columns."""
    acc = tile_dot(a_desc, b_desc, tile_row * R, tile_col * C, D, R, C, K, EXACT)
    rows = tile_row * R + tl.arange(0, R)
    cols = tile_col * C + tl.arange(0, C)
    x = score_tile(acc, rows, cols, s, SCORE, POSITIVE, shift)
    if s.picked is not None:
        x = without_picks(x, rows, cols, s, tile_col * C, C)
    return rows, cols, x


@triton.jit
def without_picks(x, rows, cols, s, first_col, C: tl.constexpr):
    """The scores of a tile with -inf in the columns ``picked``, (n, picks) global indices that ascend in each row.

    ``first_col`` is the tile's first column. The picks of a row in this tile are those from ``low`` to ``high``.
    """
    start, ok = s.first + first_col, rows < s.n
    row_at = s.picked + rows.to(tl.int64) * s.picks
    low, high = tl.zeros_like(rows), tl.zeros_like(rows)
    for k in range(0, s.picks, SOME_PICKS):
        at = k + tl.arange(0, SOME_PICKS)
        here = ok[:, None] & (at < s.picks)[None, :]
        col = tl.load(row_at[:, None] + at[None, :], mask=here, other=2**62)
        low += tl.sum((col < start).to(tl.int32), 1)
        high += tl.sum((col < start + C).to(tl.int32), 1)
    for k in range(0, tl.max(high - low, 0)):
        col = (tl.load(row_at + low + k, mask=low + k < high, other=-1) - s.first).to(tl.int32)
        x = tl.where(col[:, None] == cols[None, :], float("-inf"), x)
    return x


@triton.jit
def near_sums(e):
    """Sums over those rows of a tile that one thread holds: (32, C). On Hopper these rows are 8 and 64 apart.

    A tile of fewer than 64 rows is returned as it is.
    """
    R: tl.constexpr = e.shape[0]
    C: tl.constexpr = e.shape[1]
    if R >= 64:
        near = tl.reshape(tl.sum(tl.sum(tl.reshape(e, (R // 64, 4, 2, 8, C)), 2), 0), (32, C))
    else:
        near = e
    return near


@triton.jit
def store_tile(desc, row, col, tile):
    """Write a tile at once, or in pieces of as many columns as ``desc`` has: pieces take less shared memory."""
    R: tl.constexpr = tile.shape[0]
    C: tl.constexpr = tile.shape[1]
    W: tl.constexpr = desc.block_shape[1]
    tile = tile.to(desc.dtype)
    if C == W:
        desc.store([row, col], tile)
    else:
        # Each thread holds some columns of both halves, so splitting moves nothing between threads.
        left, right = tl.split(tl.permute(tl.reshape(tile, (R, 2, C // 2)), (0, 2, 1)))
        store_tile(desc, row, col, left)
        store_tile(desc, row, col + C // 2, right)
