"""Check the content of ``state.json`` before anything uses it.

A checksum proves that a file is the one that was written. Checkpoints of format 1 have none, so the types and ranges
of all entries are checked as well. Every problem is a ``ValueError`` with one sentence.
"""

from __future__ import annotations

import json
import math
import re
import zlib
from collections.abc import Callable
from typing import Any

FORMAT = 2  # 2: state.json has a checksum. Format 1, without one, is still read.
CHECKSUM = "checksum"
MEMORY = {"data", "loss", "backbone", "dense_loss", "measured", "peak", "dense_peak"}
SAFE_NAME = re.compile(r"[A-Za-z0-9_]+\.safetensors")


def state_checksum(state: dict[str, Any]) -> int:
    """Return the CRC-32 sum over all entries but the checksum itself. It does not depend on order or white space.

    >>> state_checksum({"step": 9}) == state_checksum({"step": 9, "checksum": 1}) != state_checksum({"step": 8})
    True
    """
    rest = {key: value for key, value in state.items() if key != CHECKSUM}
    return zlib.crc32(json.dumps(rest, sort_keys=True).encode())


def check_state(state: Any, step: int) -> None:
    """Raise ``ValueError`` if a state is damaged or incomplete.

    Args:
        state: the content of state.json.
        step: the step in the name of the checkpoint's folder.
    """
    if not isinstance(state, dict):
        raise ValueError("it is not a JSON object")
    form = state.get("format")
    if form not in (1, FORMAT) or isinstance(form, bool | float):
        raise ValueError(f"it has format {form!r}, and this version reads formats 1 and {FORMAT}")
    if (form == FORMAT) != (CHECKSUM in state):
        raise ValueError(f"format {form} and the checksum do not fit together")
    if form == FORMAT and state[CHECKSUM] != state_checksum(state):
        raise ValueError("its content does not match its checksum")
    for name, (what, fits) in ENTRIES.items():
        if name not in state and name in OPTIONAL:
            continue
        if name not in state:
            raise ValueError(f"it has no entry {name!r}")
        if not fits(state[name]):
            raise ValueError(f"its entry {name!r} must be {what}")
    if state["step"] != step:
        raise ValueError(f"it is the state of step {state['step']}, and its folder is that of step {step}")


def _count(value: Any) -> bool:
    return isinstance(value, int) and not isinstance(value, bool) and 0 <= value < 2**63


def _number(value: Any) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool) and math.isfinite(value)


def _object_of(fits: Callable[[Any], bool]) -> Callable[[Any], bool]:
    return lambda value: isinstance(value, dict) and all(fits(entry) for entry in value.values())


def _files(value: Any) -> bool:
    return (
        isinstance(value, dict)
        and all(SAFE_NAME.fullmatch(name) for name in value)  # never a path that leaves the folder
        and all(isinstance(facts, dict) and set(facts) == {"bytes", "crc32"} for facts in value.values())
        and all(_count(number) for facts in value.values() for number in facts.values())
    )


def _position(value: Any) -> bool:
    return isinstance(value, dict) and set(value) == {"epoch", "window", "offset"} and all(map(_count, value.values()))


def _best(value: Any) -> bool:
    if not isinstance(value, dict):
        return False
    return not value or (
        set(value) == {"step", "value"} and all(map(_number, value.values())) and 0 <= value["step"] < 2**53
    )


def _skips(value: Any) -> bool:
    return (
        isinstance(value, dict)
        and set(value) == {"counts", "once"}
        and _object_of(_count)(value["counts"])
        and isinstance(value["once"], list)
        and all(isinstance(entry, str) for entry in value["once"])
    )


def _memory(value: Any) -> bool:
    return isinstance(value, dict) and (not value or set(value) >= MEMORY) and all(map(_any_number, value.values()))


def _any_number(value: Any) -> bool:
    return isinstance(value, int | float)


def _plan(value: Any) -> bool:
    return (
        isinstance(value, list)
        and len(value) > 0
        and all(isinstance(leg, list) and len(leg) == 3 for leg in value)
        and all(_count(first) and _count(last) and isinstance(kind, str) for first, last, kind in value)
        and value[0][0] == 0
    )


ENTRIES: dict[str, tuple[str, Callable[[Any], bool]]] = {
    "step": ("a whole number", _count),
    "files": ("the sizes and checksums of safetensors files", _files),
    "position": ("the whole numbers epoch, window and offset", _position),
    "skips": ("counts of skipped records by reason", _skips),
    "skipped": ("a whole number", _count),
    "best": ("empty, or the numbers step and value", _best),
    "metrics": ("an object of numbers", _object_of(_any_number)),
    "scaler": ("an object", lambda value: isinstance(value, dict)),
    "memory": ("empty, or the memory of a step in bytes", _memory),
    "plan": ("a list of [first, last, kind]", _plan),
    "pairs": ("a whole number", _count),
    "config": ("an object of sections", _object_of(lambda entry: isinstance(entry, dict))),
}
OPTIONAL = ("plan", "pairs")  # checkpoints of earlier versions have none
