"""The sigmoid loss and its gradients: the backward of two passes, whose kernel also computes the loss."""

from __future__ import annotations

from typing import Any

import torch

from tilewise.kernels.scalar_loss import saved_dtype
from tilewise.kernels.spec import Needs
from tilewise.kernels.triton_impl.buffers import Buffer, Descriptor
from tilewise.kernels.triton_impl.one_pass.sigmoid_kernels import sigmoid_kernel
from tilewise.kernels.triton_impl.scores import Scores
from tilewise.kernels.triton_impl.sizes import multiprocessors
from tilewise.kernels.triton_impl.two_pass.backward import Backward


class Sigmoid(Backward):
    """Writes the steps of backward of the sigmoid loss, whose kernel also computes the loss."""

    tiles_have_positives = True

    def __init__(self, scores: Scores, more: dict[str, Buffer], needs: Needs) -> None:
        more = more | {"grad_row": more["weight"]}
        super().__init__(scores, more, needs, saved_dtype(scores.dtype))
        size = multiprocessors(scores.device) * self.sizes.programs * self.sizes.rows
        self.loss_part = scores.zeros("loss_part", size)
        self.needs_repair = scores.zeros("needs_repair", 1, dtype=torch.int32)

    def losses_and_grads(self) -> tuple[Buffer | None, ...]:
        """Parts of the loss, and the gradients, of all macro-tiles."""
        grads = self.run()
        self._launch(slice(0, self.n), slice(0, self.m), REPAIR=True)
        return self.loss_part, *grads

    def _gradient(self, g: Buffer, desc: Descriptor, i: slice, j: slice) -> None:
        part = None if self.bias is None else self.bias.part(i, j)
        self._launch(i, j, g_desc=desc, bias_part=part, REPAIR=False)
        if self.bias is not None:
            self.bias.add(j, part)

    def _launch(self, i: slice, j: slice, **values: Any) -> None:
        values |= {"loss_part": self.loss_part, "needs_repair": self.needs_repair}
        values |= {"factor": self.g_factor, "TERMS": self.terms}
        self.scores.tiles(sigmoid_kernel, i, j, self.sizes, **values)
