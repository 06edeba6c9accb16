"""Record the autocast state of a moment, to be in it again later."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass

import torch


@dataclass(frozen=True)
class Autocast:
    """The autocast state of a moment, to be entered again later, also on another thread."""

    states: tuple[tuple[str, bool, torch.dtype], ...]
    cache_enabled: bool

    @classmethod
    def record(cls, device_types: set[str]) -> Autocast:
        """The state that is active now for these device types."""
        states = tuple(
            (kind, torch.is_autocast_enabled(kind), torch.get_autocast_dtype(kind))
            for kind in sorted(device_types)
            if torch.amp.is_autocast_available(kind)
        )
        return cls(states, torch.is_autocast_cache_enabled())

    @contextmanager
    def active(self) -> Iterator[None]:
        """Be in that state inside."""
        with ExitStack() as stack:
            for kind, enabled, dtype in self.states:
                stack.enter_context(
                    torch.autocast(kind, dtype=dtype, enabled=enabled, cache_enabled=self.cache_enabled)
                )
            yield

    def forget(self) -> None:
        """Drop the low-precision weights that autocast keeps.

        A copy that was made without a graph must not serve where there is one: the gradient would end in it.
        Recent torch sees to that by itself; the memory is free either way.
        """
        if any(enabled for _, enabled, _ in self.states):
            torch.clear_autocast_cache()
