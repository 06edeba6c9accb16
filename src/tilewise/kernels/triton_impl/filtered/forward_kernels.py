"""Forward of the filter, which drops entries that carry almost no probability. `filter_plan` has the equations.

An *entry* is one row and one tile.

    gather_kernel      a chunk of the columns in their new order, and the mean column of each tile
    mass_kernel        the log-sum-exp of each entry; probe_kernel: the same for a sample of the rows
    row_kernel         the log-sum-exp and entropy of each row
    choose_kernel      the entries that it drops
    top_kernel         the largest score of each row

Every number is computed by one program, so that sums have one order. Scores are in units of log2. The *place* of a column
is its position in the new order: order[place] is the column. Strides (``a_units``, ``b_units``, ``out_units``) are in
units of 16 bytes, UNIT numbers each, so that the compiler knows the alignment of rows and prefetches them. If
``skip_if`` is set, the exact case runs instead, and a kernel returns without reading scores.

Axes: W columns of a tile, D features, K of them at a time, R rows at a time.
"""

import triton
import triton.language as tl

from tilewise.kernels.filter_plan import SMALLEST_LIMIT as LIMIT
from tilewise.kernels.triton_impl.bits import BIAS
from tilewise.kernels.triton_impl.launch import kernel
from tilewise.kernels.triton_impl.primitives import (
    LN2,
    LOG2E,
    NO_SHARE,
    ScoreInputs,
    finite,
    score_tile,
    scored_tile,
    tile_place,
    with_rank,
    without_rank,
)
from tilewise.kernels.triton_impl.two_pass.forward_kernels import raised


@kernel(optional=("bias",), dynamic=("m", "first", "first_tile", "b_units", "out_units"))
def gather_kernel(b, bias, order, skip_if, out, mean, m, first, first_tile, b_units, out_units,
                  D: tl.constexpr, UNIT: tl.constexpr, W: tl.constexpr, R: tl.constexpr, K: tl.constexpr):  # fmt: skip
    """out = the m columns from place ``first`` on; mean = the mean column of each of their tiles, first_tile the first.

    Columns with a bias of -inf do not count in the mean. A program handles K features of one tile.
    """
    width = tl.where(tl.load(skip_if) != 0, 0, W)
    tile = tl.program_id(0) // ((D + K - 1) // K)
    at = (tl.program_id(0) % ((D + K - 1) // K)) * K + tl.arange(0, K)
    total = tl.zeros((K,), tl.float32)
    count = 0.0
    for start in range(0, width, R):
        here = tile * W + start + tl.arange(0, R)
        ok = here < m
        col = tl.load(order + first + here, mask=ok, other=0).to(tl.int64)
        inside = ok[:, None] & (at < D)[None, :]
        value = tl.load(b + col[:, None] * b_units * UNIT + at[None, :], mask=inside, other=0.0)
        tl.store(out + here.to(tl.int64)[:, None] * out_units * UNIT + at[None, :], value, mask=inside)
        if bias is not None:
            ok = ok & (tl.load(bias + first + here, mask=ok, other=0.0) > float("-inf"))
            value = tl.where(ok[:, None], value, 0.0)
        total += tl.sum(value.to(tl.float32), 0)
        count += tl.sum(ok.to(tl.float32), 0)
    total = total / tl.maximum(count, 1.0)
    tl.store(mean + (first_tile + tile).to(tl.int64) * D + at, total.to(mean.dtype.element_ty), mask=at < D)


SMALLEST_LIMIT = tl.constexpr(LIMIT)
NO_PLACE = tl.constexpr(2**31 - 1)  # larger than every column


@triton.jit
def log_sum(x):
    """log2 of the sum of exp2(x) over the columns of a tile, as two numbers to be added: the maximum, and the rest."""
    safe = finite(tl.max(x, 1))
    return safe, tl.log2(tl.sum(tl.exp2(x - safe[:, None]), 1))


@triton.jit
def tile_entropy(x, safe, log_total):
    """The entropy of the softmax over the columns of a tile, in units of log2; ``safe`` and ``log_total``: `log_sum`."""
    below = x - safe[:, None]
    gap = tl.sum(tl.exp2(below) * tl.maximum(below, NO_SHARE), 1)  # 0 times -inf would be NaN
    return tl.where(log_total == float("-inf"), 0.0, log_total - gap * tl.exp2(-log_total))


@kernel(
    optional=("bias", "row_shift", "order", "entropy_part", "top_part", "top_col_part"),
    dynamic=("softcap", "n", "m", "first", "first_tile"),
)
def mass_kernel(a_desc, b_desc, scale, bias, softcap, order, row_shift, skip_if, part, entropy_part, top_part, top_col_part,
                n, m, first, first_tile,
                D: tl.constexpr, SCORE: tl.constexpr, R: tl.constexpr, C: tl.constexpr, K: tl.constexpr,
                GROUP: tl.constexpr, PROGRAMS: tl.constexpr, EXACT: tl.constexpr):  # fmt: skip
    """part[tile, row] = log2 of the sum of exp(x - row_shift) over the columns of the tile.

    The columns are the m columns from place ``first`` on, which `gather_kernel` wrote; ``first_tile`` is their first tile.
    Optional, in the same places: the entropy over the tile in units of log2, the largest score in units of log2 (see
    `with_rank`) and its column, the lowest of equal ones.
    """
    row_tiles, col_tiles = tl.cdiv(n, R), tl.cdiv(m, C)
    tiles = row_tiles * col_tiles
    tiles = tl.where(tl.load(skip_if) != 0, 0, tiles)
    own_bias = bias
    if BIAS & SCORE:
        own_bias = bias + first
    s = ScoreInputs(tl.load(scale), own_bias, softcap, None, None, None, None, n, m, 0, 0)
    for tile in tl.range(tl.program_id(0), tiles, PROGRAMS, flatten=True):
        tile_row, tile_col = tile_place(tile, row_tiles, col_tiles, GROUP)
        rows, cols, x = scored_tile(a_desc, b_desc, s, tile_row, tile_col, D, SCORE, 0, R, C, K, EXACT)
        safe, total = log_sum(x)
        here = (first_tile + tile_col).to(tl.int64) * n + rows
        if entropy_part is not None:
            tl.store(entropy_part + here, tile_entropy(x, safe, total), mask=rows < n)
        if top_part is not None:
            y = with_rank(x)
            high = tl.max(y, 1)
            col = tl.load(order + first + cols, mask=cols < m, other=NO_PLACE)
            tl.store(top_part + here, high, mask=rows < n)
            col = tl.min(tl.where(y == high[:, None], col[None, :], NO_PLACE), 1)
            tl.store(top_col_part + here, col, mask=rows < n)
        if row_shift is not None:
            # The shift is close to the largest scores of the row: subtracted first, it leaves more digits to the sum.
            safe -= tl.load(row_shift + rows, mask=rows < n, other=0.0) * LOG2E
        tl.store(part + here, safe + total, mask=rows < n)


@kernel(optional=("bias", "entropy_part", "own_part"), dynamic=("softcap", "m", "col_start"))
def probe_kernel(product, scale, bias, softcap, row_key, place, order, part, entropy_part, own_part, m, col_start,
                 SCORE: tl.constexpr, W: tl.constexpr, S: tl.constexpr, R: tl.constexpr):  # fmt: skip
    """part[tile, row] as in `mass_kernel`, for a sample of S rows: product is (m, S), columns in their old order.

    Optional: entropy_part as there, and own_part[row], the score of the row's positive. A row without one is not written.
    """
    tile = tl.program_id(0) // (S // R)
    row = (tl.program_id(0) % (S // R)) * R + tl.arange(0, R)
    at = tile * W + tl.arange(0, W)
    ok = at < m
    col = tl.load(order + at, mask=ok, other=0)
    acc = tl.load(product + col.to(tl.int64)[None, :] * S + row[:, None], mask=ok[None, :], other=0.0).to(tl.float32)
    # A column past the end gets the index m and scores -inf.
    col = tl.where(ok, col, m)
    s = ScoreInputs(tl.load(scale), bias, softcap, None, None, None, None, S, m, 0, 0)
    x = score_tile(acc, row, col, s, SCORE, 0)
    safe, total = log_sum(x)
    tl.store(part + tile.to(tl.int64) * S + row, safe + total)
    if entropy_part is not None:
        tl.store(entropy_part + tile.to(tl.int64) * S + row, tile_entropy(x, safe, total))
    if own_part is not None:
        key = tl.load(row_key + row) - col_start
        inside = (key >= 0) & (key < m)
        own = tl.load(place + key, mask=inside, other=-1)
        hit = own[:, None] == at[None, :]
        tl.store(own_part + row, tl.sum(tl.where(hit, x, 0.0), 1) * LN2, mask=inside & (own // W == tile))


@triton.jit
def log_masses(part, t, row, tiles, n, lse, own):
    """log2 of the mass of the entries (t, row). NaN in the tile ``own`` of the positive: NaN < x is False, so it is kept."""
    ok = (t < tiles)[:, None] & (row < n)[None, :]
    v = tl.load(part + t.to(tl.int64)[:, None] * n + row[None, :], mask=ok, other=float("-inf")) - lse[None, :]
    return tl.where(t[:, None] == own[None, :], float("nan"), v)


@triton.jit
def keep_picked(v, t, row, first_row, n, pick_place, picks, W: tl.constexpr):
    """The masses v with NaN in the tiles of the columns that a row picks; pick_place is (rows, picks), -1 for none."""
    for k in range(0, picks):
        place = tl.load(pick_place + (first_row + row).to(tl.int64) * picks + k, mask=row < n, other=-1)
        v = tl.where(t[:, None] == tl.where(place >= 0, place // W, -1)[None, :], float("nan"), v)
    return v


@triton.jit
def entropies(entropy_part, v, t, row, tiles, n):
    """E of the entries (t, row) in units of log2: M (entropy over the tile - log2 M), with v = log2 M; 0 for M = 0."""
    ok = (t < tiles)[:, None] & (row < n)[None, :]
    each = tl.load(entropy_part + t.to(tl.int64)[:, None] * n + row[None, :], mask=ok, other=0.0)
    return tl.where(v == float("-inf"), 0.0, tl.exp2(v) * (each - v))


@kernel(optional=("skip_if", "entropy_part", "row_entropy"), dynamic=("n", "tiles", "first_row"))
def row_kernel(part, entropy_part, skip_if, row_lse, row_entropy, n, tiles, first_row, R: tl.constexpr,
               T: tl.constexpr):  # fmt: skip
    """The log-sum-exp of each row over all tiles, and with ``entropy_part`` its entropy. part is (tiles, n).

    Row 0 of this launch is row ``first_row`` of the results. If ``skip_if`` is set, nothing is read or written.
    """
    row = tl.program_id(0) * R + tl.arange(0, R)
    ok_row = row < n
    if skip_if is not None:
        tiles = tl.where(tl.load(skip_if) != 0, 0, tiles)
    high = tl.full((R,), float("-inf"), tl.float32)
    total = tl.zeros((R,), tl.float32)
    for start in range(0, tiles, T):
        t = start + tl.arange(0, T)
        ok = (t < tiles)[:, None] & ok_row[None, :]
        v = tl.load(part + t.to(tl.int64)[:, None] * n + row[None, :], mask=ok, other=float("-inf"))
        high, total = raised(high, total, v, 0)
    lse = high + tl.log2(total)
    tl.store(row_lse + first_row + row, lse * LN2, mask=ok_row & (tiles > 0))
    if entropy_part is not None:
        h = tl.zeros((R,), tl.float32)
        nowhere = tl.full((R,), -1, tl.int32)
        for start in range(0, tiles, T):
            t = start + tl.arange(0, T)
            h += tl.sum(entropies(entropy_part, log_masses(part, t, row, tiles, n, lse, nowhere), t, row, tiles, n), 0)
        tl.store(row_entropy + first_row + row, h * LN2, mask=ok_row & (tiles > 0))


@kernel(
    optional=("skip_if", "entropy_part", "pick_place", "row_pos", "row_entropy", "surprise"),
    dynamic=("tolerance", "usable", "most_entropy", "n", "m", "tiles", "first_row", "all_rows", "col_start", "picks"),
)
def choose_kernel(row_key, place, pick_place, part, entropy_part, skip_if, row_pos, row_lse, row_entropy, mass, surprise,
                  tolerance, usable, most_entropy, n, m, tiles, first_row, all_rows, col_start, picks,
                  W: tl.constexpr, HALVINGS: tl.constexpr, ROUNDING: tl.constexpr, R: tl.constexpr,
                  T: tl.constexpr):  # fmt: skip
    """Each row's entries of `FilterPlan.mass`, given its log-sum-exp (`row_kernel`; over a group that of all ranks).

    A row drops the entries whose mass is below a threshold, found by bisection, so that their sum is at most ``usable``.
    part is (tiles, n); mass is (tiles, all_rows), and row 0 of this launch is its row ``first_row``. place[column] is the
    place of the column. If ``skip_if`` is set, no part is read, and a row drops nothing.

    With ``entropy_part`` also `FilterPlan.surprise`, and the dropped entropy is at most ``most_entropy`` times usable, in
    units of log2. With ROUNDING the limits depend on the row: see `filter_plan`. row_pos is the score of the
    row's positive.
    """
    row = tl.program_id(0) * R + tl.arange(0, R)
    ok_row = row < n
    seen = tiles
    if skip_if is not None:
        seen = tl.where(tl.load(skip_if) != 0, 0, tiles)
    lse = tl.load(row_lse + first_row + row, mask=ok_row & (seen > 0), other=float("-inf")).to(tl.float32) * LOG2E

    key = tl.load(row_key + first_row + row, mask=ok_row, other=-1)
    valid = key >= 0
    inside = valid & (key >= col_start) & (key - col_start < m)
    own = tl.load(place + (key - col_start), mask=inside, other=0)
    own = tl.where(inside, own // W, -1)
    most = tl.zeros((R,), tl.float32) + usable
    if ROUNDING and row_pos is not None:
        p = tl.exp2(tl.load(row_pos + first_row + row, mask=ok_row & valid, other=0.0) * LOG2E - lse)
        share = tl.minimum(tl.maximum(2.0 * (1.0 - p), SMALLEST_LIMIT), 1.0)
        most = most * tl.where(valid, share, 1.0)
    # The threshold most / tiles is safe for every row; above most, one entry alone could be too much.
    below, above = tl.log2(most / tiles), tl.log2(most)
    limit = tl.zeros((R,), tl.float32)
    if entropy_part is not None:
        limit += usable * most_entropy
        if ROUNDING:
            h = tl.load(row_entropy + first_row + row, mask=ok_row, other=0.0).to(tl.float32) * LOG2E
            limit = usable * tl.maximum(0.5 * h, SMALLEST_LIMIT)
        each = limit / tiles
        below = tl.minimum(below, tl.log2(each / (2.0 * tl.log2(W / each))))
    for _ in range(HALVINGS):
        middle = (below + above) * 0.5
        dropped = tl.zeros((R,), tl.float32)
        lost = tl.zeros((R,), tl.float32)
        for start in range(0, seen, T):
            t = start + tl.arange(0, T)
            v = log_masses(part, t, row, seen, n, lse, own)
            if pick_place is not None:
                v = keep_picked(v, t, row, first_row, n, pick_place, picks, W)
            dropped += tl.sum(tl.where(v < middle[None, :], tl.exp2(v), 0.0), 0)
            if entropy_part is not None:
                lost += tl.sum(tl.where(v < middle[None, :], entropies(entropy_part, v, t, row, seen, n), 0.0), 0)
        fits = (dropped <= most) & (lost <= limit)
        below = tl.where(fits, middle, below)
        above = tl.where(fits, above, middle)
    dropped = tl.zeros((R,), tl.float32)
    lost = tl.zeros((R,), tl.float32)
    for start in range(0, tiles, T):
        t = start + tl.arange(0, T)
        ok = (t < tiles)[:, None] & ok_row[None, :]
        # With skip_if, lse is -inf and the masses are NaN, so nothing is below the threshold.
        v = log_masses(part, t, row, seen, n, lse, own)
        if pick_place is not None:
            v = keep_picked(v, t, row, first_row, n, pick_place, picks, W)
        if surprise is not None:
            lost += tl.sum(tl.where(v < below[None, :], entropies(entropy_part, v, t, row, seen, n), 0.0), 0)
            dropped += tl.sum(tl.where(v < below[None, :], tl.exp2(v), 0.0), 0)
        stands = tl.exp2(v) / tolerance
        stands = tl.where(v < below[None, :], stands, -1.0)
        stands = tl.where(valid[None, :], stands, 0.0)
        at = mass + t.to(tl.int64)[:, None] * all_rows + (first_row + row)[None, :]
        tl.store(at, stands.to(mass.dtype.element_ty), mask=ok)
    if surprise is not None:
        tl.store(surprise + first_row + row, tl.where(dropped > 0.0, lost / dropped, 0.0) * LN2, mask=ok_row)


@kernel(optional=("row_shift",), dynamic=("n", "tiles", "first_row", "col_start"))
def top_kernel(row_shift, top_part, top_col_part, skip_if, row_top, row_top_col, n, tiles, first_row, col_start,
               R: tl.constexpr, T: tl.constexpr):  # fmt: skip
    """The largest score of each row over all tiles and its column, the lowest of equal ones; see `mass_kernel`.

    If ``skip_if`` is set, nothing is written.
    """
    row = tl.program_id(0) * R + tl.arange(0, R)
    ok_row = (row < n) & (tl.load(skip_if) == 0)
    best = tl.full((R,), float("-inf"), tl.float32)
    column = tl.full((R,), NO_PLACE, tl.int32)
    for start in range(0, tiles, T):
        t = start + tl.arange(0, T)
        ok = (t < tiles)[:, None] & ok_row[None, :]
        at = t.to(tl.int64)[:, None] * n + row[None, :]
        score = tl.load(top_part + at, mask=ok, other=float("-inf"))
        col = tl.load(top_col_part + at, mask=ok, other=NO_PLACE)
        high = tl.max(score, 0)
        col = tl.min(tl.where(score == high[None, :], col, NO_PLACE), 0)
        column = tl.where(high > best, col, tl.where(high == best, tl.minimum(col, column), column))
        best = tl.maximum(best, high)
    start = tl.zeros((R,), tl.float32)
    if row_shift is not None:
        start += tl.load(row_shift + first_row + row, mask=ok_row, other=0.0)
    best = without_rank(best, best * LN2 - start)
    tl.store(row_top + first_row + row, best, mask=ok_row)
    tl.store(row_top_col + first_row + row, column.to(tl.int64) + col_start, mask=ok_row)
