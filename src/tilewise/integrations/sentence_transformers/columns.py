"""What the losses share: embeddings of the columns of a batch, checks, and the mean over ranks."""

from __future__ import annotations

import sys
from typing import Any, ClassVar

import torch
import torch.distributed as dist
from torch import Tensor, nn

from tilewise.cache import Encoder
from tilewise.cache.chunks import map_tensors
from tilewise.errors import ConfigError, DtypeError, ShapeError


class CachedLoss(nn.Module):
    """A loss with a gradient cache around ``self.loss``. The settings of that loss are attributes of this one too."""

    SETTINGS: ClassVar[tuple[str, ...]] = ()  # read from ``self.loss``, and assigned to it

    def __getattr__(self, name: str) -> Any:
        return getattr(self.loss, name) if name in self.SETTINGS else super().__getattr__(name)

    def __setattr__(self, name: str, value: Any) -> None:
        if name in self.SETTINGS:
            setattr(self.loss, name, value)
        else:
            super().__setattr__(name, value)


def embed_columns(model: nn.Module, columns: list[dict[str, Any]]) -> list[Tensor]:
    """One (n, d) embedding per column, from the same forward passes as in sentence-transformers.

    From 6.2 on, sentence-transformers merges all columns but the first into one forward where it can, which changes the
    dropout masks. Losses such as its `AdaptiveLayerLoss` switch this off. So its own function is called if the package
    is loaded and has one. Otherwise each column has its own forward.
    """
    if "sentence_transformers" in sys.modules:
        try:
            from sentence_transformers.base.losses.merged_forward import embed_columns as merged
        except ImportError:  # before 6.2
            merged = None
        if callable(merged):
            embeddings: list[Tensor] = merged(model, columns)
            return embeddings
    return [model(features)["sentence_embedding"] for features in columns]


def inputs_of(features: dict[str, Any]) -> dict[str, Any]:
    """A copy without the graphs of an earlier call of the model, which writes its outputs into the features."""
    inputs: dict[str, Any] = map_tensors(lambda value: value if value.is_leaf else value.detach(), dict(features))
    return inputs


def encoder_of(model: nn.Module) -> Encoder:
    """The model as an encoder of a gradient cache."""
    return Encoder(lambda **features: model(features)["sentence_embedding"], (model,))


def check_cached(mini_batch_num_tokens: int | None, show_progress_bar: bool) -> None:
    """Refuse the arguments of cached losses that have no counterpart here."""
    if mini_batch_num_tokens is not None:
        raise ConfigError("mini_batch_num_tokens is not supported: chunks are counted in rows (mini_batch_size)")
    if show_progress_bar:
        raise ConfigError(
            "show_progress_bar is not supported. Use tilewise.cache.GradientCache with a progress function"
        )


def no_matryoshka(plain: str) -> ConfigError:
    """The error of a cached loss inside of `MatryoshkaLoss`; ``plain`` is the loss without a cache."""
    return ConfigError(
        f"MatryoshkaLoss does not work around this Cached{plain}. Use it around tilewise's {plain}, or use the cached "
        "loss of sentence-transformers"
    )


def check_model(model: Any) -> nn.Module:
    """Check that this is a module. Returns it."""
    if not isinstance(model, nn.Module):
        raise DtypeError(
            "model is a module that maps a batch of features to a dict with 'sentence_embedding', as a "
            f"SentenceTransformer does, got {model!r}. To pass embeddings, use "
            "MultipleNegativesRankingLoss(None) and compute_loss_from_embeddings, or tilewise.info_nce"
        )
    return model


def check_columns(embeddings: list[Tensor]) -> None:
    """Check the embeddings of a batch: at least two columns of the same shape."""
    if len(embeddings) < 2:
        raise ShapeError(f"a batch needs at least two columns, queries and their documents, got {len(embeddings)}")
    shapes = [tuple(column.shape) for column in embeddings]
    if len(set(shapes)) > 1:
        raise ShapeError(f"all columns need the same shape, because row i of each is one sample, got {shapes}")


def mean_over(group: dist.ProcessGroup | None, loss_n: Tensor) -> Tensor:
    """The mean. Over a group, W / N times the sum of this rank's rows, as all losses return it."""
    if group is None:
        return loss_n.mean()
    rows = torch.tensor(float(loss_n.shape[0]), dtype=torch.float64, device=loss_n.device)
    dist.all_reduce(rows, group=group)
    return loss_n.sum() * (dist.get_world_size(group) / rows).to(loss_n.dtype)
