"""SIGTERM and Ctrl-C. During training they end the run after the current step, which is saved. At any other time the
process ends at once."""

from __future__ import annotations

import os
import signal
import sys
import threading
import time
from types import FrameType
from typing import Any

GRACE_S = 10.0  # how long after a stop signal a run still waits for data
SHOW_CURSOR = "\x1b[?25h"  # the progress bar hides the cursor


def end_on_signals() -> None:
    """Let SIGTERM and SIGINT end this process with one sentence, outside the block of a `StopRequest`.

    No cleanup is needed: files are written under another name and renamed, and locks end with the process.
    """
    for number in (signal.SIGTERM, signal.SIGINT):
        signal.signal(number, _end)


def _end(number: int, frame: FrameType | None) -> None:
    # An exception inside an import or a destructor would end in a traceback, or be ignored. Exit directly.
    name = signal.Signals(number).name
    _tell(f"stopped by {name} while no step was running; what was saved is whole. The same command starts again")
    os._exit(128 + number)


def _tell(sentence: str) -> None:
    """Write directly to the terminal. A signal may arrive while Python's own buffers are being written."""
    if os.environ.get("RANK", "0") == "0":  # under torchrun only the first rank prints
        on_screen = SHOW_CURSOR + "\n" if sys.stderr is not None and sys.stderr.isatty() else ""
        os.write(2, f"{on_screen}tilewise: {sentence}\n".encode())


class StopRequest:
    """Inside the block, the first SIGTERM or SIGINT sets `signal_number`. A second SIGINT raises KeyboardInterrupt.

    Under ``torchrun`` the third one does: Ctrl-C in a terminal reaches every process, and ``torchrun`` forwards it too.
    """

    def __init__(self) -> None:
        self.signal_number = 0
        self._noted = 0.0
        self._left = 2 if "TORCHELASTIC_RUN_ID" in os.environ else 1  # SIGINTs that are requests to stop
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
