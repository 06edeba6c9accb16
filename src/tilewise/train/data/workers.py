"""Threads that read and decode records.

They are daemon threads: a read that never returns, for example from a network file system, does not keep the process
alive. `Workers.map` polls while it waits, so that the caller can give up.
"""

from __future__ import annotations

import queue
import threading
import time
import weakref
from collections.abc import Callable, Iterable
from concurrent.futures import CancelledError, Future
from concurrent.futures import TimeoutError as NotYet
from typing import Any, TypeVar

Item = TypeVar("Item")
Made = TypeVar("Made")
POLL_S = 0.1
BLOCKED_S = 10.0  # seconds after which a read counts as blocked


class Workers:
    """A pool of daemon threads, started at the first use.

    Args:
        count: the number of threads.

    Attributes:
        give_up: if set, `map` calls it when a single call has not returned for `BLOCKED_S`, and raises
            ``CancelledError`` if it returns true.
    """

    def __init__(self, count: int) -> None:
        self.count = count
        self.give_up: Callable[[], bool] | None = None
        self._tasks: queue.SimpleQueue[tuple[Future[Any], Callable[[], Any]] | None] = queue.SimpleQueue()
        self._started = False
        self._lock = threading.Lock()

    def map(
        self, function: Callable[[Item], Made], items: Iterable[Item], give_up: Callable[[], bool] | None = None
    ) -> list[Made]:
        """Return ``[function(item) for item in items]``, computed on the threads.

        The first exception of a call is raised. Calls that have not started by then are dropped.

        Args:
            function: is called on the threads.
            items: its arguments.
            give_up: is called while `map` waits. Once it returns true, `map` raises ``CancelledError``.
        """
        self._start()
        futures: list[Future[Made]] = []
        for item in items:
            future: Future[Made] = Future()
            self._tasks.put((future, lambda item=item: function(item)))  # type: ignore[misc]
            futures.append(future)
        try:
            if give_up is not None:
                return [_result(future, give_up, 0.0) for future in futures]
            return [_result(future, self.give_up, BLOCKED_S) for future in futures]
        finally:
            for future in futures:
                future.cancel()

    def _start(self) -> None:
        with self._lock:
            if self._started:
                return
            self._started = True
            for number in range(self.count):
                threading.Thread(target=_work, args=(self._tasks,), daemon=True, name=f"tilewise-{number}").start()
            weakref.finalize(self, _end, self._tasks, self.count)


def _result(future: Future[Made], give_up: Callable[[], bool] | None, patience_s: float) -> Made:
    if give_up is None:
        return future.result()
    start = time.monotonic()
    while True:
        try:
            return future.result(timeout=POLL_S)
        except NotYet:
            if future.done():  # the call itself raised a TimeoutError
                return future.result()
            if time.monotonic() - start >= patience_s and give_up():
                raise CancelledError from None


def _work(tasks: queue.SimpleQueue[tuple[Future[Any], Callable[[], Any]] | None]) -> None:
    while (task := tasks.get()) is not None:
        future, call = task
        if future.set_running_or_notify_cancel():
            try:
                future.set_result(call())
            except BaseException as error:  # raised again by `map`
                future.set_exception(error)
        del task, future, call  # so that an idle thread has no reference to a source


def _end(tasks: queue.SimpleQueue[Any], count: int) -> None:
    for _ in range(count):
        tasks.put(None)
