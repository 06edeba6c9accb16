"""Keys applied to one tile: which pairs are positive, excluded, or a sample paired with itself.

Axes: r, c rows and columns of one tile; i, j their slices.
"""

from __future__ import annotations

import torch
from torch import Tensor

from tilewise.kernels import keys
from tilewise.kernels.spec import Pair, PairSpec


class TileKeys:
    """The keys of a pair of blocks, applied tile by tile.

    With "one" positive the column of each row's positive is known, and no mask is built. With "many" positives each
    tile builds a mask.
    """

    def __init__(self, pair: Pair, spec: PairSpec) -> None:
        self.pair, self.spec = pair, spec
        if spec.positive == "one":
            own = torch.arange(pair.row_start, pair.row_start + pair.a.shape[0], device=pair.a.device)
            key = own if pair.row_key is None else pair.row_key
            # (n, 1), the positive's column, relative to the block; may lie outside
            self.pos_col_n1 = (key - pair.col_start)[:, None]
            if spec.mask_self:  # a sample is never its own positive
                self.pos_col_n1.masked_fill_((key == own)[:, None], -1)

    def num_positives(self) -> Tensor:
        """The number of positives of each row: (n,)."""
        if self.spec.positive == "one":
            return _inside(self.pos_col_n1[:, 0], slice(0, self.pair.b.shape[0]))[1].to(self.pair.stat_dtype)
        return keys.num_positives(self.pair, self.spec)

    def exclude_(self, x_rc: Tensor, i: slice, j: slice) -> None:
        """Set excluded pairs to -inf: equal skip keys that are not positive, and with ``mask_self`` equal indices."""
        pair = self.pair
        if pair.row_skip is not None and pair.col_skip is not None:
            self.exclude_unless_positive_(x_rc, pair.row_skip[i, None] == pair.col_skip[None, j], i, j)
        if self.spec.mask_self:
            x_rc.diagonal(self._diagonal(i, j)).fill_(-torch.inf)

    def exclude_unless_positive_(self, x_rc: Tensor, mask_rc: Tensor, i: slice, j: slice) -> None:
        """Set the pairs of a mask to -inf, but not the positives. Overwrites the mask."""
        if self.spec.positive == "one":
            place, inside = _inside(self.pos_col_n1[i], j)
            mask_rc.scatter_(1, place, mask_rc.gather(1, place) & ~inside)
        elif self.spec.positive == "many":
            mask_rc &= ~self._mask(i, j)
        x_rc.masked_fill_(mask_rc, -torch.inf)

    def positive_sums(self, x_rc: Tensor, i: slice, j: slice, scratch: Tensor) -> tuple[Tensor, Tensor | None]:
        """Sum of x - row_shift over the positives of each row, float64: (r,).

        With symmetric scores, a tile off the diagonal also represents its mirror image: the second result, (c,), has
        the sums of the rows j.
        """
        mirrored = self.spec.symmetric and i != j
        if self.spec.positive == "one":
            mirror = self._scores_at(x_rc.T, self.pos_col_n1[j], j, i)[:, 0] if mirrored else None
            return self._scores_at(x_rc, self.pos_col_n1[i], i, j)[:, 0], mirror
        mask_rc = self._mask(i, j)
        # float64: the sum of a hundred scores of 1000, minus a hundred shifts, would have two digits in float32.
        torch.where(mask_rc, x_rc, x_rc.new_zeros(()), out=scratch)
        row = scratch.sum(1, dtype=torch.float64) - self._shift(i) * mask_rc.sum(1)
        if not mirrored:
            return row, None
        return row, scratch.sum(0, dtype=torch.float64) - self._shift(j) * mask_rc.sum(0)

    def flip_positives_(self, x_rc: Tensor, i: slice, j: slice) -> None:
        """Change the sign of the positives, in place."""
        if self.spec.positive == "one":
            place, inside = _inside(self.pos_col_n1[i], j)
            found = x_rc.gather(1, place)
            x_rc.scatter_(1, place, torch.where(inside, -found, found))
        elif self.spec.positive == "many":
            torch.where(self._mask(i, j), -x_rc, x_rc, out=x_rc)

    def add_at_positives_(self, g_rc: Tensor, value: Tensor, i: slice, j: slice, scratch: Tensor) -> None:
        """Add value_i at the positives of row i, in place; with symmetric scores also value_j."""
        if self.spec.positive == "one":
            self.add_at_picks_(g_rc, self.pos_col_n1, value[:, None], i, j)
            if self.spec.symmetric:
                self.add_at_picks_(g_rc.T, self.pos_col_n1, value[:, None], j, i)
            return
        value = value.to(g_rc.dtype)
        if self.spec.symmetric:
            torch.add(value[i, None], value[None, j], out=scratch)
            g_rc.add_(scratch.mul_(self._mask(i, j)))
        else:
            g_rc.addcmul_(value[i, None], self._mask(i, j).to(g_rc.dtype))

    def picked_scores(self, x_rc: Tensor, i: slice, j: slice) -> Tensor:
        """x - row_shift at the columns that each row picks, float64: (r, K); 0 for a column outside of the tile."""
        return self._scores_at(x_rc, self.pair.pick[i] - self.pair.col_start, i, j)

    def exclude_picks_(self, x_rc: Tensor, i: slice, j: slice) -> None:
        """Set the scores of the picked columns to -inf, in place. Columns outside are clamped to the tile and add 0."""
        place, inside = _inside(self.pair.pick[i] - self.pair.col_start, j)
        x_rc.scatter_add_(1, place, torch.where(inside, -torch.inf, 0.0).to(x_rc.dtype))

    def add_at_picks_(self, g_rc: Tensor, col_nk: Tensor, value_nk: Tensor, i: slice, j: slice) -> None:
        """Add value_ik at the column col_ik of row i, in place. The columns of a row are distinct, or negative."""
        place, inside = _inside(col_nk[i], j)
        g_rc.scatter_add_(1, place, torch.where(inside, value_nk[i], 0.0).to(g_rc.dtype))

    def _scores_at(self, x_rc: Tensor, col_rk: Tensor, i: slice, j: slice) -> Tensor:
        """x - row_shift at the columns of each row, float64: (r, K); 0 for a column outside of the tile."""
        place, inside = _inside(col_rk, j)
        found = x_rc.gather(1, place).double()
        if self.pair.row_shift is not None:
            found -= self.pair.row_shift[i, None].double()
        return torch.where(inside, found, 0.0)

    def _mask(self, i: slice, j: slice) -> Tensor:
        """For "many" positives: the mask of the positives, (r, c) bool."""
        mask_rc = self.pair.row_key[i, None] == self.pair.col_key[None, j]
        if self.spec.mask_self:
            mask_rc.diagonal(self._diagonal(i, j)).fill_(False)
        return mask_rc

    def _diagonal(self, i: slice, j: slice) -> int:
        """The diagonal of the tile on which row and column are one sample; an empty one if it lies outside."""
        offset = (self.pair.row_start + i.start) - (self.pair.col_start + j.start)
        return max(-(i.stop - i.start), min(offset, j.stop - j.start))

    def _shift(self, rows: slice) -> Tensor | float:
        return 0.0 if self.pair.row_shift is None else self.pair.row_shift[rows].double()


def _inside(cols: Tensor, j: slice) -> tuple[Tensor, Tensor]:
    """Columns of the block as columns of the tile, clamped to the tile, and whether they are inside."""
    place, width = cols - j.start, j.stop - j.start
    return place.clamp(0, width - 1), (place >= 0) & (place < width)
