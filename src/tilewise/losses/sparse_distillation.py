"""Distillation from a sparse teacher: K class ids and log-probabilities of each token. Logits are never stored.

Axes: n tokens, K ids of each.
"""

from __future__ import annotations

from typing import Any, Literal, get_args

import torch
from torch import Tensor

from tilewise import _check
from tilewise.errors import RangeError, ShapeError
from tilewise.kernels.spec import PairSpec, stat_dtype
from tilewise.losses.entry import entry
from tilewise.losses.head import check_head, check_shift, target_scores
from tilewise.losses.module import LossModule
from tilewise.losses.per_token import (
    check_id_range,
    check_token_ids,
    check_token_mask,
    check_token_temperature,
    check_token_values,
    row_scale_of,
    tempered,
)
from tilewise.losses.sharded_head import Head
from tilewise.ops.autograd import pair_stats
from tilewise.ops.call import PairKeys, call_settings
from tilewise.ops.distributed.collectives import same_rows, shard_of_columns
from tilewise.ops.small import Calls
from tilewise.options import TileOptions, check_choice

Divergence = Literal["forward", "reverse", "cross_entropy", "total_variation", "log_acceptance"]
Tail = Literal["ignore", "renormalize", "bucket"]
LARGEST_TOTAL = 1.05  # of a token's teacher probabilities: log-probabilities that were stored in bfloat16 are rounded


def _mean_divisor(values: dict[str, Any]) -> Tensor:
    """The number of tokens of this rank that count."""
    shift = check_shift(values["shift"])
    ids = check_token_ids("teacher_ids", values["teacher_ids"], values["input"], shift)
    return _present(ids, values["mask"], values["input"], shift)[1].sum()


@entry(
    Head(
        rows=("input", "teacher_ids", "teacher_log_probs", "mask"),
        columns=("linear_weight", "linear_bias"),
        count=_mean_divisor,
    )
)
def linear_sparse_distillation_loss(
    calls: Calls,
    input: Tensor,
    linear_weight: Tensor,
    teacher_ids: Tensor,
    teacher_log_probs: Tensor,
    *,
    divergence: Divergence = "forward",
    tail: Tail = "ignore",
    linear_bias: Tensor | None = None,
    mask: Tensor | None = None,
    reduction: _check.Reduction = "mean",
    softcap: float | None = None,
    logit_scale: float | Tensor = 1.0,
    temperature: float | Tensor = 1.0,
    shift: int = 0,
    group: torch.distributed.ProcessGroup | None = None,
    options: TileOptions | None = None,
) -> Tensor:
    """Divergence of a student from K stored log-probabilities of each token. The logits are never stored.

    With the student's logits as in `linear_token_stats`, equals::

        s = logits.log_softmax(-1).gather(-1, teacher_ids);  t = teacher_log_probs
        if tail == "renormalize": t = t.log_softmax(-1)
        if tail == "bucket": s, t = (cat([x, log(1 - x.exp().sum(-1))]) for x in (s, t))  # the rest as one class
        forward = (t.exp() * (t - s)).sum(-1)        # KL(teacher || student)
        reverse = (s.exp() * (s - t)).sum(-1)        # KL(student || teacher)
        cross_entropy = -(t.exp() * s).sum(-1)
        acceptance = torch.minimum(s.exp(), t.exp()).sum(-1)  # of a draft model (the student) by its target model
        total_variation = 1 - acceptance;  log_acceptance = -acceptance.log()

    The student's probabilities are exact: their softmax is over the whole vocabulary, whatever ``tail`` is.

    Args:
        input: (..., d), hidden states of the student.
        linear_weight: (V, d), its classifier.
        teacher_ids: (..., K) integers in [0, V), distinct for each token; negative for padding. A token without ids is
            ignored. An id out of range is an error on the CPU, and the loss is NaN on a GPU. An id twice is an error on
            the CPU; on a GPU it counts twice.
        teacher_log_probs: (..., K), natural logarithms of the teacher's probabilities, at the same temperature. Without
            gradient. Those of padding may be anything.
        divergence: see above. The gradient of "cross_entropy" is that of "forward". The last two are for draft models
            of speculative decoding; see docs/sparse-teachers.md.
        tail: how the teacher's probability outside of the K ids is treated. "ignore" leaves it out. "renormalize"
            divides the K probabilities by their sum. "bucket" compares it with the student's other probability, as one
            class. The student's is the sum over its other classes, accurate however small it is. The teacher's is 1
            less the sum of its K probabilities, at least machine epsilon (1.2e-7 for float32). "reverse" depends on
            the student's probability outside of the ids only with "bucket"; ``filter_tolerance`` has no effect there.
            The acceptance over the whole vocabulary is at least that of "ignore" and at most that of "bucket".
        linear_bias: (V,).
        mask: (...) bool, True for tokens that count.
        reduction: "mean" is over the tokens that count, NaN if there are none. "none" returns 0 for the others.
        softcap, logit_scale, temperature: of the student, as in `linear_token_stats`.
        shift: with shift k, the hidden state of token t is compared with the teacher's entries (and mask) of token
            t + k. The last k states are not used.
        group: as in `linear_cross_entropy`: every rank holds all tokens and a slice of the classes; ids are global.
        options: how the loss is computed; see `TileOptions`. ``gradients`` has no effect.

    Memory: as `linear_cross_entropy`, and a few (..., K) tensors.

    >>> ids, log_probs = torch.tensor([[0, 1], [2, -1]]), torch.tensor([[0.5, 0.25], [0.5, 0.0]]).log()
    >>> student, classes = torch.zeros(2, 3), torch.eye(4, 3)
    >>> losses = linear_sparse_distillation_loss(student, classes, ids, log_probs, tail="bucket", reduction="none")
    >>> [round(loss, 4) for loss in losses.tolist()]
    [0.1733, 0.1438]
    """
    _check.check_reduction(reduction)
    check_choice("divergence", divergence, get_args(Divergence))
    check_choice("tail", tail, get_args(Tail))
    options, name, shift = _check.check_options(options), _check.group_name(group), check_shift(shift)
    a, c, bias, cap, shape = check_head(input, linear_weight, linear_bias, softcap, shift)
    scale = _check.check_scalar("logit_scale", logit_scale, a, rows="multiply the states in input by it")
    degrees = check_token_temperature(temperature, input, shift)
    scale, bias, cap = tempered(degrees, scale, bias, cap, stat_dtype(a.dtype))
    ids = check_token_ids("teacher_ids", teacher_ids, input, shift)
    t = check_token_values("teacher_log_probs", teacher_log_probs, input, shift).to(stat_dtype(a.dtype))
    bucket = tail == "bucket"
    if t.shape != ids.shape:
        raise ShapeError(
            f"teacher_log_probs has one number for each id, got {tuple(teacher_log_probs.shape)} numbers and "
            f"{tuple(teacher_ids.shape)} ids. Pass K of both"
        )
    if bucket:  # `skip_picked` needs ascending ids
        ids, order = ids.sort(dim=1)
        t = t.gather(1, order)
    settings = {"divergence": divergence, "tail": tail, "reduction": reduction, "shift": shift, "mask": mask}
    numbers = {"logit_scale": logit_scale, "temperature": temperature, "ids": ids.shape[1]}
    must_match = call_settings(name, **settings, **numbers)
    start, classes = shard_of_columns(c, must_match, name)

    here, counted = _present(ids, mask, input, shift)
    check_id_range("teacher_ids", ids, here, classes, "A negative id is padding; the student needs all other classes")
    _check_distinct(ids, here)
    t = torch.where(here, t, -torch.inf)
    _check_log_probs(t)
    # The likeliest id of a token is used as its target. Its score is the row's shift; a key of -1 ignores the token.
    key = torch.where(counted, ids.gather(1, t.argmax(1, keepdim=True))[:, 0], -1)
    key = torch.where(counted & (key < 0), ids.amax(1), key)  # all are -inf, and the first one is padding
    row_shift = target_scores(a, c, key - start, scale, bias, cap, name, options)
    row_scale = row_scale_of(degrees, counted) if isinstance(degrees, Tensor) else None
    if row_shift is not None and row_scale is not None:
        row_shift = row_shift * row_scale
    stats = pair_stats(
        a,
        c,
        scale,
        bias,
        keys=PairKeys(row_key=key, row_shift=row_shift, pick=torch.where(here, ids, -1), row_scale=row_scale),
        spec=PairSpec(
            row_lse=True,
            row_picked=True,
            skip_picked=bucket,
            positive="one",
            softcap=cap,
            drop_rows=True,
            same_rows=same_rows(name),
        ),
        options=options,
        group_name=name,
        calls=calls,
    )
    # In float64, because gradients cancel where one class has nearly all probability; these are few numbers.
    x = torch.where(here & (ids >= classes), torch.nan, stats.row_picked).double()
    lse = stats.row_lse[:, None].double()
    if bucket:  # one more class: all others of the student, if there are any, and what the teacher has left
        x, rest = torch.cat([x, lse], 1), counted[:, None] & (lse != -torch.inf)
        here, t = torch.cat([here, rest], 1), torch.cat([t, torch.where(rest, _log_rest(t), -torch.inf)], 1)
        # Rows that do not count keep their finite values: a row of -inf alone would have NaN gradients.
        lse = torch.where(here | ~counted[:, None], x, -torch.inf).logsumexp(1, keepdim=True)
    loss_n = _divergence(x - lse, t.double(), here, counted, divergence, tail)
    loss_n = torch.where(counted, loss_n, 0.0).to(stats.row_lse.dtype)
    if reduction == "none":
        return loss_n.reshape(shape)
    return loss_n.sum() / counted.sum() if reduction == "mean" else loss_n.sum()


def _divergence(s: Tensor, t: Tensor, here: Tensor, counted: Tensor, divergence: str, tail: str) -> Tensor:
    """The divergence of each token from the log-probabilities of student and teacher, (n, K), where ``here``: (n,).

    t is -inf elsewhere. Rows that do not count have finite values of no meaning, so that no NaN reaches a gradient.
    """
    s = torch.where(here, s, torch.where(counted, -torch.inf, -1.0)[:, None])
    if tail == "renormalize":
        total = t.logsumexp(1, keepdim=True)
        t = t - torch.where(total == -torch.inf, 0.0, total)
    if divergence in ("total_variation", "log_acceptance"):
        both = torch.minimum(s, t)
        known = both != -torch.inf  # NaN stays
        some = known.any(1)
        both = torch.where(known, both, torch.where(some, -torch.inf, 0.0)[:, None])
        accepted = torch.where(some, both.logsumexp(1), -torch.inf)
        return -accepted if divergence == "log_acceptance" else -torch.expm1(accepted)
    if divergence == "reverse":
        known = s != -torch.inf  # NaN stays
        s = torch.where(known, s, 0.0)
        return torch.where(known, s.exp() * (s - t), 0.0).sum(1)
    known, q = t != -torch.inf, t.exp()
    terms = q * (t - s) if divergence == "forward" else -q * s
    return torch.where(known, terms, 0.0).sum(1)


def _log_rest(t: Tensor) -> Tensor:
    """log(1 - sum_k exp(t_k)) of each row, (n, 1); the difference is at least machine epsilon."""
    total = t.logsumexp(1, keepdim=True)
    return torch.log(-torch.expm1(total.clamp(max=-torch.finfo(t.dtype).eps)))


def _present(ids: Tensor, mask: Tensor | None, input: Tensor, shift: int) -> tuple[Tensor, Tensor]:
    """Which ids count, (n, K), and which tokens have any, (n,)."""
    here = ids >= 0
    mask = check_token_mask(mask, input, shift)
    if mask is not None:
        here = here & mask[:, None]
    return here, here.any(1)


def _check_distinct(ids: Tensor, here: Tensor) -> None:
    """Check that no token has an id twice. Only on a CPU: a check would synchronize a GPU."""
    if not _check.can_read(ids):
        return
    ordered = torch.where(here, ids, -1).sort(1).values
    twice = ordered[:, 1:][(ordered[:, 1:] == ordered[:, :-1]) & (ordered[:, 1:] >= 0)]
    if twice.numel():
        raise RangeError(
            f"teacher_ids has each id of a token once, got {twice[0].item()} twice ({twice.numel()} such entries). "
            "Pad with negative ids"
        )


def _check_log_probs(t: Tensor) -> None:
    """Check that each token's probabilities sum to at most LARGEST_TOTAL. Only on a CPU: it would synchronize a GPU."""
    if not _check.can_read(t) or not t.numel():
        return
    total = t.double().exp().sum(1).max().item()
    if not total <= LARGEST_TOTAL:
        raise RangeError(
            "teacher_log_probs holds natural logarithms of probabilities, which sum to at most 1 for each token, got a "
            f"sum of {total:g}. Pass log_softmax of the teacher's logits, and each id of a token once"
        )


class LinearSparseDistillationLoss(LossModule):
    """`linear_sparse_distillation_loss` as a Module that stores the settings."""

    function = staticmethod(linear_sparse_distillation_loss)
    attributes = ("logit_scale",)

    def __init__(
        self,
        *,
        divergence: Divergence = "forward",
        tail: Tail = "ignore",
        reduction: _check.Reduction = "mean",
        softcap: float | None = None,
        logit_scale: float | Tensor = 1.0,
        temperature: float | Tensor = 1.0,
        shift: int = 0,
        group: torch.distributed.ProcessGroup | None = None,
        options: TileOptions | None = None,
    ) -> None:
        super().__init__(locals())
