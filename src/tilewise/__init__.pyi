# The public names and where they live: the only list. `__init__.py` reads it, and type checkers do.
from tilewise.errors import TilewiseError as TilewiseError
from tilewise.losses.clip import ClipLoss as ClipLoss
from tilewise.losses.clip import clip_loss as clip_loss
from tilewise.losses.clip_distillation import ClipDistillationLoss as ClipDistillationLoss
from tilewise.losses.clip_distillation import clip_distillation_loss as clip_distillation_loss
from tilewise.losses.cross_entropy import LinearCrossEntropyLoss as LinearCrossEntropyLoss
from tilewise.losses.cross_entropy import linear_cross_entropy as linear_cross_entropy
from tilewise.losses.distillation import DistillationStats as DistillationStats
from tilewise.losses.distillation import LinearDistillationLoss as LinearDistillationLoss
from tilewise.losses.distillation import linear_distillation_loss as linear_distillation_loss
from tilewise.losses.distillation import linear_distillation_stats as linear_distillation_stats
from tilewise.losses.guide import Guide as Guide
from tilewise.losses.info_nce import InfoNCELoss as InfoNCELoss
from tilewise.losses.info_nce import info_nce as info_nce
from tilewise.losses.logsumexp import linear_logsumexp as linear_logsumexp
from tilewise.losses.nt_xent import NTXentLoss as NTXentLoss
from tilewise.losses.nt_xent import nt_xent as nt_xent
from tilewise.losses.siglip import SigLipLoss as SigLipLoss
from tilewise.losses.siglip import siglip_loss as siglip_loss
from tilewise.losses.sparse_distillation import LinearSparseDistillationLoss as LinearSparseDistillationLoss
from tilewise.losses.sparse_distillation import linear_sparse_distillation_loss as linear_sparse_distillation_loss
from tilewise.losses.supcon import SupConLoss as SupConLoss
from tilewise.losses.supcon import supcon_loss as supcon_loss
from tilewise.losses.token_stats import TokenStats as TokenStats
from tilewise.losses.token_stats import linear_token_stats as linear_token_stats
from tilewise.ops.explain import explain as explain
from tilewise.ops.filter_report import record_filtering as record_filtering
from tilewise.options import TileOptions as TileOptions
from tilewise.retrieval import mine_hard_negatives as mine_hard_negatives
from tilewise.retrieval import nearest as nearest
from tilewise.retrieval import recall_at_k as recall_at_k
from tilewise.retrieval import retrieval_metrics as retrieval_metrics
from tilewise.retrieval import retrieval_ranks as retrieval_ranks
from tilewise.retrieval import retrieval_ranks_both as retrieval_ranks_both

__version__: str
