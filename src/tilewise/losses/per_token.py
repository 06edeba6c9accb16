"""Arguments with entries for each token or query: ids of classes, temperatures, and a mask."""

from __future__ import annotations

import torch
from torch import Tensor

from tilewise import _check
from tilewise.errors import DtypeError, RangeError, ShapeError
from tilewise.kernels.spec import stat_dtype


def check_token_ids(name: str, ids: Tensor, input: Tensor, shift: int) -> Tensor:
    """Check K ids for each token, (..., K). Returns those of the scored states: (n, K) int64."""
    _check.check_tensor(name, ids, "a tensor of class ids")
    _check.check_integers(name, ids, _check.WHOLE)
    _check_entries(name, ids, input, "K class ids")
    if ids.shape[-1] == 0:
        raise ShapeError(
            f"{name} has at least one class id for each token, got {tuple(ids.shape)}. "
            "Its last axis holds the ids of a token"
        )
    return _scored(ids, shift).long()


def check_token_values(name: str, values: Tensor, input: Tensor, shift: int) -> Tensor:
    """Check K numbers for each token, (..., K), without gradient. Returns those of the scored states: (n, K)."""
    _check.check_floating(name, values, values.dim() if isinstance(values, Tensor) else 0)
    _check.check_constant(name, values)
    _check_entries(name, values, input, "K numbers")
    return _scored(values, shift)


def check_token_mask(mask: Tensor | None, input: Tensor, shift: int) -> Tensor | None:
    """Check a mask of the tokens, (...) bool. Returns that of the scored states: (n,)."""
    if mask is None:
        return None
    _check.check_tensor("mask", mask)
    if mask.dtype != torch.bool:
        raise DtypeError(
            f"mask is a bool tensor, False for tokens to ignore, got {mask.dtype}. Convert it with .bool()"
        )
    if mask.shape != input.shape[:-1]:
        raise ShapeError(
            f"mask has one entry for each hidden state, {tuple(input.shape[:-1])}, got {tuple(mask.shape)}. "
            f"{_check.reshape_advice(mask, input.shape[:-1].numel())}"
        )
    _check.check_device(("mask", "input"), mask, input)
    return (mask[..., shift:] if shift else mask).reshape(-1)


def check_id_range(name: str, ids_nk: Tensor, wanted: Tensor | None, classes: int | Tensor, advice: str) -> Tensor:
    """Whether each id is in [0, classes): (n, K). On a CPU, a ``wanted`` id that is not (None: any) is an error."""
    inside = (ids_nk >= 0) & (ids_nk < classes)
    if _check.can_read(ids_nk):
        wrong = ids_nk[~inside if wanted is None else ~inside & wanted]
        if wrong.numel():
            raise RangeError(
                f"{name} holds class ids in [0, {int(classes)}), got {wrong[0].item()} ({wrong.numel()} out of range). "
                f"{advice}"
            )
    return inside


def check_temperature(temperature: float, per: str = "") -> float:
    """Check a temperature: a positive, finite number. ``per``: as in `check_number`."""
    number = _check.check_number("temperature", temperature, per=per)
    if not number > 0.0:
        raise RangeError(f"temperature is positive, got {temperature}. It divides the logits")
    return number


def check_token_temperature(temperature: float | Tensor, input: Tensor, shift: int) -> float | Tensor:
    """Check a temperature: positive, finite. Returns a float, or the temperatures of the scored states: (n,)."""
    if not isinstance(temperature, Tensor):
        return check_temperature(temperature, per=str(tuple(input.shape[:-1])))
    _check.check_floating("temperature", temperature, temperature.dim())
    _check.check_constant("temperature", temperature)
    if temperature.dim() == 0:
        temperature = temperature.expand(input.shape[:-1])
    _check_entries("temperature", temperature[..., None], input, "one number")
    return _scored(temperature[..., None], shift)[:, 0].to(stat_dtype(input.dtype))


def tempered(
    temperature: float | Tensor, scale: Tensor, bias: Tensor | None, softcap: float, stat: torch.dtype
) -> tuple[Tensor, Tensor | None, float]:
    """Scale, bias and soft cap of logits that one temperature divides; unchanged for a temperature of each token.

    cap * tanh(x / cap) / t = (cap / t) * tanh((x / t) / (cap / t)): a temperature changes only these three.

    Divided in the type of the statistics: rounding the quotient to a half type would amount to another temperature.
    """
    if isinstance(temperature, Tensor) or temperature == 1.0:
        return scale, bias, softcap
    wide = [None if x is None else (x if x.dtype == torch.float64 else x.to(stat)) / temperature for x in (scale, bias)]
    assert wide[0] is not None
    return wide[0], wide[1], softcap / temperature


def row_scale_of(temperature_n: Tensor, valid_n: Tensor | None) -> Tensor:
    """1 / temperature of each row, and 1 for an ignored one, whose temperature may be anything."""
    scale = temperature_n.reciprocal()
    if valid_n is not None:
        scale = torch.where(valid_n, scale, 1.0)
    if _check.can_read(scale):
        wrong = temperature_n[~((scale > 0.0) & scale.isfinite())]
        if wrong.numel():
            raise RangeError(
                f"temperature is positive and finite, got {wrong[0].item()} ({wrong.numel()} of {scale.numel()} "
                "tokens). It divides the logits"
            )
    return scale


def divide_rows(a: Tensor, temperature: float | Tensor) -> tuple[Tensor, float | Tensor]:
    """Queries divided by temperatures of their own, (n,), and 1. One number is returned as it is, with the queries."""
    if not isinstance(temperature, Tensor) or temperature.numel() == 1:
        return a, temperature
    _check.check_floating("temperature", temperature, 1)
    _check.check_device(("temperature", "the features"), temperature, a)
    if temperature.shape != a.shape[:1]:
        raise ShapeError(
            f"temperature is a number, or ({a.shape[0]},), one for each query, got {tuple(temperature.shape)}. "
            f"{_check.reshape_advice(temperature, a.shape[0])}"
        )
    if _check.can_read(temperature) and not bool(((temperature > 0.0) & temperature.isfinite()).all()):
        raise RangeError(
            f"temperature is positive and finite, got values from {temperature.min().item()} to "
            f"{temperature.max().item()}. It divides the scores"
        )
    stat = stat_dtype(a.dtype)
    return (a.to(stat) / temperature.to(stat)[:, None]).to(a.dtype), 1.0


def _check_entries(name: str, values: Tensor, input: Tensor, what: str) -> None:
    if values.shape[:-1] != input.shape[:-1]:
        size = ", ".join(str(size) for size in input.shape[:-1])
        shape = tuple(values.shape[:-1] if what == "one number" else values.shape)
        raise ShapeError(
            f"{name} has {what} for each hidden state, ({size}{', K' if what != 'one number' else ''}), got {shape}. "
            "Its first axes are those of input"
        )
    _check.check_device((name, "input"), values, input)


def _scored(values: Tensor, shift: int) -> Tensor:
    """Entries of the scored states, (n, K). Those of state t are at t + shift, like a target."""
    if shift:
        values = values[..., shift:, :]
    return values.reshape(-1, values.shape[-1])
