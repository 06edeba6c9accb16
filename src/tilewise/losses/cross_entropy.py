"""Cross entropy of a linear classifier, such as a language model's head, without storing its logits."""

from __future__ import annotations

from dataclasses import replace
from typing import Any, Literal, overload

import torch
from torch import Tensor

from tilewise import _check
from tilewise.errors import GradientError, RangeError
from tilewise.kernels.spec import PairSpec, RowWeights, stat_dtype
from tilewise.losses.entry import entry
from tilewise.losses.head import check_head, check_ignore_index, check_shift, check_target, pick_at, target_scores
from tilewise.losses.logsumexp import check_bias
from tilewise.losses.module import LossModule
from tilewise.losses.sharded_head import Head
from tilewise.ops.autograd import pair_loss, pair_stats
from tilewise.ops.call import PairKeys, call_settings
from tilewise.ops.distributed.collectives import same_rows, shard_of_columns, sum_over_ranks
from tilewise.ops.small import Calls
from tilewise.options import DEFAULT_OPTIONS, TileOptions, check_flag

IN_RANGE = PairSpec(row_lse=True, positive="one", in_range=True)
WITH_IGNORED = PairSpec(row_lse=True, positive="one", ignored=-100, drop_rows=True)
NO_SIGN = 2**31 - 1  # the bits of an index; those of a negative number are an index beyond all classes


def _mean_divisor(values: dict[str, Any]) -> Tensor:
    """The sum of the weights of the valid targets of this rank; without weights their number."""
    shift, ignored = check_shift(values["shift"]), check_ignore_index(values["ignore_index"])
    y = values["target"][..., shift:] if shift else values["target"]
    valid = y != ignored
    if values["weight"] is None:
        return valid.sum()
    return torch.where(valid, values["weight"][torch.where(valid, y, 0)], 0.0).sum()


SHARDED = Head(rows=("input", "target"), columns=("linear_weight", "linear_bias", "weight"), count=_mean_divisor)


@overload
def linear_cross_entropy(
    input: Tensor,
    linear_weight: Tensor,
    target: Tensor,
    *,
    linear_bias: Tensor | None = None,
    weight: Tensor | None = None,
    reduction: _check.Reduction = "mean",
    ignore_index: int | None = -100,
    label_smoothing: float = 0.0,
    softcap: float | None = None,
    logit_scale: float | Tensor = 1.0,
    z_loss: float = 0.0,
    shift: int = 0,
    return_lse: Literal[False] = False,
    group: torch.distributed.ProcessGroup | None = None,
    options: TileOptions | None = None,
) -> Tensor: ...


@overload
def linear_cross_entropy(
    input: Tensor,
    linear_weight: Tensor,
    target: Tensor,
    *,
    linear_bias: Tensor | None = None,
    weight: Tensor | None = None,
    reduction: _check.Reduction = "mean",
    ignore_index: int | None = -100,
    label_smoothing: float = 0.0,
    softcap: float | None = None,
    logit_scale: float | Tensor = 1.0,
    z_loss: float = 0.0,
    shift: int = 0,
    return_lse: Literal[True],
    group: torch.distributed.ProcessGroup | None = None,
    options: TileOptions | None = None,
) -> tuple[Tensor, Tensor]: ...


@entry(SHARDED)
def linear_cross_entropy(
    calls: Calls,
    input: Tensor,
    linear_weight: Tensor,
    target: Tensor,
    *,
    linear_bias: Tensor | None = None,
    weight: Tensor | None = None,
    reduction: _check.Reduction = "mean",
    ignore_index: int | None = -100,
    label_smoothing: float = 0.0,
    softcap: float | None = None,
    logit_scale: float | Tensor = 1.0,
    z_loss: float = 0.0,
    shift: int = 0,
    return_lse: bool = False,
    group: torch.distributed.ProcessGroup | None = None,
    options: TileOptions | None = None,
) -> Tensor | tuple[Tensor, Tensor]:
    """`torch.nn.functional.cross_entropy` of the logits of a linear layer. The logits of a large call are never stored.

    Equals::

        logits = logit_scale * input @ linear_weight.T + linear_bias
        if softcap: logits = softcap * tanh(logits / softcap)
        F.cross_entropy(logits, target, weight, ignore_index=..., label_smoothing=..., reduction=...)

    plus ``z_loss * logsumexp(logits) ** 2`` for each row. Special cases are those of `cross_entropy`: "mean" divides by
    the sum of the targets' weights and is NaN if all rows are ignored. The z-loss has no class, so class weights do not
    apply to it: its mean is over the rows that are not ignored.

    Args:
        input: (..., d), hidden states.
        linear_weight: (V, d), the classifier.
        target: (...) integers in [0, V), or ``ignore_index`` (None is -100, as in PyTorch). A target out of range is an
            error on the CPU. On a GPU the loss is NaN, because a check would synchronize.
        linear_bias: (V,).
        weight: (V,), the weight of each class.
        label_smoothing: in [0, 1].
        softcap, logit_scale, z_loss: as above; a ``logit_scale`` that requires grad gets its exact gradient. A softcap
            of None or 0 is no cap.
        shift: with shift k, the hidden state of token t is scored against the target of token t + k. The last k states
            along the next-to-last dimension are not used. True is 1.
        return_lse: also return ``logsumexp(logits)`` of each row, from the same pass: differentiable, in the shape of
            reduction "none", 0 for an ignored row. With it and ``z_loss=0`` you can log or weight the z-loss apart.
        reduction: "none" returns the shape of ``target``, with its last dimension shorter by ``shift``.
        group: a process group over whose ranks the classes are sharded, in rank order. Every rank holds all tokens.
            Plain data parallelism needs no group.
        options: how the loss is computed; see `TileOptions`. No option changes its value beyond rounding.

    Memory: the inputs, their gradients, O(rows) statistics, and a workspace.

    >>> hidden, classifier = torch.eye(3), torch.eye(3)
    >>> round(linear_cross_entropy(hidden, classifier, torch.tensor([0, 1, -100])).item(), 4)
    0.5514
    """
    name = ""
    if not calls.checked:
        _check.check_reduction(reduction)
        options, name = _check.check_row_options(options, group)
        if return_lse is not False:
            check_flag("return_lse", return_lse)
    options = options or DEFAULT_OPTIONS
    if type(ignore_index) is not int or not -(2**63) <= ignore_index < 2**63:
        ignore_index = check_ignore_index(ignore_index)
    if type(shift) is not int or shift != 0:
        shift = check_shift(shift)
    a, c, bias, cap, shape = check_head(input, linear_weight, linear_bias, softcap, shift, checked=calls.checked)
    rows = "multiply the states in input by it"
    scale = _check.check_scale("logit_scale", logit_scale, a, rows=rows, checked=calls.checked)
    if not (type(label_smoothing) is type(z_loss) is float and label_smoothing == z_loss == 0.0):
        label_smoothing = _check.check_number("label_smoothing", label_smoothing)
        if not 0.0 <= label_smoothing <= 1.0:
            raise RangeError(f"label_smoothing is in [0, 1], got {label_smoothing}. It is a fraction, not a percentage")
        z_loss = check_z_loss(z_loss)
    start: int | Tensor = 0
    classes: int | Tensor = c.shape[0]
    if name:
        must_match = call_settings(
            name,
            reduction=reduction,
            label_smoothing=label_smoothing,
            z_loss=z_loss,
            ignore_index=ignore_index,
            shift=shift,
            logit_scale=logit_scale,
            weight=weight,
        )
        start, classes = shard_of_columns(c, must_match, name)
    y, in_range = check_target(target, input, shift, ignore_index, classes, checked=calls.checked)
    if weight is not None:
        weight = _check_class_weight(weight, c)
    scalar = reduction != "none" and label_smoothing == 0.0 and not name and not return_lse
    if scalar and in_range and weight is None:
        share = 1.0 / y.shape[0] if reduction == "mean" else 1.0
        square = None if z_loss == 0.0 else torch.full(y.shape, z_loss * share, dtype=stat_dtype(a.dtype))
        spec = replace(IN_RANGE, softcap=cap) if cap else IN_RANGE
        weights, known = RowWeights(share=share, square=square), PairKeys(row_key=y)

        def known_keys() -> PairKeys:
            return known._replace(row_shift=target_scores(a, c, y, scale, bias, cap, name, options))

        how: dict[str, Any] = {"full_keys": known_keys, "spec": spec, "options": options, "calls": calls}
        return pair_loss(a, c, scale, bias, weights=weights, keys=known, **how)

    ignored = min(ignore_index, -1)  # the key of ignored rows; a negative key matches no column
    spec = WITH_IGNORED
    if cap or name or ignored != spec.ignored:
        spec = replace(spec, softcap=cap, ignored=ignored, same_rows=same_rows(name))
    mean = scalar and reduction == "mean" and weight is None and z_loss == 0.0

    def keys_of(key: Tensor) -> PairKeys:
        own = key - start if name else key
        return PairKeys(row_key=key, row_shift=target_scores(a, c, own, scale, bias, cap, name, options))

    def checked_key() -> Tensor:
        """The targets; a negative one is wrong, not ignored: without its sign it is beyond the classes."""
        if _check.can_read(y) and ignore_index < 0:
            return y
        return torch.where(y != ignore_index, y & NO_SIGN, ignored)

    if mean:
        first = y if ignore_index < 0 else checked_key()
        how = {"full_keys": lambda: keys_of(checked_key()), "spec": spec, "options": options, "calls": calls}
        return pair_loss(a, c, scale, bias, weights=RowWeights(kept=True), keys=PairKeys(row_key=first), **how)
    valid, key = y != ignore_index, checked_key()
    own = key - start if name else key
    stat, smooth = stat_dtype(a.dtype), label_smoothing > 0.0
    col_weight = None
    if smooth:
        col_weight = torch.ones(c.shape[0], dtype=stat, device=a.device) if weight is None else weight.to(stat)
    target_weight = None
    if weight is not None:
        picked = pick_at(weight.to(stat), own, 0.0 if name else torch.nan)
        target_weight = torch.where(valid, sum_over_ranks(picked, name), 0.0)
    spec = replace(spec, row_sum=smooth)
    count = valid.sum().to(stat) if reduction == "mean" else torch.ones((), dtype=stat, device=a.device)
    if scalar:
        each = valid.to(stat) if target_weight is None else target_weight
        total = each.sum() if reduction == "mean" and weight is not None else count
        square = torch.where(valid, z_loss / count, 0.0).to(stat) if z_loss else None
        # Class weights whose sum is 0 give NaN: 0 / 0.
        each = each / total.clamp(min=1.0) if weight is None else torch.where(valid, each / total, 0.0)
        weights = RowWeights(each=each, square=square)
        how = {"full_keys": lambda: keys_of(key), "spec": spec, "options": options, "calls": calls}
        loss = pair_loss(a, c, scale, bias, weights=weights, keys=PairKeys(row_key=key), **how)
        return loss + torch.zeros_like(total).masked_fill(total == 0, torch.nan)  # NaN if no row is valid
    keys = PairKeys(row_key=key, col_weight=col_weight)
    how = {"full_keys": lambda: keys_of(key)._replace(col_weight=col_weight), "spec": spec, "calls": calls}
    stats = pair_stats(a, c, scale, bias, keys=keys, options=options, group_name=name, **how)
    row_shift = stats.row_shift
    # A target out of range has 0 positives, and 0 / 0 gives NaN, also as a gradient. An ignored row is no error.
    positives = torch.where(valid, stats.num_positives.detach(), 1.0)
    loss_n = (stats.row_lse - stats.row_pos) * (positives / positives)
    if target_weight is not None:
        loss_n = target_weight * loss_n
    lse = stats.row_lse if row_shift is None else stats.row_lse + row_shift
    if smooth:
        assert col_weight is not None
        uniform = sum_over_ranks(col_weight.sum(), name) * lse - stats.row_sum
        loss_n = (1.0 - label_smoothing) * loss_n + label_smoothing * uniform / classes
    loss_n, lse = torch.where(valid, loss_n, 0.0), torch.where(valid, lse, 0.0)
    if reduction == "none":
        loss = (loss_n + z_loss * lse.square() if z_loss else loss_n).reshape(shape)
    else:
        total = count
        if reduction == "mean" and target_weight is not None:
            total = target_weight.sum()
        loss = loss_n.sum() / total
        if z_loss:
            loss = loss + z_loss / count * lse.square().sum()
    return (loss, lse.reshape(shape)) if return_lse else loss


def check_z_loss(z_loss: float) -> float:
    """Check a finite number that is not negative. Returns it as a float."""
    number = _check.check_number("z_loss", z_loss)
    if number < 0.0:
        raise RangeError(f"z_loss is at least 0, got {z_loss}. A negative value has no minimum")
    return number


def _check_class_weight(weight: Tensor | None, c: Tensor) -> Tensor | None:
    """Check the class weights, (V,). Autocast does not convert them: they are part of the loss, not features."""
    if weight is not None and isinstance(weight, Tensor) and weight.requires_grad:
        raise GradientError("weight is a constant and gets no gradient, but it requires grad. Pass weight.detach()")
    checked = check_bias("weight", weight, c, cast=False)
    if checked is not None and _check.can_read(checked) and not torch.isfinite(checked).all():
        worst = checked[~torch.isfinite(checked)]
        raise RangeError(
            f"weight, one per class, must be finite, got {worst[0].item()} ({worst.numel()} of {checked.numel()}). "
            "Set the weight of a class without examples to 0, not 1 / 0"
        )
    return checked


class LinearCrossEntropyLoss(LossModule):
    """`linear_cross_entropy` as a Module that stores the settings."""

    weight: Tensor | None
    function = staticmethod(linear_cross_entropy)
    attributes = ("weight", "logit_scale")

    def __init__(
        self,
        *,
        weight: Tensor | None = None,
        reduction: _check.Reduction = "mean",
        ignore_index: int | None = -100,
        label_smoothing: float = 0.0,
        softcap: float | None = None,
        logit_scale: float | Tensor = 1.0,
        z_loss: float = 0.0,
        shift: int = 0,
        return_lse: bool = False,
        group: torch.distributed.ProcessGroup | None = None,
        options: TileOptions | None = None,
    ) -> None:
        if weight is not None:
            _check.check_tensor("weight", weight)  # a Module refuses other buffers with an error of its own
        super().__init__(locals())
        del self.weight
        self.register_buffer("weight", weight)
