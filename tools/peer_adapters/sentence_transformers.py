"""sentence-transformers with our ranking losses, and models with random weights in place of those that it downloads."""

from __future__ import annotations

from typing import Any

import sentence_transformers  # type: ignore[import-not-found]
import tokenizers
from sentence_transformers import losses
from sentence_transformers.models import StaticEmbedding  # type: ignore[import-not-found]

from tilewise.integrations import sentence_transformers as ours

losses.MultipleNegativesRankingLoss = ours.MultipleNegativesRankingLoss
losses.CachedMultipleNegativesRankingLoss = ours.CachedMultipleNegativesRankingLoss


def small_model(*_: Any, **__: Any) -> Any:
    """Embeddings of single characters, 1,024 wide, as in the model that the tests download."""
    vocabulary = {char: index for index, char in enumerate("\0 abcdefghijklmnopqrstuvwxyzABCDEFGHIJKLMNOPQRSTUVWXYZ")}
    tokenizer = tokenizers.Tokenizer(tokenizers.models.WordLevel(vocabulary, unk_token="\0"))
    tokenizer.pre_tokenizer = tokenizers.pre_tokenizers.Split("", "isolated")
    return sentence_transformers.SentenceTransformer(modules=[StaticEmbedding(tokenizer, embedding_dim=1024)])
