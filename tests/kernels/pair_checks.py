"""What it means to be right: statistics and gradients of a backend against the dense oracle, for any pair and spec."""

from __future__ import annotations

import dataclasses

import torch
from tests.compare import assert_close, assert_no_worse, relative_error
from tests.kernels.dense import dense_scores, dense_stats
from torch import Tensor

from tilewise.kernels.backend import Backend
from tilewise.kernels.spec import STATISTICS, Grads, GradStats, Needs, Pair, PairSpec, Stats, stat_dtype
from tilewise.options import TileOptions

STATS = tuple(stat.name for stat in STATISTICS if stat.gradient)
GUIDE, NORMS = ("guide_a", "guide_b"), ("row_norm", "guide_norm")
LOOSE = {torch.float64: (1e-12, 1e-12), torch.float32: (2e-6, 1e-5)}  # of statistics and of gradients


def leaves_of(pair: Pair, dtype: torch.dtype | None = None) -> Pair:
    """The same pair with leaves that require grad, features in ``dtype`` and vectors to match."""
    dtype = dtype or pair.a.dtype
    stat = stat_dtype(dtype)

    def leaf(value: Tensor, dtype: torch.dtype) -> Tensor:
        return value.detach().to(dtype).clone().requires_grad_()

    a = leaf(pair.a, dtype)
    vectors = {
        name: None if getattr(pair, name) is None else getattr(pair, name).to(stat)
        for name in (
            "row_shift",
            "col_shift",
            "col_weight",
            "row_scale",
            "guide_scale",
            "guide_bias",
            "row_limit",
            *NORMS,
        )
    }
    guide = {name: None if getattr(pair, name) is None else getattr(pair, name).to(dtype) for name in GUIDE}
    return dataclasses.replace(
        pair,
        a=a,
        b=a if pair.b is pair.a else leaf(pair.b, dtype),
        scale=leaf(pair.scale, stat),
        bias=None if pair.bias is None else leaf(pair.bias, stat),
        **vectors,
        **guide,
    )


def incoming_gradients(stats: Stats, seed: int = 1) -> GradStats:
    """A random gradient for each statistic; 0 where it is -inf, as no loss can ask for that one's gradient."""
    generator = torch.Generator().manual_seed(seed)

    def draw(value: Tensor | None) -> Tensor | None:
        if value is None:
            return None
        random = torch.randn(value.shape, generator=generator, dtype=torch.float64)
        stat = stat_dtype(value.dtype)
        return torch.where(value.isfinite(), random.to(value.device), 0.0).to(stat)

    return GradStats(**{name: draw(getattr(stats, name)) for name in STATS})


def dense_grads(pair: Pair, spec: PairSpec, grad: GradStats) -> Grads:
    """Gradients by autograd through the oracle; ``pair`` has leaves."""
    stats = dense_stats(pair, spec)
    total = sum(
        torch.where(getattr(grad, name) != 0, getattr(stats, name) * getattr(grad, name), 0.0).sum()
        for name in STATS
        if getattr(grad, name) is not None
    )
    named = {"a": pair.a, "scale": pair.scale}
    if pair.b is not pair.a:
        named["b"] = pair.b
    if pair.bias is not None:
        named["bias"] = pair.bias
    values = torch.autograd.grad(total, list(named.values()))
    return Grads(**dict(zip(named, values, strict=True)))


def all_needs(pair: Pair) -> Needs:
    return Needs(a=True, b=pair.b is not pair.a, scale=True, bias=pair.bias is not None)


def stats_asked(stats: Stats) -> dict[str, Tensor]:
    return {name: value for name, value in vars(stats).items() if value is not None and name != "row_shift"}


def grads_asked(grads: Grads) -> dict[str, Tensor]:
    return {name: getattr(grads, name) for name in ("a", "b", "scale", "bias") if getattr(grads, name) is not None}


def comparable(stats: Stats, pair: Pair) -> dict[str, Tensor]:
    """Statistics as numbers of a meaningful size: a positive that was measured from its own score is all rounding,
    so it is compared as a score, and against its row's log-sum-exp."""
    named = stats_asked(stats)
    named.pop("row_top_col", None)  # see `check_top`
    if stats.row_top is not None and pair.row_shift is not None:
        named["row_top"] = stats.row_top + pair.row_shift
    for name in (
        "row_lse",
        "col_lse",
        "row_hot_lse",
        "guide_lse",
    ):  # a logarithm: an error of 1e-7 is one of 1e-7 in the sum, even where it is 0
        if name in named:
            named[name] = torch.cat([named[name], torch.ones_like(named[name])])
    if stats.row_pos is not None and pair.row_shift is not None:
        assert stats.num_positives is not None
        named["row_pos"] = stats.row_pos + stats.num_positives * pair.row_shift
        if stats.row_lse is not None:
            named["row_nll"] = stats.row_lse * stats.num_positives - stats.row_pos
    return named


def finite(values: Tensor, where: Tensor) -> Tensor:
    return values[where.isfinite().to(values.device)]


def check_forward(
    backend: Backend,
    pair: Pair,
    spec: PairSpec,
    options: TileOptions | None = None,
    *,
    hard: bool = False,
    tolerance: float | None = None,
) -> Stats:
    """Statistics against the oracle in float64; ``hard`` and half types against what dense makes of them."""
    stats = backend.forward(pair, spec, options or TileOptions())
    exact, dense = dense_stats(leaves_of(pair, torch.float64), spec), dense_stats(pair, spec)
    types = {name: value.dtype for name, value in stats_asked(stats).items()}
    assert types.pop("row_top_col", torch.int64) == torch.int64
    wide = {name for name in types if name.endswith("lse") and types[name] == torch.float64}
    assert {types[name] for name in types if name not in wide} <= {pair.stat_dtype}
    check_top(stats, pair, spec)
    got, want, yardstick = (comparable(answer, pair) for answer in (stats, exact, dense))
    assert got.keys() == want.keys()
    for name in want:
        assert torch.equal(got[name].isfinite().cpu(), want[name].isfinite().cpu()), name
        mine, right = finite(got[name], want[name]), finite(want[name], want[name])
        if pair.a.dtype not in LOOSE or (hard and pair.a.dtype != torch.float64):
            dense_one = finite(yardstick[name], want[name])
            if dense_one.isfinite().all():
                assert_no_worse(mine, dense_one, right, name)
            else:  # dense half types overflow or give NaN where ours do not
                assert_close(mine, right, 1e-3, name)
        else:
            assert_close(mine, right, tolerance or LOOSE[pair.a.dtype][0], name)
    return stats


def check_top(stats: Stats, pair: Pair, spec: PairSpec) -> None:
    """The column has the largest score, up to the rounding of scores, and none before it has the same."""
    if stats.row_top_col is None or 0 in (pair.a.shape[0], pair.b.shape[0]):
        return
    x_nm = dense_scores(leaves_of(pair, torch.float64), spec)[0].detach()
    index = stats.row_top_col - pair.col_start
    found = x_nm.gather(1, index[:, None]).squeeze(1)
    best = x_nm.max(1)
    same = found == best.values
    assert (same | (best.values - found <= 1e-5 * (1.0 + best.values.abs()))).all()
    assert torch.equal(index[same], best.indices[same])
    assert same.double().mean() > 0.9


def check_backward(
    backend: Backend,
    pair: Pair,
    spec: PairSpec,
    options: TileOptions | None = None,
    *,
    hard: bool = False,
    tolerance: float | None = None,
    grad_dtype: torch.dtype | None = None,
    floor: float = 0.0,
) -> Grads:
    """Gradients of all arguments against autograd through the oracle in float64.

    ``floor``: an error that is always allowed to the scale of half types, whose sum is taken of a rounded G.
    """
    options = options or TileOptions()
    stats = backend.forward(pair, spec, options)
    grad = incoming_gradients(stats)
    grads = backend.backward(pair, stats, grad, all_needs(pair), spec, options, grad_dtype=grad_dtype)
    exact_pair = leaves_of(pair, torch.float64)
    wide = GradStats(**{name: None if value is None else value.double() for name, value in vars(grad).items()})
    got, want = grads_asked(grads), grads_asked(dense_grads(exact_pair, spec, wide))
    yardstick = grads_asked(dense_grads(leaves_of(pair), spec, grad))
    assert got.keys() == want.keys()
    for name in want:
        is_feature = name in ("a", "b")
        assert got[name].dtype == ((grad_dtype or pair.a.dtype) if is_feature else pair.stat_dtype)
        assert got[name].shape == want[name].shape
    # The scale's gradient is <A, dA> / scale, a sum that may cancel: its error is relative to the size of the terms.
    terms = (exact_pair.a.norm() * want["a"].norm() / exact_pair.scale.abs()).detach()
    for answer in (got, want, yardstick):
        answer["scale"] = torch.stack([answer["scale"].double(), terms])
    if pair.a.dtype in LOOSE:
        limit = tolerance or LOOSE[pair.a.dtype][1]
        if hard:  # in float32 a score of 1,000 is known to 6e-5 only, and exp(x) no better
            limit = max(limit, torch.finfo(pair.a.dtype).eps / 2 * largest_score(exact_pair, spec))
    for name in want:
        if pair.a.dtype in LOOSE:
            assert_close(got[name], want[name], limit, name)
            continue
        allowed = _chance(want[name], pair.a.dtype, floor if name == "scale" else 0.0)
        if relative_error(got[name], want[name]) > allowed:
            assert_no_worse(got[name], yardstick[name], want[name], name)
    return grads


def _chance(values: Tensor, dtype: torch.dtype, floor: float) -> float:
    """An error that is always allowed: of a few numbers, one rounding of each, because their mean error is chance."""
    return max(floor, torch.finfo(dtype).eps / 2) if values.numel() < 64 else floor


def largest_score(pair: Pair, spec: PairSpec) -> float:
    scores = dense_scores(pair, spec)[0].detach().flatten()
    return max(scores[scores.isfinite()].abs().tolist(), default=0.0)
