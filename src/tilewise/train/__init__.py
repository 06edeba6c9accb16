"""The training system: configuration, data, models, the loop, evaluation, checkpoints, the report.

    from tilewise.train import load_model
    trained = load_model("runs/run")

Nothing in the library imports this package. Its command line is ``tilewise`` (see `tilewise.train.cli`).
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from tilewise.train.inference import ImageTextModel, load_model

__all__ = ["ImageTextModel", "load_model"]


def __getattr__(name: str) -> Any:
    if name in __all__:  # imported on first use, so that the command line starts without torch
        from tilewise.train import inference

        return getattr(inference, name)
    raise AttributeError(f"module 'tilewise.train' has no attribute {name!r}")
