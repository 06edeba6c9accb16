"""Exact losses over a pair-score matrix that is never stored, except for a small batch.

    import tilewise as tw
    loss = tw.clip_loss(image_features, text_features, logit_scale)

Memory grows with the rows plus the columns, and the time is that of the matrix products.

A name is imported when it is first used, so that ``tilewise --help`` does not import torch. Where torch is imported
already, all names are imported, so that torch finds the operators of a program that ``torch.export`` saved. The names
and their modules are listed in ``__init__.pyi``.
"""

from __future__ import annotations

import ast
import sys
from importlib import import_module
from pathlib import Path
from typing import Any

from tilewise._version import __version__ as __version__

_STUB = ast.parse(Path(__file__).with_suffix(".pyi").read_text(encoding="utf-8"))
_HOMES = {alias.name: node.module for node in _STUB.body if isinstance(node, ast.ImportFrom) for alias in node.names}
_PARTS = ("errors", "kernels", "losses", "ops", "options", "retrieval", "ring")  # also reached as tilewise.losses

__all__ = sorted([*_HOMES, "__version__"])


def _import_all() -> None:
    for home in dict.fromkeys(_HOMES.values()):
        import_module(str(home))


def __getattr__(name: str) -> Any:
    if name in _HOMES:
        value = getattr(import_module(str(_HOMES[name])), name)
    elif name in _PARTS:
        _import_all()  # with what is inside, such as tilewise.losses.clip
        value = import_module(f"tilewise.{name}")
    else:
        raise AttributeError(f"module 'tilewise' has no attribute {name!r}")
    globals()[name] = value
    return value


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__, *_PARTS})


if sys.modules.get("torch") is not None:
    _import_all()
