"""The models of `benchmarks.steps`, from transformers' own configurations with random weights, and what trains them.

Axes: b sequences, t tokens of each, d features, V words of the vocabulary.
"""

from __future__ import annotations

import copy
import importlib
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

import tilewise as tw
from benchmarks import peers
from benchmarks.measure import Step
from tilewise.cache import GradientCache
from tilewise.integrations.transformers import use_linear_cross_entropy

# Class and configuration of each language model, as its publisher's config.json has them
LANGUAGE: dict[str, tuple[str, dict[str, Any]]] = {
    "Llama-3.2-1B": (
        "Llama",
        {"vocab_size": 128256, "hidden_size": 2048, "intermediate_size": 8192, "num_hidden_layers": 16}
        | {"num_attention_heads": 32, "num_key_value_heads": 8, "head_dim": 64, "rms_norm_eps": 1e-5},
    ),
    "Qwen3-0.6B": (
        "Qwen3",
        {"vocab_size": 151936, "hidden_size": 1024, "intermediate_size": 3072, "num_hidden_layers": 28}
        | {"num_attention_heads": 16, "num_key_value_heads": 8, "head_dim": 128},
    ),
    "Gemma-3-1B": (
        "Gemma3",
        {"vocab_size": 262144, "hidden_size": 1152, "intermediate_size": 6912, "num_hidden_layers": 26}
        | {"num_attention_heads": 4, "num_key_value_heads": 1, "head_dim": 256, "sliding_window": 512},
    ),
}
LONGEST, IGNORED = 131072, -100
SMALL = {"vocab_size": 500, "hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 2, "head_dim": 16}
SMALL |= {"num_attention_heads": 2, "num_key_value_heads": 1}
SMALL_BERT = {"vocab_size": 500, "hidden_size": 32, "num_hidden_layers": 2, "num_attention_heads": 2}
SMALL_BERT |= {"intermediate_size": 64}
QUERY_TOKENS, DOCUMENT_TOKENS, CHUNK = 32, 128, 256
TEMPERATURE = 0.05
NO_HEAD, OWN, COMPILED = "no head", "transformers", "torch.compile of the head"
PEERS = {"Liger": "liger", "Cut Cross-Entropy": "cce", "torch's own": "torch-native"}
LANGUAGE_METHODS = ("tilewise", OWN, COMPILED, *PEERS, NO_HEAD)
SENTENCES = "sentence-transformers, cached"
RETRIEVAL_METHODS = ("tilewise", "all scores, cached", SENTENCES)


def language_model(name: str, device: torch.device, small: bool) -> nn.Module:
    """The model with random weights, in bfloat16 (small: float32), with gradient checkpointing."""
    transformers = importlib.import_module("transformers")
    family, settings = LANGUAGE[name]
    text = "Text" if family == "Gemma3" else ""
    shape = settings | (SMALL if small else {}) | {"max_position_embeddings": LONGEST, "tie_word_embeddings": True}
    config = getattr(transformers, f"{family}{text}Config")(**shape, use_cache=False)
    torch.manual_seed(0)
    with device:
        model: Any = getattr(transformers, f"{family}ForCausalLM")(config)
    model = model.to(torch.float32 if small else torch.bfloat16).train()
    model.gradient_checkpointing_enable(gradient_checkpointing_kwargs={"use_reentrant": False})
    return model


def language_steps(
    name: str, batch: int, length: int, device: torch.device, wanted: Sequence[str], small: bool
) -> dict[str, Step | peers.PeerAbsent]:
    """Steps (forward and backward) of one model on b x t random tokens, one for each head."""
    model: Any = language_model(name, device, small)
    weights = list(model.parameters())
    ids = torch.randint(model.config.vocab_size, (batch, length), device=device)
    # A copy that shares all weights: only it gets the loss of tilewise.
    twin = copy.deepcopy(model, {id(weight): weight for weight in weights})
    target = F.pad(ids[:, 1:], (0, 1), value=IGNORED).flatten()

    def with_head(head: Callable[[Tensor, Tensor, Tensor], Tensor]) -> Callable[[], Tensor]:
        def forward() -> Tensor:
            hidden = model.base_model(input_ids=ids).last_hidden_state
            return head(hidden.flatten(0, 1), model.get_output_embeddings().weight, target)

        return forward

    steps: dict[str, Step | peers.PeerAbsent] = {}
    for method in wanted:
        try:
            if method == "tilewise":
                use_linear_cross_entropy(twin)
            whole = {"tilewise": twin, OWN: model}.get(method)  # a model that computes its own loss
            forward = partial(own_loss, whole, ids) if whole else with_head(head_of(method))
            steps[method] = Step(forward, weights)
        except peers.PeerAbsent as absent:
            steps[method] = absent
    return steps


def own_loss(model: Any, ids: Tensor) -> Tensor:
    """The loss that the model itself computes for the next tokens."""
    loss: Tensor = model(input_ids=ids, labels=ids).loss
    return loss


def stored_logits(hidden: Tensor, weight: Tensor, target: Tensor) -> Tensor:
    """The mean loss from stored logits, with a float32 softmax."""
    return F.cross_entropy((hidden @ weight.T).float(), target, ignore_index=IGNORED)


def head_of(method: str) -> Callable[[Tensor, Tensor, Tensor], Tensor]:
    """A head outside of the model: from hidden states (b t, d), classifier (V, d) and targets (b t,) to the loss."""
    if method == NO_HEAD:
        return lambda hidden, weight, target: hidden.sum()
    if method == COMPILED:
        torch._dynamo.reset()
        return torch.compile(stored_logits, dynamic=False)
    x: dict[str, Any] = {}
    loss = peers.build(PEERS[method], x)

    def head(hidden: Tensor, weight: Tensor, target: Tensor) -> Tensor:
        x.update(a=hidden, b=weight, target=target)
        try:
            return loss()
        finally:
            x.clear()

    return head


class Pooled(nn.Module):
    """BERT-base with random weights. Its feature is that of the first token, of unit length."""

    def __init__(self, device: torch.device, small: bool) -> None:
        super().__init__()
        transformers = importlib.import_module("transformers")
        torch.manual_seed(0)
        # Without dropout, so that all methods compute the same loss
        none = {"hidden_dropout_prob": 0.0, "attention_probs_dropout_prob": 0.0}
        with device:
            config = transformers.BertConfig(**(SMALL_BERT if small else {}), **none)
            self.bert = transformers.BertModel(config, add_pooling_layer=False)
        self.to(torch.float32 if small else torch.bfloat16)

    def forward(self, features: dict[str, Tensor]) -> dict[str, Tensor]:
        """As sentence-transformers calls a model: from and to a dictionary."""
        state = self.bert(**features).last_hidden_state[:, 0]
        return {**features, "sentence_embedding": F.normalize(state, dim=-1)}

    def embed(self, input_ids: Tensor) -> Tensor:
        """The features of these tokens."""
        return self({"input_ids": input_ids})["sentence_embedding"]


def all_scores(query: Tensor, document: Tensor) -> Tensor:
    """InfoNCE of all stored scores."""
    scores = query @ document.T / TEMPERATURE
    return F.cross_entropy(scores.float(), torch.arange(len(scores), device=scores.device))


def retrieval_steps(
    pairs: int, device: torch.device, wanted: Sequence[str], small: bool
) -> dict[str, Step | peers.PeerAbsent]:
    """Steps of BERT-base on pairs of a query and a document, through a gradient cache, one for each loss."""
    model, lengths = Pooled(device, small), (8, 16) if small else (QUERY_TOKENS, DOCUMENT_TOKENS)
    words = model.bert.config.vocab_size
    query, document = (torch.randint(words, (pairs, length), device=device) for length in lengths)
    weights, chunk = list(model.parameters()), min(CHUNK, pairs // 2)
    losses = {"tilewise": lambda q, d: tw.info_nce(q, d, temperature=TEMPERATURE), "all scores, cached": all_scores}
    steps: dict[str, Step | peers.PeerAbsent] = {}
    for method in wanted:
        if method != SENTENCES:
            cache = GradientCache(model.embed, losses[method], chunk_size=chunk)
            steps[method] = Step(lambda cache=cache: cache(query, document), weights)
            continue
        try:
            module = importlib.import_module("sentence_transformers.losses")
        except ImportError as error:
            steps[method] = peers.PeerAbsent(f"sentence_transformers cannot be imported: {error}")
            continue
        whole = nn.Sequential(model)  # as its own models, which are sequences of modules
        cached = module.CachedMultipleNegativesRankingLoss(whole, scale=1 / TEMPERATURE, mini_batch_size=chunk)
        sides = [{"input_ids": query}, {"input_ids": document}]
        steps[method] = Step(partial(cached, sides, None), weights)
    return steps
