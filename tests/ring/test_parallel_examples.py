"""The examples of data x tensor parallelism and of context parallelism have the losses of one process."""

import importlib
import os
import re
import sys
from pathlib import Path

import pytest
import torch
import torch.nn.functional as F
from tests.compare import assert_close
from tests.processes import free_port, run_commands

import tilewise as tw

EXAMPLES = Path(__file__).parents[2] / "examples"
STEPS = ("--steps", "3")
LAYOUTS = ("contiguous", "zigzag", "ulysses")
RUNS = (("two_dimensional", 4, ()), *(("context_parallel", 2, ("--layout", layout)) for layout in LAYOUTS))


@pytest.fixture
def example(monkeypatch):
    """A function that imports an example, as if it were started from its own folder."""
    monkeypatch.syspath_prepend(str(EXAMPLES))
    yield importlib.import_module
    for name in ("context_parallel", "two_dimensional", "llama", "language_model"):
        sys.modules.pop(name, None)


@pytest.mark.parametrize("name", ["context_parallel", "llama", "two_dimensional"])
def test_they_are_short(name):
    assert len((EXAMPLES / f"{name}.py").read_text().splitlines()) < (80 if name == "two_dimensional" else 95)


@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("world", [1, 2, 4])
def test_targets_that_are_shifted_before_they_are_cut_have_the_mean_of_whole_sequences(example, layout, world):
    """Without processes: the sums of the ranks. Targets that are shifted after the cut lose the seam."""
    positions = example("context_parallel").positions
    torch.manual_seed(0)
    hidden, weight = torch.randn(3, 16, 8, dtype=torch.float64), torch.randn(20, 8, dtype=torch.float64)
    labels = torch.randint(20, (3, 16)).masked_fill(torch.rand(3, 16) < 0.3, -100)
    want = F.cross_entropy((hidden[:, :-1] @ weight.T).flatten(0, 1), labels[:, 1:].flatten())
    cuts = [positions(16, rank, world, layout) for rank in range(world)]
    assert torch.cat(cuts).sort().values.tolist() == list(range(16))

    def mean(targets):
        sums = [tw.linear_cross_entropy(hidden[:, own], weight, targets[:, own], reduction="sum") for own in cuts]
        return sum(sums) / (targets != -100).sum()

    assert_close(mean(F.pad(labels[:, 1:], (0, 1), value=-100)), want, 1e-12, layout)
    if world > 1:
        late = [tw.linear_cross_entropy(hidden[:, own], weight, labels[:, own], shift=1) for own in cuts]
        assert abs(sum(late) / world - want) > 1e-3


def all_runs():
    """A rank: the examples that have as many ranks, one after the other. Prints their losses."""
    sys.path.insert(0, str(EXAMPLES))
    torch.set_num_threads(1)
    read = torch.load(os.environ["TOKENS"])
    importlib.import_module("language_model").read_tokens = lambda vocabulary: read
    world = int(os.environ["WORLD_SIZE"])
    ports = os.environ["PORTS"].split()
    for (name, ranks, options), port in zip(RUNS, ports, strict=True):
        if ranks == world:
            os.environ["MASTER_PORT"] = port  # each makes a group of its own
            print(name, *options, *importlib.import_module(name).main([*STEPS, *options]), flush=True)


@pytest.mark.group
def test_their_losses_are_those_of_one_process(example, tmp_path, capsys):
    read = example("language_model").read_tokens(vocabulary=2_000)  # once: it takes longer than three steps
    torch.save(read, tmp_path / "tokens.pt")
    example("language_model").read_tokens = lambda vocabulary: read
    want = {name: example(name).main([*STEPS]) for name in ("two_dimensional", "context_parallel")}
    assert want["two_dimensional"][0] > want["two_dimensional"][-1] + 0.1
    assert "step 0: loss 7." in capsys.readouterr().out
    for world in (2, 4):
        ports = " ".join(str(free_port()) for _ in RUNS)
        common = {"WORLD_SIZE": str(world), "MASTER_ADDR": "127.0.0.1", "PORTS": ports}
        common["TOKENS"] = str(tmp_path / "tokens.pt")
        commands = [(common | {"RANK": str(rank), "LOCAL_RANK": str(rank)}, []) for rank in range(world)]
        for code, output in run_commands(all_runs, tmp_path, commands):
            assert code == 0, output
            for name, ranks, options in RUNS:
                if ranks != world:
                    continue
                line = re.search(f"^{' '.join((name, *options))} (.*)$", output, re.MULTILINE)
                losses = [float(value) for value in line[1].split()]
                assert losses == pytest.approx(want[name], abs=1e-5), (name, options)
