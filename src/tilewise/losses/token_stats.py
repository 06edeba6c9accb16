"""What a language model thinks of each token, from one pass over its vocabulary and without its logits."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from tilewise import _check
from tilewise.errors import ConfigError
from tilewise.kernels.spec import PairSpec, Stats
from tilewise.losses.cross_entropy import NAMES, _check_target, _rows, _target_scores
from tilewise.losses.logsumexp import check_bias, check_softcap
from tilewise.ops.autograd import pair_stats
from tilewise.ops.call import PairKeys
from tilewise.ops.distributed.collectives import shard_of_columns
from tilewise.options import TileOptions

NEED_TARGET = ("log_prob", "correct")
WANT = ("log_prob", "entropy", "argmax", "correct", "logsumexp")


@dataclass(frozen=True, kw_only=True)
class TokenStats:
    """Statistics of tokens, each in their shape; None where nobody asked.

    Tokens with the target ``ignore_index`` do not count: they have an argmax of -1, False for ``correct``, and 0 for
    everything else.
    """

    log_prob: Tensor | None = None  # of the target; float32 (float64 for float64), differentiable
    entropy: Tensor | None = None  # of the softmax, in nats; differentiable
    argmax: Tensor | None = None  # int64, the class with the largest logit; the lowest, if several are equal
    correct: Tensor | None = None  # bool, whether the target is that class
    logsumexp: Tensor | None = None  # of the logits; differentiable
    valid: Tensor | None = None  # bool, whether the token counts; None without targets

    @property
    def accuracy(self) -> Tensor:
        """Correct tokens over those that count: 0-d, NaN if there are none. Asks for ``correct``."""
        if self.correct is None or self.valid is None:
            raise ConfigError(
                'accuracy asks for "correct", which was not computed. Pass targets, and want=("correct",) or more'
            )
        return self.correct.sum() / self.valid.sum()


def linear_token_stats(
    input: Tensor,
    linear_weight: Tensor,
    target: Tensor | None = None,
    *,
    want: Sequence[str] | None = None,
    linear_bias: Tensor | None = None,
    ignore_index: int = -100,
    softcap: float | None = None,
    logit_scale: float | Tensor = 1.0,
    shift: int = 0,
    group: torch.distributed.ProcessGroup | None = None,
    options: TileOptions | None = None,
) -> TokenStats:
    """Log-probability, entropy, argmax and correctness of each token, from one product that is never stored.

    With logits as in `linear_cross_entropy`, equals::

        log_p = logits.log_softmax(-1)
        log_prob = log_p.gather(-1, target[..., None])[..., 0]
        entropy = -(log_p.exp() * log_p).sum(-1)
        argmax = logits.argmax(-1);  correct = argmax == target;  logsumexp = logits.logsumexp(-1)

    ``log_prob``, ``entropy`` and ``logsumexp`` have exact gradients, all from one backward pass. The loss of
    `linear_cross_entropy` is ``-log_prob.sum() / valid.sum()``.

    Args:
        input: (..., d), hidden states.
        linear_weight: (V, d), the classifier.
        target: (...) integers in [0, V), or ``ignore_index``; None if there are none, and then every token counts.
        want: names of `TokenStats`' fields to compute; None for all (without targets: all that need none).
        linear_bias: (V,).
        ignore_index, softcap, logit_scale, shift, group: as in `linear_cross_entropy`; a temperature T is
            ``logit_scale=1 / T``.
        options: how, never what. ``filter_tolerance`` and ``gradients`` have no effect here.

    Memory: as `linear_cross_entropy`. Time: entropy and argmax ask for the maximum of each row of a tile.

    >>> stats = linear_token_stats(torch.eye(3), 9.0 * torch.eye(3), torch.tensor([0, 2, -100]))
    >>> stats.argmax.tolist(), stats.correct.tolist(), stats.accuracy.item()
    ([0, 1, -1], [True, False, False], 0.5)
    """
    options, name = _check.check_options(options), _check.group_name(group)
    asked = _check_want(want, target)
    a, shape = _rows(input, shift)
    c = _check.check_features("linear_weight", linear_weight)
    _check.check_together(NAMES, a, c)
    bias = check_bias("linear_bias", linear_bias, c)
    cap = check_softcap(softcap)
    scale = _check.check_scalar("logit_scale", logit_scale, a)
    y = valid = key = row_shift = None
    if target is not None:
        settings = f"ignore_index={int(ignore_index)} shift={int(shift)}" if name else ""
        start, classes = shard_of_columns(c, settings, name)
        y = _check_target(target, input, shift, ignore_index, classes)
        valid = y != ignore_index
        key = torch.where(valid, y, -1)
        row_shift = _target_scores(a, c, key - start, scale, bias, cap, name)
    stats = pair_stats(
        a,
        c,
        scale,
        bias,
        keys=PairKeys(row_key=key, row_shift=row_shift),
        spec=PairSpec(
            row_lse=True,
            row_entropy="entropy" in asked,
            row_top="argmax" in asked or "correct" in asked,
            positive="one" if "log_prob" in asked else "none",
            softcap=cap,
            drop_rows=key is not None,
            same_rows=bool(name),
        ),
        options=options,
        group_name=name,
    )
    found = _found(stats, asked, valid, row_shift)
    if "correct" in asked:
        assert stats.row_top_col is not None
        assert valid is not None
        found["correct"] = (stats.row_top_col == y) & valid
    return TokenStats(**{field: value.reshape(shape) for field, value in found.items()})


def _found(stats: Stats, asked: tuple[str, ...], valid: Tensor | None, row_shift: Tensor | None) -> dict[str, Tensor]:
    """What was asked for, (n,) each, with the values of tokens that do not count."""
    found: dict[str, Tensor] = {}
    lse, entropy, top = stats.row_lse, stats.row_entropy, stats.row_top_col
    assert lse is not None
    if "log_prob" in asked:
        assert valid is not None
        assert stats.row_pos is not None
        assert stats.num_positives is not None
        # A target that no column has leaves 0 hits, and 0 / 0 says so; an ignored row has none and is no error.
        found["log_prob"] = stats.row_pos / torch.where(valid, stats.num_positives.detach(), 1.0) - lse
    if "logsumexp" in asked:
        found["logsumexp"] = lse if row_shift is None else lse + row_shift
    if "entropy" in asked and entropy is not None:
        found["entropy"] = entropy
    if valid is not None:
        found = {field: torch.where(valid, value, 0.0) for field, value in found.items()} | {"valid": valid}
    if "argmax" in asked and top is not None:
        found["argmax"] = top if valid is None else torch.where(valid, top, -1)
    return found


def _check_want(want: Sequence[str] | None, target: Tensor | None) -> tuple[str, ...]:
    """The names of the fields that are asked for."""
    if want is None:
        return tuple(field for field in WANT if target is not None or field not in NEED_TARGET)
    asked = (want,) if isinstance(want, str) else tuple(want)
    for field in asked:
        if field not in WANT:
            raise ConfigError(f"want names statistics of tokens, {', '.join(WANT)}, got {field!r}. Choose among these")
        if target is None and field in NEED_TARGET:
            raise ConfigError(f"{field} is about a token's target, and no target came. Pass target, or leave it out")
    return asked
