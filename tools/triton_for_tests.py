"""Install Triton for the tests of its interpreter, where torch has not brought it.

Torch for CUDA requires the Triton that it was built with, and this does nothing. CPU builds of torch require none. Then
this installs the Triton that belongs to the same release of torch, or, if that one cannot be had, any supported one.
Without Triton (macOS, for instance) the tests of its kernels are skipped.

    python tools/triton_for_tests.py
"""

from __future__ import annotations

import importlib.util
import platform
import subprocess
import sys
from importlib.metadata import version

# Which Triton each release of torch for CUDA requires.
PAIRS = {"2.11": "==3.6.0", "2.12": "==3.7.1", "2.13": "==3.7.1", "2.14": "~=3.8.0", "2.15": "~=3.9.0"}
ANY = ">=3.6,<3.10"


def install(wanted: str) -> bool:
    """Whether pip could install this version. Dependencies stay as they are: Triton needs none."""
    command = [sys.executable, "-m", "pip", "install", "--disable-pip-version-check", "--no-deps", f"triton{wanted}"]
    return subprocess.run([*command, "--only-binary", "triton"], check=False).returncode == 0


def main() -> None:
    if importlib.util.find_spec("triton") is None:
        if platform.system() != "Linux":
            print(f"There is no Triton for {platform.system()}: the tests of its kernels are skipped.")
            return
        release = ".".join(version("torch").split(".")[:2])
        print(f"This build of torch {version('torch')} does not require Triton. The tests run in its interpreter.")
        if not (install(PAIRS.get(release, ANY)) or install(ANY)):
            print(f"No Triton for {platform.machine()} could be installed: the tests of its kernels are skipped.")
            return
    print(f"torch {version('torch')}, triton {version('triton')}")


if __name__ == "__main__":
    main()
