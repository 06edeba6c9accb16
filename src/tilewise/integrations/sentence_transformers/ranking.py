"""`MultipleNegativesRankingLoss`, plain and cached.

The first column of a batch contains queries, the second their documents, further columns hard negatives. Let q_i be the
queries and d_i their documents. The softmax of row i contains these scores:

    query_to_doc     q_i with all documents and all hard negatives
    query_to_query   q_i with all other queries
    doc_to_query     d_i with all queries
    doc_to_doc       d_i with all documents and hard negatives of other queries

The target is the score of (q_i, d_i). "joint" uses one softmax over all chosen directions. "per_direction" averages one
softmax per direction.

Hardness raises scores of query_to_doc by a multiple of their similarity, without a gradient of its own, for these:

    in_batch_negatives   documents and hard negatives of other queries
    hard_negatives       the query's own hard negatives
    all_negatives        both
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from functools import partial
from typing import Any, Literal

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn

from tilewise import _check
from tilewise.errors import ConfigError, RangeError
from tilewise.integrations._groups import world_group
from tilewise.integrations.sentence_transformers.columns import (
    CachedLoss,
    check_columns,
    check_model,
    embed_columns,
    hash_ids,
    inputs_of,
    mean_over,
    refuse_static,
)
from tilewise.losses.hardness import Hardness, HardnessMode, check_hardness, others_logsumexp
from tilewise.losses.info_nce import info_nce
from tilewise.options import TileOptions, check_choice

Direction = Literal["query_to_doc", "query_to_query", "doc_to_query", "doc_to_doc"]
DIRECTIONS = ("query_to_doc", "query_to_query", "doc_to_query", "doc_to_doc")
PARTITIONS = ("joint", "per_direction")
Similarity = Literal["cos_sim", "dot_score"]
Ids = Tensor | Sequence[str] | Sequence[int]
NO_ID = -(2**63)  # of a hard negative: it is never masked


class MultipleNegativesRankingLoss(nn.Module):
    """The loss of that name in sentence-transformers, computed by `tilewise.info_nce`.

    Args:
        model: maps a batch of features (a dict) to a dict with "sentence_embedding". None if only
            `compute_loss_from_embeddings` is used.
        scale: multiplies the similarities; positive. An ``nn.Parameter`` gets its exact gradient.
        similarity_fct: cosine or dot product: the functions ``cos_sim`` and ``dot_score``, or these names.
        gather_across_devices: compare with documents and queries of all ranks. Each rank returns its share of the
            global mean, so that DDP's averaging gives the gradient of the global mean, for any split of the rows.
        directions, partition_mode: see the module docstring. "doc_to_doc" without "doc_to_query" is refused.
        hardness_mode, hardness_strength: see the module docstring. The strength is the multiple; 0 has no effect.
            "hard_negatives" has no effect on a batch without hard negatives.
        labels_as_ids: use the labels as ids of the rows, to mask false negatives: rows with equal ids have the same
            document and are not negatives of each other. Their hard negatives stay negatives, except in "doc_to_doc".
            Ids are integers or strings; see `hash_ids`. Ids are compared over all ranks.
        options: how to compute it. No option changes the result beyond rounding.

    The model gets the same dictionaries of features that the loss gets, and may write into them, as in
    sentence-transformers. `AdaptiveLayerLoss` relies on this.

    Memory: linear in the rows. Cost: one product of queries with documents, and one more for each further direction.
    """

    def __init__(
        self,
        model: nn.Module | None,
        scale: float | Tensor = 20.0,
        similarity_fct: Callable[[Tensor, Tensor], Tensor] | Similarity = "cos_sim",
        gather_across_devices: bool = False,
        directions: tuple[Direction, ...] = ("query_to_doc",),
        partition_mode: Literal["joint", "per_direction"] = "joint",
        hardness_mode: HardnessMode | None = None,
        hardness_strength: float = 0.0,
        *,
        labels_as_ids: bool = False,
        options: TileOptions | None = None,
    ) -> None:
        super().__init__()
        if model is not None:
            check_model(model)
        if not isinstance(scale, Tensor) and not scale > 0:
            raise RangeError(f"Scale must be a positive value, got {scale}. It is 1 / temperature")
        _check_directions(directions, partition_mode)
        _similarity(similarity_fct)
        check_hardness(hardness_strength, hardness_mode or "all_negatives", in_batch=True, negatives=True)
        self.model = model
        self.scale = scale
        self.similarity_fct: Any = similarity_fct
        self.gather_across_devices = gather_across_devices
        self.directions, self.partition_mode = tuple(directions), partition_mode
        self.hardness_mode, self.hardness_strength = hardness_mode, hardness_strength
        self.labels_as_ids, self.options = labels_as_ids, options

    def forward(self, sentence_features: Iterable[dict[str, Any]], labels: Ids | None = None) -> Tensor:
        """The loss of a batch: a dict of features per column. Labels are used only with ``labels_as_ids``."""
        embeddings = embed_columns(check_model(self.model), list(sentence_features))
        return self.compute_loss_from_embeddings(embeddings, labels)

    def compute_loss_from_embeddings(self, embeddings: list[Tensor], labels: Ids | None = None) -> Tensor:
        """The loss of (n, d) embeddings: queries, documents, then any number of columns of hard negatives."""
        check_columns(embeddings)
        ids = self._ids(labels, embeddings[0]) if self.labels_as_ids else None
        if _similarity(self.similarity_fct) == "cos_sim":
            embeddings = [F.normalize(column, dim=1) for column in embeddings]
        query, doc, *hard = embeddings
        group = world_group() if self.gather_across_devices else None
        both, apart = "doc_to_query" in self.directions, self.partition_mode == "per_direction"
        settings: dict[str, Any] = {"temperature": self.temperature, "group": group, "options": self.options}
        harder = self._hardness(hard=bool(hard))
        if any(harder):
            loss_n = self._hardened_loss(query, doc, hard, ids, harder, settings)
        elif apart or self.directions == ("query_to_doc",):
            negatives = torch.cat(hard) if hard else None
            return info_nce(query, doc, negatives, symmetric=both, query_ids=ids, **settings)
        else:
            loss_n = info_nce(query, doc, reduction="none", **self._query_negatives(query, hard, ids), **settings)
        if both:
            doc_loss_n = info_nce(doc, query, reduction="none", **self._doc_negatives(doc, hard, ids), **settings)
            # In one softmax both are sums that are measured from the score of the target.
            loss_n = (loss_n + doc_loss_n) / 2 if apart else torch.logaddexp(loss_n, doc_loss_n)
        return mean_over(group, loss_n)

    def _hardness(self, *, hard: bool) -> Hardness:
        mode = self.hardness_mode
        if mode is None or (mode == "hard_negatives" and not hard):
            return Hardness()
        return check_hardness(self.hardness_strength, mode, in_batch=True, negatives=True)

    def _hardened_loss(
        self,
        query: Tensor,
        doc: Tensor,
        hard: list[Tensor],
        ids: Tensor | None,
        harder: Hardness,
        settings: dict[str, Any],
    ) -> Tensor:
        """The loss of each row over the directions that begin with its query: (n,).

        A query's own hard negatives and those of other queries have different hardness, so they are separate sums.
        """
        strength: dict[str, Any] = {"hardness": self.hardness_strength, "hardness_mode": self.hardness_mode}
        own = torch.stack(hard, 1) if hard else None
        loss_n = info_nce(query, doc, own, query_ids=ids, reduction="none", **strength, **settings)
        others: list[tuple[Tensor, float, Tensor | None]] = [(column, harder.in_batch, None) for column in hard]
        if "query_to_query" in self.directions:
            others.append((query, 0.0, ids))
        if others:
            query, doc, *columns = (_check.autocast(x) for x in (query, doc, *(column for column, *_ in others)))
            scale = _check.scale_tensor(_check.check_temperature(settings["temperature"], query), query)
            pos_n = scale * (query.to(scale.dtype) * doc.to(scale.dtype)).sum(1)
            shift = pos_n.detach()  # scores relative to the target's, as those of `info_nce`
            how: dict[str, Any] = {"row_shift": shift, "options": self.options}
            how["group_name"] = _check.group_name(settings["group"])
            for column, (_, hardness, column_ids) in zip(columns, others, strict=True):
                lse_n = others_logsumexp(query, column, scale, hardness=hardness, ids=column_ids, **how)
                loss_n = torch.logaddexp(loss_n, lse_n - (pos_n - shift))
        return loss_n

    def _ids(self, labels: Ids | None, rows: Tensor) -> Tensor:
        if labels is None:
            raise ConfigError(
                "labels_as_ids=True needs labels: one id per row. For the trainer of sentence-transformers, add a "
                "column of integers named 'label' to the dataset"
            )
        ids = labels if isinstance(labels, Tensor) else hash_ids(labels)
        ids = ids.reshape(-1) if ids.dim() == 2 and ids.shape[1] == 1 else ids
        return _check.check_ids("labels", ids.to(rows.device), (rows.shape[0],), rows)

    def _query_negatives(self, query: Tensor, hard: list[Tensor], ids: Tensor | None) -> dict[str, Any]:
        """Negatives of the queries in addition to the documents. Equal ids are masked, so a query skips itself."""
        if "query_to_query" not in self.directions:
            return {"negative_keys": torch.cat(hard) if hard else None, "query_ids": ids}
        ids = _row_ids(query) if ids is None else ids
        no_ids = torch.full((len(hard) * len(ids),), NO_ID, device=ids.device)
        return {
            "negative_keys": torch.cat([*hard, query]),
            "query_ids": ids,
            "key_ids": torch.cat([ids, no_ids, ids]),
        }

    def _doc_negatives(self, doc: Tensor, hard: list[Tensor], ids: Tensor | None) -> dict[str, Any]:
        """Negatives of the documents in addition to the queries: documents and hard negatives of other queries."""
        if "doc_to_doc" not in self.directions:
            return {"query_ids": ids}
        ids = _row_ids(doc) if ids is None else ids
        return {
            "negative_keys": torch.cat([doc, *hard]),
            "query_ids": ids,
            "key_ids": ids.repeat(2 + len(hard)),
        }

    @property
    def temperature(self) -> float | Tensor:
        """The inverse of the scale."""
        return 1.0 / self.scale

    def get_config_dict(self) -> dict[str, Any]:
        """The settings, for a model card."""
        return {
            "scale": self.scale if not isinstance(self.scale, Tensor) else self.scale.item(),
            "similarity_fct": _name(self.similarity_fct),
            "gather_across_devices": self.gather_across_devices,
            "directions": self.directions,
            "partition_mode": self.partition_mode,
            "hardness_mode": self.hardness_mode,
            "hardness_strength": self.hardness_strength,
        }


class CachedMultipleNegativesRankingLoss(CachedLoss):
    """`MultipleNegativesRankingLoss` with a gradient cache: the model encodes ``mini_batch_size`` rows at a time.

    Loss and gradients equal those of the same chunks without a cache, including dropout. It costs one more forward
    pass. The result is an ordinary loss: it can be scaled before ``backward``, and DDP synchronizes once. See
    `tilewise.cache`.

    Args:
        mini_batch_size: rows per forward of the model.
        mini_batch_num_tokens: if given, it replaces ``mini_batch_size``: a forward has as many rows as have at most so
            many tokens together, without padding.
        show_progress_bar: show a bar for each of the two passes.

    The other arguments are those of `MultipleNegativesRankingLoss`.

    `MatryoshkaLoss` may be around it. Gradients of a ``scale`` that is a parameter are then added when the loss is
    computed, as in sentence-transformers.
    """

    SETTINGS = (  # read from ``self.loss``, and assigned to it
        *("scale", "similarity_fct", "gather_across_devices", "directions", "partition_mode", "labels_as_ids"),
        *("hardness_mode", "hardness_strength", "temperature"),
    )

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
        hardness_mode: HardnessMode | None = None,
        hardness_strength: float = 0.0,
        *,
        labels_as_ids: bool = False,
        options: TileOptions | None = None,
    ) -> None:
        super().__init__()
        self.model = check_model(model)
        refuse_static(model, "a gradient cache")
        self.set_chunks(mini_batch_size, mini_batch_num_tokens, show_progress_bar)
        self.loss = MultipleNegativesRankingLoss(
            model,
            scale,
            similarity_fct,
            gather_across_devices,
            directions,
            partition_mode,
            hardness_mode,
            hardness_strength,
            labels_as_ids=labels_as_ids,
            options=options,
        )

    def __getattr__(self, name: str) -> Any:
        return getattr(self.loss, name) if name in self.SETTINGS else super().__getattr__(name)

    def __setattr__(self, name: str, value: Any) -> None:
        if name in self.SETTINGS:
            setattr(self.loss, name, value)
        else:
            super().__setattr__(name, value)

    def compute_loss_from_embeddings(self, embeddings: list[Tensor], labels: Ids | None = None) -> Tensor:
        """That of `MultipleNegativesRankingLoss`."""
        return self.loss.compute_loss_from_embeddings(embeddings, labels)

    def forward(self, sentence_features: Iterable[dict[str, Any]], labels: Ids | None = None) -> Tensor:
        """The loss of a batch: a dict of features per column. Labels are used only with ``labels_as_ids``."""
        return self.cached_loss([inputs_of(features) for features in sentence_features], labels)

    def get_config_dict(self) -> dict[str, Any]:
        """The settings, for a model card."""
        return self.loss.get_config_dict() | {
            "mini_batch_size": self.mini_batch_size,
            "mini_batch_num_tokens": self.mini_batch_num_tokens,
        }


def _check_directions(directions: tuple[str, ...], partition_mode: str) -> None:
    if isinstance(directions, str):
        raise ConfigError(f"directions is a tuple of names, got {directions!r}. Write directions=({directions!r},)")
    for name in directions:
        check_choice("direction", name, DIRECTIONS)
    if "query_to_doc" not in directions:
        raise ConfigError(f"directions needs 'query_to_doc', which has the target, got {tuple(directions)}. Add it")
    check_choice("partition_mode", partition_mode, PARTITIONS)
    if partition_mode == "per_direction" and {"query_to_query", "doc_to_doc"} & set(directions):
        raise ConfigError(
            "partition_mode='per_direction' needs the target in each direction, and query_to_query and doc_to_doc "
            "do not contain it. Use partition_mode='joint'"
        )
    if "doc_to_doc" in directions and "doc_to_query" not in directions:
        raise ConfigError("doc_to_doc without doc_to_query is not supported. Add 'doc_to_query' to directions")


def _name(function: Any) -> str:
    """The name of a similarity, as it is in a model card."""
    if isinstance(function, partial) and not function.args and not function.keywords:
        function = function.func
    return function if isinstance(function, str) else getattr(function, "__name__", type(function).__name__)


def _similarity(function: Any) -> Similarity:
    name = _name(function)
    if name == "cos_sim":
        return "cos_sim"
    if name == "dot_score":
        return "dot_score"
    raise ConfigError(f"similarity_fct is cos_sim or dot_score, got {name}. Only matrix products are supported")


def _row_ids(rows: Tensor) -> Tensor:
    """A different number for each row of all ranks."""
    rank = dist.get_rank() if dist.is_available() and dist.is_initialized() else 0
    return torch.arange(rows.shape[0], device=rows.device) + (rank << 40)
