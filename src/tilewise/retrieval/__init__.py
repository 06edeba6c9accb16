"""Ranks, recall and the nearest items of retrieval. The matrix of scores is never stored."""

from tilewise.retrieval.call import BothRanks
from tilewise.retrieval.metrics import retrieval_metrics, write_beir, write_trec
from tilewise.retrieval.mining import HardNegatives, mine_hard_negatives
from tilewise.retrieval.nearest import Nearest, nearest
from tilewise.retrieval.progress import Progress
from tilewise.retrieval.ranks import recall_at_k, retrieval_ranks, retrieval_ranks_both

__all__ = [
    "BothRanks",
    "HardNegatives",
    "Nearest",
    "Progress",
    "mine_hard_negatives",
    "nearest",
    "recall_at_k",
    "retrieval_metrics",
    "retrieval_ranks",
    "retrieval_ranks_both",
    "write_beir",
    "write_trec",
]
