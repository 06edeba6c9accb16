"""What the GPU tests ask about skipping, as functions of the place (see `tests.gpu.checks`).

The oracle takes the plan of a call, so that it knows what was dropped, and everything else from float64 scores.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from tests.compare import assert_close
from tests.gpu.checks import Place
from torch import Tensor

import tilewise as tw
from tilewise.kernels import filter_plan as plans
from tilewise.kernels.spec import FilterPlan

TOLERANCE = 1e-2
ERRORS = {torch.float32: 2e-5, torch.float16: 2e-3, torch.bfloat16: 1.5e-2}  # of G's rounding, and of the result's


@dataclass
class Head:
    """A language model's head with scores that a trained one might have."""

    leaves: dict[str, Tensor]
    target: Tensor
    softcap: float | None

    def loss(self, options: tw.TileOptions, **settings: Any) -> Tensor:
        x = self.leaves
        return tw.linear_cross_entropy(
            x["input"],
            x["weight"],
            self.target,
            linear_bias=x.get("bias"),
            logit_scale=x["scale"],
            softcap=self.softcap,
            options=options,
            **settings,
        )

    def solve(self, options: tw.TileOptions) -> tuple[Tensor, dict[str, Tensor]]:
        loss = self.loss(options)
        return loss.detach(), dict(zip(self.leaves, torch.autograd.grad(loss, list(self.leaves.values())), strict=True))


def make_head(
    place: Place,
    dtype: torch.dtype,
    n: int,
    d: int,
    m: int,
    seed: int,
    *,
    bias: bool = False,
    softcap: float | None = None,
) -> Head:
    g = torch.Generator().manual_seed(seed)
    rank = torch.randperm(m, generator=g) + 1
    rest = 2 * torch.randn(m, d - 1, generator=g) / math.sqrt(d - 1)
    target = torch.randint(0, m, (n,), generator=g)
    hidden = torch.cat([torch.full((n, 1), 8.0), torch.randn(n, d - 1, generator=g) + 2 * rest[target]], 1)
    weight = torch.cat([(-2.0 / 8 * rank.log())[:, None], rest], 1)
    values = {"input": hidden.to(dtype), "weight": weight.to(dtype), "scale": torch.tensor(1.1)}
    if bias:
        values["bias"] = 0.3 * torch.randn(m, generator=g)
    leaves = {name: value.to(place.device).requires_grad_() for name, value in values.items()}
    target[::5] = -100
    return Head(leaves, target.to(place.device), softcap)


def dense_gradients(head: Head, plan: FilterPlan, tolerance: float) -> tuple[dict[str, Tensor], Tensor]:
    """float64 gradients of the mean with the tile's mean in place of what the plan drops; and what rows drop."""
    x = {name: value.detach().double() for name, value in head.leaves.items()}
    valid = head.target >= 0
    product = x["input"] @ x["weight"].T
    scores = x["scale"] * product + x.get("bias", 0.0)
    if head.softcap:
        scores = head.softcap * torch.tanh(scores / head.softcap)
    p, lse = scores.softmax(1), scores.logsumexp(1)
    tiles, width = plan.mass.shape[0], plans.tile_width(p.shape[1])
    tile = torch.empty(p.shape[1], dtype=torch.long, device=p.device)
    tile[plan.order.long()] = torch.arange(p.shape[1], device=p.device) // width
    size = torch.bincount(tile, minlength=tiles).double()
    mass_nt = p.new_zeros(len(p), tiles).index_add_(1, tile, p)
    dropped_nt = (plan.mass.T >= 0) & valid[:, None]
    stands_nt = mass_nt / size
    slope = torch.ones_like(p)
    if head.softcap:
        slope = 1 - (scores / head.softcap).square()
        x_nt = stands_nt.log() + lse[:, None]
        stands_nt = stands_nt * (1 - (x_nt / head.softcap).square()).clamp(min=0.0)
    own = F.one_hot(head.target.clamp(min=0), p.shape[1]).double()
    g = torch.where(dropped_nt[:, tile], stands_nt[:, tile], (p - own) * slope)
    g = g * valid[:, None] / valid.sum()
    want = {
        "input": x["scale"] * g @ x["weight"],
        "weight": x["scale"] * g.T @ x["input"],
        "scale": (g * product).sum(),
    }
    if "bias" in x:
        want["bias"] = g.sum(0)
    return want, (mass_nt * dropped_nt).sum(1)


def check_filtered(place: Place, dtype: torch.dtype, n: int, d: int, m: int, seed: int, **settings: Any) -> float:
    """The bound, the gradients, the same twice; the host waits for nothing but the number of pairs."""
    workspace = settings.pop("workspace_mib", 256)
    head = make_head(place, dtype, n, d, m, seed, **settings)
    options = place.options(filter_tolerance=TOLERANCE, workspace_mib=workspace)
    with tw.record_filtering() as report:
        loss, grads = head.solve(options)
    assert len(report) == 1
    plan = report._plans[0][0]
    exact, _ = head.solve(place.options(gradients="backward"))
    assert_close(loss, exact, 1e-5, "loss")
    want, dropped = dense_gradients(head, plan, TOLERANCE)
    assert dropped.max() <= TOLERANCE
    assert dropped.max() > TOLERANCE / 2
    assert report.dense == [False]
    for name, value in want.items():
        assert_close(grads[name], value, ERRORS[dtype] * (10 if name == "scale" else 1), name)
    with place.no_waiting():
        again, again_grads = head.solve(options)
    assert torch.equal(again, loss)
    assert all(torch.equal(again_grads[name], grads[name]) for name in grads)
    return report.kept_share[0]


def flat_head(place: Place, dtype: torch.dtype, n: int, d: int, m: int) -> Head:
    """A head that knows nothing yet."""
    g = torch.Generator().manual_seed(0)
    hidden = torch.randn(n, d, generator=g).to(place.device, dtype).requires_grad_()
    weight = (torch.randn(m, d, generator=g) / d).to(place.device, dtype).requires_grad_()
    leaves = {"input": hidden, "weight": weight, "scale": torch.tensor(1.0, device=place.device).requires_grad_()}
    return Head(leaves, torch.arange(n, device=place.device), None)


def check_flat(place: Place, dtype: torch.dtype, n: int, d: int, m: int) -> None:
    """All pairs are kept: everything is computed."""
    head = flat_head(place, dtype, n, d, m)
    with tw.record_filtering() as report:
        _, grads = head.solve(place.options(filter_tolerance=TOLERANCE))
    assert report.dense == [True]
    _, want = head.solve(place.options(gradients="backward"))
    for name, value in want.items():
        assert_close(grads[name], value, 1e-5 if dtype == torch.float32 else 1e-3, name)


def check_probed_flat(place: Place, dtype: torch.dtype, n: int, d: int, m: int) -> None:
    """A sample of the rows was asked: the call is the exact one from the start, number by number; nothing waits."""
    head = flat_head(place, dtype, n, d, m)
    options = place.options(filter_tolerance=TOLERANCE)
    want_loss, want = head.solve(place.options(gradients="backward"))
    head.solve(options)
    with tw.record_filtering() as report, place.no_waiting():
        loss, grads = head.solve(options)
    assert report.dense == [True]
    assert report.kept_share == [1.0]
    assert report.largest_dropped == [0.0]
    assert torch.equal(loss, want_loss)
    for name, value in want.items():
        assert torch.equal(grads[name], value), name
