"""Two-tower models: the demo's small one, and those of `transformers` by configuration."""

from tilewise.train.models.build import build_model
from tilewise.train.models.towers import TwoTowers

__all__ = ["TwoTowers", "build_model"]
