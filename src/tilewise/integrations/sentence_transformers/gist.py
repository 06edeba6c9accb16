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
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn
from torch.autograd.function import once_differentiable

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

    Attributes, as in sentence-transformers:
        similarity_fct: a ``nn.CosineSimilarity``. Others are refused.
        cross_entropy_loss: a ``nn.CrossEntropyLoss``. Assign another function of scores (n, m) and labels (n,) to
            compute another loss, or to look at the scores. All scores of the batch are then stored: first those of the
            anchors with the positives, where the labels point, then those with anchors, between positives, and with
            negatives. They are -inf where a pair is left out. All ranks then need batches of the same size.

    Memory: linear in the rows. Cost: a product of both models for each pair of columns that is compared.
    """

    options: TileOptions | None = None

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
        self.similarity_fct: Any = nn.CosineSimilarity(dim=-1)
        self.cross_entropy_loss: Any = nn.CrossEntropyLoss()

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
                ". Encode the same columns with both models"
            )
        check_columns(guide_embeddings)
        if not isinstance(self.similarity_fct, nn.CosineSimilarity):
            raise ConfigError(
                f"similarity_fct of a GIST loss is nn.CosineSimilarity, got {type(self.similarity_fct).__name__}. "
                "For other similarities call tilewise.info_nce(..., guide=tilewise.Guide(...))"
            )
        columns = [_check.autocast(F.normalize(column, dim=1)) for column in embeddings]
        guides = [F.normalize(column.detach(), dim=1).to(columns[0]) for column in guide_embeddings]
        group = world_group() if self.gather_across_devices else None
        if not _is_plain(self.cross_entropy_loss):
            loss: Tensor = self.cross_entropy_loss(*self._stored_scores(columns, guides, group))
            return loss
        anchor, positive, *hard = columns
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
            scale = _check.scale_tensor(_check.check_temperature(self.temperature, anchor), anchor)
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

    def _stored_scores(
        self, columns: list[Tensor], guides: list[Tensor], group: dist.ProcessGroup | None
    ) -> tuple[Tensor, Tensor]:
        """The scores and labels for a ``cross_entropy_loss`` of the user, from normalized embeddings."""
        limit = guide_limit(guides[0], guides[1], self.margin, self.margin_strategy)[:, None]
        others, guide_others = columns, guides
        if group is not None:  # anchors are compared with those of this rank
            _check_equal_batches(columns[0], group)
            others, guide_others = ([x[0], *(_Gathered.apply(y, group) for y in x[1:])] for x in (columns, guides))
        rows = torch.arange(len(columns[0]), device=columns[0].device)
        labels = rows + (0 if group is None else dist.get_rank(group) * len(rows))
        pairs = [(0, 1)] + [(0, 0)] * self.contrast_anchors + [(1, 1)] * self.contrast_positives
        scores = []
        for one, other in pairs + [(0, negatives) for negatives in range(2, len(columns))]:
            left_out = guides[one] @ guide_others[other].T > limit
            if (one, other) == (0, 1):
                left_out[rows, labels] = False
            scores.append((columns[one] @ others[other].T).masked_fill(left_out, -math.inf))
        return torch.cat(scores, 1) / self.temperature, labels

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


class CachedGISTEmbedLoss(GISTEmbedLoss, CachedLoss):
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
        refuse_static(check_model(model), "a gradient cache")
        contrasts = (contrast_anchors, contrast_positives)
        super().__init__(
            *(model, guide, temperature, margin_strategy, margin, *contrasts, gather_across_devices), options=options
        )
        self.set_chunks(mini_batch_size, mini_batch_num_tokens, show_progress_bar)

    def forward(self, sentence_features: Iterable[dict[str, Any]], labels: Tensor | None = None) -> Tensor:
        """The loss of a batch: a dict of features per column. Labels are not used."""
        columns = [inputs_of(features) for features in sentence_features]
        with torch.no_grad():
            encoder, settings = encoder_of(self.guide), self.chunks()
            guides = [cached_encode(encoder, column, **settings) for column in self.guide_inputs(columns)]
        return self.cached_loss(columns, guides)

    def embed_minibatch(self, *args: Any, **kwargs: Any) -> tuple[Any, ...]:
        """The embeddings of these rows, and twice None: the guide runs by itself. See `CachedLoss`."""
        return *super().embed_minibatch(*args, **kwargs), None

    def joined(self, more: list[list[Tensor]]) -> list[Tensor]:
        """The guide's embeddings of each column, from those of its chunks."""
        return [torch.cat(chunks) for chunks in more]

    def in_one_chunk(self, more: list[Tensor]) -> list[list[Tensor]]:
        """The opposite of `joined`."""
        return [[column] for column in more]

    def get_config_dict(self) -> dict[str, Any]:
        """The settings, for a model card."""
        return super().get_config_dict() | {
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


def _is_plain(function: Any) -> bool:
    """Whether this is the cross-entropy without settings, which needs no stored scores."""
    return (
        type(function) is nn.CrossEntropyLoss
        and function.weight is None
        and function.ignore_index < 0
        and function.reduction == "mean"
        and function.label_smoothing == 0
    )


def _check_equal_batches(rows: Tensor, group: dist.ProcessGroup) -> None:
    sizes = torch.tensor([len(rows), -len(rows)], device=rows.device)
    dist.all_reduce(sizes, dist.ReduceOp.MAX, group=group)
    largest, smallest = sizes[0].item(), -sizes[1].item()
    if largest != smallest:
        raise ShapeError(
            f"with a cross_entropy_loss of your own, all ranks need batches of one size, got {smallest} to {largest} "
            "rows. Drop the last batch, or keep nn.CrossEntropyLoss()"
        )


class _Gathered(torch.autograd.Function):
    """The rows of all ranks. Backward adds the gradients of all ranks."""

    @staticmethod
    def forward(ctx: Any, rows: Tensor, group: dist.ProcessGroup) -> Tensor:
        ctx.group = group
        parts = [torch.empty_like(rows) for _ in range(dist.get_world_size(group))]
        dist.all_gather(parts, rows.contiguous(), group=group)
        return torch.cat(parts)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None]:
        total = grad.clone(memory_format=torch.contiguous_format)
        dist.all_reduce(total, group=ctx.group)
        return total.chunk(dist.get_world_size(ctx.group))[dist.get_rank(ctx.group)], None


def _token_ids(features: dict[str, Any]) -> Any:
    """The token ids of each text. Texts in one row without padding are split at their lengths."""
    ids = features["input_ids"]
    if "cu_seq_lens_q" not in features:
        return ids
    ends = features["cu_seq_lens_q"].tolist()
    return [ids[0, start:end].tolist() for start, end in pairwise(ends)]
