"""Modules that exist only in memory."""

from __future__ import annotations

import sys
import types
from pathlib import Path
from typing import Any


def module(name: str, path: str = "", **content: Any) -> types.ModuleType:
    """Register a module with this content. With ``path``, a folder below the current one, its other files are found."""
    made = types.ModuleType(name)
    made.__path__ = [str(Path(path).resolve())] if path else []
    for key, value in content.items():
        setattr(made, key, value)
    sys.modules[name] = made
    return made
