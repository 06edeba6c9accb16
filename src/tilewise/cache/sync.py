"""Hold back the gradient reduction of DDP and FSDP until the last chunk.

A wrapped module reduces its gradients in every backward. Here a step has one backward per chunk, and only the
last one that uses the module may reduce. Wrappers are known by what they can do, never by their class.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from typing import Any, Literal

from torch import nn

from tilewise.errors import ConfigError

Sync = Literal["last", "every"]


def synchronizing_modules(modules: Sequence[nn.Module]) -> list[nn.Module]:
    """The modules in here that reduce gradients over ranks, each once."""
    found: dict[nn.Module, None] = {}
    for module in modules:
        for part in module.modules():
            if _is_fsdp2(part) or _has_no_sync(part):
                found[part] = None
    return list(found)


def _is_fsdp2(module: nn.Module) -> bool:
    return hasattr(module, "set_requires_gradient_sync")


def _has_no_sync(module: nn.Module) -> bool:
    return callable(getattr(module, "no_sync", None)) and not _is_fsdp2(module)


class SyncPlan:
    """Which wrapper may reduce in which chunk.

    Args:
        users: for each encoder that will run, in order, its modules and its number of chunks.
        sync: "last" reduces once per step, in the last chunk of the last encoder that uses a wrapper. "every"
            reduces in every chunk: more traffic; under FSDP less memory, for no unsharded gradient is kept.
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
        """Forward and backward of one chunk go inside; tells whether a wrapper counts on it to reduce."""
        reduces = False
        with ExitStack() as stack:
            for wrapper in self.wrappers[user]:
                if self.sync == "last" and self.last[wrapper] == (user, chunk):
                    reduces = True
                elif self.sync == "last":
                    stack.enter_context(_held_back(wrapper))
            yield reduces


@contextmanager
def _held_back(wrapper: nn.Module) -> Iterator[None]:
    if not _is_fsdp2(wrapper):
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
    """In its first backward DDP learns the static graph, and torch fails inside if it may not reduce then."""
    if getattr(wrapper, "static_graph", False) and not getattr(wrapper, "_static_graph_delay_allreduce_enqueued", True):
        raise ConfigError(
            "DDP(static_graph=True) has to reduce gradients in its first backward, so it cannot wait for the last "
            "chunk of the first step. Run that step with sync='every' (and equal numbers of chunks on all ranks), "
            "or leave static_graph out"
        )


def _fsdp2_reduces(module: nn.Module) -> bool:
    """What the user has chosen with ``set_requires_gradient_sync``; there is no public way to ask."""
    state: Any = module._get_fsdp_state() if hasattr(module, "_get_fsdp_state") else None  # type: ignore[operator]
    groups = getattr(state, "_fsdp_param_groups", None) or [getattr(state, "_fsdp_param_group", None)]
    return all(getattr(group, "reduce_grads", True) for group in groups)
