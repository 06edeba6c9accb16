"""SIGTERM and Ctrl-C as requests: the current step is finished and saved, then the run ends."""

from __future__ import annotations

import os
import signal
import threading
from types import FrameType
from typing import Any


class StopRequest:
    """Inside the block, the first SIGTERM or SIGINT sets `signal_number`; a second SIGINT interrupts as usual.

    Under ``torchrun`` it is the third: Ctrl-C in a terminal reaches every process, and ``torchrun`` sends it on, too.
    """

    def __init__(self) -> None:
        self.signal_number = 0
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
        self.signal_number = self.signal_number or number

    def __exit__(self, *unused: object) -> None:
        for number, handler in self._before.items():
            signal.signal(number, handler)
