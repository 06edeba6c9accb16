"""Split nested tensors by rows into chunks, and join chunks.

A *tree* is a tensor, or a tuple, list, mapping or dataclass of trees. A mapping is any dict-like object, such as the
``BatchEncoding`` of transformers. Other values (a flag, a string, ``None``) and 0-d tensors are passed to every chunk
unchanged.
"""

from __future__ import annotations

import copy
import dataclasses
import itertools
from collections.abc import Callable, Mapping, Sequence
from typing import Any, Protocol, runtime_checkable

import torch
from torch import Tensor

from tilewise.errors import ConfigError, DtypeError, ShapeError

Tree = Any
ChunkSize = int | Callable[[Tree], Sequence[int]]  # rows of a chunk, or a function: a batch to the rows of each chunk


def map_tensors(function: Callable[[Tensor], Any], tree: Tree) -> Tree:
    """The same tree with ``function`` applied to every tensor.

    >>> map_tensors(lambda t: t + 1, {"x": torch.zeros(2), "name": "a"})
    {'x': tensor([1., 1.]), 'name': 'a'}
    """
    if isinstance(tree, Tensor):
        return function(tree)
    if isinstance(tree, tuple) and hasattr(tree, "_fields"):
        return type(tree)(*(map_tensors(function, item) for item in tree))
    if isinstance(tree, tuple | list):
        return type(tree)(map_tensors(function, item) for item in tree)
    if isinstance(tree, Mapping):
        items = {key: map_tensors(function, value) for key, value in tree.items()}
        return items if type(tree) is dict else _same_mapping(tree, items)
    if dataclasses.is_dataclass(tree) and not isinstance(tree, type):
        names = [field.name for field in dataclasses.fields(tree)]
        twin = copy.copy(tree)
        for name in names:  # setattr fails on frozen dataclasses, and `replace` fails on fields without init
            object.__setattr__(twin, name, map_tensors(function, getattr(tree, name)))
        return twin
    return tree


def _same_mapping(tree: Mapping[Any, Any], items: dict[Any, Any]) -> Any:
    """A mapping of the same type with these items; a dict if the type cannot be copied and written."""
    if not hasattr(tree, "__setitem__"):
        return items
    twin = copy.copy(tree)
    for key, value in items.items():
        old = tree[key]
        twin[key] = value
        if value is not old and tree[key] is value:  # the copy shares the storage of the original
            twin[key] = old
            return items
    return twin


def tensors_of(tree: Tree) -> list[Tensor]:
    """All tensors of a tree, in the order of `map_tensors`."""
    found: list[Tensor] = []

    def keep(tensor: Tensor) -> Tensor:
        found.append(tensor)
        return tensor

    map_tensors(keep, tree)
    return found


def with_tensors(tree: Tree, tensors: Sequence[Tensor]) -> Tree:
    """The tree with its tensors replaced, in order."""
    replacements = iter(tensors)
    return map_tensors(lambda _: next(replacements), tree)


def count_rows(tree: Tree, name: str = "the input") -> int:
    """The number of rows that all tensors of a tree share.

    >>> count_rows({"ids": torch.zeros(5, 7), "mask": torch.zeros(5, 7), "scale": torch.tensor(2.0)})
    5
    """
    shapes = [tuple(tensor.shape) for tensor in tensors_of(tree) if tensor.dim() > 0]
    if not shapes:
        raise DtypeError(
            f"{name} needs at least one tensor with rows to be split into chunks, got {_describe(tree)}. "
            "For other data, pass a LazyBatch(rows, load)"
        )
    if len({shape[0] for shape in shapes}) > 1:
        raise ShapeError(
            f"all tensors of {name} need the same number of rows, got shapes {shapes}. Pass a tensor that all rows "
            "share to the encoder itself: functools.partial(encoder, position_ids=position_ids)"
        )
    if shapes[0][0] == 0:
        raise ShapeError(f"{name} has no rows. A step needs at least one row. Skip empty batches")
    return int(shapes[0][0])


def _describe(tree: Tree) -> str:
    return "None" if tree is None else f"a {type(tree).__name__}"


def row_ranges(rows: int, chunk_size: ChunkSize, batch: Tree = None) -> tuple[slice, ...]:
    """The rows of every chunk of a batch. The last chunk may be shorter, unless a function gives the rows of each.

    >>> row_ranges(5, 2)
    (slice(0, 2, None), slice(2, 4, None), slice(4, 5, None))
    """
    if callable(chunk_size):
        sizes = list(chunk_size(batch))
        if not all(isinstance(size, int) and size > 0 for size in sizes) or sum(sizes) != rows:
            raise ConfigError(
                f"the function chunk_size returns the number of rows of each chunk, {rows} together, got {sizes!r:.80}"
                ". Return whole numbers that add up to it"
            )
        ends = list(itertools.accumulate(sizes))
        return tuple(slice(end - size, end) for end, size in zip(ends, sizes, strict=True))
    if isinstance(chunk_size, bool) or not isinstance(chunk_size, int) or chunk_size < 1:
        raise ConfigError(f"chunk_size is a whole number of rows, at least 1, got {chunk_size!r:.60}. Pass one")
    return tuple(slice(first, min(first + chunk_size, rows)) for first in range(0, rows, chunk_size))


def take_rows(tree: Tree, rows: slice) -> Tree:
    """These rows of every tensor that has rows, as views."""
    return map_tensors(lambda tensor: tensor[rows] if tensor.dim() > 0 else tensor, tree)


@runtime_checkable
class BatchSource(Protocol):
    """A batch whose rows are loaded on demand. `load` must return the same rows each time.

    ``device`` is the device of the chunk when it is encoded. With ``None``, a chunk stays on the device of the tensors
    that `load` returns.
    """

    rows: int
    device: torch.device | None

    def load(self, rows: slice) -> Tree:
        """The rows from ``rows.start`` up to ``rows.stop``, as a tree."""
        ...


class Joined:
    """The outputs of an encoder for all chunks, joined by rows, and the row range of each chunk.

    The output of a chunk may have another number of rows than its input, for example several views of a sample. A 0-d
    tensor, such as a temperature that the model returns, has no rows: the one of the last chunk is used.
    """

    def __init__(self, chunks: list[Tree], name: str) -> None:
        parts = [tensors_of(chunk) for chunk in chunks]
        if not parts[0]:
            raise DtypeError(
                f"{name} must return at least one tensor, got {_describe(chunks[0])}. Return its representations"
            )
        if len({len(part) for part in parts}) > 1:
            raise ShapeError(
                f"{name} returned {sorted({len(part) for part in parts})} tensors for different chunks. "
                "It must return the same structure for every chunk"
            )
        self.template = map_tensors(lambda tensor: torch.empty(0), chunks[0])
        self.ranges: list[list[slice | None]] = []  # by tensor, then by chunk; None for a 0-d tensor
        self._tensors: list[Tensor] = []
        for pieces in zip(*parts, strict=True):
            self.ranges.append(_ranges_of(pieces))
            # Detached, because it may be a parameter, which must stay a leaf.
            self._tensors.append(pieces[-1].detach() if pieces[0].dim() == 0 else _join(pieces, name))

    def take(self) -> list[Tensor]:
        """Return the joined tensors and drop the references to them."""
        tensors, self._tensors = self._tensors, []
        return tensors

    def part(self, index: int, chunk: int, whole: Tensor) -> Tensor | None:
        """The rows of ``whole`` (shaped like tensor ``index``) of this chunk."""
        rows = self.ranges[index][chunk]
        if rows is not None:
            return whole[rows]
        return whole if chunk == len(self.ranges[index]) - 1 else None

    def tree(self, tensors: Sequence[Tensor]) -> Tree:
        """These tensors in the structure that the encoder returned."""
        return with_tensors(self.template, tensors)


def _ranges_of(pieces: Sequence[Tensor]) -> list[slice | None]:
    if pieces[0].dim() == 0:
        return [None] * len(pieces)
    ends = torch.tensor([len(piece) for piece in pieces]).cumsum(0).tolist()
    return [slice(end - len(piece), end) for end, piece in zip(ends, pieces, strict=True)]


def _join(pieces: Sequence[Tensor], name: str) -> Tensor:
    try:
        return torch.cat(list(pieces))
    except RuntimeError as error:
        shapes = [tuple(piece.shape) for piece in pieces]
        raise ShapeError(
            f"the outputs of {name} for different chunks need equal shapes except for their rows, got {shapes}. "
            "Pad to a fixed length, or return one vector per row"
        ) from error


def call_with(function: Callable[..., Tree], chunk: Tree) -> Tree:
    """Call an encoder with a mapping as keywords, a tuple or list as positional arguments, or one argument."""
    if isinstance(chunk, Mapping):
        return function(**chunk)
    if isinstance(chunk, tuple | list) and not hasattr(chunk, "_fields"):
        return function(*chunk)
    return function(chunk)
