"""The filter with all scores in float64: the oracle of the kernels, and a filter for the torch backend in tests.

`tilewise.kernels.filter_plan` has the method. Axes: n rows of a, m rows of b, T tiles of W columns, K picked columns.
"""

import torch
from torch import Tensor

from tilewise.kernels import filter_plan as plans
from tilewise.kernels.spec import FilterPlan, Grads, Stats
from tilewise.kernels.torch_impl import two_pass


class DenseFilter:
    """The capability `filtered` of a backend. Statistics are those of the torch backend."""

    def forward(self, pair, spec, options):
        """The statistics, and the plan of what backward drops."""
        stats = two_pass.forward(pair, spec, options)
        tolerance = plans.tolerance_of(options, pair.a.dtype)
        if plans.rounding_exceeds(pair, tolerance):
            return stats, plans.keep_everything(pair, spec)
        return stats, plan_of(pair, stats, spec, options, tolerance)

    def forward_saving(self, pair, spec, options):
        """`forward`. Nothing is saved."""
        return *self.forward(pair, spec, options), None

    def backward(self, pair, stats, plan, grad, needs, spec, options, *, saved=None):
        """The gradients, or None if all entries are kept."""
        if int(plan.keep_all):
            return None
        tolerance, valid = plans.tolerance_of(options, pair.a.dtype), (pair.row_key >= 0)[:, None]
        g = torch.where(valid, score_gradient(pair, stats, plan, grad, spec, tolerance), 0.0)
        a, b = torch.where(valid, pair.a, 0.0).double(), pair.b.double()
        return Grads(
            a=(pair.scale * g @ b).to(pair.a.dtype) if needs.a else None,
            b=(pair.scale * g.T @ a).to(pair.b.dtype) if needs.b else None,
            scale=(g * (a @ b.T)).sum().to(pair.stat_dtype) if needs.scale else None,
            bias=g.sum(0).to(pair.stat_dtype) if needs.bias else None,
        )


def scores_of(pair, spec) -> Tensor:
    """(n, m) float64."""
    x = pair.scale.double() * pair.a.double() @ pair.b.double().T
    if pair.bias is not None:
        x = x + pair.bias.double()
    return spec.softcap * torch.tanh(x / spec.softcap) if spec.softcap else x


def plan_of(pair, stats: Stats, spec, options, tolerance) -> FilterPlan:
    """What each row drops."""
    n, m = pair.a.shape[0], pair.b.shape[0]
    width, tiles = plans.tile_width(m), plans.tile_count(m)
    order = plans.order_columns(pair)
    shift = 0.0 if pair.row_shift is None else pair.row_shift.double()[:, None]
    x_nm = torch.nn.functional.pad(scores_of(pair, spec)[:, order.long()], (0, tiles * width - m), value=-torch.inf)
    x_ntw = (x_nm - shift).view(n, tiles, width)
    part_nt, entropy_tn = x_ntw.logsumexp(2), None
    if spec.row_entropy:
        log_p = torch.where(part_nt[:, :, None] == -torch.inf, 0.0, x_ntw - part_nt[:, :, None])
        entropy_tn = -(log_p.exp() * log_p.clamp(min=-1e30)).sum(2).T.to(pair.stat_dtype)
        entropy_tn = torch.where(-torch.inf == part_nt.T, 0.0, entropy_tn)
    part_tn, lse = part_nt.T.to(pair.stat_dtype), stats.row_lse.to(pair.stat_dtype)
    places = plans.always_kept(order, pair)
    log_prob = None
    if spec.positive == "one":
        log_prob = torch.where(places[:, 0] >= 0, (stats.row_pos - stats.row_lse).to(lse.dtype), -torch.inf)
    most = plans.limits(options, m, log_prob, stats.row_entropy)
    mass = plans.choose(part_tn, lse, places, pair.row_key >= 0, tolerance, width, most, entropy_tn)
    surprise = lse.new_zeros(0)
    if entropy_tn is not None:
        surprise = plans.mean_surprise(mass, part_tn - lse, entropy_tn)
    kept = (mass < 0).sum(1, dtype=torch.int32)
    b_md = pair.b.double()
    if pair.bias is not None:
        b_md = torch.where(pair.bias[:, None] > -torch.inf, b_md, 0.0)
    mean = b_md.new_zeros(tiles, b_md.shape[1]).index_add_(0, tiles_of_columns(order), b_md)
    return FilterPlan(
        order=order,
        mass=mass.to(pair.a.dtype),
        mean=(mean / plans.columns_of_tiles(order, pair.bias)[:, None]).to(pair.a.dtype),
        surprise=surprise,
        kept=kept,
        keep_all=plans.too_many(kept, mass.numel()),
    )


def tiles_of_columns(order: Tensor) -> Tensor:
    """The tile of each column: (m,)."""
    tile = torch.empty_like(order, dtype=torch.int64)
    tile[order.long()] = torch.arange(len(order), device=order.device) // plans.tile_width(len(order))
    return tile


def score_gradient(pair, stats: Stats, plan: FilterPlan, grad, spec, tolerance) -> Tensor:
    """G, with the mean of the tile for what is dropped: (n, m) float64."""
    x, tile = scores_of(pair, spec), tiles_of_columns(plan.order)
    lse = stats.row_lse.double() if pair.row_shift is None else stats.row_lse.double() + pair.row_shift
    value, h = torch.zeros_like(lse), torch.zeros_like(lse)
    if grad.row_lse is not None:
        value = grad.row_lse.double()
    dropped = value
    if grad.row_entropy is not None:
        h = grad.row_entropy.double()
        value = value - h * stats.row_entropy.double()
        dropped = value + h * plan.surprise
    below = (lse[:, None] - x).clamp(max=1e30)
    g = (x - lse[:, None]).exp() * (value[:, None] + h[:, None] * below)
    columns = torch.arange(x.shape[1], device=x.device)
    if grad.row_pos is not None:
        g = g + torch.where(columns == (pair.row_key - pair.col_start)[:, None], grad.row_pos.double()[:, None], 0.0)
    if grad.row_picked is not None:
        place = pair.pick - pair.col_start
        inside = (place >= 0) & (place < x.shape[1])
        coming = torch.where(inside, grad.row_picked.double(), 0.0)
        g = g.scatter_add(1, place.clamp(0, x.shape[1] - 1), coming)
    if spec.softcap:
        g = g * (1.0 - (x / spec.softcap).square())
    share = plan.mass.double().clamp(min=0.0) * tolerance / plans.columns_of_tiles(plan.order, pair.bias)[:, None]
    instead = share * dropped
    if spec.softcap:
        instead = instead * (1.0 - ((share.log() + lse) / spec.softcap).square()).clamp(min=0.0)
    instead_nm = torch.where(share > 0, instead, 0.0)[tile].T
    if pair.bias is not None:
        instead_nm = torch.where(pair.bias > -torch.inf, instead_nm, 0.0)
    return torch.where((plan.mass < 0)[tile].T, g, instead_nm)
