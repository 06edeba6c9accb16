"""Files that name the same version agree, and an install from a clone can be resolved."""

import re
import tomllib
from pathlib import Path

import pytest
import tools.test_matrix as matrix
import tools.triton_for_tests as triton_for_tests

import tilewise

ROOT = Path(__file__).parents[1]
PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
PINS = dict(re.findall(r"^([\w.-]+)==(\S+)$", (ROOT / "constraints.txt").read_text(), re.MULTILINE))


def minor(version: str) -> tuple[int, ...]:
    return tuple(map(int, version.split(".")[:2]))


def torch_range() -> tuple[tuple[int, ...], tuple[int, ...]]:
    """The first supported release of torch and the first one that is not."""
    (wanted,) = [one for one in PROJECT["dependencies"] if one.startswith("torch")]
    first, end = re.fullmatch(r"torch>=([\d.]+),<([\d.]+)", wanted).groups()
    return minor(first), minor(end)


def test_the_version_is_the_same_everywhere():
    assert tilewise.__version__ == PROJECT["version"]
    assert f"\nversion: {PROJECT['version']}\n" in (ROOT / "CITATION.cff").read_text()


def test_the_matrix_has_the_oldest_and_the_newest_torch():
    first, end = torch_range()
    assert minor(matrix.OLDEST) == first
    assert minor(matrix.NEWEST) == (end[0], end[1] - 1)
    workflow = (ROOT / ".github" / "workflows" / "tests.yml").read_text()
    assert {matrix.OLDEST, matrix.NEWEST} == set(re.findall(r"\d+\.\d+\.\d+", workflow))


def test_every_supported_torch_has_its_triton():
    first, end = torch_range()
    supported = {f"{first[0]}.{number}" for number in range(first[1], end[1])}
    assert set(triton_for_tests.PAIRS) == supported
    assert first <= minor(PINS["torch"]) < end


def test_nothing_but_torch_names_a_triton():
    """Torch for CUDA requires one version exactly. A second pin could not be met."""
    assert "triton" not in PINS
    wanted = [*PROJECT["dependencies"], *(one for extra in PROJECT["optional-dependencies"].values() for one in extra)]
    assert not [one for one in wanted if one.startswith("triton")]


def test_the_workflow_runs_every_python_of_the_classifiers():
    named = {line.rsplit(" ", 1)[1] for line in PROJECT["classifiers"] if re.search(r"Python :: 3\.\d+$", line)}
    workflow = (ROOT / ".github" / "workflows" / "tests.yml").read_text()
    assert set(re.search(r"python: \[(.*)\]", workflow)[1].replace('"', "").split(", ")) == named
    assert min(named, key=minor) == PROJECT["requires-python"].removeprefix(">=")


def test_the_workflow_runs_the_commands_of_the_readme_on_macos():
    yaml = pytest.importorskip("yaml")
    section = (ROOT / "README.md").read_text().split("\n## Two commands\n")[1].split("\n## ")[0]
    job = yaml.safe_load((ROOT / ".github" / "workflows" / "tests.yml").read_text())["jobs"]["mac"]
    commands = [step["run"] for step in job["steps"] if step.get("run", "").startswith("make ")]
    assert commands == re.findall(r"^make [a-z-]+", section, re.MULTILINE) == ["make demo", "make test"]
    assert job["runs-on"].startswith("macos-")


def test_ruff_is_the_same_before_a_commit():
    assert f"rev: v{PINS['ruff']}\n" in (ROOT / ".pre-commit-config.yaml").read_text()


def test_no_message_names_a_package_that_is_not_published():
    """Until there is a release, `pip install` needs a clone."""
    found = [path for path in (ROOT / "src").rglob("*.py") if re.search(r"pip install\W+tilewise", path.read_text())]
    assert found == []


@pytest.mark.parametrize("name", ["tests.yml", "wheels.yml", "release.yml", "docs.yml"])
def test_workflows_are_yaml_and_their_commands_exist(name):
    yaml = pytest.importorskip("yaml")
    text = (ROOT / ".github" / "workflows" / name).read_text()
    assert yaml.safe_load(text)["jobs"]
    targets = re.findall(r"^([a-z-]+):", (ROOT / "Makefile").read_text(), re.MULTILINE)
    assert set(re.findall(r"run: make ([\w-]+)", text)) <= set(targets)
    assert all((ROOT / script).exists() for script in re.findall(r"tools/\w+\.py", text))
