"""examples/grpo.py runs, and its first importance ratio is 1 to six digits."""

from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]


@pytest.mark.slow
def test_first_importance_ratio_is_one() -> None:
    done = subprocess.run(
        [sys.executable, "examples/grpo.py", "--steps", "2"], cwd=ROOT, capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stderr
    low, high = re.search(r"first importance ratio: (\S+) to (\S+)", done.stdout).groups()
    assert 1 - 2e-6 < float(low) <= float(high) < 1 + 2e-6
    low, high = re.search(r"rounded to bfloat16 it would be (\S+) to (\S+)", done.stdout).groups()
    assert float(high) - float(low) > 1e-4, "rounding must be visible"
