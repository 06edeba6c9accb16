"""Checked settings: dataclass fields with types, limits and help; TOML files; `key=value` overrides.

This module is independent of what is trained. A section is a frozen dataclass whose fields are created with `setting`.
`check_section` in its ``__post_init__`` refuses wrong types and values. `build` creates nested sections from plain
dictionaries, and `to_toml` writes them with their help as comments.
"""

from __future__ import annotations

import copy
import dataclasses
import difflib
import json
import math
import os
import tomllib
import types
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any, Literal, TypeVar, get_args, get_origin, get_type_hints

from tilewise.errors import ConfigError
from tilewise.train.untrusted import OBEYED, TEXT_LIMIT

Section = TypeVar("Section")


def setting(
    default: Any, help: str, *, least: float | None = None, most: float | None = None, above: float | None = None
) -> Any:
    """A dataclass field with its help and its limits (``least <= x <= most``, ``x > above``)."""
    limits = {"least": least, "most": most, "above": above}
    return dataclasses.field(default=default, metadata={"help": help, **limits})


def check_section(section: Any) -> None:
    """Refuse a field of the wrong type, outside its limits, or not among its choices."""
    hints = get_type_hints(type(section))
    for field in dataclasses.fields(section):
        if not field.metadata:  # a nested section, which is checked already
            continue
        value = _convert(getattr(section, field.name), hints[field.name], field.name)
        _check_limits(value, field)
        object.__setattr__(section, field.name, value)


def _convert(value: Any, hint: Any, name: str) -> Any:
    """Convert a value to its type: whole numbers to floats, lists to tuples. Other mismatches are refused."""
    origin = get_origin(hint)
    if origin is Literal:
        if value not in get_args(hint):
            choices = ", ".join(repr(choice) for choice in get_args(hint))
            raise ConfigError(f"{name} is one of {choices}, got {value!r}{_did_you_mean(value, get_args(hint), 0.7)}")
        return value
    if origin is tuple:
        parts = get_args(hint)
        if not isinstance(value, list | tuple):
            raise ConfigError(f"{name} is a list, got {value!r}; write it as [a, b]")
        if parts[-1] is Ellipsis:
            parts = parts[:1] * len(value)
        if len(value) != len(parts):
            raise ConfigError(f"{name} has {len(parts)} entries, got {len(value)}: {value!r}")
        return tuple(_convert(v, part, f"{name}[{i}]") for i, (v, part) in enumerate(zip(value, parts, strict=True)))
    if hint is float and isinstance(value, int) and not isinstance(value, bool):
        try:
            return float(value)
        except OverflowError:
            raise ConfigError(
                f"{name} must be a number below 1.8e308, got one of {value.bit_length()} bits. Give a smaller one"
            ) from None
    if not isinstance(value, hint) or (isinstance(value, bool) and hint is not bool):
        kind = {int: "a whole number", float: "a number", bool: "true or false", str: "text"}[hint]
        advice = ""
        if hint is str:
            advice = ". Text that looks like a number, a date or true needs quotation marks, in a shell '\"...\"'"
        raise ConfigError(f"{name} is {kind}, got {value!r}{advice}")
    return value


def _check_limits(value: Any, field: dataclasses.Field[Any]) -> None:
    least, most, above = (field.metadata[key] for key in ("least", "most", "above"))
    if isinstance(value, str) and "\0" in value:
        raise ConfigError(f"{field.name} must be text without zero bytes, got {value!r}")
    if isinstance(value, str) and any("\ud800" <= c <= "\udfff" for c in value):  # bytes that are not UTF-8
        raise ConfigError(f"{field.name} must be valid UTF-8, got {value!r}. Rename the file or folder")
    for number in value if isinstance(value, tuple) else (value,):
        if least is not None and not number >= least:
            raise ConfigError(f"{field.name} must be at least {least}, got {number}")
        if above is not None and not number > above:
            raise ConfigError(f"{field.name} must be greater than {above}, got {number}")
        if most is not None and not number <= most:
            raise ConfigError(f"{field.name} must be at most {most}, got {number}")
        if isinstance(number, float) and not math.isfinite(number):
            raise ConfigError(
                f"{field.name} must be a finite number, got {number}. Give a number such as {_example(field)}"
            )
        if isinstance(number, int) and abs(number) >= 2**63:
            raise ConfigError(f"{field.name} must be below 2^63, got a number of {number.bit_length()} bits")


def _example(field: dataclasses.Field[Any]) -> str:
    return str(field.default if not isinstance(field.default, tuple) else list(field.default))


def build(cls: type[Section], values: Mapping[str, Any], prefix: str = "") -> Section:
    """Create a section and its nested sections from a dictionary. Unknown keys are refused."""
    fields = {field.name: field for field in dataclasses.fields(cls)}  # type: ignore[arg-type]
    hints = get_type_hints(cls)
    arguments: dict[str, Any] = {}
    for key, value in values.items():
        if key not in fields:
            inside = [f"{name}.{key}" for name in fields if key in _names_inside(hints[name])]
            hint = f" (did you mean {inside[0]!r}?)" if inside else _did_you_mean(key, fields)
            raise ConfigError(f"no setting {prefix}{key}{hint}; there are: {', '.join(sorted(fields))}")
        if dataclasses.is_dataclass(hints[key]):
            if not isinstance(value, Mapping):
                raise ConfigError(f"{prefix}{key} is a section with settings of its own, got {value!r}")
            value = build(hints[key], value, f"{prefix}{key}.")
        arguments[key] = value
    try:
        return cls(**arguments)
    except ConfigError as error:
        raise ConfigError(f"{prefix}{error}") if prefix and not str(error).startswith(prefix) else error from None


def _names_inside(hint: Any) -> set[str]:
    return {field.name for field in dataclasses.fields(hint)} if dataclasses.is_dataclass(hint) else set()


def _did_you_mean(given: Any, known: Iterable[Any], cutoff: float = 0.6) -> str:
    close = difflib.get_close_matches(str(given).lower(), [str(k) for k in known], n=1, cutoff=cutoff)
    return f" (did you mean {close[0]!r}?)" if close else ""


def read_toml(path: str | Path) -> dict[str, Any]:
    """Read a TOML file as a nested dictionary."""
    try:
        with open(path, "rb") as file:  # a pipe is fine; a device such as /dev/zero never ends
            text = file.read(TEXT_LIMIT + 1)
        if len(text) > TEXT_LIMIT:
            raise ConfigError(
                f"{path} has more than {TEXT_LIMIT // 2**20} MiB, which no settings have. Give a TOML file; "
                "`tilewise config` prints one"
            )
        return tomllib.loads(text.decode("utf-8"))
    except OSError as error:
        inside = Path(path) / "config.toml"
        advice = f"Give {inside}" if os.path.isfile(inside) else "Give a TOML file; `tilewise config` prints one"
        raise ConfigError(f"cannot read the configuration {path}: {error.strerror or error}. {advice}") from None
    except ConfigError:
        raise
    except ValueError as error:  # of TOML, of UTF-8, or a path with a zero byte
        raise ConfigError(f"{path} is not valid TOML: {error}") from None
    except RecursionError:
        raise ConfigError(f"{path} is not valid TOML: nested too deeply") from None


def apply_overrides(values: Mapping[str, Any], overrides: Sequence[str]) -> dict[str, Any]:
    """Apply overrides ``section.key=value`` to a nested dictionary. A value that is not TOML is text.

    >>> apply_overrides({"loss": {"name": "dense"}}, ["loss.name=tilewise", "loop.steps=3"])
    {'loss': {'name': 'tilewise'}, 'loop': {'steps': 3}}
    """
    result = copy.deepcopy(dict(values))
    for override in overrides:
        dotted, equals, text = override.partition("=")
        if not equals or not dotted.strip() or dotted.startswith("-"):
            raise ConfigError(f"an override must be section.key=value, without dashes or spaces, got {override!r}")
        *sections, key = dotted.strip().split(".")
        place = result
        for section in sections:
            place = place.setdefault(section, {})
            if not isinstance(place, dict):
                raise ConfigError(f"{override!r}: {section} is a setting, not a section")
        place[key] = _parse(text.strip())
    return result


def _parse(text: str) -> Any:
    try:
        return tomllib.loads(f"value = {text}")["value"]
    except (ValueError, RecursionError):  # not TOML: plain text
        return text


def to_dict(section: Any) -> dict[str, Any]:
    """Nested plain values, ready for JSON."""
    return json.loads(json.dumps(dataclasses.asdict(section)))


def to_toml(section: Any, *, help: bool = False) -> str:
    """The nested sections as TOML that `read_toml` and `build` turn into the same object again."""
    lines: list[str] = []
    for part in dataclasses.fields(section):
        lines.append(f"[{part.name}]")
        inner = getattr(section, part.name)
        hints = get_type_hints(type(inner))
        for field in dataclasses.fields(inner):
            if help:
                lines.append(f"# {field.metadata['help']}")
                if choices := get_args(hints[field.name]) if get_origin(hints[field.name]) is Literal else ():
                    lines.append(f"# one of: {', '.join(choices)}")
            lines.append(f"{field.name} = {_toml_value(getattr(inner, field.name))}")
        lines.append("")
    return "\n".join(lines)


def changed_settings(section: Any) -> dict[str, str]:
    """Return the settings that differ from the defaults, as one line per section.

    Args:
        section: a section of sections, as for `to_toml`.
    """
    lines: dict[str, str] = {}
    for part in dataclasses.fields(section):
        inner = getattr(section, part.name)
        found = [
            f"{field.name}={_toml_value(getattr(inner, field.name))}"
            for field in dataclasses.fields(inner)
            if getattr(inner, field.name) != field.default
        ]
        if found:
            lines[part.name] = "  ".join(found)
    return lines


def _toml_value(value: Any) -> str:
    if isinstance(value, tuple | list):
        return "[" + ", ".join(_toml_value(v) for v in value) + "]"
    if isinstance(value, types.NoneType):
        raise AssertionError("settings are never None")
    if isinstance(value, float):
        return repr(value)
    # TOML forbids DEL. The other characters would be obeyed by the terminal that shows the settings.
    return OBEYED.sub(lambda found: f"\\u{ord(found[0]):04x}", json.dumps(value, ensure_ascii=False))


def differences(one: Mapping[str, Any], other: Mapping[str, Any], prefix: str = "") -> dict[str, tuple[Any, Any]]:
    """Return the dotted names whose values differ between two nested dictionaries, with both values.

    >>> differences({"loss": {"name": "dense", "kind": "clip"}}, {"loss": {"name": "local", "kind": "clip"}})
    {'loss.name': ('dense', 'local')}
    """
    found: dict[str, tuple[Any, Any]] = {}
    for key in sorted({*one, *other}):
        left, right = one.get(key), other.get(key)
        if isinstance(left, Mapping) and isinstance(right, Mapping):
            found |= differences(left, right, f"{prefix}{key}.")
        elif left != right:
            found[f"{prefix}{key}"] = (left, right)
    return found
