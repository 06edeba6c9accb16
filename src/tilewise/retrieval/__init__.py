"""Ranks and recall of retrieval. The matrix of scores is never stored."""

from tilewise.retrieval.call import BothRanks
from tilewise.retrieval.progress import Progress
from tilewise.retrieval.ranks import recall_at_k, retrieval_ranks, retrieval_ranks_both

__all__ = ["BothRanks", "Progress", "recall_at_k", "retrieval_ranks", "retrieval_ranks_both"]
