"""InfoNCE with soft labels: several positives of each query, each with a weight.

Axes: n queries, m keys, d features, K targets of each query.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from tilewise import _check
from tilewise.errors import ConfigError, RangeError, ShapeError
from tilewise.kernels.spec import PairSpec, stat_dtype
from tilewise.losses.entry import entry
from tilewise.losses.module import LossModule
from tilewise.losses.per_token import divide_rows
from tilewise.losses.sharded import Pairs
from tilewise.losses.statistics import check_pick
from tilewise.ops.autograd import pair_stats
from tilewise.ops.call import PairKeys, call_settings
from tilewise.ops.distributed.collectives import shard_of_columns
from tilewise.ops.paired_scores import positive_shift
from tilewise.ops.reduce import reduce_rows
from tilewise.ops.small import Calls
from tilewise.options import DEFAULT_OPTIONS, TileOptions, check_flag

NAMES = ("query", "key")


@entry(Pairs((*NAMES, "target", "target_weight"), scalars=("temperature",)))
def soft_info_nce(
    calls: Calls,
    query: Tensor,
    key: Tensor,
    target: Tensor | None = None,
    target_weight: Tensor | None = None,
    *,
    temperature: float | Tensor = 0.07,
    label_smoothing: float = 0.0,
    exclude_self: bool = False,
    reduction: _check.Reduction = "mean",
    group: torch.distributed.ProcessGroup | None = None,
    options: TileOptions | None = None,
) -> Tensor:
    """Cross entropy of each query against all keys, with soft labels: K keys of each query, each with a weight.

    Equals, without building the (n, m) logits or labels::

        labels = torch.zeros(n, m).scatter_add(1, target, target_weight)
        F.cross_entropy(query @ key.T / temperature, labels, label_smoothing=label_smoothing)

    Args:
        query, key: (n, d) and (m, d). They are not normalized; normalize them first.
        target: (n, K) integers, the keys that have a weight; negative for padding. A key may occur several times in a
            row. A key out of range is an error on the CPU, and the loss of its row is NaN on a GPU. None: key i is the
            only target of query i.
        target_weight: (n, K), usually with a sum of 1 in each row. Any sum is allowed: it multiplies the loss of the
            row. Those of padding may be anything. One that requires grad gets its exact gradient. None: the targets of
            a row have equal weights with a sum of 1; a row without targets has a loss of 0.
        temperature: divides the scores: a number, or (n,), one for each query. A tensor that requires grad gets its
            exact gradient.
        label_smoothing: from 0 to 1. The labels become ``(1 - label_smoothing) * labels + label_smoothing / m``.
        exclude_self: leave out the pair of query i and key i, where ``query`` and ``key`` are the same rows. If it is a
            target, it counts as padding. Not with ``label_smoothing``.
        reduction: "none" returns (n,).
        group: a process group over whose ranks queries and keys are sharded. Targets are indices into the keys of all
            ranks, in rank order; see docs/concepts/ring.md.
        options: how the loss is computed; see `TileOptions`. No option changes its value beyond rounding.

    Memory: the features, their gradients, O(n K + m) numbers, and a workspace.

    >>> x = torch.eye(4)
    >>> round(soft_info_nce(x, x, temperature=1.0).item(), 4)
    0.7437
    >>> target, weight = torch.tensor([[0, 1], [1, -1], [2, 3], [3, -1]]), torch.tensor([0.5, 0.5])
    >>> round(soft_info_nce(x, x, target, weight.expand(4, 2), temperature=1.0).item(), 4)
    0.8078
    """
    name, a, b = "", query, key
    options = DEFAULT_OPTIONS if options is None else options
    if not calls.checked:
        _check.check_reduction(reduction)
        options, name = _check.check_options(options), _check.group_name(group)
        a, b = _check.check_sides(NAMES, a, b)
        check_flag("exclude_self", exclude_self)
    smoothing = _check_smoothing(label_smoothing, exclude_self)
    a, temperature = divide_rows(a, temperature)
    scale = _check.check_temperature(temperature, a)
    stat = stat_dtype(a.dtype)
    if target is None or exclude_self:
        _check.check_same_rows(NAMES, a, b)
    pick = None if target is None else check_pick("target", target, a)
    targets = None if pick is None else pick.shape[1]
    settings = {"label_smoothing": smoothing, "exclude_self": exclude_self, "targets": targets}
    must_match = call_settings(name, reduction=reduction, temperature=temperature, **settings)
    start, keys_of_all = shard_of_columns(b, must_match, name)
    own = torch.arange(a.shape[0], device=a.device) + start
    pick = own[:, None] if pick is None else pick
    wanted = (pick >= 0) & (pick != own[:, None]) if exclude_self else pick >= 0
    inside = wanted & (pick < keys_of_all)
    if _check.can_read(pick) and not torch.equal(wanted, inside):
        raise RangeError(
            f"target holds indices of keys from 0 to {int(keys_of_all) - 1}, or negative ones for padding, got "
            f"{pick.max().item()}. Are they indices into all keys?"
        )
    weight = _check_weight(target_weight, pick, wanted, stat)

    heaviest = pick.gather(1, weight.detach().argmax(1, keepdim=True))[:, 0] - start
    shift = positive_shift(a, b, scale, heaviest, options)
    if shift is not None:  # 0 where the target is on another rank
        shift = torch.where((heaviest >= 0) & (heaviest < b.shape[0]), shift, 0.0)
    skip = own if exclude_self else None
    mean = torch.ones(b.shape[0], dtype=stat, device=b.device) / keys_of_all if smoothing else None
    pick = torch.where(inside, pick, -1)
    keys = PairKeys(row_skip=skip, col_skip=skip, row_shift=shift, col_weight=mean, pick=pick)
    spec = PairSpec(row_lse=True, row_picked=True, row_sum=smoothing > 0.0)
    how: dict[str, Any] = {"options": options, "group_name": name, "must_match": must_match, "calls": calls}
    stats = pair_stats(a, b, scale, keys=keys, spec=spec, **how)
    above = torch.where(inside, stats.row_lse[:, None] - stats.row_picked, torch.where(wanted, torch.nan, 0.0))
    loss_n = (weight * above).sum(1)
    if smoothing:
        lse = stats.row_lse if shift is None else stats.row_lse + shift
        loss_n = torch.lerp(loss_n, lse - stats.row_sum, smoothing)
    return reduce_rows(loss_n, reduction, name)


def _check_smoothing(label_smoothing: float, exclude_self: bool) -> float:
    smoothing = _check.check_number("label_smoothing", label_smoothing)
    if not 0.0 <= smoothing <= 1.0:
        raise RangeError(f"label_smoothing is from 0 to 1, got {smoothing}. It is the share of the uniform labels")
    if smoothing and exclude_self:
        raise ConfigError(
            f"label_smoothing gives every key a weight, got {smoothing} with exclude_self=True, which leaves some "
            "out. Pass one of the two"
        )
    return smoothing


def _check_weight(weight: Tensor | None, pick: Tensor, wanted: Tensor, dtype: torch.dtype) -> Tensor:
    """The weights of the targets, (n, K), 0 for padding."""
    if weight is None:
        return wanted.to(dtype) / wanted.sum(1, keepdim=True).clamp(min=1)
    _check.check_floating("target_weight", weight, 2)
    if weight.shape != pick.shape:
        raise ShapeError(
            f"target_weight has one number for each target, {tuple(pick.shape)}, got {tuple(weight.shape)}. "
            "Pass K of both"
        )
    _check.check_device(("target_weight", "the features"), weight, pick)
    return torch.where(wanted, weight.to(dtype), 0.0)


class SoftInfoNCELoss(LossModule):
    """`soft_info_nce` as a Module that stores the settings."""

    function = staticmethod(soft_info_nce)
    attributes = ("temperature",)

    def __init__(
        self,
        *,
        temperature: float | Tensor = 0.07,
        label_smoothing: float = 0.0,
        exclude_self: bool = False,
        reduction: _check.Reduction = "mean",
        group: torch.distributed.ProcessGroup | None = None,
        options: TileOptions | None = None,
    ) -> None:
        super().__init__(locals())
