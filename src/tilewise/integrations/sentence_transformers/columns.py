"""Shared parts of the losses: embeddings of the columns of a batch, ids, checks, and the mean over ranks."""

from __future__ import annotations

import hashlib
import sys
from collections.abc import Callable, Sequence
from numbers import Integral
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

from tilewise.cache import Encoder, GradientCache
from tilewise.cache.chunks import count_rows, map_tensors, take_rows
from tilewise.cache.settings import Progress
from tilewise.errors import ConfigError, DtypeError, RangeError, ShapeError


class CachedLoss(nn.Module):
    """A gradient cache for the model of a loss that has a method ``compute_loss_from_embeddings``."""

    uses_gradient_cache = True  # read by the wrapping losses of sentence-transformers
    model: nn.Module
    compute_loss_from_embeddings: Callable[..., Tensor]

    def set_chunks(self, mini_batch_size: int, mini_batch_num_tokens: int | None, show_progress_bar: bool) -> None:
        """Check and keep the settings of the chunks."""
        if mini_batch_num_tokens is not None and mini_batch_num_tokens <= 0:
            raise RangeError(
                f"mini_batch_num_tokens must be a positive integer or None, got {mini_batch_num_tokens}. None is none"
            )
        self.mini_batch_size, self.mini_batch_num_tokens = mini_batch_size, mini_batch_num_tokens
        self.show_progress_bar = show_progress_bar

    def chunks(self) -> dict[str, Any]:
        """The settings of a gradient cache: the size of its chunks, and an optional progress bar."""
        tokens = self.mini_batch_num_tokens
        size = self.mini_batch_size if tokens is None else lambda features: rows_by_tokens(features, tokens)
        return {"chunk_size": size, "progress": progress_bar() if self.show_progress_bar else None}

    def cached_loss(self, columns: list[dict[str, Any]], more: Any) -> Tensor:
        """The loss of the columns of a batch. ``more`` is the second argument of ``calculate_loss``, joined."""
        cache = GradientCache(Encoder(self._embed, (self.model,)), self._loss_of_columns, **self.chunks())
        loss: Tensor = cache.loss(*columns, more=more)
        return loss

    def embed_minibatch(
        self,
        sentence_feature: dict[str, Any],
        begin: int,
        end: int,
        with_grad: bool,
        copy_random_state: bool = False,
        random_state: None = None,
    ) -> tuple[Any, ...]:
        """The embeddings of these rows, and None. Called for each chunk in both passes; it may be replaced.

        The last two arguments and the None are those of sentence-transformers, where this method also keeps the random
        state. Here the cache does that.
        """
        with torch.set_grad_enabled(with_grad):
            chunk = without_padding(take_rows(sentence_feature, slice(begin, end)))
            return self.model(chunk)["sentence_embedding"], None

    def _embed(self, **chunk: Any) -> Tensor:
        rows, grad = count_rows(chunk), torch.is_grad_enabled()
        embedding: Tensor = self.embed_minibatch(
            sentence_feature=chunk, begin=0, end=rows, with_grad=grad, copy_random_state=False, random_state=None
        )[0]
        return embedding

    def calculate_loss(self, reps: list[list[Tensor]], more: Any = None, *, with_backward: bool = False) -> Tensor:
        """The loss of the embeddings of each column, in chunks. `MatryoshkaLoss` replaces this method.

        With ``with_backward``, also runs backward, and returns the loss without its graph.
        """
        loss = self.compute_loss_from_embeddings([torch.cat(chunks) for chunks in reps], self.joined(more))
        if with_backward:
            loss.backward()
            loss = loss.detach()
        return loss

    def joined(self, more: Any) -> Any:
        """The second argument of ``calculate_loss``, with its chunks joined."""
        return more

    def in_one_chunk(self, more: Any) -> Any:
        """The opposite of `joined`."""
        return more

    def _loss_of_columns(self, *embeddings: Tensor, more: Any) -> Tensor:
        if "calculate_loss" not in self.__dict__:
            return self.compute_loss_from_embeddings(list(embeddings), more)
        # `MatryoshkaLoss` calls the original several times, each time with its backward.
        more = self.in_one_chunk(more)
        if not torch.is_grad_enabled():
            return self.calculate_loss([[column] for column in embeddings], more)
        leaves = [column.detach().requires_grad_() for column in embeddings]
        total = self.calculate_loss([[leaf] for leaf in leaves], more, with_backward=True)
        known = [
            (column * leaf.grad).sum() for column, leaf in zip(embeddings, leaves, strict=True) if leaf.grad is not None
        ]
        return total + sum(term - term.detach() for term in known)  # the value of `total`, with these gradients


def rows_by_tokens(features: dict[str, Any], tokens: int) -> list[int]:
    """The number of rows of each chunk, with as many rows as ``tokens`` allow, padding not counted, and at least one.

    >>> rows_by_tokens({"attention_mask": torch.tensor([[1, 1, 0], [1, 0, 0], [1, 1, 1], [1, 1, 1]])}, 3)
    [2, 1, 1]
    """
    mask = features.get("attention_mask")
    if not isinstance(mask, Tensor) or mask.dim() != 2:
        raise ConfigError(
            "mini_batch_num_tokens needs the number of tokens of each text, and the features have no attention_mask "
            "with a row for each. Use mini_batch_size instead"
        )
    sizes: list[int] = []
    total = 0
    for count in mask.sum(1).tolist():
        total += count
        if sizes and total <= tokens:
            sizes[-1] += 1
        else:
            sizes.append(1)
            total = count
    return sizes


def without_padding(features: dict[str, Any]) -> dict[str, Any]:
    """The features without the last columns, if they are padding in all rows."""
    mask = features.get("attention_mask")
    if not isinstance(mask, Tensor) or mask.dim() != 2 or not (used := mask.bool().any(0).nonzero()).numel():
        return features
    width, end = mask.shape[1], int(used[-1]) + 1

    def cut(value: Any) -> Any:
        whole = isinstance(value, Tensor) and value.dim() >= 2 and value.shape[1] == width
        return value[:, :end] if whole else value

    return {name: cut(value) for name, value in features.items()}


def progress_bar() -> Progress:
    """A progress function of a gradient cache that shows a bar for each pass."""
    from tqdm import tqdm

    bars: dict[str, Any] = {}

    def show(chunk: int, chunks: int, phase: str) -> None:
        if chunk == 0:
            bars[phase] = tqdm(total=chunks, desc=f"{phase} mini-batches", leave=False)
        bars[phase].update()
        if chunk + 1 == chunks:
            bars[phase].close()

    return show


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
    """The model as an encoder of a gradient cache. It gets chunks without padding, as in sentence-transformers."""
    return Encoder(lambda **features: model(without_padding(features))["sentence_embedding"], (model,))


def check_model(model: Any) -> nn.Module:
    """Check that this is a module. Returns it."""
    if not isinstance(model, nn.Module):
        raise DtypeError(
            "model is a module that maps a batch of features to a dict with 'sentence_embedding', as a "
            f"SentenceTransformer does, got {model!r}. To pass embeddings, use "
            "MultipleNegativesRankingLoss(None) and compute_loss_from_embeddings, or tilewise.info_nce"
        )
    return model


def refuse_static(model: nn.Module, use: str) -> None:
    """Refuse a model whose features have no row for each text."""
    if any(type(module).__name__ == "StaticEmbedding" for module in model.modules()):
        raise ConfigError(
            f"{use} is not compatible with a SentenceTransformer model based on a StaticEmbedding, whose features have "
            "no row for each text. Use the loss without a cache, and a guide with the same tokenizer"
        )


def check_columns(embeddings: list[Tensor]) -> None:
    """Check the embeddings of a batch: at least two columns of the same shape."""
    if len(embeddings) < 2:
        raise ShapeError(
            f"a batch needs at least two columns, queries and their documents, got {len(embeddings)}. Does the dataset "
            "lack one?"
        )
    shapes = [tuple(column.shape) for column in embeddings]
    if len(set(shapes)) > 1:
        raise ShapeError(
            f"all columns need the same shape, because row i of each is one sample, got {shapes}. Did a filter drop "
            "samples of one column only?"
        )


def hash_ids(ids: Sequence[str] | Sequence[int]) -> Tensor:
    """Integer ids of strings, (n,) int64, the same in every process. Integers are kept.

    A string becomes the first 8 bytes of its BLAKE2 hash. Two different ones of a million collide with a probability of
    3e-8. Use it to make the column "label" of a dataset::

        dataset = dataset.map(lambda row: {"label": hash_ids([row["document_id"]]).item()})

    >>> hash_ids(["a", "b", "a"]).unique().numel()
    2
    """
    if isinstance(ids, str) or not all(isinstance(value, str | Integral) for value in ids):
        raise DtypeError(
            f"ids is a list of strings or of integers, got {ids!r:.60}. Pass one string or integer per row"
        )
    numbers = [_hash(value) if isinstance(value, str) else int(value) for value in ids]
    if large := [number for number in numbers if not -(2**63) <= number < 2**63]:
        raise RangeError(f"integer ids must fit into 64 bits, got {large[0]}. Pass larger ones as strings")
    return torch.tensor(numbers, dtype=torch.int64)


def _hash(text: str) -> int:
    return int.from_bytes(hashlib.blake2b(text.encode(), digest_size=8).digest(), "big", signed=True)


def mean_over(group: dist.ProcessGroup | None, loss_n: Tensor) -> Tensor:
    """The mean. Over a group, W / N times the sum of this rank's rows, as all losses return it."""
    if group is None:
        return loss_n.mean()
    rows = torch.tensor(float(loss_n.shape[0]), dtype=torch.float64, device=loss_n.device)
    dist.all_reduce(rows, group=group)
    return loss_n.sum() * (dist.get_world_size(group) / rows).to(loss_n.dtype)
