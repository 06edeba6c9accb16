"""A backend with nothing but `two_pass`, over the dense oracle: what a third backend has to provide."""

import dataclasses

import torch
from tests.kernels.dense import dense_scores, dense_stats, guide_scores, left_scores

from tilewise.kernels.backend import Backend
from tilewise.kernels.spec import STATISTICS, Grads


class OracleBackend(Backend):
    """Builds all scores, in float64."""

    name = "oracle"

    def forward(self, pair, spec, options):
        with torch.no_grad():
            return dense_stats(wide(pair, spec), spec).rounded(pair.stat_dtype)

    def backward(self, pair, stats, grad, needs, spec, options, *, grad_dtype=None, saved=None):
        with torch.enable_grad():
            leaves = wide(pair, spec, requires_grad=True)
            # The statistics are those of all blocks: as functions of this block's scores, each adds exp(x - total).
            inputs = {"a": leaves.a, "b": leaves.b, "scale": leaves.scale, "bias": leaves.bias}
            wanted = {name: value for name, value in inputs.items() if value is not None and getattr(needs, name)}
            if spec.symmetric:
                wanted.pop("b", None)
            loss = surrogate(leaves, stats, grad, spec)
            found = dict(zip(wanted, torch.autograd.grad(loss, list(wanted.values()), allow_unused=True), strict=True))
        dtypes = {"a": grad_dtype or pair.a.dtype, "b": grad_dtype or pair.b.dtype}
        zeros = {name: torch.zeros_like(inputs[name]) for name in wanted}
        return Grads(
            **{
                name: (zeros[name] if value is None else value).to(dtypes.get(name, pair.stat_dtype))
                for name, value in found.items()
            }
        )


def wide(pair, spec, requires_grad=False):
    """The pair in float64; as leaves of a graph, if wanted."""
    names = ("a", "b", "scale", "bias", "row_shift", "col_shift", "col_weight", "guide_a", "guide_b", "guide_scale")
    names += ("guide_bias", "row_limit", "row_norm", "guide_norm", "row_scale")
    values = {name: getattr(pair, name) for name in names}
    values = {name: None if value is None else value.double() for name, value in values.items()}
    if requires_grad:
        for name in names[:4]:
            if values[name] is not None:
                values[name] = values[name].detach().clone().requires_grad_()
    if spec.symmetric:
        values["b"] = values["a"]
    return dataclasses.replace(pair, **values)


def surrogate(pair, stats, grad, spec):
    """A number whose gradient is that of the statistics over all blocks, with ``grad`` coming in.

    sum_j exp(x_ij - lse_i), with the log-sum-exp of all blocks as a constant, has the gradient of the log-sum-exp.
    """
    x = left_scores(dense_scores(pair, spec)[0], pair, spec)
    total = x.new_zeros(())

    def level(lse, shift):
        return lse.double() if shift is None else lse.double() + shift

    def masses(lse, shift, dim):
        below = (x - level(lse, shift).unsqueeze(dim)).masked_fill(x == -torch.inf, -torch.inf)
        return torch.where(x == -torch.inf, 0.0, below.exp())

    if grad.row_lse is not None:
        total = total + (grad.row_lse.double()[:, None] * masses(stats.row_lse, pair.row_shift, 1)).sum()
    if grad.col_lse is not None:
        total = total + (grad.col_lse.double()[None, :] * masses(stats.col_lse, pair.col_shift, 0)).sum()
    if grad.row_entropy is not None:
        p = masses(stats.row_lse, pair.row_shift, 1)
        above = torch.where(x == -torch.inf, 0.0, level(stats.row_lse, pair.row_shift)[:, None] - x)
        slope = (p * (above - stats.row_entropy.double()[:, None])).detach()
        total = total + (grad.row_entropy.double()[:, None] * slope * torch.where(x == -torch.inf, 0.0, x)).sum()
    if spec.divergence:
        p = masses(stats.row_lse, pair.row_shift, 1)
        log_p, log_q = p.log(), guide_scores(pair, spec) - stats.guide_lse.double()[:, None]
        log_m = ((1.0 - spec.beta) * p + spec.beta * log_q.exp()).log()
        slopes = {"row_kl": p - log_q.exp()}
        if grad.row_reverse_kl is not None:
            slopes["row_reverse_kl"] = p * (log_p - log_q - stats.row_reverse_kl.double()[:, None])
        if grad.row_jsd is not None:
            slopes["row_jsd"] = (1.0 - spec.beta) * p * (log_p - log_m - stats.row_mix_kl.double()[:, None])
        if grad.row_hot_lse is not None:
            hot = 0.0 if pair.row_shift is None else spec.hot * pair.row_shift
            slopes["row_hot_lse"] = spec.hot * (spec.hot * x - level(stats.row_hot_lse, hot)[:, None]).exp()
        for name, slope in slopes.items():
            if getattr(grad, name) is not None:
                total = total + (getattr(grad, name).double()[:, None] * slope.detach() * x).sum()
    rest = dense_stats(pair, spec)
    of_all = {"row_lse", "col_lse", "row_entropy", "row_kl", "row_reverse_kl", "row_jsd", "row_hot_lse"}
    sums = {stat.name for stat in STATISTICS if stat.gradient} - of_all
    for name in sums:  # over all blocks they are the sum of what each block adds
        if getattr(grad, name) is not None:
            total = total + (getattr(grad, name).double() * getattr(rest, name)).sum()
    return total
