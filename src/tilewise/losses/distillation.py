"""Distillation of a language model's head: divergences of a student's next-token distribution from a teacher's.

The logits of neither model are stored: both scores of a token and a class are computed in the same tile.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from tilewise import _check
from tilewise.errors import ConfigError, RangeError, ShapeError
from tilewise.kernels.spec import GuideUse, PairSpec, stat_dtype
from tilewise.losses.entry import entry
from tilewise.losses.head import (
    _rows,
    check_head,
    check_ignore_index,
    check_shift,
    check_target,
    target_scores,
)
from tilewise.losses.logsumexp import check_bias, check_softcap
from tilewise.losses.module import LossModule
from tilewise.losses.per_token import check_temperature, check_token_mask, tempered
from tilewise.losses.sharded_head import Head
from tilewise.ops.autograd import pair_stats
from tilewise.ops.call import PairKeys, call_settings
from tilewise.ops.distributed.collectives import same_rows, shard_of_columns
from tilewise.ops.distributed.dtensors import replicated
from tilewise.ops.small import Calls
from tilewise.options import TileOptions, check_flag

TEACHER_NAMES = ("teacher_input", "teacher_weight")
SHARDED = Head(
    rows=("input", "teacher_input", "mask", "target"),
    columns=("linear_weight", "linear_bias", "teacher_weight", "teacher_bias"),
    teacher=("teacher_weight", "teacher_bias"),
    scalars=("logit_scale", "teacher_logit_scale"),
)


@dataclass(frozen=True, kw_only=True)
class DistillationStats:
    """Statistics of tokens, each in the shape of the tokens: float32 (float64 for float64), 0 for an ignored token."""

    divergence: Tensor  # of the student from the teacher, at the temperature; differentiable
    entropy: Tensor | None  # of the student's softmax at the temperature, in nats; no gradient; None if not wanted
    log_prob: Tensor | None  # of the target, at temperature 1; differentiable; None without targets
    valid: Tensor  # bool, False for an ignored token
    has_target: Tensor | None  # bool, whether the token counts and has a target; None without targets


@entry(SHARDED)
def linear_distillation_stats(
    calls: Calls,
    input: Tensor,
    linear_weight: Tensor,
    teacher_input: Tensor,
    teacher_weight: Tensor,
    target: Tensor | None = None,
    *,
    entropy: bool = True,
    beta: float = 0.0,
    temperature: float = 1.0,
    linear_bias: Tensor | None = None,
    teacher_bias: Tensor | None = None,
    logit_scale: float | Tensor = 1.0,
    teacher_logit_scale: float | Tensor = 1.0,
    softcap: float | None = None,
    teacher_softcap: float | None = None,
    mask: Tensor | None = None,
    ignore_index: int | None = -100,
    classes: int | None = None,
    shift: int = 0,
    group: torch.distributed.ProcessGroup | None = None,
    options: TileOptions | None = None,
) -> DistillationStats:
    """The terms of `linear_distillation_loss` for each token: divergence, entropy, and log-probability of a target.

    ``entropy``: whether to compute it. The other arguments are those of `linear_distillation_loss`.

    >>> x, w = torch.eye(2), torch.eye(2)
    >>> stats = linear_distillation_stats(x, w, x, 3.0 * w, torch.tensor([0, 1]))
    >>> [round(value, 4) for value in stats.divergence.tolist()], [round(value, 4) for value in stats.log_prob.tolist()]
    ([0.1698, 0.1698], [-0.3133, -0.3133])
    """
    options, name = _check.check_options(options), _check.group_name(group)
    check_flag("entropy", entropy)
    ignore_index, shift = check_ignore_index(ignore_index), check_shift(shift)
    guide, beta, t = _check_beta(beta), float(beta), check_temperature(temperature)
    a, c, bias, cap, shape = check_head(input, linear_weight, linear_bias, softcap, shift)
    scale = _check.check_scalar("logit_scale", logit_scale, a, rows="multiply the states in input by it")
    teacher_a, teacher_c = _check_teacher(input, a, c, teacher_input, teacher_weight, shift)
    teacher_bias = check_bias("teacher_bias", teacher_bias, teacher_c)
    c, teacher_c, bias, teacher_bias = _without_padding(c, teacher_c, bias, teacher_bias, classes, name)
    stat = stat_dtype(a.dtype)
    scale, bias, cap = tempered(t, scale, bias, cap, stat)
    teacher_scale = _check.check_scalar("teacher_logit_scale", teacher_logit_scale, a).detach()
    teacher_cap = check_softcap(teacher_softcap, "teacher_softcap")
    teacher_scale, teacher_bias, teacher_cap = tempered(t, teacher_scale, teacher_bias, teacher_cap, stat)
    settings = {"temperature": t, "shift": shift, "ignore_index": ignore_index, "target": target is not None}
    must_match = call_settings(name, logit_scale=logit_scale, teacher=teacher_logit_scale, mask=mask, **settings)
    start, total = shard_of_columns(c, must_match, name)
    valid, key, has_target, row_shift = check_token_mask(mask, input, shift), None, None, None
    if target is not None:
        y, _ = check_target(target, input, shift, ignore_index, total)
        valid = y != ignore_index if valid is None else valid
        has_target = valid & (y != ignore_index)
        # A token that counts and has no target gets a column that does not exist.
        key = torch.where(has_target, y, torch.where(valid, total, -1))
        row_shift = target_scores(a, c, key - start, scale, bias, cap, name, options)
    elif valid is not None:
        key = valid.long() - 1
    keys = PairKeys(
        row_key=key,
        row_shift=row_shift,
        guide_a=teacher_a.detach(),
        guide_b=teacher_c.detach(),
        guide_scale=teacher_scale.to(stat),
        guide_bias=None if teacher_bias is None else teacher_bias.detach().to(stat),
    )
    spec = PairSpec(
        row_lse=True,
        row_entropy=entropy,
        positive="none" if target is None else "one",
        softcap=cap,
        guide=guide,
        guide_softcap=teacher_cap,
        beta=beta if guide == "jsd" else 0.0,
        hot=t if target is not None and t != 1.0 else 0.0,  # targets need the scores at temperature 1
        drop_rows=key is not None,
        same_rows=same_rows(name),
    )
    if name and guide == "jsd":
        keys = _with_norms(a, c, scale, bias, keys, spec, options, name)
    found = pair_stats(a, c, scale, bias, keys=keys, spec=spec, options=options, group_name=name, calls=calls)
    divergence = getattr(found, f"row_{guide}")
    # Without a class whose logit is more than -inf a model has no distribution.
    neither = (found.row_lse.detach() == -torch.inf) | (found.guide_lse == -torch.inf)
    divergence = torch.where(neither, torch.nan, divergence)
    log_prob = None
    if has_target is not None:
        # A target out of range has 0 positives, and 0 / 0 gives NaN.
        pos = found.row_pos / torch.where(has_target, found.num_positives.detach(), 1.0)
        log_prob = pos - found.row_lse if found.row_hot_lse is None else t * pos - found.row_hot_lse
        log_prob = torch.where(has_target, log_prob, 0.0).reshape(shape)
    if valid is None:
        valid = torch.ones(a.shape[0], dtype=torch.bool, device=a.device)
    return DistillationStats(
        divergence=torch.where(valid, divergence, 0.0).reshape(shape),
        entropy=torch.where(valid, found.row_entropy.detach(), 0.0).reshape(shape) if entropy else None,
        log_prob=log_prob,
        valid=valid.reshape(shape),
        has_target=None if has_target is None else has_target.reshape(shape),
    )


def linear_distillation_loss(
    input: Tensor,
    linear_weight: Tensor,
    teacher_input: Tensor,
    teacher_weight: Tensor,
    target: Tensor | None = None,
    *,
    beta: float = 0.0,
    temperature: float = 1.0,
    target_weight: float = 1.0,
    linear_bias: Tensor | None = None,
    teacher_bias: Tensor | None = None,
    logit_scale: float | Tensor = 1.0,
    teacher_logit_scale: float | Tensor = 1.0,
    softcap: float | None = None,
    teacher_softcap: float | None = None,
    mask: Tensor | None = None,
    ignore_index: int | None = -100,
    classes: int | None = None,
    shift: int = 0,
    reduction: _check.Reduction = "mean",
    group: torch.distributed.ProcessGroup | None = None,
    options: TileOptions | None = None,
) -> Tensor:
    """Divergence of a student's next-token distribution from a teacher's. No logits are stored, of either model.

    With the logits of both models, each scaled, biased and soft-capped as in `linear_cross_entropy`::

        p, q = softmax(logits / temperature), softmax(teacher_logits / temperature)
        beta = 0:      sum(q * log(q / p))                                  KL(teacher || student)
        beta = 1:      sum(p * log(p / q))                                  KL(student || teacher)
        between:       beta * sum(q * log(q / m)) + (1 - beta) * sum(p * log(p / m)),  m = (1 - beta) * p + beta * q
        with targets:  + target_weight * F.cross_entropy(logits, target)

    The student's hidden states, classifier, bias and scale get exact gradients, the teacher gets none. The gradient of
    a divergence shrinks with the square of the temperature: multiply the loss by ``temperature ** 2`` to keep its size.

    Args:
        input: (..., d), the student's hidden states.
        linear_weight: (V, d), the student's classifier.
        teacher_input: (..., e), the teacher's hidden states of the same tokens, in the type of ``input``. The width
            may differ.
        teacher_weight: (V, e), the teacher's classifier: the same classes in the same order.
        target: (...) class indices or ``ignore_index``. The cross-entropy at temperature 1 then comes from the same
            pass.
        beta: in [0, 1]; see above.
        temperature: divides the logits of both models in the divergence; positive.
        target_weight: the weight of the cross-entropy.
        linear_bias, teacher_bias: (V,) each.
        logit_scale, softcap, teacher_logit_scale, teacher_softcap: as in `linear_cross_entropy`.
        mask: (...) bool, False for tokens to ignore. By default tokens without a target are ignored, and without
            targets none. With both, a token that counts and has no target adds to the divergence only.
        classes: the number of classes that both models share. Further rows of both classifiers are padding. Without
            it both need the same number of rows.
        shift: with shift k, the states of token t belong to the target and the mask of token t + k, as in
            `linear_cross_entropy`. The last k states of both models are not used.
        reduction: "mean" divides the divergence by the number of tokens that count, and the cross-entropy by the
            number of targets. "none" returns the shape of the tokens.
        group: a process group over whose ranks the classes of both models are sharded, in rank order.
        options: how the loss is computed; see `TileOptions`. ``filter_tolerance`` and ``gradients`` have no effect.

    Memory: the inputs, the student's gradients, O(tokens) statistics, and a workspace. Cost: two products in forward
    and four in backward; for ``beta`` between 0 and 1 two more in forward, except on one GPU.

    >>> x, w = torch.eye(2), torch.eye(2)
    >>> round(linear_distillation_loss(x, w, x, 3.0 * w).item(), 4)
    0.1698
    >>> linear_distillation_loss(x, w, x, w).item()
    0.0
    """
    _check.check_reduction(reduction)
    target_weight = _check.check_number("target_weight", target_weight)
    if name := _check.group_name(group):
        # The statistics do not depend on these settings, so ranks compare them in an exchange of their own.
        classifier = _check.check_features("linear_weight", linear_weight)
        shard_of_columns(classifier, call_settings(name, reduction=reduction, target_weight=target_weight), name)
    stats = linear_distillation_stats(
        input,
        linear_weight,
        teacher_input,
        teacher_weight,
        target,
        entropy=False,
        beta=beta,
        temperature=temperature,
        linear_bias=linear_bias,
        teacher_bias=teacher_bias,
        logit_scale=logit_scale,
        teacher_logit_scale=teacher_logit_scale,
        softcap=softcap,
        teacher_softcap=teacher_softcap,
        mask=mask,
        ignore_index=ignore_index,
        classes=classes,
        shift=shift,
        group=group,
        options=options,
    )
    loss, nll = stats.divergence, None if stats.log_prob is None else -target_weight * stats.log_prob
    if reduction == "none":
        return loss if nll is None else loss + nll
    mean = reduction == "mean"
    loss = loss.sum() / stats.valid.sum() if mean else loss.sum()
    if nll is not None:
        assert stats.has_target is not None
        loss = loss + (nll.sum() / stats.has_target.sum() if mean else nll.sum())
    return replicated(loss) if mean else loss


def _with_norms(
    a: Tensor,
    c: Tensor,
    scale: Tensor,
    bias: Tensor | None,
    keys: PairKeys,
    spec: PairSpec,
    options: TileOptions,
    name: str,
) -> PairKeys:
    """The keys with both log-sum-exps of each row over the columns of all ranks. Each takes a product of its own."""
    more: dict[str, Any] = {"drop_rows": spec.drop_rows, "same_rows": spec.same_rows}
    how: dict[str, Any] = {"options": options, "group_name": name}
    own, other = PairKeys(row_key=keys.row_key, row_shift=keys.row_shift), PairKeys(row_key=keys.row_key)
    with torch.no_grad():
        row = pair_stats(a, c, scale, bias, keys=own, spec=PairSpec(row_lse=True, softcap=spec.softcap, **more), **how)
        teacher: tuple[Any, ...] = keys.guide_a, keys.guide_b, keys.guide_scale, keys.guide_bias
        guide_spec = PairSpec(row_lse=True, softcap=spec.guide_softcap, **more)
        guide = pair_stats(*teacher, keys=other, spec=guide_spec, **how)
    return keys._replace(row_norm=row.row_lse, guide_norm=guide.row_lse)


def _check_beta(beta: float) -> GuideUse:
    """Check the weight of the mixture. Returns the divergence that it means."""
    _check.check_number("beta", beta)
    if not 0.0 <= beta <= 1.0:
        raise RangeError(
            f"beta is in [0, 1], got {beta}. 0 is KL(teacher || student), 1 is KL(student || teacher), and 0.5 is the "
            "Jensen-Shannon divergence"
        )
    return "kl" if beta == 0.0 else "reverse_kl" if beta == 1.0 else "jsd"


def _check_teacher(
    input: Tensor, a: Tensor, c: Tensor, teacher_input: Tensor, teacher_weight: Tensor, shift: int
) -> tuple[Tensor, Tensor]:
    """Check the teacher's side. Returns its hidden states, (n, e), and its classifier."""
    _check.check_tensor("teacher_input", teacher_input)
    if teacher_input.shape[:-1] != input.shape[:-1]:
        raise ShapeError(
            f"teacher_input has one hidden state for each of the student's, {tuple(input.shape[:-1])} of them, got "
            f"{tuple(teacher_input.shape)}. Run both models on the same tokens"
        )
    teacher_a, _ = _rows(teacher_input, shift)
    teacher_c = _check.check_features("teacher_weight", teacher_weight)
    _check.check_together(TEACHER_NAMES, teacher_a, teacher_c)
    _check.check_device_and_type(("teacher_input", "input"), teacher_a, a, "both tensors of the teacher")
    return teacher_a, teacher_c


def _without_padding(
    c: Tensor, teacher_c: Tensor, bias: Tensor | None, teacher_bias: Tensor | None, classes: int | None, group: str
) -> tuple[Tensor, Tensor, Tensor | None, Tensor | None]:
    """Both classifiers and biases, cut to the classes that both models share."""
    sizes = f"{c.shape[0]} (student) and {teacher_c.shape[0]} (teacher)"
    if classes is None:
        if group and c.shape[0] != teacher_c.shape[0]:
            raise ShapeError(
                f"over a group both classifiers are sharded over the same classes, got {sizes} rows on this rank. Cut "
                "both alike, as linear_weight[:k] and teacher_weight[:k], or pass DTensors without group=: those of "
                "student and teacher may have other placements"
            )
        if c.shape[0] != teacher_c.shape[0]:
            raise ShapeError(
                f"both classifiers need the same classes, got {sizes} rows. If one is padded, pass classes=, the size "
                "of the tokenizer. If the tokenizers differ, their probabilities cannot be compared"
            )
        return c, teacher_c, bias, teacher_bias
    classes = _check.check_index("classes", classes, "Pass the size of the tokenizer, len(tokenizer)")
    if group:
        raise ConfigError(
            "classes= is for whole classifiers, and group= shards them. Cut the padding from the last shards instead: "
            "linear_weight[:k] and teacher_weight[:k]"
        )
    if not 0 < classes <= min(c.shape[0], teacher_c.shape[0]):
        raise RangeError(
            f"classes is at least 1 and at most the rows of both classifiers, {sizes}, got {classes}. Pass the size of "
            "the tokenizer, len(tokenizer)"
        )
    if bias is not None:
        bias = bias[:classes]
    return c[:classes], teacher_c[:classes], bias, None if teacher_bias is None else teacher_bias[:classes]


class LinearDistillationLoss(LossModule):
    """`linear_distillation_loss` as a Module that stores the settings."""

    function = staticmethod(linear_distillation_loss)
    attributes = ("logit_scale",)

    def __init__(
        self,
        *,
        beta: float = 0.0,
        temperature: float = 1.0,
        target_weight: float = 1.0,
        logit_scale: float | Tensor = 1.0,
        teacher_logit_scale: float | Tensor = 1.0,
        softcap: float | None = None,
        teacher_softcap: float | None = None,
        ignore_index: int | None = -100,
        classes: int | None = None,
        shift: int = 0,
        reduction: _check.Reduction = "mean",
        group: torch.distributed.ProcessGroup | None = None,
        options: TileOptions | None = None,
    ) -> None:
        super().__init__(locals())
