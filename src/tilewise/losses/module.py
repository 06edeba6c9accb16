"""What the Modules of the losses share."""

from __future__ import annotations

from typing import Any


def settings_of(given: dict[str, Any], *attributes: str) -> dict[str, Any]:
    """The arguments of a Module, from ``locals()`` in its ``__init__``, except those that become ``attributes``."""
    return {name: value for name, value in given.items() if name not in ("self", "__class__", *attributes)}
