"""The ring, started with torchrun."""

import os
import subprocess
from pathlib import Path

import pytest
from tests.processes import TORCHRUN


@pytest.mark.group
def test_torchrun():
    done = subprocess.run(
        [*TORCHRUN, "--nproc-per-node=2", str(Path(__file__).with_name("torchrun_job.py"))],
        capture_output=True,
        text=True,
        timeout=600,
        env={**os.environ, "OMP_NUM_THREADS": "1"},
    )
    assert done.returncode == 0, done.stderr[-3000:]
    assert "rank 0 of 2" in done.stdout
    assert "rank 1 of 2" in done.stdout
