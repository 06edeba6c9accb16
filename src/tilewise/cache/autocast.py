"""Record the autocast state, and enter it again later."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass

import torch


@dataclass(frozen=True)
class Autocast:
    """A recorded autocast state. It can be entered again later, also in another thread."""

    states: tuple[tuple[str, bool, torch.dtype], ...]
    cache_enabled: bool

    @classmethod
    def record(cls, device_types: set[str]) -> Autocast:
        """Record the current state for these device types."""
        states = tuple(
            (kind, torch.is_autocast_enabled(kind), torch.get_autocast_dtype(kind))
            for kind in sorted(device_types)
            if torch.amp.is_autocast_available(kind)
        )
        return cls(states, torch.is_autocast_cache_enabled())

    @contextmanager
    def active(self) -> Iterator[None]:
        """Enter the recorded state."""
        with ExitStack() as stack:
            for kind, enabled, dtype in self.states:
                stack.enter_context(
                    torch.autocast(kind, dtype=dtype, enabled=enabled, cache_enabled=self.cache_enabled)
                )
            yield

    def clear_cache(self) -> None:
        """Clear autocast's cache of low-precision weights.

        A copy that was cached without a graph must not be used in a graph, because the gradient would stop at it.
        Recent versions of torch prevent this. In all versions, the memory is freed.
        """
        if any(enabled for _, enabled, _ in self.states):
            torch.clear_autocast_cache()
