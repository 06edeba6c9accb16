"""Losses with the signatures of sentence-transformers.

- from sentence_transformers.losses import CachedMultipleNegativesRankingLoss
+ from tilewise.integrations.sentence_transformers import CachedMultipleNegativesRankingLoss
"""

from tilewise.integrations.sentence_transformers.columns import hash_ids
from tilewise.integrations.sentence_transformers.gist import CachedGISTEmbedLoss, GISTEmbedLoss
from tilewise.integrations.sentence_transformers.ranking import (
    CachedMultipleNegativesRankingLoss,
    MultipleNegativesRankingLoss,
)

__all__ = [
    "CachedGISTEmbedLoss",
    "CachedMultipleNegativesRankingLoss",
    "GISTEmbedLoss",
    "MultipleNegativesRankingLoss",
    "hash_ids",
]
