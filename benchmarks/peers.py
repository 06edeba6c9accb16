"""Other libraries that compute one of these losses, each behind one function. They are optional.

``python -m benchmarks.run gpu --peers FOLDER`` adds their folder to the path. A peer that is not installed, or cannot
be imported on this machine, is recorded as absent, with the reason.

Each adapter computes the loss of `benchmarks.cases` (the same mean over rows) from the same inputs. The loss is
recorded beside the time, so an adapter that computes something else is noticed.
"""

from __future__ import annotations

import importlib
import importlib.metadata
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

Inputs = dict[str, Any]
Forward = Callable[[], Tensor]


class PeerAbsent(Exception):
    """A peer that is not installed or cannot run here."""


@dataclass(frozen=True)
class Peer:
    """A library, how to import it, and which loss it computes."""

    module: str
    package: str
    loss: str
    build: Callable[[Any, Inputs], Forward]


def _inf_cl(module: Any, x: Inputs) -> Forward:
    def forward() -> Tensor:
        # A call computes one direction; the mean of both is the symmetric loss.
        rows = module.cal_flash_loss(x["a"], x["b"], scale=x["scale"]).mean()
        cols = module.cal_flash_loss(x["b"], x["a"], scale=x["scale"]).mean()
        return (rows + cols) / 2

    return forward


def _memeff(module: Any, x: Inputs) -> Forward:
    # Its temperature must be a number. Its default, stable=True, rescales the gradient.
    loss = module.MemoryEfficientCLIPLoss(temperature=1 / x["scale"].item(), normalized_inputs=True, stable=False)
    return lambda: loss(x["a"], x["b"])


def _siglip_kernel(module: Any, x: Inputs) -> Forward:
    return lambda: module.fused_siglip_loss(x["a"], x["b"], x["scale"].log(), x["bias"])


def _cce(filter_eps: str | None) -> Callable[[Any, Inputs], Forward]:
    return lambda module, x: lambda: module.linear_cross_entropy(x["a"], x["b"], x["target"], filter_eps=filter_eps)


def _liger(module: Any, x: Inputs) -> Forward:
    loss = module.LigerFusedLinearCrossEntropyLoss()
    return lambda: loss(x["b"], x["a"], x["target"])


def _torch_native(module: Any, x: Inputs) -> Forward:
    if not hasattr(module, "linear_cross_entropy"):
        raise PeerAbsent(f"torch {torch.__version__} has no linear_cross_entropy; it came with 2.13")
    options = torch.nn.LinearCrossEntropyOptions()  # takes the chunked path; without options the logits are stored
    return lambda: module.linear_cross_entropy(x["a"], x["b"], x["target"], options=options)


LIGER = "liger_kernel.transformers.fused_linear_cross_entropy"
PEERS = {
    "inf_cl": Peer("inf_cl", "inf_cl", "clip", _inf_cl),
    "memeff": Peer("memeff", "memeff", "clip", _memeff),
    "siglip-kernel": Peer("siglip_kernel", "siglip_kernel", "siglip", _siglip_kernel),
    "cce": Peer("cut_cross_entropy", "cut_cross_entropy", "cross_entropy", _cce("high")),
    "cce-exact": Peer("cut_cross_entropy", "cut_cross_entropy", "cross_entropy", _cce(None)),
    "liger": Peer(LIGER, "liger_kernel", "cross_entropy", _liger),
    "torch-native": Peer("torch.nn.functional", "torch", "cross_entropy", _torch_native),
}


def build(name: str, inputs: Inputs) -> Forward:
    """The forward function of a peer on these inputs. Raises `PeerAbsent` if it is not available."""
    peer = PEERS[name]
    try:
        module = importlib.import_module(peer.module)
    except Exception as error:  # without a GPU, some raise other errors than ImportError
        raise PeerAbsent(f"{peer.module} cannot be imported: {type(error).__name__}: {error}") from error
    return peer.build(module, inputs)


def version(name: str) -> str | None:
    """The installed version, or None if it is not installed."""
    try:
        return importlib.metadata.version(PEERS[name].package)
    except importlib.metadata.PackageNotFoundError:
        return None
