"""`import tilewise` costs next to nothing beyond torch, and brings nothing optional along."""

import json
import subprocess
import sys

import pytest

OPTIONAL = {
    "triton",
    "torchvision",
    "transformers",
    "webdataset",
    "pyarrow",
    "PIL",
    "typer",
    "rich",
    "matplotlib",
    "tensorboard",
    "safetensors",
    "pytest",
    "hypothesis",
}
PROGRAM = """
import json, sys, time, warnings
warnings.simplefilter("error", ResourceWarning)
import torch
torch_s = time.process_time()
before, threads, state = set(sys.modules), torch.get_num_threads(), torch.get_float32_matmul_precision()
rng, default = torch.get_rng_state(), torch.get_default_dtype()
start, cpu = time.perf_counter(), time.process_time()
import tilewise
wall_s, cpu_s = time.perf_counter() - start, time.process_time() - cpu
print(json.dumps({
    "wall_s": wall_s, "cpu_s": cpu_s, "torch_s": torch_s,
    "new": sorted({name.split(".")[0] for name in set(sys.modules) - before}),
    "tilewise": sorted(name for name in sys.modules if name.startswith("tilewise.")),
    "untouched": threads == torch.get_num_threads() and state == torch.get_float32_matmul_precision()
        and torch.equal(rng, torch.get_rng_state()) and default == torch.get_default_dtype(),
    "distributed": torch.distributed.is_available() and torch.distributed.is_initialized(),
}))
"""


@pytest.fixture(scope="module")
def imported():
    # torch comes with its bytecode. The first run writes that of this package: see conftest.py.
    command = [sys.executable, "-c", PROGRAM]
    runs = [json.loads(subprocess.run(command, capture_output=True, check=True, timeout=300).stdout) for _ in range(3)]
    return min(runs, key=lambda run: run["cpu_s"] / run["torch_s"])


def test_importing_takes_at_most_a_sixth_of_what_torch_takes(imported):
    # Processor time beside that of torch: neither a busy nor a slow machine changes the answer.
    assert imported["cpu_s"] <= imported["torch_s"] / 6, imported


def test_importing_brings_no_optional_package(imported):
    assert not OPTIONAL & set(imported["new"])


def test_importing_brings_neither_trainer_nor_cache_nor_kernels_of_others(imported):
    for part in ("tilewise.train", "tilewise.integrations", "tilewise.kernels.triton_impl"):
        assert not [name for name in imported["tilewise"] if name.startswith(part)]


def test_importing_changes_no_setting_of_torch(imported):
    assert imported["untouched"]
    assert not imported["distributed"]


def test_torch_knows_the_operators_as_before():
    """A program that torch.export saved is loaded after `import tilewise`, which nothing else of it is asked of."""
    program = "import torch, tilewise; torch.ops.tilewise.pair_stats; torch.ops.tilewise.pair_loss"
    subprocess.run([sys.executable, "-c", program], check=True, timeout=300)
