"""Exact losses over a pair-score matrix that is never stored.

    import tilewise as tw
    loss = tw.clip_loss(image_features, text_features, logit_scale)

Memory grows with the rows plus the columns, and the time is that of the matrix products.

A name is imported when it is first used, so that ``tilewise --help`` need not wait for torch; where torch is there
already, all of them are, so that torch knows the operators of a program that ``torch.export`` saved.
"""

from __future__ import annotations

import sys
from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from tilewise.errors import TilewiseError
    from tilewise.losses.clip import ClipLoss, clip_loss
    from tilewise.losses.cross_entropy import LinearCrossEntropyLoss, linear_cross_entropy
    from tilewise.losses.filtering import record_filtering
    from tilewise.losses.info_nce import InfoNCELoss, info_nce
    from tilewise.losses.logsumexp import linear_logsumexp
    from tilewise.losses.nt_xent import NTXentLoss, nt_xent
    from tilewise.losses.siglip import SigLipLoss, siglip_loss
    from tilewise.losses.supcon import SupConLoss, supcon_loss
    from tilewise.losses.token_stats import TokenStats, linear_token_stats
    from tilewise.options import TileOptions
    from tilewise.retrieval import recall_at_k, retrieval_ranks, retrieval_ranks_both

__version__ = "0.2.0"

__all__ = [
    "ClipLoss",
    "InfoNCELoss",
    "LinearCrossEntropyLoss",
    "NTXentLoss",
    "SigLipLoss",
    "SupConLoss",
    "TileOptions",
    "TilewiseError",
    "TokenStats",
    "__version__",
    "clip_loss",
    "info_nce",
    "linear_cross_entropy",
    "linear_logsumexp",
    "linear_token_stats",
    "nt_xent",
    "recall_at_k",
    "record_filtering",
    "retrieval_ranks",
    "retrieval_ranks_both",
    "siglip_loss",
    "supcon_loss",
]

_HOMES = {
    "errors": ("TilewiseError",),
    "options": ("TileOptions",),
    "losses.clip": ("ClipLoss", "clip_loss"),
    "losses.cross_entropy": ("LinearCrossEntropyLoss", "linear_cross_entropy"),
    "losses.filtering": ("record_filtering",),
    "losses.info_nce": ("InfoNCELoss", "info_nce"),
    "losses.logsumexp": ("linear_logsumexp",),
    "losses.nt_xent": ("NTXentLoss", "nt_xent"),
    "losses.siglip": ("SigLipLoss", "siglip_loss"),
    "losses.supcon": ("SupConLoss", "supcon_loss"),
    "losses.token_stats": ("TokenStats", "linear_token_stats"),
    "retrieval": ("recall_at_k", "retrieval_ranks", "retrieval_ranks_both"),
}
_HOME_OF = {name: home for home, names in _HOMES.items() for name in names}
_PARTS = ("errors", "kernels", "losses", "ops", "options", "retrieval", "ring")  # also reached as tilewise.losses


def __getattr__(name: str) -> Any:
    if name in _HOME_OF:
        value = getattr(import_module(f"tilewise.{_HOME_OF[name]}"), name)
    elif name in _PARTS:
        for home in _HOMES:  # with what is inside, such as tilewise.losses.clip
            import_module(f"tilewise.{home}")
        value = import_module(f"tilewise.{name}")
    else:
        raise AttributeError(f"module 'tilewise' has no attribute {name!r}")
    globals()[name] = value
    return value


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__, *_PARTS})


if sys.modules.get("torch") is not None:
    for _home in _HOMES:
        import_module(f"tilewise.{_home}")
