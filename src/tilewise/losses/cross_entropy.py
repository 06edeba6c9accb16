"""Cross entropy of a linear classifier, such as a language model's head, without storing its logits."""

from __future__ import annotations

import math
from dataclasses import replace
from typing import Any, Literal, overload

import torch
from torch import Tensor, nn

from tilewise import _check
from tilewise.errors import DtypeError, GradientError, RangeError, ShapeError
from tilewise.kernels.spec import PairSpec, RowWeights, stat_dtype
from tilewise.losses.entry import entry
from tilewise.losses.logsumexp import check_bias, check_softcap
from tilewise.losses.module import settings_of
from tilewise.losses.sharded_head import Head
from tilewise.ops.autograd import pair_loss, pair_stats
from tilewise.ops.call import PairKeys, call_settings
from tilewise.ops.distributed.collectives import same_rows, shard_of_columns, sum_over_ranks
from tilewise.ops.paired_scores import positive_shift
from tilewise.ops.small import Calls
from tilewise.options import DEFAULT_OPTIONS, TileOptions, check_flag

NAMES = ("input", "linear_weight")
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
    y, in_range = _check_target(target, input, shift, ignore_index, classes, checked=calls.checked)
    if weight is not None:
        weight = _check_class_weight(weight, c)
    scalar = reduction != "none" and label_smoothing == 0.0 and not name and not return_lse
    if scalar and in_range and weight is None:
        share = 1.0 / y.shape[0] if reduction == "mean" else 1.0
        square = None if z_loss == 0.0 else torch.full(y.shape, z_loss * share, dtype=stat_dtype(a.dtype))
        spec = replace(IN_RANGE, softcap=cap) if cap else IN_RANGE
        weights, known = RowWeights(share=share, square=square), PairKeys(row_key=y)

        def known_keys() -> PairKeys:
            return known._replace(row_shift=_target_scores(a, c, y, scale, bias, cap, name, options))

        how: dict[str, Any] = {"full_keys": known_keys, "spec": spec, "options": options, "calls": calls}
        return pair_loss(a, c, scale, bias, weights=weights, keys=known, **how)

    ignored = min(ignore_index, -1)  # the key of ignored rows; a negative key matches no column
    spec = WITH_IGNORED
    if cap or name or ignored != spec.ignored:
        spec = replace(spec, softcap=cap, ignored=ignored, same_rows=same_rows(name))
    mean = scalar and reduction == "mean" and weight is None and z_loss == 0.0

    def keys_of(key: Tensor) -> PairKeys:
        own = key - start if name else key
        return PairKeys(row_key=key, row_shift=_target_scores(a, c, own, scale, bias, cap, name, options))

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
        picked = _pick(weight.to(stat), own, 0.0 if name else torch.nan)
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


def check_ignore_index(ignore_index: int | None) -> int:
    """Check the target of ignored rows. None is -100, as in PyTorch."""
    if ignore_index is None:
        return -100
    return _check.check_index("ignore_index", ignore_index, "Pass the integer that marks padding in target")


def check_shift(shift: int) -> int:
    """Check a number of tokens. True is 1 and False is 0, as in Cut Cross-Entropy."""
    if not isinstance(shift, int) or shift < 0:
        raise RangeError(
            f"shift is a whole number of tokens, at least 0, got {shift!r:.60}. Next-token loss has shift=1"
        )
    return int(shift)


def _rows(input: Tensor, shift: int) -> tuple[Tensor, torch.Size]:
    """The hidden states to score, as (n, d), and the shape of their losses."""
    _check.check_tensor("input", input)
    if input.dim() < 1:
        raise ShapeError(f"input must be (..., features), got {tuple(input.shape)}. Add a dimension")
    if shift and input.dim() < 2:
        raise ShapeError(
            f"with shift={shift}, input must be (..., tokens, features), got {tuple(input.shape)}. "
            "Add a dimension, or shift the target yourself"
        )
    flat, shape = _scored_rows(input, shift)
    return _check.check_features("input", flat), shape


def _scored_rows(input: Tensor, shift: int) -> tuple[Tensor, torch.Size]:
    """See `_rows`, which has checked everything but the type."""
    if shift:
        input = input[..., : max(input.shape[-2] - shift, 0), :]
    shape = input.shape[:-1]
    # Of two dimensions too: while `explain` runs, this makes a fake tensor of a real one that a function holds.
    return input.reshape(math.prod(shape), input.shape[-1]), shape


def check_head(
    input: Tensor,
    linear_weight: Tensor,
    linear_bias: Tensor | None,
    softcap: float | None,
    shift: int,
    *,
    checked: bool = False,
) -> tuple[Tensor, Tensor, Tensor | None, float, torch.Size]:
    """Check what all losses of a classifier share. ``checked``: see `Calls`.

    Returns the states to score, (n, d), the classifier, (V, d), bias, soft cap, and the shape of the losses.
    """
    if checked:
        a, shape = _scored_rows(input, shift) if shift or input.ndim != 2 else (input, input.shape[:-1])
        return a, linear_weight, linear_bias, float(softcap or 0.0), shape
    a, shape = _rows(input, shift)
    if isinstance(linear_weight, Tensor) and not linear_weight.is_nested and linear_weight.dim() > 2:
        raise ShapeError(
            f"linear_weight is one classifier, (classes, features), got {tuple(linear_weight.shape)}, which is one for "
            "each position of a K-dimensional loss. Call the loss once per position, with linear_weight[:, k] and "
            "target[:, k], or use torch.nn.functional.linear_cross_entropy"
        )
    c = _check.check_features("linear_weight", linear_weight)
    _check.check_together(NAMES, a, c)
    bias, cap = check_bias("linear_bias", linear_bias, c), check_softcap(softcap)
    return a, c, bias, cap, shape


def _check_target(
    target: Tensor,
    input: Tensor,
    shift: int,
    ignore_index: int,
    classes: int | Tensor,
    *,
    checked: bool = False,
) -> tuple[Tensor, bool]:
    """Check the targets. Returns those of the scored states, (n,) int64, and whether all are known to be classes."""
    if checked and target.dtype is torch.int64:
        return _scored_target(target, shift, ignore_index, classes, checked=True)
    _check.check_tensor("target", target, "a tensor of class indices")
    if target.dtype not in _check.INTEGERS:
        advice = _check.WHOLE
        if target.dim() == input.dim() and target.is_floating_point():
            advice = (
                "Class probabilities are not supported: use label_smoothing, or a dense loss such as "
                "torch.nn.functional.linear_cross_entropy"
            )
        raise DtypeError(f"target holds class indices (integers), got {target.dtype}. {advice}")
    if target.shape != input.shape[:-1]:
        same = target.numel() == input.shape[:-1].numel()
        raise ShapeError(
            f"target has one entry for each hidden state, {tuple(input.shape[:-1])}, got {tuple(target.shape)}. "
            + ("Reshape it" if same else "For next-token prediction pass shift=1 instead of a shorter target")
        )
    _check.check_device(("target", "input"), target, input)
    return _scored_target(target.long(), shift, ignore_index, classes)


def _scored_target(
    target: Tensor, shift: int, ignore_index: int, classes: int | Tensor, *, checked: bool = False
) -> tuple[Tensor, bool]:
    """See `_check_target`, which has checked everything but the numbers."""
    y = target[..., shift:] if shift else target
    if y.ndim != 1:
        y = y.reshape(-1)
    if y.shape[0] > 0 and y.is_cpu and (checked or _check.can_read(y)):
        low, high = torch.aminmax(y)
        if type(low) is not Tensor:  # `explain`: the view is a fake tensor, too
            return y.view(-1), False
        least, most = low.item(), high.item()
        if least >= 0 and most < classes and not least <= ignore_index <= most:
            return y, True
        wrong = y[(y != ignore_index) & ((y < 0) | (y >= classes))]
        if wrong.numel():
            raise RangeError(
                f"targets are class indices in [0, {int(classes)}) or ignore_index={ignore_index}, "
                f"got {wrong[0].item()} ({wrong.numel()} out of range). "
                "Set ignore_index to the value that marks padding"
            )
    return y, False


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


def _pick(values_v: Tensor, own: Tensor, outside: float) -> Tensor:
    """values[own], and ``outside`` for a class that is not here, but of another rank or out of range."""
    inside = (own >= 0) & (own < values_v.shape[0])
    if values_v.shape[0] == 0:
        return torch.full(own.shape, outside, dtype=values_v.dtype, device=own.device)
    return torch.where(inside, values_v[own.clamp(0, values_v.shape[0] - 1)], outside)


def _target_scores(
    a: Tensor,
    c: Tensor,
    own: Tensor,
    scale: Tensor | float,
    bias: Tensor | None,
    softcap: float,
    group_name: str,
    options: TileOptions,
) -> Tensor | None:
    """The shift of each row: approximately the score of its target: (n,), no gradient. None for no shift."""
    if group_name and not same_rows(group_name):  # the target of a row is in the shard of another rank
        return None
    shift = positive_shift(a, c, scale, own, options)
    if shift is None:
        return None
    score = torch.where((own >= 0) & (own < c.shape[0]), shift, 0.0)
    if bias is not None:
        score = score + _pick(bias.detach().to(score.dtype), own, 0.0)
    score = sum_over_ranks(score, group_name)
    if softcap:
        return softcap * torch.tanh(score / softcap)
    # A bias of -inf excludes a target. It cannot be a shift, because -inf - -inf is NaN.
    return score if bias is None else torch.where(score == -torch.inf, 0.0, score)


class LinearCrossEntropyLoss(nn.Module):
    """`linear_cross_entropy` as a Module that stores the settings."""

    weight: Tensor | None

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
        super().__init__()
        if weight is not None:
            _check.check_tensor("weight", weight)  # a Module refuses other buffers with an error of its own
        self.register_buffer("weight", weight)
        self.logit_scale = logit_scale  # attribute assignment registers an nn.Parameter, which is then learned
        self.settings = settings_of(locals(), "weight", "logit_scale")

    def forward(
        self, input: Tensor, linear_weight: Tensor, target: Tensor, *, linear_bias: Tensor | None = None
    ) -> Tensor | tuple[Tensor, Tensor]:
        """See `linear_cross_entropy`."""
        result: Tensor | tuple[Tensor, Tensor] = linear_cross_entropy(
            input,
            linear_weight,
            target,
            linear_bias=linear_bias,
            weight=self.weight,
            logit_scale=self.logit_scale,
            **self.settings,
        )
        return result
