"""Hardness weighting: a negative that is close to the query counts more in the softmax.

The logit of a negative is raised by ``hardness`` times its similarity, as a constant without a gradient:

    x_ij = scale * <a_i, b_j> + hardness * <a_i, b_j>.detach()

The second term raises the probability of a close negative, and with it the gradient of its score.
"""

from __future__ import annotations

import math
from numbers import Real
from typing import Any, Literal, NamedTuple, get_args

import torch
from torch import Tensor

from tilewise import _check
from tilewise.errors import ConfigError, DtypeError, RangeError
from tilewise.kernels.spec import PairSpec
from tilewise.ops.autograd import pair_stats
from tilewise.ops.call import PairKeys

HardnessMode = Literal["all_negatives", "in_batch_negatives", "hard_negatives"]
MODES = get_args(HardnessMode)


class Hardness(NamedTuple):
    """The hardness of each kind of negatives; 0 for none."""

    in_batch: float = 0.0  # of the keys of the other queries
    hard: float = 0.0  # of the negatives that are given as such


def check_hardness(hardness: float, mode: str, *, in_batch: bool, negatives: bool) -> Hardness:
    """The settings as one value for each kind of negatives; whether there are negatives of each kind."""
    if mode not in MODES:
        raise ConfigError(f"no hardness_mode {mode!r}; choose one of {', '.join(MODES)}")
    if isinstance(hardness, bool) or not isinstance(hardness, Real):
        raise DtypeError(f"hardness is a number, got {type(hardness).__name__}. Pass a float, 0 for none")
    value = float(hardness)
    if not 0.0 <= value < math.inf:
        raise RangeError(f"hardness must be 0 or a positive number, got {value}. Pass 0 for none; 5 and 9 are usual")
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
    scale: Tensor,
    bias: Tensor | None = None,
    *,
    hardness: float,
    keys: PairKeys,
    spec: PairSpec,
    **how: Any,
) -> Tensor:
    """The ``row_lse`` of `pair_stats` with scores raised by ``hardness``: (n,).

        row_lse_i = log sum_j exp(x_ij)         d row_lse_i / d <a_i, b_j> = p_ij * scale, p_i = softmax(x_i)

    It is computed with the scale ``scale + hardness``, whose gradients are then multiplied by scale / (scale +
    hardness). The gradient of the scale itself, sum_j p_ij <a_i, b_j>, must not be, so it is divided first.
    """
    if hardness == 0.0:
        plain = pair_stats(a, b, scale, bias, keys=keys, spec=spec, **how).row_lse
        assert plain is not None
        return plain
    fixed = scale.detach()
    share = fixed / (fixed + hardness)
    raised = fixed + hardness + (scale - fixed) / share
    lse = pair_stats(a, b, raised, bias, keys=keys, spec=spec, **how).row_lse
    assert lse is not None
    value = lse.detach()
    # A row without negatives has -inf, and -inf - -inf is NaN.
    return value + share * torch.where(value > -torch.inf, lse - value, 0.0)


def others_logsumexp(
    a: Tensor, b: Tensor, scale: Tensor, *, hardness: float = 0.0, ids: Tensor | None = None, **how: Any
) -> Tensor:
    """`hard_logsumexp` of each row with the columns of all OTHER rows, less those of equal ids: (n,).

    Row i of ``b`` belongs to row i of ``a``, over a group too. -inf for a row without others. ``row_shift``, (n,), is
    subtracted from the scores.
    """
    options, shift = _check.check_options(how.pop("options", None)), how.pop("row_shift", None)
    keys = PairKeys(row_skip=ids, col_skip=ids, row_shift=shift)
    spec = PairSpec(row_lse=True, mask_self=True)
    return hard_logsumexp(a, b, scale, hardness=hardness, keys=keys, spec=spec, options=options, **how)


def raised(x_nk: Tensor, own_nk: Tensor, hardness: float) -> Tensor:
    """Scores of own negatives, raised by their similarities."""
    return x_nk if hardness == 0.0 else x_nk + hardness * own_nk.detach()
