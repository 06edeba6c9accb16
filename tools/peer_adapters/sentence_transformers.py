"""sentence-transformers with our ranking and GIST losses, and models with random weights in place of downloads."""

from __future__ import annotations

import os
import tempfile
from collections.abc import Callable
from datetime import timedelta
from typing import Any

from tools.peer_adapters.stand_in import HUB, OWN, publish  # isort: skip - before the hub's client is imported
import sentence_transformers  # type: ignore[import-not-found]
import tokenizers
import torch
import torch.distributed as dist
import transformers
from sentence_transformers.sentence_transformer import losses, modules  # type: ignore[import-not-found]
from sentence_transformers.util import all_gather_with_grad  # type: ignore[import-not-found]

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


def on_two_ranks(compute: Callable[..., torch.Tensor]) -> Callable[..., torch.Tensor]:
    """``compute`` with a process as rank 0 and this one as rank 1, in tests that simulate rank 1 of two.

    Such a test replaces the package's function that gathers rows by one that puts rows of rank 0 before the given ones.
    """
    gathering = (losses.gist_embed, losses.cached_gist_embed, losses.cached_multiple_negatives_ranking)

    def run(loss: Any, *columns: list[torch.Tensor] | None) -> torch.Tensor:
        replaced = [module.all_gather_with_grad for module in gathering]
        gather = next((function for function in replaced if function is not all_gather_with_grad), None)
        if gather is None or not loss.gather_across_devices:
            return compute(loss, *columns)
        with tempfile.TemporaryDirectory() as folder:
            process = os.fork()
            if process == 0:
                columns = tuple(part and [gather(rows)[: len(rows)] for rows in part] for part in columns)
                torch.set_num_threads(1)  # threads are not copied
            group = {"init_method": f"file://{folder}/meet", "world_size": 2, "timeout": timedelta(seconds=60)}
            try:
                dist.init_process_group("gloo", rank=int(process != 0), **group)
                value = compute(loss, *columns)
                dist.destroy_process_group()
            finally:
                if process == 0:
                    os._exit(0)
            os.waitpid(process, 0)
        return value

    return run


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
    for one in (ours.GISTEmbedLoss, ours.MultipleNegativesRankingLoss):
        one.compute_loss_from_embeddings = on_two_ranks(one.compute_loss_from_embeddings)  # type: ignore[method-assign]
