"""`GISTEmbedLoss`, plain and cached: in-batch negatives that a guide model finds too close are left out.

The first column of a batch contains anchors a_i, the second their positives p_i, a further one hard negatives n_i. All
similarities are cosines. The softmax of row i contains these, divided by the temperature:

    a_i with all positives and all negatives    of all ranks, if gathered
    a_i with all anchors                        contrast_anchors; of this rank only, as in sentence-transformers
    p_i with all positives                      contrast_positives; of all ranks, if gathered

The target is (a_i, p_i), which is never left out. Any other pair is left out if its similarity under the guide is above
``limit_i``: the similarity of a_i and p_i under the guide, minus a margin.
"""

from __future__ import annotations

import math
from collections.abc import Iterable
from itertools import pairwise
from typing import Any, Literal

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from tilewise import _check
from tilewise.cache import cached_encode
from tilewise.cache.chunks import map_tensors
from tilewise.errors import ConfigError, ShapeError
from tilewise.integrations._groups import world_group
from tilewise.integrations.sentence_transformers.columns import (
    CachedLoss,
    check_columns,
    check_model,
    embed_columns,
    encoder_of,
    inputs_of,
    mean_over,
    refuse_static,
)
from tilewise.losses.guide import Guide, guide_limit, guided_logsumexp
from tilewise.losses.info_nce import info_nce
from tilewise.options import TileOptions

TOKENIZER = ("get_vocab", "batch_decode")  # methods that both tokenizers need


class GISTEmbedLoss(nn.Module):
    """The loss of that name in sentence-transformers, computed by `tilewise.info_nce` with a `tilewise.Guide`.

    Args:
        model: maps a batch of features (a dict) to a dict with "sentence_embedding". It needs a ``tokenizer``.
        guide: the guide model, likewise. It gets no gradient. If its tokenizer has another vocabulary, or if it takes
            shorter texts, the tokens are decoded and tokenized again for the guide.
        temperature: divides the similarities; positive.
        margin_strategy, margin: see `tilewise.Guide`. A relative margin is in [0, 1].
        contrast_anchors, contrast_positives: whether anchors are compared with anchors, and positives with positives.
        gather_across_devices: compare with positives and negatives of all ranks. Each rank returns its share of the
            global mean, as in `MultipleNegativesRankingLoss`.
        options: how to compute it. No option changes the result beyond rounding.

    Memory: linear in the rows. Cost: a product of both models for each pair of columns that is compared.
    """

    def __init__(
        self,
        model: nn.Module,
        guide: nn.Module,
        temperature: float = 0.01,
        margin_strategy: Literal["absolute", "relative"] = "absolute",
        margin: float = 0.0,
        contrast_anchors: bool = True,
        contrast_positives: bool = True,
        gather_across_devices: bool = False,
        *,
        options: TileOptions | None = None,
    ) -> None:
        super().__init__()
        self.model, self.guide = check_model(model), check_model(guide)
        self.must_retokenize = _must_retokenize(model, guide)
        if self.must_retokenize:
            refuse_static(model, "a guide with another tokenizer")
        none = torch.empty(0, 1)
        Guide(query=none, key=none, margin=margin, margin_strategy=margin_strategy)  # checks the margin
        self.temperature = temperature
        self.margin_strategy, self.margin = margin_strategy, margin
        self.contrast_anchors, self.contrast_positives = contrast_anchors, contrast_positives
        self.gather_across_devices, self.options = gather_across_devices, options

    def forward(self, sentence_features: Iterable[dict[str, Any]], labels: Tensor | None = None) -> Tensor:
        """The loss of a batch: a dict of features per column. Labels are not used."""
        columns = list(sentence_features)
        guide_columns = self.guide_inputs(columns)  # first, because the model writes its outputs into the features
        embeddings = embed_columns(self.model, columns)
        with torch.no_grad():
            guide_embeddings = embed_columns(self.guide, guide_columns)
        return self.compute_loss_from_embeddings(embeddings, guide_embeddings)

    def guide_inputs(self, columns: list[dict[str, Any]]) -> list[dict[str, Any]]:
        """The features of each column for the guide: a copy of the model's, or the texts with the guide's tokens."""
        if not self.must_retokenize:
            return [inputs_of(features) for features in columns]
        tokenizer: Any = self.model.tokenizer
        guide: Any = self.guide
        tokenize = getattr(guide, "preprocess", None) or guide.tokenize  # sentence-transformers before 6 has the latter
        found = []
        for features in columns:
            texts = tokenizer.batch_decode(_token_ids(features), skip_special_tokens=True)
            found.append(map_tensors(lambda value: value.to(guide.device), dict(tokenize(texts))))
        return found

    def compute_loss_from_embeddings(self, embeddings: list[Tensor], guide_embeddings: list[Tensor]) -> Tensor:
        """The loss of embeddings: anchors, positives, then columns of negatives, (n, d) each; (n, e) of the guide."""
        check_columns(embeddings)
        if len(guide_embeddings) != len(embeddings):
            raise ShapeError(
                f"the guide needs an embedding for each column, {len(embeddings)} of them, got {len(guide_embeddings)}"
            )
        check_columns(guide_embeddings)
        anchor, positive, *hard = (_check.autocast(F.normalize(column, dim=1)) for column in embeddings)
        guides = [F.normalize(column.detach(), dim=1).to(anchor) for column in guide_embeddings]
        group = world_group() if self.gather_across_devices else None
        guide = Guide(
            query=guides[0],
            key=guides[1],
            negative_keys=torch.cat(guides[2:]) if hard else None,
            margin=self.margin,
            margin_strategy=self.margin_strategy,
        )
        settings: dict[str, Any] = {"temperature": self.temperature, "group": group, "options": self.options}
        negatives = torch.cat(hard) if hard else None
        loss_n = info_nce(anchor, positive, negatives, guide=guide, reduction="none", **settings)
        same = []  # columns that are compared with themselves: embeddings, those of the guide, group
        if self.contrast_anchors:
            same.append((anchor, guides[0], ""))
        if self.contrast_positives:
            same.append((positive, guides[1], _check.group_name(group)))
        if same:
            scale = _check.check_temperature(self.temperature, anchor)
            pos_n = scale * (anchor.to(scale.dtype) * positive.to(scale.dtype)).sum(1)
            # Scores relative to the target's, as those of `info_nce`: late in training the difference is small.
            shift = pos_n.detach()
            limit = guide_limit(guides[0], guides[1], self.margin, self.margin_strategy)
            how: dict[str, Any] = {"row_shift": shift, "options": _check.check_options(self.options)}
            for rows, guide_rows, name in same:
                both = (rows, rows, scale, guide_rows, guide_rows, limit)
                lse_n = guided_logsumexp(*both, group_name=name, **how)
                loss_n = torch.logaddexp(loss_n, lse_n - (pos_n - shift))
        return mean_over(group, loss_n)

    def get_config_dict(self) -> dict[str, Any]:
        """The settings, for a model card."""
        return {
            "guide": self.guide,
            "temperature": self.temperature,
            "margin_strategy": self.margin_strategy,
            "margin": self.margin,
            "contrast_anchors": self.contrast_anchors,
            "contrast_positives": self.contrast_positives,
            "gather_across_devices": self.gather_across_devices,
        }


class CachedGISTEmbedLoss(CachedLoss):
    """`GISTEmbedLoss` with a gradient cache: both models encode ``mini_batch_size`` rows at a time.

    Loss and gradients equal those of the same chunks without a cache, including dropout of the model. The guide runs
    once. The result is an ordinary loss. See `tilewise.cache`.

    Args:
        mini_batch_size: rows per forward of a model.
        mini_batch_num_tokens: if given, it replaces ``mini_batch_size``: a forward has as many rows as have at most so
            many tokens together, without padding.
        show_progress_bar: show a bar for each of the two passes.

    The other arguments are those of `GISTEmbedLoss`.

    `MatryoshkaLoss` may be around it.
    """

    SETTINGS = (
        *("temperature", "margin_strategy", "margin", "contrast_anchors", "contrast_positives"),
        *("gather_across_devices", "must_retokenize"),
    )

    def __init__(
        self,
        model: nn.Module,
        guide: nn.Module,
        temperature: float = 0.01,
        mini_batch_size: int = 32,
        mini_batch_num_tokens: int | None = None,
        show_progress_bar: bool = False,
        margin_strategy: Literal["absolute", "relative"] = "absolute",
        margin: float = 0.0,
        contrast_anchors: bool = True,
        contrast_positives: bool = True,
        gather_across_devices: bool = False,
        *,
        options: TileOptions | None = None,
    ) -> None:
        super().__init__(mini_batch_size, mini_batch_num_tokens, show_progress_bar)
        contrasts = (contrast_anchors, contrast_positives)
        self.loss = GISTEmbedLoss(
            *(model, guide, temperature, margin_strategy, margin, *contrasts, gather_across_devices), options=options
        )
        refuse_static(model, "a gradient cache")
        self.model, self.guide = self.loss.model, self.loss.guide

    def forward(self, sentence_features: Iterable[dict[str, Any]], labels: Tensor | None = None) -> Tensor:
        """The loss of a batch: a dict of features per column. Labels are not used."""
        columns = [inputs_of(features) for features in sentence_features]
        with torch.no_grad():
            encoder, settings = encoder_of(self.guide), self.chunks()
            guides = [cached_encode(encoder, column, **settings) for column in self.loss.guide_inputs(columns)]
        return self.cached_loss(columns, guides)

    def joined(self, more: list[list[Tensor]]) -> list[Tensor]:
        """The guide's embeddings of each column, from those of its chunks."""
        return [torch.cat(chunks) for chunks in more]

    def in_one_chunk(self, more: list[Tensor]) -> list[list[Tensor]]:
        """The opposite of `joined`."""
        return [[column] for column in more]

    def get_config_dict(self) -> dict[str, Any]:
        """The settings, for a model card."""
        return self.loss.get_config_dict() | {
            "mini_batch_size": self.mini_batch_size,
            "mini_batch_num_tokens": self.mini_batch_num_tokens,
        }


def _must_retokenize(model: Any, guide: Any) -> bool:
    """Whether the guide has another vocabulary than the model, or truncates texts earlier."""
    for name, one in (("model", model), ("guide", guide)):
        tokenizer = getattr(one, "tokenizer", None)
        if not all(callable(getattr(tokenizer, method, None)) for method in TOKENIZER):
            raise ConfigError(
                f"{name} needs a tokenizer of transformers as its attribute tokenizer, got {type(tokenizer).__name__}. "
                "For other models encode both sides yourself and call tilewise.info_nce(..., guide=tilewise.Guide(...))"
            )
    if model.tokenizer.get_vocab() != guide.tokenizer.get_vocab():
        return True
    lengths = [getattr(one, "max_seq_length", None) for one in (model, guide)]
    longest, guide_longest = (math.inf if length is None else length for length in lengths)
    return bool(guide_longest < longest)


def _token_ids(features: dict[str, Any]) -> Any:
    """The token ids of each text. Texts in one row without padding are split at their lengths."""
    ids = features["input_ids"]
    if "cu_seq_lens_q" not in features:
        return ids
    ends = features["cu_seq_lens_q"].tolist()
    return [ids[0, start:end].tolist() for start, end in pairwise(ends)]
