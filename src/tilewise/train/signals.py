"""SIGTERM and Ctrl-C: while a run trains, requests to finish the step and save; at any other time, the end."""

from __future__ import annotations

import os
import signal
import sys
import threading
import time
from types import FrameType
from typing import Any

GRACE_S = 10.0  # how long after a stop signal a run still waits for data
SHOW_CURSOR = "\x1b[?25h"  # a bar hides it


def end_on_signals() -> None:
    """Until (and after) a `StopRequest` holds them, SIGTERM and SIGINT end this process with one sentence.

    Nothing has to be cleaned up then: files are written aside and renamed, locks go with the process.
    """
    for number in (signal.SIGTERM, signal.SIGINT):
        signal.signal(number, _end)


def _end(number: int, frame: FrameType | None) -> None:
    # No exception: raised inside of an import or a destructor, it would end in a traceback, or be swallowed.
    name = signal.Signals(number).name
    _tell(f"stopped by {name} while no step was running; what was saved is whole. The same command starts again")
    os._exit(128 + number)


def _tell(sentence: str) -> None:
    """Straight to the terminal: a signal may arrive while Python's own buffers are being written."""
    if os.environ.get("RANK", "0") == "0":  # under torchrun one rank speaks
        on_screen = SHOW_CURSOR + "\n" if sys.stderr is not None and sys.stderr.isatty() else ""
        os.write(2, f"{on_screen}tilewise: {sentence}\n".encode())


class StopRequest:
    """Inside the block, the first SIGTERM or SIGINT sets `signal_number`; a second SIGINT interrupts as usual.

    Under ``torchrun`` it is the third: Ctrl-C in a terminal reaches every process, and ``torchrun`` sends it on, too.
    """

    def __init__(self) -> None:
        self.signal_number = 0
        self._noted = 0.0
        self._left = 2 if "TORCHELASTIC_RUN_ID" in os.environ else 1  # requests that are taken as such
        self._before: dict[int, Any] = {}

    def __enter__(self) -> StopRequest:
        if threading.current_thread() is threading.main_thread():
            for number in (signal.SIGTERM, signal.SIGINT):
                self._before[number] = signal.signal(number, self._note)
        return self

    def _note(self, number: int, frame: FrameType | None) -> None:
        if number == signal.SIGINT:
            if self.signal_number and not self._left:
                raise KeyboardInterrupt
            self._left -= 1
        if not self.signal_number:
            again = "; Ctrl-C again gives it up" if number == signal.SIGINT else ""
            _tell(f"{signal.Signals(number).name}: this step is finished and saved, then the run ends{again}")
            self._noted = time.monotonic()
        self.signal_number = self.signal_number or number

    def overdue(self) -> bool:
        """Return whether a stop signal came more than `GRACE_S` ago. Reads that block are then given up."""
        return bool(self.signal_number) and time.monotonic() - self._noted > GRACE_S

    def __exit__(self, *unused: object) -> None:
        for number, handler in self._before.items():
            signal.signal(number, handler)
