"""The cost model obeys its laws, and the committed tables are up to date."""

from __future__ import annotations

import json

import pytest
from reproductions.cost_model import OUT, PAPER_GB, Loss, Machine, main, memory_bytes, paper_model_gib, predict

MACHINE, LOSS = Machine(), Loss()


def test_committed_results_are_what_the_model_writes(tmp_path, capsys):
    main(["--out", str(tmp_path)])
    for name in ("cost_model.json", "cost_model.md"):
        assert (tmp_path / name).read_text() == (OUT / name).read_text(), (
            f"run python -m reproductions.cost_model: {name}"
        )
    assert (OUT / "cost_model.png").stat().st_size > 10_000


def test_one_rank_talks_to_nobody():
    alone = predict(1, 2**16, MACHINE, LOSS)
    assert (alone.link_s, alone.exposed_s, alone.sent_bytes, alone.hidden_share) == (0.0, 0.0, 0, 1.0)
    products = 4 * 2 * 2**32 * LOSS.width / (MACHINE.rate_tflops * 1e12)
    assert alone.step_s == pytest.approx(products + 2 * MACHINE.block_overhead_s)


@pytest.mark.parametrize("world", [8, 64, 1024])
def test_memory_depends_on_the_rows_of_a_rank_and_not_on_the_ranks(world):
    assert memory_bytes(world, 4096, LOSS) == memory_bytes(2, 4096, LOSS)


def test_many_ranks_launch_little():
    """One block at a time, 1,024 ranks would take 307 ms for launches."""
    found = predict(1024, 2**16, MACHINE, LOSS)
    assert 2 * 1024 * MACHINE.block_overhead_s > 0.3
    assert found.overhead_s <= 0.06
    assert found.step_s <= 0.06
    assert found.team > MACHINE.ranks_per_node
    large = predict(1024, 2**24, MACHINE, LOSS)  # blocks that fill the workspace travel one at a time
    assert (large.team, large.overhead_s) == (1, 2 * 1024 * MACHINE.block_overhead_s)


def test_a_step_lies_between_the_longer_of_work_and_link_and_their_sum():
    for world in (2, 8, 32, 256):
        for batch in (2**14, 2**18, 2**22):
            found = predict(world, batch, MACHINE, LOSS)
            assert max(found.work_s, found.link_s) <= found.step_s <= found.work_s + found.link_s + 1e-12
            assert 0.0 <= found.hidden_share <= 1.0


def test_a_slower_link_is_never_faster_and_a_fast_one_is_hidden():
    times = [predict(32, 2**20, Machine(net_gb_s=speed), LOSS).step_s for speed in (1, 5, 25, 400)]
    assert times == sorted(times, reverse=True)
    assert times[0] > 3 * times[-1]
    assert predict(32, 2**20, MACHINE, LOSS).hidden_share > 0.95


def test_the_laws_give_the_figures_of_the_paper():
    for world, methods in PAPER_GB.items():
        for method, figures in methods.items():
            for thousands, told in figures.items():
                law = paper_model_gib(method, world, thousands * 1024)
                # The smallest cells of OpenCLIP also hold buffers of a fixed size.
                assert told == pytest.approx(law, rel=0.15, abs=0.5 if method == "OpenCLIP" else 0.02)


def test_the_json_says_on_what_it_rests():
    told = json.loads((OUT / "cost_model.json").read_text())
    assert told["machine"]["rate_tflops"] == Machine.rate_tflops
    assert {"net_gb_s", "node_gb_s", "hop_latency_s"} <= told["machine"].keys()
