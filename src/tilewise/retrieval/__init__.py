"""Ranks, recall and the nearest items of retrieval. The matrix of scores is never stored."""

from tilewise.retrieval.call import BothRanks
from tilewise.retrieval.nearest import Nearest, nearest
from tilewise.retrieval.progress import Progress
from tilewise.retrieval.ranks import recall_at_k, retrieval_ranks, retrieval_ranks_both

__all__ = ["BothRanks", "Nearest", "Progress", "nearest", "recall_at_k", "retrieval_ranks", "retrieval_ranks_both"]
