"""The sigmoid loss and its gradients: the backward of two passes, whose kernel also computes the loss."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from triton.tools.tensor_descriptor import TensorDescriptor

from tilewise.kernels.scalar_loss import saved_dtype
from tilewise.kernels.spec import Grads, GradStats, Needs, RowWeights, Stats
from tilewise.kernels.triton_impl.launch.call import Call
from tilewise.kernels.triton_impl.one_pass.sigmoid_kernels import sigmoid_kernel
from tilewise.kernels.triton_impl.sizes import multiprocessors
from tilewise.kernels.triton_impl.two_pass.backward import Backward, Bias


class Sigmoid(Backward):
    """Backward of the sigmoid loss, whose kernel also computes the loss."""

    tiles_have_positives = True

    def __init__(
        self, call: Call, weights: RowWeights, needs: Needs, factors: tuple[Tensor | None, Tensor | None]
    ) -> None:
        grad = GradStats(row_softplus=weights.full(call.pair))
        super().__init__(call, Stats(), grad, needs, saved_dtype(call.a.dtype), factors=factors)
        size = multiprocessors(call.a.device) * self.sizes.programs * self.sizes.rows
        self.loss_part = call.empty(size, zero=True)
        self.needs_repair = call.empty(1, dtype=torch.int32, zero=True)

    def losses_and_grads(self) -> tuple[Tensor, Grads]:
        """Parts of the loss, and the gradients, of all macro-tiles."""
        grads = self.run()
        self._launch(slice(0, self.n), slice(0, self.m), REPAIR=True)
        return self.loss_part, grads

    def _gradient(self, g: Tensor, desc: TensorDescriptor, i: slice, j: slice, bias: Bias | None) -> None:
        part = None if bias is None else bias.part(i, j)
        self._launch(i, j, g_desc=desc, bias_part=part, REPAIR=False)
        if bias is not None:
            bias.add(j)

    def _launch(self, i: slice, j: slice, **values: Any) -> None:
        values |= {"loss_part": self.loss_part, "needs_repair": self.needs_repair}
        values |= {"factor": self.inside, "TERMS": self.terms}
        self.call.run(sigmoid_kernel, i, j, self.sizes, **values)
