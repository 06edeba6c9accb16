"""Hardness weighting: a negative that is close to the query counts more in the softmax.

The logit of a negative is raised by ``hardness`` times its similarity, as a constant without a gradient:

    x_ij = scale * <a_i, b_j> + hardness * <a_i, b_j>.detach()

The second term raises the probability of a close negative, and with it the gradient of its score.
"""

from __future__ import annotations

from typing import Any, Literal, NamedTuple, get_args

import torch
from torch import Tensor

from tilewise import _check
from tilewise.errors import ConfigError, RangeError
from tilewise.kernels.spec import PairSpec
from tilewise.ops.autograd import pair_stats
from tilewise.ops.call import PairKeys
from tilewise.options import TileOptions, check_choice

HardnessMode = Literal["all_negatives", "in_batch_negatives", "hard_negatives"]
MODES = get_args(HardnessMode)
OTHERS = PairSpec(row_lse=True, mask_self=True)


class Hardness(NamedTuple):
    """The hardness of each kind of negatives; 0 for none."""

    in_batch: float = 0.0  # for the keys of the other queries
    hard: float = 0.0  # for `negative_keys`


NONE = Hardness()


def check_hardness(
    hardness: float, mode: str, *, in_batch: bool, negatives: bool, dtype: torch.dtype = torch.float32
) -> Hardness:
    """Check the settings. ``in_batch`` and ``negatives``: which kinds of negatives the call has."""
    if type(hardness) is float and hardness == 0.0 and type(mode) is str and mode == "all_negatives":
        return NONE
    check_choice("hardness_mode", mode, MODES)
    value = _check.check_number("hardness", hardness, dtype=dtype)
    if value < 0.0:
        raise RangeError(f"hardness must not be negative, got {value}. Pass 0 for none")
    if value and mode == "in_batch_negatives" and not in_batch:
        raise ConfigError(f"hardness_mode={mode!r} needs in_batch=True, got False. Use 'hard_negatives'")
    if value and mode == "hard_negatives" and not negatives:
        raise ConfigError(f"hardness_mode={mode!r} needs negative_keys, got None. Use 'in_batch_negatives'")
    return Hardness(
        in_batch=value if mode != "hard_negatives" else 0.0, hard=value if mode != "in_batch_negatives" else 0.0
    )


def hard_logsumexp(
    a: Tensor,
    b: Tensor,
    scale: Tensor | float,
    bias: Tensor | None = None,
    *,
    hardness: float,
    keys: PairKeys,
    spec: PairSpec,
    **how: Any,
) -> Tensor:
    """The ``row_lse`` of `pair_stats` with scores raised by ``hardness``: (n,).

        row_lse_i = log sum_j exp(x_ij)         d row_lse_i / d <a_i, b_j> = p_ij * scale, p_i = softmax(x_i)

    `pair_stats` runs with the scale ``scale + hardness``. Its gradients of a and b are then too large by the factor
    (scale + hardness) / scale, so the gradient of the result is multiplied by the inverse, ``share``. The gradient of
    the scale, sum_j p_ij <a_i, b_j>, is right as it is, so the scale is divided by ``share``, which cancels that.
    ``bias`` has no gradient.
    """
    if hardness == 0.0:
        return pair_stats(a, b, scale, bias, keys=keys, spec=spec, **how).row_lse
    scale = _check.scale_tensor(scale, a)
    fixed = scale.detach()
    share = fixed / (fixed + hardness)
    raised_scale = fixed + hardness + (scale - fixed) / share
    lse = pair_stats(a, b, raised_scale, bias, keys=keys, spec=spec, **how).row_lse
    value = lse.detach()
    # A row without negatives has -inf, and -inf - -inf is NaN.
    return value + share * torch.where(value == -torch.inf, 0.0, lse - value)


def others_logsumexp(
    a: Tensor,
    b: Tensor,
    scale: Tensor | float,
    *,
    hardness: float = 0.0,
    ids: Tensor | None = None,
    row_shift: Tensor | None = None,
    options: TileOptions | None = None,
    group_name: str = "",
) -> Tensor:
    """`hard_logsumexp` of each row of ``a`` with all rows of ``b`` but its own: (n,), -inf if there are no others.

    Args:
        a, b: (n, d) each. Row i of ``b`` belongs to row i of ``a``; over a group, to that of the same rank.
        scale: of the scores.
        hardness: see the top of this file.
        ids: (n,): a row is not scored with another of the same id. None: with all others.
        row_shift: (n,), is subtracted from the scores of each row.
        options: how it is computed.
        group_name: over whose ranks the rows are sharded.
    """
    keys = PairKeys(row_skip=ids, col_skip=ids, row_shift=row_shift)
    how: dict[str, Any] = {"options": _check.check_options(options), "group_name": group_name}
    return hard_logsumexp(a, b, scale, hardness=hardness, keys=keys, spec=OTHERS, **how)
