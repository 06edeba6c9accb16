"""Exact losses over a pair-score matrix that is never stored.

    import tilewise as tw
    loss = tw.clip_loss(image_features, text_features, logit_scale)

Memory grows with the rows plus the columns, and the time is that of the matrix products.
"""

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

__version__ = "0.1.0"

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
