"""Forward with entropies or largest scores: see `token_kernels`."""

from __future__ import annotations

import torch
from torch import Tensor

from tilewise.kernels.spec import Stats
from tilewise.kernels.triton_impl import bits as bit
from tilewise.kernels.triton_impl.launch.call import Call, bit_sum, cdiv, pieces
from tilewise.kernels.triton_impl.two_pass.forward import MERGE_BLOCK, MERGE_PARTS, Forward
from tilewise.kernels.triton_impl.two_pass.token_kernels import merge_tokens_kernel, token_kernel


class TokenForward(Forward):
    """Log-sum-exp, entropy, largest score and only positive of the rows of all macro-tiles."""

    def __init__(self, call: Call) -> None:
        self.call, self.spec, self.sizes, self.saved = call, call.spec, call.forward_sizes, None
        self.n, self.m = call.a.shape[0], call.b.shape[0]
        self.row_step, self.col_step = self._macro()
        self.peaks = None  # every row of a tile has a shift of its own, and no sum needs repair
        self.needs_repair = call.empty(1, dtype=torch.int32)
        size = cdiv(min(self.m, self.col_step), self.sizes.cols) * min(self.n, self.row_step)
        self.bits = bit_sum((bit.ENTROPY, self.spec.row_entropy), (bit.TOP, self.spec.row_top))
        self.parts: dict[str, Tensor | None] = {
            "lse_part": call.empty(size),
            "entropy_part": call.empty(size) if self.spec.row_entropy else None,
            "top_part": call.empty(size) if self.spec.row_top else None,
            "place_part": call.empty(size, dtype=torch.int32) if self.spec.row_top else None,
        }

    def run(self) -> Stats:
        """All macro-tiles, those of the same rows one after another."""
        spec, new = self.spec, self.call.empty
        pos = new(self.n) if spec.positive != "none" else None
        out: dict[str, Tensor | None] = {
            "row_lse": new(self.n),
            "row_entropy": new(self.n) if spec.row_entropy else None,
            "row_top": new(self.n) if spec.row_top else None,
            "row_top_col": new(self.n, dtype=torch.int64) if spec.row_top else None,
        }
        num_positives = self._positives(pos)
        for i in pieces(self.n, self.row_step):
            mine = {name: None if value is None else value[i] for name, value in out.items()}
            for j in pieces(self.m, self.col_step):
                self.call.run(token_kernel, i, j, self.sizes, STATS=self.bits, **self.parts)
                self._fold(i, j, mine)
        return Stats(**out, row_pos=pos, num_positives=num_positives)

    def _fold(self, i: slice, j: slice, out: dict[str, Tensor | None]) -> None:
        """The parts of the macro-tile (i, j) into the statistics of its rows."""
        block, n = min(MERGE_BLOCK, self.sizes.rows), i.stop - i.start
        values = {"row_shift": self.call.rows(i, self.sizes)["row_shift"], "n": n}
        values |= {"parts": cdiv(j.stop - j.start, self.sizes.cols), "first": self.call.pair.col_start + j.start}
        values |= {"BEGIN": j.start == 0, "END": j.stop == self.m, "STATS": self.bits}
        values |= {"MANY_PARTS": MERGE_PARTS, "BLOCK": block}
        merge = self.call.prepare(merge_tokens_kernel, warps=2).put(values).put(self.parts).put(out)
        merge.launch(cdiv(n, block))
