"""`tilewise doctor`: what it shows, and what it calls a problem."""

import json
import tomllib
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from typer.testing import CliRunner

from tilewise.kernels import known_faults, tuned_file
from tilewise.tools import doctor
from tilewise.train.cli import app

ROOT = Path(__file__).resolve().parents[2]
FINE = {"torch": "2.13.0", "triton": "3.6.0", "cuda": "13.0", "driver": "580.1"}


@pytest.fixture(autouse=True)
def plain(monkeypatch, tmp_path):
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    monkeypatch.delenv("TRITON_INTERPRET", raising=False)


@pytest.fixture
def hopper(monkeypatch):
    """A machine with one H100, as far as the doctor can see."""
    about = SimpleNamespace(total_memory=80 * 2**30)
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 1)
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda device=None: "NVIDIA H100")
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda device=None: about)
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device=None: (9, 0))
    monkeypatch.setattr(doctor, "typical_calls", lambda device: [])
    monkeypatch.setattr(doctor, "find_versions", lambda: FINE)
    monkeypatch.setattr(known_faults, "triton_version", lambda: FINE["triton"])


def test_this_machine():
    done = CliRunner().invoke(app, ["doctor", "--json"])
    found = json.loads(done.stdout)
    assert set(found["versions"]) == {"tilewise", "python", "torch", "triton", "assembler", "cuda", "driver"}
    assert found["versions"]["torch"] == torch.__version__
    assert len(found["calls"]) == 4
    assert {call["strategy"] for call in found["calls"]} <= {"one_pass", "two_pass"}
    if not torch.cuda.is_available():
        assert found["devices"] == []
        assert {call["backend"] for call in found["calls"]} == {"torch"}
        assert "CUDA device" in found["calls"][0]["refused"]["triton"]
    assert done.exit_code == (1 if found["problems"] else 0)


def test_a_card_without_problems(hopper):
    found = doctor.check_up()
    assert found.exit_code == 0
    assert found.devices == [doctor.Device("NVIDIA H100", "9.0", 80.0, False, str(tuned_file.path_for("NVIDIA H100")))]
    assert "not tuned" in str(found)
    assert str(found).endswith("no problems found")
    (note,) = found.notes
    assert "ptxas before 13.3" in note.what
    assert "no wrong result is known" in note.what
    assert f"note      {note.what}. {note.remedy}." in str(found)
    assert json.loads(found.as_json())["notes"] == [{"what": note.what, "remedy": note.remedy}]


def test_a_card_without_notes(hopper, monkeypatch):
    monkeypatch.setattr(known_faults, "triton_version", lambda: "3.9.0")
    assert doctor.check_up().notes == []


def test_the_assembler_is_that_which_triton_uses(monkeypatch, tmp_path):
    tool = tmp_path / "ptxas"
    tool.write_text("#!/bin/sh\necho Cuda compilation tools, release 13.4, V13.4.59\n")
    tool.chmod(0o755)
    monkeypatch.setenv("TRITON_PTXAS_PATH", str(tool))
    assert doctor.assembler_version() == "ptxas 13.4.59"
    monkeypatch.setenv("TRITON_PTXAS_PATH", str(tmp_path / "missing"))
    assert doctor.assembler_version() is None
    monkeypatch.delenv("TRITON_PTXAS_PATH")
    if doctor.registry.installed("triton"):
        assert "ptxas" in (doctor.assembler_version() or "")


def test_tuned_sizes_are_found(hopper):
    tuned_file.write("NVIDIA H100", {})
    assert "tuned: " in str(doctor.check_up())
    path = tuned_file.path_for("NVIDIA H100")
    path.write_text("{")
    found = doctor.check_up()
    assert found.exit_code == 1
    assert str(path) in found.problems[0].what


def test_a_known_fault(hopper, monkeypatch):
    monkeypatch.setattr(known_faults, "triton_version", lambda: "3.7.1")
    found = doctor.check_up()
    assert found.exit_code == 1
    assert "Hopper" in found.problems[0].what
    assert "2.15 or newer" in found.problems[0].remedy
    assert "2.14" not in str(found)


PROBLEMS = {
    "old torch": ({"torch": "2.10.1+cu128"}, True, "torch 2.10.1", "pip install 'torch>=2.11,<2.16'"),
    "new torch": ({"torch": "2.16.0"}, True, "torch 2.16.0", "pip install 'torch>=2.11,<2.16'"),
    "no Triton": ({"triton": None}, True, "Triton is missing", "pip install triton"),
    "new Triton": ({"triton": "4.0.0"}, True, "Triton 4.0.0 is unknown", "newer tilewise"),
    "CPU build": ({"cuda": None}, False, "sees no CUDA device", "CUDA build"),
    "old driver": ({}, False, "sees no CUDA device", "newer driver"),
}


@pytest.mark.parametrize("versions, cuda, what, remedy", PROBLEMS.values(), ids=PROBLEMS)
def test_each_problem_has_a_remedy(monkeypatch, versions, cuda, what, remedy):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: cuda)
    (found,) = doctor.environment_problems(FINE | versions)
    assert what in found.what
    assert remedy in found.remedy


def test_the_interpreter_is_a_problem(monkeypatch):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    assert doctor.environment_problems(FINE) == []
    monkeypatch.setenv("TRITON_INTERPRET", "1")
    (found,) = doctor.environment_problems(FINE)
    assert "TRITON_INTERPRET" in found.what
    assert found.remedy == "Unset it"


def test_a_call_that_fails_is_a_problem(monkeypatch):
    monkeypatch.setattr(doctor, "typical_calls", lambda device: 1 / 0)
    assert "ZeroDivisionError" in doctor.check_up().problems[-1].what


def test_the_supported_versions_are_those_of_the_package():
    (wanted,) = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["dependencies"]
    first, below = (".".join(map(str, bound)) for bound in (doctor.TORCH_FROM, doctor.TORCH_BELOW))
    assert wanted == f"torch>={first},<{below}"
