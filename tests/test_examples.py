"""The examples do what they say: each trains on real data, and its result improves within a few steps."""

from __future__ import annotations

import importlib
import json
import re
import sys
from pathlib import Path
from typing import Any

import pytest
from tests.processes import rank_environments, run_commands, run_script

ROOT = Path(__file__).parents[1]
EXAMPLES = ROOT / "examples"
SCRIPTS = (  # the other examples are whole programs with options, and have tests of their own
    "clip_distillation",
    "contrastive",
    "distillation",
    "language_model",
    "many_classes",
    "mining",
    "recommender",
    "retrieval",
    "several_processes",
    "simclr",
    "zero_shot",
)
NOTEBOOKS = sorted(path.name for path in EXAMPLES.glob("*.ipynb"))


@pytest.fixture
def example(monkeypatch: pytest.MonkeyPatch):
    """A function that imports an example, as if it were started from its own folder."""
    monkeypatch.syspath_prepend(str(EXAMPLES))
    yield importlib.import_module
    for name in SCRIPTS:
        sys.modules.pop(name, None)


@pytest.mark.parametrize("name", SCRIPTS)
def test_examples_are_short(name: str) -> None:
    assert len((EXAMPLES / f"{name}.py").read_text().splitlines()) < 60


@pytest.mark.slow
def test_simclr_finds_the_icon_of_another_family(example: Any) -> None:
    found = example("simclr").main(["--steps", "12"])
    assert found[-1] > found[0] + 0.02


@pytest.mark.slow
def test_a_margin_softmax_recognizes_names_that_it_was_not_trained_on(example: Any) -> None:
    found = example("many_classes").main(["--steps", "200"])
    assert found[-1] > found[0] + 0.05


@pytest.mark.slow
def test_contrastive_and_zero_shot(example: Any, capsys: pytest.CaptureFixture[str]) -> None:
    """The classifier trains the model of the contrastive example, so that one run shows both."""
    found = example("zero_shot").main(["--steps", "12"])
    shown = capsys.readouterr().out
    recalls = [float(share) for share in re.findall(r"first ten for ([\d.]+)% of new captions", shown)]
    assert recalls[-1] > 4 * recalls[0] > 0  # chance is 10 of 1,907
    frequent = float(re.search(r"most frequent class: ([\d.]+)%", shown)[1]) / 100
    assert found[1] > frequent > 1 / 12
    assert found[3] > found[1]


@pytest.mark.slow
@pytest.mark.parametrize("name, steps", [("retrieval", 6), ("recommender", 30)])
def test_recall_rises(example: Any, name: str, steps: int) -> None:
    found = example(name).main(["--steps", str(steps)])
    assert found[-1] > found[0] + 0.02


@pytest.mark.slow
def test_mined_negatives_change_a_second_training_that_gains(example: Any, capsys: pytest.CaptureFixture[str]) -> None:
    (found,) = example("mining").main(["--steps", "3", "--seeds", "1"])
    again, mined = found["trained again"], found["with mined negatives"]
    assert min(again, mined) > found["trained"] + 0.002
    assert again != mined
    assert f"mean {mined - again:+.4f}" in capsys.readouterr().out


@pytest.mark.slow
def test_the_language_model_learns(example: Any) -> None:
    found = example("language_model").main(["--steps", "6"])
    assert found[-1] < found[0] - 1


@pytest.mark.slow
def test_a_student_learns_more_from_its_teacher(example: Any) -> None:
    found = example("distillation").main(["--steps", "20"])
    assert found["teacher"] < found["student of the teacher"] < found["student alone"]


@pytest.mark.slow
def test_a_student_with_few_captions_learns_more_from_its_teacher(example: Any) -> None:
    clip = example("clip_distillation")
    found = clip.main(["--steps", "40", "--pairs", "100", "--seeds", "1"])
    alone, _, unpaired = (found[name][0] for name in clip.METHODS)
    assert found["teacher"][0] > unpaired > 1.4 * alone


@pytest.mark.slow
@pytest.mark.group
def test_several_processes_have_the_loss_of_one(tmp_path: Path) -> None:
    arguments = [str(EXAMPLES / "several_processes.py"), "--steps", "1"]
    ends = run_commands(run_script, tmp_path, [(environment, arguments) for environment in rank_environments(2)])
    assert [code for code, _ in ends] == [0, 0], ends
    losses = re.findall(r"loss ([\d.]+) of 2 ranks, ([\d.]+) in one process", ends[0][1])
    assert len(losses) == 2
    assert all(abs(float(a) - float(b)) <= 2e-4 for a, b in losses)
    assert float(losses[0][0]) > float(losses[1][0])


def run_notebook(name: str, steps: int | None = None) -> dict[str, Any]:
    """Run the code cells in order, with a number of steps if it is given, and return their names."""
    names: dict[str, Any] = {"__name__": "__notebook__"}
    for cell in json.loads((EXAMPLES / name).read_text())["cells"]:
        if cell["cell_type"] == "code":
            assert cell["outputs"] == [], "clear the outputs of a notebook before it is committed"
            source = "".join(cell["source"])
            if steps is not None:
                source = re.sub(r"^STEPS = \d+$", f"STEPS = {steps}", source, flags=re.MULTILINE)
            exec(compile(source, name, "exec"), names)
    return names


@pytest.mark.slow
def test_the_quickstart_notebook() -> None:
    names = run_notebook("quickstart.ipynb", steps=20)
    assert names["STEPS"] == 20
    assert names["error"] < 1e-5
    assert names["recalls"][1] > 5 * names["recalls"][0]


def test_the_notebook_of_log_probabilities() -> None:
    names = run_notebook("log_probabilities.ipynb")
    assert names["error_rounded"] > 100 * names["error_ours"] > 0
    assert names["hidden"].grad.norm() > 0


def test_every_notebook_is_tested() -> None:
    assert NOTEBOOKS == ["log_probabilities.ipynb", "quickstart.ipynb"]
