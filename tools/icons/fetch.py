"""Fetch pinned npm packages. npm only downloads: nothing of a package is run."""

from __future__ import annotations

import base64
import hashlib
import subprocess
import tarfile
from pathlib import Path

from tools.icons.sources import Package


def fetch(package: Package, folder: Path) -> Path:
    """Download and unpack a package under ``folder`` unless it is there; return its root."""
    folder.mkdir(parents=True, exist_ok=True)
    archive = folder / f"{package.npm.removeprefix('@').replace('/', '-')}-{package.version}.tgz"
    if not archive.exists():
        subprocess.run(["npm", "pack", "--silent", package.spec], cwd=folder, check=True, stdout=subprocess.DEVNULL)
    digest = base64.b64encode(hashlib.sha512(archive.read_bytes()).digest()).decode()
    if digest != package.sha512:
        raise SystemExit(
            f"{archive} is not the pinned {package.spec}: wanted sha512 {package.sha512}, got {digest}. "
            "Delete the file and fetch it again, or change the pin in tools/icons/sources.py"
        )
    root = folder / archive.stem
    if not (root / ".whole").exists():
        with tarfile.open(archive) as file:
            file.extractall(root, filter="data")
        (root / ".whole").touch()
    inner = [path for path in root.iterdir() if path.is_dir()]
    return inner[0] if len(inner) == 1 else root / "package"
