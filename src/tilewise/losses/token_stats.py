"""Statistics of each token under a language model, from one pass over the vocabulary, without storing logits."""

from __future__ import annotations

import functools
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from tilewise import _check
from tilewise.errors import ConfigError, DtypeError
from tilewise.kernels.spec import PairSpec, Stats, stat_dtype
from tilewise.losses.cross_entropy import _check_target, _target_scores, check_head, check_ignore_index, check_shift
from tilewise.losses.entry import entry
from tilewise.losses.per_token import check_id_range, check_token_ids, check_token_temperature, row_scale_of, tempered
from tilewise.losses.sharded_head import Head
from tilewise.ops.autograd import pair_stats
from tilewise.ops.call import PairKeys, call_settings
from tilewise.ops.distributed.collectives import same_rows, shard_of_columns
from tilewise.ops.small import Calls
from tilewise.options import DEFAULT_OPTIONS, TileOptions

NEED_TARGET = ("log_prob", "correct")
WANT = ("log_prob", "entropy", "log_sum_sq_prob", "mean_logit", "argmax", "correct", "logsumexp")
DEFAULT = ("log_prob", "entropy", "argmax", "correct", "logsumexp")


@dataclass(frozen=True, kw_only=True)
class TokenStats:
    """Statistics of tokens, in the shape of the tokens (``picked``: K for each); None for one that was not requested.

    For an ignored token, whose target is ``ignore_index``, ``argmax`` is -1, ``correct`` is False, and all other
    statistics are 0.
    """

    log_prob: Tensor | None = None  # of the target; float32 (float64 for float64), differentiable
    entropy: Tensor | None = None  # of the softmax, in nats; differentiable
    log_sum_sq_prob: Tensor | None = None  # log of the sum of squared probabilities; differentiable
    mean_logit: Tensor | None = None  # over all classes; differentiable
    argmax: Tensor | None = None  # int64, the class with the largest logit; the lowest of equal ones
    correct: Tensor | None = None  # bool, whether the target is the argmax: an equal logit of a lower class wins
    logsumexp: Tensor | None = None  # of the logits; differentiable
    picked: Tensor | None = None  # (..., K), the log-probabilities of the classes in ``pick``; differentiable
    valid: Tensor | None = None  # bool, False for an ignored token; None without targets

    @property
    def accuracy(self) -> Tensor:
        """Fraction of correct tokens among those not ignored: 0-d, NaN if there are none. Requires ``correct``."""
        if self.correct is None or self.valid is None:
            raise ConfigError(
                'accuracy requires "correct", which was not computed. Pass target, and want=("correct",) or more'
            )
        return self.correct.sum() / self.valid.sum()

    @property
    def top1(self) -> Tensor | None:
        """``correct``, by the name that TRL gives it."""
        return self.correct

    def mean(self, name: str, dim: int | None = None) -> Tensor:
        """Mean of a field over the tokens that are not ignored: of all tokens, or along ``dim``; NaN if there are none.

        >>> target = torch.tensor([[0, 1, -100], [2, -100, 3]])
        >>> stats = linear_token_stats(torch.zeros(2, 3, 4), torch.ones(5, 4), target)
        >>> round(stats.mean("entropy").exp().item(), 4), stats.mean("log_prob", dim=-1).exp()
        (5.0, tensor([0.2000, 0.2000]))
        """
        values = getattr(self, name) if name in WANT else None
        if values is None:
            there = ", ".join(field for field in WANT if getattr(self, field) is not None)
            advice = f"Choose one of {', '.join(WANT)}"
            if name in WANT:
                advice = (
                    "Pass target, and add it to want"
                    if name in NEED_TARGET and self.valid is None
                    else "Add it to want"
                )
            elif name == "picked":
                advice = "It has K numbers for each token; use picked[valid].mean(0)"
            raise ConfigError(f"the mean of {name!r} is not available. Computed were: {there}. {advice}")
        if self.valid is None:
            values = values if values.is_floating_point() else values.float()
            return values.mean() if dim is None else values.mean(dim)
        total = torch.where(self.valid, values, 0)
        return total.sum() / self.valid.sum() if dim is None else total.sum(dim) / self.valid.sum(dim)


@entry(Head(rows=("input", "pick", "target"), columns=("linear_weight", "linear_bias")))
def linear_token_stats(
    calls: Calls,
    input: Tensor,
    linear_weight: Tensor,
    target: Tensor | None = None,
    *,
    want: Sequence[str] | None = None,
    pick: Tensor | None = None,
    linear_bias: Tensor | None = None,
    ignore_index: int | None = -100,
    softcap: float | None = None,
    logit_scale: float | Tensor = 1.0,
    temperature: float | Tensor = 1.0,
    shift: int = 0,
    group: torch.distributed.ProcessGroup | None = None,
    options: TileOptions | None = None,
) -> TokenStats:
    """Log-probability, entropy, argmax and correctness of each token. The logits are never stored.

    With logits as in `linear_cross_entropy`, divided by the temperature after the soft cap, equals::

        log_p = logits.log_softmax(-1)
        log_prob = log_p.gather(-1, target[..., None])[..., 0]
        entropy = -(log_p.exp() * log_p).sum(-1)
        log_sum_sq_prob = log_p.exp().square().sum(-1).log();  mean_logit = logits.mean(-1)
        argmax = logits.argmax(-1);  correct = argmax == target;  logsumexp = logits.logsumexp(-1)
        picked = log_p.gather(-1, pick)

    All of them except ``argmax`` and ``correct`` have exact gradients, all from one backward pass. The loss of
    `linear_cross_entropy` is ``-stats.mean("log_prob")``.

    Args:
        input: (..., d), hidden states.
        linear_weight: (V, d), the classifier.
        target: (...) integers in [0, V), or ``ignore_index``. With None no token is ignored.
        want: names of the fields of `TokenStats` to compute; None for all that are available, except
            ``log_sum_sq_prob`` and ``mean_logit``. ``picked`` is computed whenever ``pick`` is passed, named here or
            not.
        pick: (..., K) integers in [0, V), whose log-probabilities are computed as ``picked``. A class may occur several
            times in a row. Those of an ignored token may be anything, and give 0. An id out of range is an error on the
            CPU, and gives NaN on a GPU.
        linear_bias: (V,).
        temperature: divides the logits, after scale, bias and soft cap; positive. A number, or one for each token,
            (...), without gradient. With ``shift``, entries of ``pick`` and ``temperature`` belong to the same states
            as those of ``target``.
        ignore_index, softcap, logit_scale, shift, group: as in `linear_cross_entropy`.
        options: how the statistics are computed; see `TileOptions`. With ``filter_tolerance``, gradients change within
            a bound, but not if ``want`` contains ``log_sum_sq_prob`` or ``mean_logit``, or without targets.
            ``gradients`` has no effect.

    Memory: as `linear_cross_entropy`. Cost: entropy and argmax also compute the maximum of each row of each tile.
    Picked classes take one more product of K columns for each token.

    >>> stats = linear_token_stats(torch.eye(3), 9.0 * torch.eye(3), torch.tensor([0, 2, -100]))
    >>> stats.argmax.tolist(), stats.correct.tolist(), stats.accuracy.item()
    ([0, 1, -1], [True, False, False], 0.5)
    """
    options, name = (options or DEFAULT_OPTIONS, "") if calls.checked else _check.check_row_options(options, group)
    names = DEFAULT if want is None and target is not None else _check_want(want, target, pick)
    if type(ignore_index) is not int or not -(2**63) <= ignore_index < 2**63:
        ignore_index = check_ignore_index(ignore_index)
    if type(shift) is not int or shift != 0:
        shift = check_shift(shift)
    a, c, bias, cap, shape = check_head(input, linear_weight, linear_bias, softcap, shift, checked=calls.checked)
    rows = "multiply the states in input by it"
    scale = _check.check_scale("logit_scale", logit_scale, a, rows=rows, checked=calls.checked)
    t: float | Tensor = 1.0
    if type(temperature) is not float or temperature != 1.0:
        t = check_token_temperature(temperature, input, shift)
        scale, bias, cap = tempered(t, _check.scale_tensor(scale, a), bias, cap, stat_dtype(a.dtype))
    y = valid = key = row_scale = None
    ids = None if pick is None else check_token_ids("pick", pick, input, shift)
    start: int | Tensor = 0
    classes: int | Tensor = c.shape[0]
    if name:
        picks, numbers = None if ids is None else ids.shape[1], {"logit_scale": logit_scale, "temperature": temperature}
        settings = {"want": "+".join(names), "pick": picks, "ignore_index": ignore_index, "shift": shift}
        start, classes = shard_of_columns(c, call_settings(name, **settings, **numbers), name)
    known = False  # whether every target is a class
    if target is not None:
        y, known = _check_target(target, input, shift, ignore_index, classes, checked=calls.checked)
        known = known and not name and "log_prob" in names
        valid = y != ignore_index
        key = y if known else torch.where(valid, y, -1)
    if isinstance(t, Tensor):
        row_scale = row_scale_of(t, valid)
    inside = None
    if ids is not None:
        counted = None if valid is None else valid[:, None]
        inside = check_id_range("pick", ids, counted, classes, "Pass ids of classes that the classifier has")
    col_weight = None
    if "mean_logit" in names:
        col_weight = torch.ones(c.shape[0], dtype=stat_dtype(a.dtype), device=a.device) / classes
    keys = PairKeys(row_key=key, col_weight=col_weight, pick=ids, row_scale=row_scale)

    def full_keys() -> PairKeys:
        if key is None:
            return keys
        row_shift = _target_scores(a, c, key - start, scale, bias, cap, name, options)
        return keys._replace(row_shift=row_shift if row_shift is None or row_scale is None else row_shift * row_scale)

    spec = _spec_of(names, ids is not None, cap, key is not None, known, same_rows(name))
    how: dict[str, Any] = {"spec": spec, "options": options, "group_name": name, "calls": calls}
    stats = pair_stats(a, c, scale, bias, keys=keys, full_keys=full_keys, **how)
    found = _found(stats, names, y, None if known else valid)
    if valid is not None:
        found["valid"] = valid
    if inside is not None:
        picked = torch.where(inside, stats.row_picked - stats.row_lse[:, None], torch.nan)
        found["picked"] = picked if valid is None else torch.where(valid[:, None], picked, 0.0)
    if len(shape) != 1:
        found = {field: value.reshape((*shape, *value.shape[1:])) for field, value in found.items()}
    return TokenStats(**found)


@functools.lru_cache(maxsize=64)
def _spec_of(names: tuple[str, ...], picked: bool, cap: float, targets: bool, known: bool, same_rows: bool) -> PairSpec:
    """What to compute. ``known``: every target is a class, and no token is ignored."""
    return PairSpec(
        row_lse=True,
        row_sum="mean_logit" in names,
        row_entropy="entropy" in names,
        row_sum_sq="log_sum_sq_prob" in names,
        row_top="argmax" in names or "correct" in names,
        row_picked=picked,
        positive="one" if "log_prob" in names else "none",
        softcap=cap,
        in_range=known,
        drop_rows=targets and not known,
        same_rows=same_rows,
    )


def _found(stats: Stats, names: tuple[str, ...], y: Tensor | None, valid: Tensor | None) -> dict[str, Tensor]:
    """The requested statistics, (n,) each, with the fixed values of ignored tokens filled in; ``valid``: if any."""
    found: dict[str, Tensor] = {}
    lse, top = stats.row_lse, stats.row_top_col
    if "log_prob" in names:
        pos = stats.row_pos
        if valid is not None:
            # A target out of range has 0 positives, and 0 / 0 gives NaN. An ignored row has none, but is no error.
            pos = pos / torch.where(valid, stats.num_positives.detach(), 1.0)
        found["log_prob"] = pos - lse
    if "logsumexp" in names:
        found["logsumexp"] = lse if stats.row_shift is None else lse + stats.row_shift
    if "entropy" in names:
        found["entropy"] = stats.row_entropy
    if "log_sum_sq_prob" in names:
        found["log_sum_sq_prob"] = stats.row_sum_sq
    if "mean_logit" in names:
        found["mean_logit"] = stats.row_sum
    if valid is not None:
        found = {field: torch.where(valid, value, 0.0) for field, value in found.items()}
    if "argmax" in names:
        found["argmax"] = top if valid is None else torch.where(valid, top, -1)
    if "correct" in names:
        found["correct"] = top == y if valid is None else (top == y) & valid
    return found


def _check_want(want: Sequence[str] | None, target: Tensor | None, pick: Tensor | None) -> tuple[str, ...]:
    """Check the requested fields. Returns their names, without "picked", which ``pick`` requests."""
    if want is None:
        return DEFAULT if target is not None else tuple(field for field in DEFAULT if field not in NEED_TARGET)
    known = ", ".join((*WANT, "picked"))
    if not isinstance(want, Iterable) or isinstance(want, Tensor):
        raise DtypeError(f"want is a sequence of names among {known}, got {want!r:.60}. Pass a tuple of names")
    names = (want,) if isinstance(want, str) else tuple(want)
    for field in names:
        if not isinstance(field, str) or field not in (*WANT, "picked"):
            raise ConfigError(f"want is a sequence of names among {known}, got {field!r:.60}. Use one of these")
        if target is None and field in NEED_TARGET:
            raise ConfigError(f"{field} needs a target, but no target was passed. Pass target, or remove it from want")
        if pick is None and field == "picked":
            raise ConfigError(
                "picked has the log-probabilities of the classes in pick, but no pick was passed. Pass pick, (..., K) "
                "class ids, or remove picked from want"
            )
    return tuple(field for field in names if field != "picked")
