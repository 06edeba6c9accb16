"""Faults of other packages that can make compiled kernels fail or compute wrong numbers. This is the only list of them.

On a card with a fault that is avoided, ``backend="auto"`` takes the torch backend. ``backend="triton"`` still takes the
compiled kernels. Both warn once. `tilewise doctor` names all faults, also those that are not avoided.
"""

from __future__ import annotations

import functools
import importlib.metadata
import warnings
from dataclasses import dataclass

import torch

# Distributions that contain the module `triton`
TRITON_PACKAGES = ("triton", "pytorch-triton", "triton-windows")
# Versions of Triton that the kernels are tested with, as (major, minor)
TESTED_TRITON = ((3, 6), (3, 7), (3, 8), (3, 9))


@dataclass(frozen=True)
class Fault:
    """A fault of Triton on some cards.

    Args:
        versions: versions of Triton with the fault, such as "3.7.1", or "3.7" for all of its releases.
        capabilities: compute capabilities of the cards on which it shows.
        what: what happens, as a clause.
        remedy: what to do, as a sentence.
        source: where it is reported, or the error.
        compiles: False if some kernels cannot be compiled; True if they can, but may be wrong.
        avoided: whether "auto" takes the torch backend. False if no call of tilewise is known to be affected.
    """

    versions: tuple[str, ...]
    capabilities: tuple[tuple[int, int], ...]
    what: str
    remedy: str
    source: str
    compiles: bool = True
    avoided: bool = True

    def affects(self, version: str) -> bool:
        """Whether this version of Triton has the fault; a local part such as "+git1234" does not matter.

        >>> [FAULTS[0].affects(version) for version in ("3.7.1+git1234", "3.8.0")]
        [True, False]
        """
        number = version.split("+")[0] + "."
        return any(number.startswith(f"{affected}.") for affected in self.versions)

    @property
    def reason(self) -> str:
        """Why "auto" does not take the compiled kernels."""
        return f"{self.what} ({self.source}). {self.remedy}"


FAULTS = (
    Fault(
        versions=("3.7",),
        capabilities=((9, 0),),
        what="kernels that Triton 3.7 compiles for Hopper cards may read outside of their shared memory",
        remedy="Install torch 2.15 or newer, which comes with Triton 3.9 or newer",
        source="https://github.com/triton-lang/triton/issues/11366",
    ),
    # Triton 3.6 and 3.7 contain the assembler ptxas 12.8.93, 3.8 contains 12.9.86. For Hopper cards Triton 3.9 uses its
    # ptxas-blackwell, 13.4.59. Of 227 kernels compiled for sm_90, 16 have such matrix products.
    Fault(
        versions=("3.6", "3.7", "3.8"),
        capabilities=((9, 0),),
        what=(
            "the assembler of Triton before 3.9 (ptxas before 13.3) may reuse registers on Hopper cards while a matrix "
            "product still reads them. Few kernels of tilewise have such products, and no wrong result is known"
        ),
        remedy="To rule it out, install torch 2.15 or newer, which comes with Triton 3.9 or newer",
        source="https://github.com/triton-lang/triton/pull/11781",
        avoided=False,
    ),
    Fault(
        versions=("3.6", "3.7"),
        capabilities=((10, 0), (10, 3)),
        what="Triton 3.6 and 3.7 cannot compile some of the kernels for data-center Blackwell cards",
        remedy="Install torch 2.14 or newer, which comes with Triton 3.8 or newer",
        source="its error is: parent layout must have at least rank >= 2",
        compiles=False,
    ),
)


@functools.cache
def triton_version() -> str | None:
    """The installed version of Triton, or None. Does not import it."""
    for package in TRITON_PACKAGES:
        try:
            return importlib.metadata.version(package)
        except importlib.metadata.PackageNotFoundError:
            continue
    return None


def faults_on(device: torch.device) -> list[Fault]:
    """The faults that the installed Triton has on this device."""
    version = triton_version()
    if device.type != "cuda" or version is None or torch.version.hip is not None:  # AMD cards have other capabilities
        return []
    capability = torch.cuda.get_device_capability(device)
    return [fault for fault in FAULTS if fault.affects(version) and capability in fault.capabilities]


@functools.cache
def warn_once(fault: Fault, avoided: bool) -> None:
    """Warn about a fault, once in a process."""
    if avoided:
        done = 'backend="auto" takes the torch backend instead, which is slower; backend="triton" takes the kernels'
    else:
        done = 'backend="triton" takes them nevertheless; backend="auto" avoids them'
    warnings.warn(f"tilewise: {fault.reason}. {done}", RuntimeWarning, stacklevel=2)
