"""Precision of float32 products.

PyTorch has two settings: `torch.set_float32_matmul_precision`, and `fp32_precision` of `torch.backends`. The first also
sets the second. If only the second was set, `torch.get_float32_matmul_precision` raises an error.

Both are settings of the process, and products of all threads follow them. So calls of different precision in several
threads take turns: those that compute with the setting of the process run side by side, and so do those that compute
with one other precision. The first of the latter changes the setting, the last one restores it.
"""

from __future__ import annotations

import threading
from collections.abc import Callable
from typing import Any

import torch

Setting = tuple[str, ...]  # `fp32_precision` of both backends


def float32_precision() -> str:
    """The precision of this thread's products on a GPU: "highest", or "high" if TF32 is permitted."""
    with matmul_precision("torch"):
        return "high" if torch.backends.cuda.matmul.fp32_precision == "tf32" else "highest"


class MatmulPrecision:
    """A context in which float32 products have the precision of `TileOptions.precision`.

    It is one call, from its first product to its last. Inside of another call of the same thread, that one pauses.
    """

    __slots__ = ("changes", "inside", "outer", "precision")

    def __init__(self, precision: str) -> None:
        self.precision, self.changes = precision, False

    def __enter__(self) -> None:
        self.outer: MatmulPrecision | None = getattr(_thread, "call", None)
        if self.outer is None and self.precision == "torch":  # nearly all calls
            self.inside = False
            _turns.plain.add(self)
            if _turns.changed_to is None:
                _thread.call = self
                return
            _turns.leave(self)
        # "torch" is the precision of the call around it.
        self.inside = self.outer is not None and self.precision in ("torch", self.outer.precision)
        if self.inside:
            return
        if self.outer is not None:
            _turns.leave(self.outer)
        _turns.join(self)
        _thread.call = self

    def __exit__(self, *_: object) -> None:
        if self.inside:
            return
        _turns.plain.discard(self)  # of nearly all calls, this is all that `leave` does
        if self.changes or _turns.changed_to is not None:
            _turns.leave(self)
        _thread.call = self.outer
        if self.outer is not None:
            _turns.join(self.outer)


class _Turns:
    """Which calls compute now.

    A call that needs no change does not take the lock: it adds itself to ``plain`` and then reads ``changed_to``.
    A call that makes a change sets ``changed_to`` first and then waits until ``plain`` is empty. So one sees the other.
    """

    def __init__(self) -> None:
        self.moved = threading.Condition()
        self.plain: set[MatmulPrecision] = set()  # calls that compute with the setting of the process
        self.changed_to: str | None = None  # the other precision, from when the first call asks for it
        self.restore: Callable[[], None] | None = None  # there once the setting is changed
        self.calls = 0  # that compute with it
        self.queue: list[MatmulPrecision] = []  # calls that wait; the first one goes first

    def join(self, call: MatmulPrecision) -> None:
        """Wait for the turn of a call."""
        setting = None
        self.plain.add(call)
        if self.changed_to is None:
            setting = _setting(call.precision)
            if _is(setting, call.precision):
                return
        self._leave_plain(call)
        with self.moved:
            self.queue.append(call)
            try:
                self.moved.wait_for(lambda: self._may_join(call))
                if self.changed_to is None:
                    setting = setting or _setting(call.precision)
                    if _is(setting, call.precision):
                        self.plain.add(call)
                        return
                    self._change(call.precision, setting)
                self.calls += 1
                call.changes = True
            finally:
                self.queue.remove(call)
                self.moved.notify_all()

    def leave(self, call: MatmulPrecision) -> None:
        """End or pause a call."""
        if not call.changes:
            self._leave_plain(call)
            return
        with self.moved:
            call.changes = False
            self.calls -= 1
            if self.calls == 0:
                assert self.restore is not None
                self.restore()
                self.changed_to = self.restore = None
            self.moved.notify_all()

    def _leave_plain(self, call: MatmulPrecision) -> None:
        self.plain.discard(call)
        if self.changed_to is not None:
            with self.moved:
                self.moved.notify_all()

    def _may_join(self, call: MatmulPrecision) -> bool:
        same = self.restore is not None and self.changed_to == call.precision
        return self.queue[0] is call and (same or self.changed_to is None)

    def _change(self, precision: str, setting: Setting) -> None:
        self.changed_to = precision
        try:
            self.moved.wait_for(lambda: not self.plain)
            self.restore = _changed(precision, setting)
        finally:
            if self.restore is None:  # interrupted
                self.changed_to = None


def _backends() -> tuple[Any, Any]:
    return torch.backends.cuda.matmul, torch.backends.mkldnn.matmul  # type: ignore[attr-defined]


def _setting(precision: str) -> Setting:
    """That of the process; not read for "torch", which is any."""
    return () if precision == "torch" else tuple(backend.fp32_precision for backend in _backends())


def _is(setting: Setting, precision: str) -> bool:
    """Whether a setting is this precision."""
    return set(setting) <= ({"tf32"} if precision == "high" else {"ieee", "none"})


def _changed(precision: str, setting: Setting) -> Callable[[], None]:
    """Change the setting of the process. Returns what restores it."""
    try:
        before = torch.get_float32_matmul_precision()
    except RuntimeError:  # only `fp32_precision` was set
        before = None
    if before is not None:
        torch.set_float32_matmul_precision(precision)
    else:
        for backend in _backends():
            backend.fp32_precision = "tf32" if precision == "high" else "ieee"

    def restore() -> None:
        if before is not None:
            torch.set_float32_matmul_precision(before)
        for backend, value in zip(_backends(), setting, strict=True):
            backend.fp32_precision = value

    return restore


matmul_precision = MatmulPrecision
_thread = threading.local()
_turns = _Turns()
