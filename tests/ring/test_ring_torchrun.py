"""The ring, started with torchrun."""

import os
import subprocess
import sys
from pathlib import Path

import pytest


@pytest.mark.group
def test_torchrun():
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node=2"]
    done = subprocess.run(
        [*command, str(Path(__file__).with_name("torchrun_job.py"))],
        capture_output=True,
        text=True,
        timeout=600,
        env={**os.environ, "GLOO_SOCKET_IFNAME": "lo", "OMP_NUM_THREADS": "1"},
    )
    assert done.returncode == 0, done.stderr[-3000:]
    assert "rank 0 of 2" in done.stdout
    assert "rank 1 of 2" in done.stdout
