"""sentence-transformers with our ranking and GIST losses, and models with random weights in place of downloads."""

from __future__ import annotations

from typing import Any

from tools.peer_adapters.stand_in import HUB, OWN, publish  # isort: skip - before the hub's client is imported
import sentence_transformers  # type: ignore[import-not-found]
import tokenizers
import torch
import transformers
from sentence_transformers.sentence_transformer import losses, modules  # type: ignore[import-not-found]

from tilewise.integrations import sentence_transformers as ours


def characters() -> Any:
    """A tokenizer of single characters."""
    letters = "abcdefghijklmnopqrstuvwxyzABCDEFGHIJKLMNOPQRSTUVWXYZ0123456789 .,:?!"
    vocabulary = {token: index for index, token in enumerate(["[PAD]", "[UNK]", "[CLS]", "[SEP]", "[MASK]", *letters])}
    tokenizer = tokenizers.Tokenizer(tokenizers.models.WordLevel(vocabulary, unk_token="[UNK]"))
    tokenizer.pre_tokenizer = tokenizers.pre_tokenizers.Split("", "isolated")
    special = {"pad_token": "[PAD]", "unk_token": "[UNK]", "cls_token": "[CLS]", "sep_token": "[SEP]"}
    return transformers.PreTrainedTokenizerFast(tokenizer_object=tokenizer, **special)


def make_models() -> None:
    """Models of the kind and width of those that the tests download."""
    torch.manual_seed(0)
    words = characters()
    bert = transformers.BertConfig(
        vocab_size=len(words), hidden_size=128, num_hidden_layers=2, num_attention_heads=2, intermediate_size=512
    )
    publish("local/bert", transformers.BertModel(bert), words)
    encoder = modules.Transformer("local/bert")
    tiny = sentence_transformers.SentenceTransformer(modules=[encoder, modules.Pooling(128)])
    publish("sentence-transformers-testing/stsb-bert-tiny-safetensors", tiny)
    distilbert = transformers.DistilBertConfig(vocab_size=len(words), dim=32, n_layers=2, n_heads=2, hidden_dim=64)
    publish("distilbert/distilbert-base-uncased", transformers.DistilBertModel(distilbert), words)
    static = modules.StaticEmbedding(words.backend_tokenizer, embedding_dim=1024)
    publish(
        "sentence-transformers/static-retrieval-mrl-en-v1", sentence_transformers.SentenceTransformer(modules=[static])
    )
    publish("google-bert/bert-base-uncased", words)


if not HUB.exists():
    make_models()
if not OWN:
    for name in (
        "MultipleNegativesRankingLoss",
        "CachedMultipleNegativesRankingLoss",
        "GISTEmbedLoss",
        "CachedGISTEmbedLoss",
    ):
        setattr(losses, name, getattr(ours, name))
