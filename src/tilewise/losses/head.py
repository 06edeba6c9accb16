"""What all losses of a classifier share: checks of hidden states, classifier and targets, and the scores of targets."""

from __future__ import annotations

import math

import torch
from torch import Tensor

from tilewise import _check
from tilewise.errors import DtypeError, RangeError, ShapeError
from tilewise.losses.logsumexp import check_bias, check_softcap
from tilewise.ops.distributed.collectives import same_rows, sum_over_ranks
from tilewise.ops.paired_scores import positive_shift
from tilewise.options import TileOptions

NAMES = ("input", "linear_weight")


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


def check_target(
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
        return _scored_target(target, shift, ignore_index, classes)
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


def _scored_target(target: Tensor, shift: int, ignore_index: int, classes: int | Tensor) -> tuple[Tensor, bool]:
    """See `check_target`, which has checked everything but the numbers."""
    y = target[..., shift:] if shift else target
    if y.ndim != 1:
        y = y.reshape(-1)
    if y.shape[0] > 0 and y.is_cpu and _check.can_read(y):
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


def pick_at(values_v: Tensor, own: Tensor, outside: float) -> Tensor:
    """values[own], and ``outside`` for a class that is not here, but of another rank or out of range."""
    inside = (own >= 0) & (own < values_v.shape[0])
    if values_v.shape[0] == 0:
        return torch.full(own.shape, outside, dtype=values_v.dtype, device=own.device)
    return torch.where(inside, values_v[own.clamp(0, values_v.shape[0] - 1)], outside)


def target_scores(
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
        score = score + pick_at(bias.detach().to(score.dtype), own, 0.0)
    score = sum_over_ranks(score, group_name)
    if softcap:
        return softcap * torch.tanh(score / softcap)
    # A bias of -inf excludes a target. It cannot be a shift, because -inf - -inf is NaN.
    return score if bias is None else torch.where(score == -torch.inf, 0.0, score)
