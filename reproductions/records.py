"""Where results are kept, and how their pages show the recorded command."""

from __future__ import annotations

import re
from pathlib import Path

RESULTS = Path(__file__).resolve().parent / "results"
MOVED = "lm_tables|lm_figures|batch_size|train_step|cost_model|contrastive_skipping"


def todays_command(command: str) -> str:
    """The recorded command with the module's present name.

    These modules were once in `benchmarks`. A JSON file keeps the command that was run; its page shows the command
    that works now.

    >>> todays_command("python -m benchmarks.lm_tables --repeats 12")
    'python -m reproductions.lm_tables --repeats 12'
    >>> todays_command("python -m benchmarks.run gpu")
    'python -m benchmarks.run gpu'
    """
    return re.sub(rf"\bbenchmarks\.({MOVED})\b", r"reproductions.\1", command)
