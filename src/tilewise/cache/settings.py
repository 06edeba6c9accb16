"""Settings that the public functions share."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Literal, get_args

import torch

from tilewise.cache.chunks import ChunkSize, row_ranges
from tilewise.cache.sync import Sync
from tilewise.errors import ConfigError, DtypeError
from tilewise.options import check_choice

Buffers = Literal["once", "twice"]
Phase = Literal["encode", "replay"]
Progress = Callable[[int, int, Phase], None]


@dataclass(frozen=True, kw_only=True)
class Settings:
    """How to encode a batch. See `GradientCache` for each setting."""

    chunk_size: ChunkSize | Sequence[ChunkSize]
    offload: torch.device | str | None = None
    sync: Sync = "last"
    buffers: Buffers = "once"
    progress: Progress | None = None

    def __post_init__(self) -> None:
        check_choice("sync", self.sync, get_args(Sync))
        check_choice("buffers", self.buffers, get_args(Buffers))
        if self.progress is not None and not callable(self.progress):
            raise DtypeError(
                f"progress is a function of (chunk, chunks, phase) or None, got {type(self.progress).__name__} "
                f"{self.progress!r:.60}. Pass print, or a function of your own"
            )
        for size in self.chunk_size if isinstance(self.chunk_size, Sequence) else [self.chunk_size]:
            if not callable(size):
                row_ranges(1, size)

    def chunk_sizes(self, encoders: int) -> list[ChunkSize]:
        """One size per encoder."""
        if not isinstance(self.chunk_size, Sequence):
            return [self.chunk_size] * encoders
        if len(self.chunk_size) != encoders:
            raise ConfigError(
                f"chunk_size is one number or one per encoder, got {len(self.chunk_size)} numbers "
                f"for {encoders} encoder{'s' * (encoders != 1)}. Pass one number for all"
            )
        return list(self.chunk_size)
