"""Log-sum-exp of each row of a matrix product that is never stored."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from tilewise import _check
from tilewise.errors import RangeError, ShapeError
from tilewise.kernels.spec import PairSpec
from tilewise.losses.entry import entry
from tilewise.losses.sharded_head import Head
from tilewise.ops.autograd import pair_stats
from tilewise.ops.call import call_settings
from tilewise.ops.small import Calls
from tilewise.options import DEFAULT_OPTIONS, TileOptions


@entry(Head(rows=("a",), columns=("b", "bias"), scalars=("scale",), vocabulary=False))
def linear_logsumexp(
    calls: Calls,
    a: Tensor,
    b: Tensor,
    *,
    scale: float | Tensor = 1.0,
    bias: Tensor | None = None,
    softcap: float | None = None,
    group: torch.distributed.ProcessGroup | None = None,
    options: TileOptions | None = None,
) -> Tensor:
    """``torch.logsumexp(scale * a @ b.T + bias, 1)`` without the (n, m) product: (n,), float32.

    Args:
        a: (n, d).
        b: (m, d).
        scale: multiplies the scores; a tensor that requires grad gets its exact gradient.
        bias: (m,), added to the scores.
        softcap: the scores become ``softcap * tanh(scores / softcap)``. None or 0 is no cap.
        group: a process group over whose ranks the rows of ``a`` and of ``b`` are sharded. Each rank gets the
            log-sum-exp of its own rows over all of ``b``.
        options: how the result is computed; see `TileOptions`. No option changes its value beyond rounding.

    >>> linear_logsumexp(torch.zeros(1, 3), torch.ones(4, 3)).item() == torch.tensor(4.0).log().item()
    True
    """
    options, name = (
        (options or DEFAULT_OPTIONS, "") if calls.checked else _check.check_row_options(options, group, shards=False)
    )
    if not calls.checked:
        a, b = _check.check_sides(("a", "b"), a, b)
    factor = _check.check_scalar("scale", scale, a, rows="multiply the rows of a by it")
    bias = check_bias("bias", bias, b)
    spec = PairSpec(row_lse=True, softcap=check_softcap(softcap))
    how: dict[str, Any] = {"group_name": name, "must_match": call_settings(name, scale=scale), "calls": calls}
    return pair_stats(a, b, factor, bias, spec=spec, options=options, **how).row_lse


def joined_logsumexp(parts: list[Tensor], *, maybe_empty: bool = True) -> Tensor:
    """The log-sum-exp of scores and of log-sum-exps, (n, any number) each: (n,), -inf for a row without any.

    In float64: a float32 sum of 1 and the small terms of far negatives would lose their digits.
    ``maybe_empty``: whether a row may have no score.
    """
    if len(parts) == 1 and parts[0].shape[1] == 1:
        return parts[0].squeeze(1)
    x = torch.cat(parts, 1).double()
    if not maybe_empty:
        return torch.logsumexp(x, 1)
    empty = (x == -torch.inf).all(1)  # a row of -inf alone would have NaN gradients
    return torch.where(empty, -torch.inf, torch.where(empty[:, None], 0.0, x).logsumexp(1))


def check_softcap(softcap: float | None, name: str = "softcap") -> float:
    """Check a soft cap. Returns it as a float, 0 for no cap."""
    if softcap is None:
        return 0.0
    number = _check.check_number(name, softcap)
    if number < 0:
        raise RangeError(f"{name} is a positive number, got {softcap}. For no cap, pass None or 0")
    return number


def check_bias(name: str, bias: Tensor | None, b: Tensor, *, cast: bool = True) -> Tensor | None:
    """Check a vector with one entry for each column. With ``cast``, returns it in autocast's type, as the features."""
    if bias is None:
        return None
    _check.check_floating(name, bias, 1)
    if bias.shape[0] != b.shape[0]:
        raise ShapeError(
            f"{name} has one entry for each of {b.shape[0]} columns, got {tuple(bias.shape)}. Is it that of another "
            "classifier?"
        )
    _check.check_device((name, "the features"), bias, b)
    return _check.autocast(bias) if cast and b.dtype != torch.float64 else bias
