"""sentence-transformers with our ranking losses, and models with random weights in place of those that it downloads."""

from __future__ import annotations

import tempfile
from typing import Any

import sentence_transformers  # type: ignore[import-not-found]
import tokenizers
import transformers
from sentence_transformers import losses
from sentence_transformers.models import StaticEmbedding  # type: ignore[import-not-found]

from tilewise.integrations import sentence_transformers as ours

losses.MultipleNegativesRankingLoss = ours.MultipleNegativesRankingLoss
losses.CachedMultipleNegativesRankingLoss = ours.CachedMultipleNegativesRankingLoss


def characters() -> tokenizers.Tokenizer:
    """A tokenizer of single characters."""
    vocabulary = {char: index for index, char in enumerate("\0 abcdefghijklmnopqrstuvwxyzABCDEFGHIJKLMNOPQRSTUVWXYZ")}
    tokenizer = tokenizers.Tokenizer(tokenizers.models.WordLevel(vocabulary, unk_token="\0"))
    tokenizer.pre_tokenizer = tokenizers.pre_tokenizers.Split("", "isolated")
    return tokenizer


def small_model() -> Any:
    """Embeddings of characters, 1,024 wide, as in the model that the tests download."""
    return sentence_transformers.SentenceTransformer(modules=[StaticEmbedding(characters(), embedding_dim=1024)])


def small_transformer() -> Any:
    """DistilBERT with two narrow layers and random weights."""
    config = transformers.DistilBertConfig(vocab_size=64, dim=32, n_layers=2, n_heads=2, hidden_dim=64)
    with tempfile.TemporaryDirectory() as folder:
        transformers.DistilBertModel(config).save_pretrained(folder)
        tokenizer = transformers.PreTrainedTokenizerFast(tokenizer_object=characters(), pad_token=" ", unk_token="\0")
        tokenizer.save_pretrained(folder)
        return sentence_transformers.SentenceTransformer(folder)
