"""examples/grpo.py runs, and its first importance ratio is 1 to six digits."""

from __future__ import annotations

import re
from pathlib import Path

import pytest
from tests.processes import run_commands, run_script

ROOT = Path(__file__).parents[2]


@pytest.mark.slow
def test_first_importance_ratio_is_one(tmp_path: Path) -> None:
    arguments = [str(ROOT / "examples" / "grpo.py"), "--steps", "2"]
    ((code, shown),) = run_commands(run_script, tmp_path, [({}, arguments)])
    assert code == 0, shown
    low, high = re.search(r"first importance ratio: (\S+) to (\S+)", shown).groups()
    assert 1 - 2e-6 < float(low) <= float(high) < 1 + 2e-6
    low, high = re.search(r"rounded to bfloat16 it would be (\S+) to (\S+)", shown).groups()
    assert float(high) - float(low) > 1e-4, "rounding must be visible"
