"""What the GPU tests ask about skipping, as functions of the place (see `tests.gpu.checks`).

The oracle takes the plan of a call, so that it knows what was dropped, and everything else from float64 scores.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from tests.compare import assert_close, relative_error
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


def check_tokens(
    place: Place, dtype: torch.dtype, n: int, d: int, m: int, seed: int, workspace_mib: int = 256
) -> float:
    """Log-probability and entropy of each token with gradients of their own: statistics, bound and gradients."""
    head = make_head(place, dtype, n, d, m, seed)
    x, valid = {name: value.detach().double() for name, value in head.leaves.items()}, head.target >= 0
    g = torch.Generator().manual_seed(seed)
    advantage, bonus = (torch.randn(n, generator=g).to(place.device).double() for _ in range(2))

    def solve(options: tw.TileOptions) -> tuple[Any, dict[str, Tensor]]:
        leaves = head.leaves
        stats = tw.linear_token_stats(
            leaves["input"], leaves["weight"], head.target, logit_scale=leaves["scale"], options=options
        )
        loss = (stats.log_prob * advantage + stats.entropy * bonus).sum()
        return stats, dict(zip(leaves, torch.autograd.grad(loss, list(leaves.values())), strict=True))

    options = place.options(filter_tolerance=TOLERANCE, workspace_mib=workspace_mib)
    with tw.record_filtering() as report:
        stats, grads = solve(options)
    assert report.dense == [False]
    exact, _ = solve(place.options())
    for name in ("log_prob", "entropy", "logsumexp"):
        assert_close(getattr(stats, name), getattr(exact, name), 1e-5, name)
    # A product sums in another order for another shape, so that a near tie may have another winner.
    assert (stats.argmax != exact.argmax).double().mean() < 0.01
    plan, product = report._plans[0][0], x["input"] @ x["weight"].T
    log_p = (x["scale"] * product).log_softmax(1)
    p, tiles, width = log_p.exp(), plan.mass.shape[0], plans.tile_width(m)
    tile = torch.empty(m, dtype=torch.long, device=p.device)
    tile[plan.order.long()] = torch.arange(m, device=p.device) // width
    mass_nt, entropy_nt = (p.new_zeros(n, tiles).index_add_(1, tile, value) for value in (p, -p * log_p))
    dropped_nt = (plan.mass.T >= 0) & valid[:, None]
    mass, lost = (mass_nt * dropped_nt).sum(1), (entropy_nt * dropped_nt).sum(1)
    assert mass.max() <= TOLERANCE
    assert lost.max() <= TOLERANCE * math.log(m)
    assert mass.max() > TOLERANCE / 2
    size = torch.bincount(tile, minlength=tiles).double()
    entropy = -(p * log_p).sum(1)
    v = -advantage - bonus * entropy
    stands_nt = (v + bonus * lost / mass.clamp(min=1e-30))[:, None] * mass_nt / size
    own = F.one_hot(head.target.clamp(min=0), m).double()
    full = advantage[:, None] * (own - p) + bonus[:, None] * p * (-log_p - entropy[:, None])
    full = torch.where(dropped_nt[:, tile], stands_nt[:, tile], full) * valid[:, None]
    want = {
        "input": x["scale"] * full @ x["weight"],
        "weight": x["scale"] * full.T @ x["input"],
        "scale": (full * product).sum(),
    }
    for name, value in want.items():
        assert_close(grads[name], value, ERRORS[dtype] * (10 if name == "scale" else 1), name)
    with place.no_waiting():
        _, again = solve(options)
    assert all(torch.equal(again[name], grads[name]) for name in grads)
    return report.kept_share[0]


def check_rounding(place: Place, dtype: torch.dtype, n: int, d: int, m: int, seed: int) -> None:
    """Errors of "rounding" are at most 1.05 times those of a dense path that rounds its logits and their gradient."""
    head = make_head(place, dtype, n, d, m, seed)
    scale = torch.ones_like(head.leaves["scale"])  # a scale would be one more rounding of the dense path
    head.leaves["scale"] = scale.requires_grad_()

    def dense(kind: torch.dtype) -> tuple[Tensor, ...]:
        a, b = (head.leaves[name].detach().to(kind).requires_grad_() for name in ("input", "weight"))
        logits = a @ b.T
        loss = F.cross_entropy(logits if kind == torch.float64 else logits.float(), head.target)
        return torch.autograd.grad(loss, (a, b))

    want, theirs = dense(torch.float64), dense(dtype)
    with tw.record_filtering() as report:
        _, grads = head.solve(place.options(filter_tolerance="rounding"))
    assert report.tolerance == [torch.finfo(dtype).eps]
    assert report.dense == [False]
    for name, right, other in zip(("input", "weight"), want, theirs, strict=True):
        assert relative_error(grads[name], right) <= 1.05 * relative_error(other, right), name


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
