"""Every kernel compiles for all cards of the size table, has enough registers, and its shared memory fits the card."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

pytest.importorskip("triton", reason="triton is not installed on this platform")

# Shared memory in bytes: of one program at most, and of a multiprocessor
LIMITS = {80: (166912, 167936), 89: (101376, 102400), 90: (232448, 233472), 100: (232448, 233472)}
ROOT = Path(__file__).resolve().parents[2]


SCRIPTS = {
    "compile_two_pass": {
        *("forward_kernel", "repair_kernel", "merge_kernel", "gradient_kernel", "positive_kernel"),
        *("positive_gradient_kernel", "factor_kernel", "check_kernel", "loss_kernel"),
    },
    "compile_filtered": {
        *("mass_kernel", "probe_kernel", "choose_kernel", "pair_kernel", "column_kernel", "gather_kernel"),
    },
    "compile_ranks": {"count_kernel", "best_kernel", "diagonal_kernel"},
    "compile_one_pass": {"exponents of cross entropy", "sigmoid", "rows", "finish", "positives", "runs", "times"},
}
# Mostly return at once; the last: of float32 on an A100
SELDOM = {"repaired sigmoid", "repair_kernel", "best_kernel"}
MOST_STACK = 512  # bytes per thread; with more, a loop over tiles is many times slower


@pytest.mark.slow
@pytest.mark.parametrize("script", SCRIPTS)
def test_kernels_compile_and_fit(script):
    env = {name: value for name, value in os.environ.items() if name != "TRITON_INTERPRET"}
    command = [sys.executable, "-W", "ignore", "-m", f"tests.kernels.{script}"]
    done = subprocess.run(command, cwd=ROOT, env=env, capture_output=True, text=True, timeout=900, check=False)
    assert done.returncode == 0, done.stderr[-3000:]
    lines = [json.loads(line) for line in done.stdout.splitlines() if line.startswith("{")]
    assert {line["kernel"] for line in lines} >= SCRIPTS[script]
    assert {line["capability"] for line in lines} == set(LIMITS)
    for line in lines:
        most, together = LIMITS[line["capability"]]
        assert line["shared"] <= most, line
        assert line["stack"] <= MOST_STACK or line["kernel"] in SELDOM, line
        assert line["programs"] * (line["shared"] + 1024) <= together, line
