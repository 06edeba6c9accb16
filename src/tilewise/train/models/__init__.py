"""Two-tower models: the demo's small one, and those of `transformers` by configuration."""

from tilewise.train.models.build import build_model
from tilewise.train.models.saved import build_described, describe_model, export_model, load_exported
from tilewise.train.models.towers import TwoTowers

__all__ = ["TwoTowers", "build_described", "build_model", "describe_model", "export_model", "load_exported"]
