"""Defer the gradient reduction of DDP and FSDP to the last chunk.

A wrapped module reduces its gradients in every backward. A cached step has one backward per chunk, and only the last
one that uses the module should reduce. Wrappers are recognized by their methods and not by their class.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from typing import Any, Literal

from torch import nn

from tilewise.errors import ConfigError

Sync = Literal["last", "every"]


def synchronizing_modules(modules: Sequence[nn.Module]) -> list[nn.Module]:
    """All modules that reduce gradients over ranks, without duplicates."""
    found: dict[nn.Module, None] = {}
    for module in modules:
        for part in module.modules():
            if is_fsdp2(part) or _has_no_sync(part):
                found[part] = None
    return list(found)


def is_fsdp2(module: nn.Module) -> bool:
    """Whether `fully_shard` was called with this module. It adds a method to the class."""
    return hasattr(type(module), "set_requires_gradient_sync")


def fsdp2_groups(module: nn.Module) -> list[Any]:
    """The parameter groups of `fully_shard`, for which there is no public getter."""
    state: Any = module._get_fsdp_state() if hasattr(module, "_get_fsdp_state") else None  # type: ignore[operator]
    return getattr(state, "_fsdp_param_groups", None) or [getattr(state, "_fsdp_param_group", None)]


def _has_no_sync(module: nn.Module) -> bool:
    return callable(getattr(module, "no_sync", None)) and not is_fsdp2(module)


class SyncPlan:
    """The chunks in which each wrapper reduces gradients.

    Args:
        users: modules and number of chunks of each encoder, in the order in which they run.
        sync: "last" reduces once per step, in the last chunk of the last encoder that uses a wrapper. "every" reduces
            in every chunk. This sends more, and needs less memory under FSDP, which then keeps no unsharded gradients.
    """

    def __init__(self, users: Sequence[tuple[Sequence[nn.Module], int]], sync: Sync = "last") -> None:
        self.sync = sync
        self.wrappers = [synchronizing_modules(modules) for modules, _ in users]
        self.last: dict[nn.Module, tuple[int, int]] = {}
        for user, (_, chunks) in enumerate(users):
            for wrapper in self.wrappers[user]:
                self.last[wrapper] = (user, chunks - 1)

    @contextmanager
    def chunk(self, user: int, chunk: int) -> Iterator[bool]:
        """Context for forward and backward of one chunk. Yields whether a wrapper reduces in this chunk."""
        reduces = False
        with ExitStack() as stack:
            for wrapper in self.wrappers[user]:
                if self.sync == "last" and self.last[wrapper] == (user, chunk):
                    reduces = True
                elif self.sync == "last":
                    stack.enter_context(_without_sync(wrapper))
            yield reduces


@contextmanager
def _without_sync(wrapper: nn.Module) -> Iterator[None]:
    if not is_fsdp2(wrapper):
        _check_static_graph(wrapper)
        with wrapper.no_sync():  # type: ignore[operator]
            yield
        return
    before = _fsdp2_reduces(wrapper)
    set_sync: Any = wrapper.set_requires_gradient_sync
    set_sync(False, recurse=False)
    try:
        yield
    finally:
        set_sync(before, recurse=False)


def _check_static_graph(wrapper: nn.Module) -> None:
    """DDP records the static graph in its first backward, and torch fails if it does not reduce then."""
    if getattr(wrapper, "static_graph", False) and not getattr(wrapper, "_static_graph_delay_allreduce_enqueued", True):
        raise ConfigError(
            "DDP(static_graph=True) must reduce gradients in its first backward, which is not the last chunk of the "
            "first step. Run that step with sync='every' (and equal numbers of chunks on all ranks), or do not use "
            "static_graph"
        )


def _fsdp2_reduces(module: nn.Module) -> bool:
    """The value set with ``set_requires_gradient_sync``."""
    return all(getattr(group, "reduce_grads", True) for group in fsdp2_groups(module))
