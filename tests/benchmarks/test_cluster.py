"""The benchmark of a cluster: what it measures and predicts with one and with two ranks."""

import json

import pytest
from tests.processes import free_port, run_commands

from benchmarks import cluster

SIZES = ["--rows", "64", "--width", "16", "--classes", "100", "--repeats", "2"]


def test_one_process_measures_the_work_alone():
    found = cluster.main(SIZES)
    assert found["world"] == 1
    assert set(found["alone_ms"]) == {"ring", "head", "encoders"}
    assert found["rate_tflops"] == pytest.approx(8 * 64 * 64 * 16 / found["alone_ms"]["ring"] / 1e9)
    assert "cases" not in found


@pytest.mark.group
def test_two_ranks_compare_what_they_measure_with_the_model(tmp_path):
    common = {"WORLD_SIZE": "2", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(free_port())}
    arguments = [*SIZES, "--out", str(tmp_path / "found.json")]
    commands = [(common | {"RANK": str(rank)}, arguments) for rank in range(2)]
    (code, output), (other, silent) = run_commands(cluster.main, tmp_path, commands)
    assert (code, other, silent) == (0, 0, ""), output + silent
    found = json.loads((tmp_path / "found.json").read_text())
    assert (found["world"], found["transport"], found["sizes"]["classes"]) == (2, "gloo", 100)
    assert set(found["cases"]) == {"ring", "head", "step"}
    sent_ms = 100 * 16 * 8 / 2 / found["link_gb_s"] / 1e6  # half of the weight and of its gradient
    assert found["cases"]["head"]["predicted_ms"] == pytest.approx(found["alone_ms"]["head"] + sent_ms)
    for name, case in found["cases"].items():
        assert case["measured_ms"] > 0
        assert f"| {name} | {case['measured_ms']:.3g} | {case['predicted_ms']:.3g} |" in output
