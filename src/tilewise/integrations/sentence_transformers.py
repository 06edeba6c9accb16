"""`MultipleNegativesRankingLoss`, plain and cached, with the signatures of sentence-transformers.

    - from sentence_transformers.losses import CachedMultipleNegativesRankingLoss
    + from tilewise.integrations.sentence_transformers import CachedMultipleNegativesRankingLoss

The first column of a batch holds queries, the second their documents, further ones hard negatives. With q_i the
queries and d_i their documents, the softmax of row i runs over

    query_to_doc     q_i with all documents and all hard negatives
    query_to_query   q_i with all other queries
    doc_to_query     d_i with all queries
    doc_to_doc       d_i with all documents and hard negatives of other queries

and the score of (q_i, d_i) is the answer. "joint" puts all chosen terms into one softmax, "per_direction" averages
one softmax per direction.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any, Literal

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn

from tilewise.cache import Encoder, GradientCache
from tilewise.errors import ConfigError, DtypeError, RangeError, ShapeError
from tilewise.integrations._groups import world_group
from tilewise.losses.info_nce import info_nce
from tilewise.options import TileOptions

Direction = Literal["query_to_doc", "query_to_query", "doc_to_query", "doc_to_doc"]
DIRECTIONS = ("query_to_doc", "query_to_query", "doc_to_query", "doc_to_doc")
PARTITIONS = ("joint", "per_direction")
Similarity = Literal["cos_sim", "dot_score"]


class MultipleNegativesRankingLoss(nn.Module):
    """sentence-transformers' loss of that name, computed by `tilewise.info_nce`.

    Args:
        model: maps a batch of features (a dict) to a dict with "sentence_embedding"; None for
            `compute_loss_from_embeddings` alone.
        scale: multiplies the similarities; positive. An ``nn.Parameter`` gets its exact gradient.
        similarity_fct: cosine or dot product, as their functions ``cos_sim`` and ``dot_score`` or by these names.
        gather_across_devices: documents and queries of all ranks; each rank returns its share of the global mean, so
            that DDP's averaging gives its gradient, for any split of the rows.
        directions, partition_mode: see the head of this file. "doc_to_doc" without "doc_to_query" is refused.
        hardness_mode, hardness_strength: without effect at a strength of 0, as theirs; refused at any other.
        options: how, never what.

    Memory: linear in the rows. Cost: one product of queries with documents, and one more for each further term.
    """

    def __init__(
        self,
        model: nn.Module | None,
        scale: float | Tensor = 20.0,
        similarity_fct: Callable[[Tensor, Tensor], Tensor] | Similarity = "cos_sim",
        gather_across_devices: bool = False,
        directions: tuple[Direction, ...] = ("query_to_doc",),
        partition_mode: Literal["joint", "per_direction"] = "joint",
        hardness_mode: str | None = None,
        hardness_strength: float = 0.0,
        *,
        options: TileOptions | None = None,
    ) -> None:
        super().__init__()
        if model is not None:
            _check_model(model)
        if not isinstance(scale, Tensor) and not scale > 0:
            raise RangeError(f"scale must be positive, got {scale}")
        _check_directions(directions, partition_mode)
        if hardness_mode is not None and hardness_strength != 0.0:
            raise ConfigError(
                f"hardness_mode={hardness_mode!r} weighs negatives by their own scores, which is not computed here. "
                "Leave it out, or keep the loss of sentence-transformers"
            )
        self.model = model
        self.scale = scale
        self.similarity_fct: Any = similarity_fct
        self.normalizes = _similarity(similarity_fct) == "cos_sim"
        self.gather_across_devices = gather_across_devices
        self.directions, self.partition_mode = tuple(directions), partition_mode
        self.options = options

    def forward(self, sentence_features: Iterable[dict[str, Any]], labels: Tensor | None = None) -> Tensor:
        """The loss of a batch, a dict of features for each column. Labels are not used."""
        model = _check_model(self.model)
        embeddings = [model(dict(features))["sentence_embedding"] for features in sentence_features]
        return self.compute_loss_from_embeddings(embeddings, labels)

    def compute_loss_from_embeddings(self, embeddings: list[Tensor], labels: Tensor | None = None) -> Tensor:
        """The loss of (n, d) embeddings of queries, documents, and any number of hard negatives for each."""
        _check_columns(embeddings)
        if self.normalizes:
            embeddings = [F.normalize(column, dim=1) for column in embeddings]
        query, doc, *hard = embeddings
        group = world_group() if self.gather_across_devices else None
        both = "doc_to_query" in self.directions
        settings: dict[str, Any] = {"temperature": 1.0 / self.scale, "group": group, "options": self.options}
        if self.partition_mode == "per_direction" or self.directions == ("query_to_doc",):
            return info_nce(query, doc, torch.cat(hard) if hard else None, symmetric=both, **settings)
        loss_n = info_nce(query, doc, reduction="none", **self._seen_by_query(query, hard), **settings)
        if both:
            of_doc = info_nce(doc, query, reduction="none", **self._seen_by_doc(doc, hard), **settings)
            loss_n = torch.logaddexp(loss_n, of_doc)  # two sums over the same answer's score, joined
        return _mean_over(group, loss_n)

    def _seen_by_query(self, query: Tensor, hard: list[Tensor]) -> dict[str, Any]:
        """What a query meets beside the documents. Equal ids never meet, so that no query meets itself."""
        if "query_to_query" not in self.directions:
            return {"negative_keys": torch.cat(hard)} if hard else {}
        ids = _row_ids(query)
        never = torch.full((len(hard) * len(ids),), -1, device=ids.device)
        return {
            "negative_keys": torch.cat([*hard, query]),
            "query_ids": ids,
            "key_ids": torch.cat([ids, never, ids]),
        }

    def _seen_by_doc(self, doc: Tensor, hard: list[Tensor]) -> dict[str, Any]:
        """What a document meets beside the queries: documents and negatives that belong to other queries."""
        if "doc_to_doc" not in self.directions:
            return {}
        ids = _row_ids(doc)
        return {
            "negative_keys": torch.cat([doc, *hard]),
            "query_ids": ids,
            "key_ids": ids.repeat(2 + len(hard)),
        }

    def get_config_dict(self) -> dict[str, Any]:
        """The settings, for a model card."""
        return {
            "scale": self.scale if not isinstance(self.scale, Tensor) else self.scale.item(),
            "similarity_fct": _similarity(self.similarity_fct),
            "gather_across_devices": self.gather_across_devices,
            "directions": self.directions,
            "partition_mode": self.partition_mode,
        }


class CachedMultipleNegativesRankingLoss(nn.Module):
    """The same loss with a gradient cache: the model sees ``mini_batch_size`` rows at once, the loss sees all.

    Equal to `MultipleNegativesRankingLoss` in loss and gradients, dropout included, at one more forward pass. What it
    returns is an ordinary loss: ``backward`` may scale it, and DDP synchronizes once. See `tilewise.cache`.

    Args:
        mini_batch_size: rows that the model sees at once.
        mini_batch_num_tokens: refused unless None; chunks are counted in rows.
        show_progress_bar: refused unless False.

    The others are those of `MultipleNegativesRankingLoss`.
    """

    def __init__(
        self,
        model: nn.Module,
        scale: float | Tensor = 20.0,
        similarity_fct: Callable[[Tensor, Tensor], Tensor] | Similarity = "cos_sim",
        mini_batch_size: int = 32,
        mini_batch_num_tokens: int | None = None,
        gather_across_devices: bool = False,
        directions: tuple[Direction, ...] = ("query_to_doc",),
        partition_mode: Literal["joint", "per_direction"] = "joint",
        show_progress_bar: bool = False,
        hardness_mode: str | None = None,
        hardness_strength: float = 0.0,
        *,
        options: TileOptions | None = None,
    ) -> None:
        super().__init__()
        if mini_batch_num_tokens is not None:
            raise ConfigError("mini_batch_num_tokens is not supported: chunks are counted in rows (mini_batch_size)")
        if show_progress_bar:
            raise ConfigError(
                "show_progress_bar is not supported: give tilewise.cache.GradientCache a progress function"
            )
        self.model = _check_model(model)
        self.loss = MultipleNegativesRankingLoss(
            model,
            scale,
            similarity_fct,
            gather_across_devices,
            directions,
            partition_mode,
            hardness_mode,
            hardness_strength,
            options=options,
        )
        self.mini_batch_size = mini_batch_size

    def forward(self, sentence_features: Iterable[dict[str, Any]], labels: Tensor | None = None) -> Tensor:
        """The loss of a batch, a dict of features for each column. Labels are not used."""
        model = self.model
        encoder = Encoder(lambda **features: model(features)["sentence_embedding"], (model,))
        cache = GradientCache(encoder, self._of_columns, chunk_size=self.mini_batch_size)
        loss: Tensor = cache.loss(*(dict(features) for features in sentence_features))
        return loss

    def _of_columns(self, *embeddings: Tensor) -> Tensor:
        return self.loss.compute_loss_from_embeddings(list(embeddings))

    def get_config_dict(self) -> dict[str, Any]:
        """The settings, for a model card."""
        return self.loss.get_config_dict() | {"mini_batch_size": self.mini_batch_size}


def _check_model(model: Any) -> nn.Module:
    if not isinstance(model, nn.Module):
        raise DtypeError(
            "model is a module that maps a batch of features to a dict with 'sentence_embedding', as a "
            f"SentenceTransformer does, got {model!r}. For embeddings that are there already use "
            "MultipleNegativesRankingLoss(None) and compute_loss_from_embeddings, or tilewise.info_nce"
        )
    return model


def _check_directions(directions: tuple[str, ...], partition_mode: str) -> None:
    if isinstance(directions, str):
        raise ConfigError(f"directions is a tuple of names, got {directions!r}. Write directions=({directions!r},)")
    if unknown := [name for name in directions if name not in DIRECTIONS]:
        raise ConfigError(f"no direction {unknown[0]!r}; there are {', '.join(DIRECTIONS)}")
    if "query_to_doc" not in directions:
        raise ConfigError(f"directions needs 'query_to_doc', which holds the answer, got {tuple(directions)}")
    if partition_mode not in PARTITIONS:
        raise ConfigError(f"no partition_mode {partition_mode!r}; choose one of {', '.join(PARTITIONS)}")
    if partition_mode == "per_direction" and {"query_to_query", "doc_to_doc"} & set(directions):
        raise ConfigError(
            "partition_mode='per_direction' needs the answer in each direction, and query_to_query and doc_to_doc "
            "do not hold it. Use partition_mode='joint'"
        )
    if "doc_to_doc" in directions and "doc_to_query" not in directions:
        raise ConfigError("doc_to_doc without doc_to_query is not supported. Add 'doc_to_query' to directions")


def _similarity(function: Any) -> Similarity:
    name = function if isinstance(function, str) else getattr(function, "__name__", type(function).__name__)
    if name == "cos_sim":
        return "cos_sim"
    if name == "dot_score":
        return "dot_score"
    raise ConfigError(f"similarity_fct is cos_sim or dot_score, got {name}. Others are not a matrix product")


def _check_columns(embeddings: list[Tensor]) -> None:
    if len(embeddings) < 2:
        raise ShapeError(f"a batch has at least two columns, queries and their documents, got {len(embeddings)}")
    shapes = [tuple(column.shape) for column in embeddings]
    if len(set(shapes)) > 1:
        raise ShapeError(f"all columns need the same shape, row i of each belongs together, got {shapes}")


def _row_ids(rows: Tensor) -> Tensor:
    """A number for each row that no row of another rank has."""
    rank = dist.get_rank() if dist.is_available() and dist.is_initialized() else 0
    return torch.arange(rows.shape[0], device=rows.device) + (rank << 40)


def _mean_over(group: dist.ProcessGroup | None, loss_n: Tensor) -> Tensor:
    """The mean; over a group W / N times the sum of this rank's rows, as all losses return it."""
    if group is None:
        return loss_n.mean()
    rows = torch.tensor(float(loss_n.shape[0]), dtype=torch.float64, device=loss_n.device)
    dist.all_reduce(rows, group=group)
    return loss_n.sum() * (dist.get_world_size(group) / rows).to(loss_n.dtype)
