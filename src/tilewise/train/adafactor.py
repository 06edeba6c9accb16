"""The modified Adafactor of ViT-g and of the Inf-CL papers."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any

import torch
from torch import Tensor

from tilewise.errors import ConfigError


class Adafactor(torch.optim.Optimizer):
    """Adafactor with a first moment in bfloat16 and without relative steps.

    For a matrix with gradient ``g`` at step ``t`` (from 1), all in float32::

        b2 = min(beta2, 1 - t ** -0.8)
        rows = b2 * rows + (1 - b2) * mean(g**2 + 1e-30, dim=-1)     # one number per row
        cols = b2 * cols + (1 - b2) * mean(g**2 + 1e-30, dim=-2)     # one number per column
        u = g / sqrt(outer(rows, cols) / mean(rows))
        u = u / max(1, rms(u))
        m = beta1 * m + (1 - beta1) * u                              # kept in bfloat16
        p = p - lr * (m + weight_decay * p)

    Vectors, and matrices with a side below 32, keep the full second moment.

    Args:
        params: parameters or groups.
        lr: learning rate. It is not scaled with the size of a parameter.
        betas: decay of the first moment, and the cap of the second moment's decay.
        weight_decay: decoupled.

    Memory: 2 bytes per parameter, plus one float per row and column. AdamW takes 8 bytes.
    """

    def __init__(
        self,
        params: Iterable[Any],
        lr: float = 1e-3,
        betas: tuple[float, float] = (0.9, 0.95),
        weight_decay: float = 1e-4,
    ) -> None:
        if lr < 0 or not all(0 <= b < 1 for b in betas) or weight_decay < 0:
            raise ConfigError(
                f"Adafactor needs lr >= 0, betas in [0, 1) and weight_decay >= 0, got {lr}, {betas}, {weight_decay}"
            )
        super().__init__(params, {"lr": lr, "betas": betas, "weight_decay": weight_decay})

    @torch.no_grad()
    def step(self, closure: Callable[[], Any] | None = None) -> Any:
        """Update every parameter that has a gradient."""
        loss = None
        if closure is not None:
            with torch.enable_grad():
                loss = closure()
        for group in self.param_groups:
            for p in group["params"]:
                if p.grad is not None:
                    self._move(p, group)
        return loss

    def _move(self, p: Tensor, group: dict[str, Any]) -> None:
        state = self.state[p]
        if not state:
            self._start(p, state)
        state["step"] += 1
        beta1, cap = group["betas"]
        beta2 = min(cap, 1.0 - float(state["step"]) ** -0.8)
        grad = p.grad.float()  # type: ignore[union-attr]
        update = grad * self._inverse_root(grad, state, beta2)
        update /= update.square().mean().sqrt().clamp(min=1.0)
        moment = state["moment"].float().mul_(beta1).add_(update, alpha=1 - beta1)
        state["moment"].copy_(moment)
        moved = p.float() * (1 - group["lr"] * group["weight_decay"]) - group["lr"] * moment
        p.copy_(moved)

    @staticmethod
    def _start(p: Tensor, state: dict[str, Any]) -> None:
        state["step"] = torch.zeros((), dtype=torch.float32)
        state["moment"] = torch.zeros_like(p, dtype=torch.bfloat16)
        if p.ndim >= 2 and min(p.shape[-2:]) >= 32:
            state["rows"] = torch.zeros(p.shape[:-1], dtype=torch.float32, device=p.device)
            state["cols"] = torch.zeros(p.shape[:-2] + p.shape[-1:], dtype=torch.float32, device=p.device)
        else:
            state["second"] = torch.zeros_like(p, dtype=torch.float32)

    @staticmethod
    def _inverse_root(grad: Tensor, state: dict[str, Any], beta2: float) -> Tensor:
        """1 / sqrt of the second moment, in a shape that broadcasts over the gradient."""
        square = grad.square().add_(1e-30)
        if "second" in state:
            return state["second"].lerp_(square, 1 - beta2).rsqrt()
        rows = state["rows"].lerp_(square.mean(-1), 1 - beta2)
        cols = state["cols"].lerp_(square.mean(-2), 1 - beta2)
        return (rows / rows.mean(-1, keepdim=True)).rsqrt().unsqueeze(-1) * cols.rsqrt().unsqueeze(-2)
