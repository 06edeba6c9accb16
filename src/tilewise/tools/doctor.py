"""`tilewise doctor`: versions, devices, the strategies of typical calls, and problems."""

from __future__ import annotations

import importlib.util
import json
import os
import platform
import re
import shutil
import subprocess
from collections.abc import Callable
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

import torch

import tilewise as tw
from tilewise.kernels import known_faults, registry, tuned_file

# Versions of torch that are tested, as in pyproject.toml: from the first on, below the second.
TORCH_FROM, TORCH_BELOW = (2, 11), (2, 16)


@dataclass(frozen=True)
class Problem:
    """Something that is wrong, and what to do."""

    what: str
    remedy: str


@dataclass(frozen=True)
class Device:
    """A CUDA device, and the tile sizes that it uses."""

    name: str
    capability: str
    memory_gib: float
    tuned: bool
    tuned_file: str


@dataclass(frozen=True)
class TypicalCall:
    """Backend and strategy of one typical call."""

    call: str
    backend: str
    strategy: str
    reason: str
    refused: dict[str, str]


@dataclass(frozen=True)
class Checkup:
    """The results of `tilewise doctor`."""

    versions: dict[str, str | None]
    devices: list[Device] = field(default_factory=list)
    calls: list[TypicalCall] = field(default_factory=list)
    problems: list[Problem] = field(default_factory=list)
    notes: list[Problem] = field(default_factory=list)  # to know about; nothing is known to go wrong

    @property
    def exit_code(self) -> int:
        """0 if all is well, 1 if something is wrong."""
        return 1 if self.problems else 0

    def as_json(self) -> str:
        """The same values, as JSON."""
        return json.dumps(asdict(self), indent=1)

    def __str__(self) -> str:
        lines = [f"{name:<9} {version or 'none'}" for name, version in self.versions.items()]
        for device in self.devices:
            lines.append(f"device    {device.name}, capability {device.capability}, {device.memory_gib:.0f} GiB")
            lines.append(f"  sizes   {f'tuned: {device.tuned_file}' if device.tuned else 'not tuned; `tilewise tune`'}")
        if not self.devices:
            lines.append("device    no CUDA device; losses run on the CPU")
        lines += [f"call      {call.call}: {call.backend}, {call.strategy} ({call.reason})" for call in self.calls]
        refused = dict.fromkeys(pair for call in self.calls for pair in call.refused.items())
        lines += [f"backend   {name} not chosen: {reason}" for name, reason in refused]
        lines += [f"note      {note.what}. {note.remedy}." for note in self.notes]
        lines += [f"problem   {problem.what}. {problem.remedy}." for problem in self.problems]
        return "\n".join([*lines, *([] if self.problems else ["no problems found"])])


def check_up() -> Checkup:
    """Collect the versions, devices and problems of this machine."""
    versions, devices = find_versions(), find_devices()
    problems, notes = [*environment_problems(versions)], list[Problem]()
    for index in range(len(devices)):
        problems += device_problems(torch.device("cuda", index))
        notes += fault_problems(torch.device("cuda", index), avoided=False)
    calls: list[TypicalCall] = []
    try:
        calls = typical_calls(torch.device("cuda", 0) if devices else torch.device("cpu"))
    except Exception as error:
        problems.append(Problem(f"tw.explain failed: {type(error).__name__}: {error}", "Report this"))
    return Checkup(versions, devices, calls, problems, list(dict.fromkeys(notes)))


def find_versions() -> dict[str, str | None]:
    """Versions of the packages and drivers on which the choice of a backend depends; None for a missing one."""
    return {
        "tilewise": tw.__version__,
        "python": platform.python_version(),
        "torch": torch.__version__,
        "triton": known_faults.triton_version() if registry.installed("triton") else None,
        "assembler": assembler_version(),
        "cuda": torch.version.cuda,
        "driver": driver_version(),
    }


def driver_version() -> str | None:
    """The version of the NVIDIA driver, or None."""
    tool = shutil.which("nvidia-smi")
    found = "" if tool is None else output_of(tool, "--query-gpu=driver_version", "--format=csv,noheader")
    return found.split("\n")[0].strip() or None


def assembler_version() -> str | None:
    """The assemblers of Triton: that of ``TRITON_PTXAS_PATH`` if it is set, else those in its package; or None."""
    spec = importlib.util.find_spec("triton")
    tools = [Path(os.environ["TRITON_PTXAS_PATH"])] if "TRITON_PTXAS_PATH" in os.environ else []
    if not tools and spec is not None and spec.submodule_search_locations:
        folder = Path(spec.submodule_search_locations[0]) / "backends" / "nvidia" / "bin"
        tools = sorted(folder.glob("ptxas*"))
    versions = {tool.name: re.search(r"V([\d.]+)", output_of(str(tool), "--version")) for tool in tools}
    return ", ".join(f"{name} {version[1]}" for name, version in versions.items() if version) or None


def output_of(*command: str) -> str:
    """What a command prints; "" if it fails."""
    try:
        return subprocess.run(command, capture_output=True, text=True, timeout=20, check=True).stdout
    except (OSError, subprocess.SubprocessError):
        return ""


def find_devices() -> list[Device]:
    """All CUDA devices."""
    found = []
    for index in range(torch.cuda.device_count() if torch.cuda.is_available() else 0):
        about, name = torch.cuda.get_device_properties(index), torch.cuda.get_device_name(index)
        sizes, _ = tuned_file.read(name, registry.size_table().parse_tuned)
        capability = ".".join(map(str, torch.cuda.get_device_capability(index)))
        path = str(tuned_file.path_for(name))
        found.append(Device(name, capability, about.total_memory / 2**30, sizes is not None, path))
    return found


def minor(version: str) -> tuple[int, ...]:
    """Major and minor version.

    >>> minor("2.13.0+cpu")
    (2, 13)
    """
    return tuple(int(number) for number in re.findall(r"\d+", version)[:2])


def environment_problems(versions: dict[str, str | None]) -> list[Problem]:
    """Problems that do not depend on a card."""
    found, cuda = [], torch.cuda.is_available()
    version, triton = versions["torch"] or "", versions["triton"]
    if not TORCH_FROM <= minor(version) < TORCH_BELOW:
        first, below = (".".join(map(str, bound)) for bound in (TORCH_FROM, TORCH_BELOW))
        wanted = f"torch {version} is not supported; {first} or newer is, below {below}"
        found.append(Problem(wanted, f"Run: pip install 'torch>={first},<{below}'"))
    if versions["driver"] and not cuda:
        what = f"there is an NVIDIA driver ({versions['driver']}), but torch {version} sees no CUDA device"
        remedy = "Install a CUDA build of torch" if versions["cuda"] is None else "Install a newer driver"
        found.append(Problem(what, f"{remedy}, and check CUDA_VISIBLE_DEVICES"))
    if cuda and triton is None and torch.version.hip is None:  # AMD cards are served by torch in any case
        what = "Triton is missing, so CUDA tensors are served by the slower torch backend"
        found.append(Problem(what, "Run: pip install triton"))
    if triton is not None and minor(triton) not in known_faults.TESTED_TRITON:
        tested = ", ".join(".".join(map(str, pair)) for pair in known_faults.TESTED_TRITON)
        what = f"Triton {triton} is unknown to this version of tilewise, which is tested with {tested}"
        found.append(Problem(what, "Install the torch that it comes with in a supported version, or a newer tilewise"))
    if os.environ.get("TRITON_INTERPRET") == "1":
        what = "TRITON_INTERPRET=1 makes Triton run its kernels in a slow interpreter, for tests"
        found.append(Problem(what, "Unset it"))
    return found


def fault_problems(device: torch.device, *, avoided: bool) -> list[Problem]:
    """Known faults on a card: those that "auto" avoids, or those that it does not."""
    faults = [fault for fault in known_faults.faults_on(device) if fault.avoided == avoided]
    return [Problem(fault.what, f"{fault.remedy} ({fault.source})") for fault in faults]


def device_problems(device: torch.device) -> list[Problem]:
    """Known faults on a card that "auto" avoids, and a file with tuned sizes that cannot be used."""
    found = fault_problems(device, avoided=True)
    _, problem = tuned_file.read(torch.cuda.get_device_name(device), registry.size_table().parse_tuned)
    if problem is not None:
        found.append(Problem(problem, "Without it, the sizes of the table are used"))
    return found


def typical_calls(device: torch.device) -> list[TypicalCall]:
    """The backend and strategy of a few calls on this device. Nothing is computed."""
    from torch._subclasses.fake_tensor import FakeTensorMode

    half = torch.bfloat16 if device.type == "cuda" else torch.float32
    with FakeTensorMode():  # sizes without memory
        x, y = (torch.empty(8192, 512, device=device, dtype=half, requires_grad=True) for _ in range(2))
        hidden = torch.empty(4096, 2048, device=device, dtype=half, requires_grad=True)
        head = torch.empty(128_000, 2048, device=device, dtype=half, requires_grad=True)
        target = torch.zeros(4096, device=device, dtype=torch.int64)
        labels = torch.zeros(8192, device=device, dtype=torch.int64)
    typical: dict[str, Callable[[], Any]] = {
        "clip_loss, 8,192 pairs of 512": lambda: tw.explain(tw.clip_loss, x, y, 20.0),
        "siglip_loss, 8,192 pairs of 512": lambda: tw.explain(tw.siglip_loss, x, y, 20.0, -10.0),
        "supcon_loss, 8,192 rows of 512": lambda: tw.explain(tw.supcon_loss, x, labels),
        "linear_cross_entropy, 4,096 tokens of 2,048, 128,000 classes": lambda: tw.explain(
            tw.linear_cross_entropy, hidden, head, target
        ),
    }
    found = []
    for name, explain in typical.items():
        decision = explain().calls[0]
        kind = str(decision.dtype).removeprefix("torch.")
        refused = dict(decision.refused)
        found.append(TypicalCall(f"{name}, {kind}", decision.backend, decision.strategy, decision.reason, refused))
    return found
