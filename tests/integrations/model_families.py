"""Tiny language models of many families, a batch for them, and one step of training.

Tests import the model classes from here, because they are loaded while torchvision is hidden.
"""

from __future__ import annotations

import sys

import pytest
import torch
from tests.integrations.tiny_models import EXPERTS, GPT2, NO_DROPOUT, SMALL, D, V
from torch import nn

# A torchvision for another torch breaks the import of transformers, and no test here needs torchvision.
hidden = "torchvision" not in sys.modules
if hidden:
    sys.modules["torchvision"] = None
try:
    transformers = pytest.importorskip("transformers")
    from transformers import (  # loaded now, while torchvision is hidden
        BartConfig,
        BartForConditionalGeneration,
        CohereConfig,
        CohereForCausalLM,
        Gemma2Config,
        Gemma2ForCausalLM,
        GPT2Config,
        GPT2DoubleHeadsModel,  # noqa: F401 - for a test
        GPT2LMHeadModel,
        GraniteConfig,
        GraniteForCausalLM,
        LlamaConfig,
        LlamaForCausalLM,
        LlamaModel,  # noqa: F401 - for a test
        MistralConfig,
        MistralForCausalLM,
        MixtralConfig,
        MixtralForCausalLM,
        Phi3Config,
        Phi3ForCausalLM,
        PhiConfig,
        PhiForCausalLM,
        Qwen2Config,
        Qwen2ForCausalLM,
        Qwen3Config,
        Qwen3ForCausalLM,
        T5Config,
        T5ForConditionalGeneration,
    )
finally:
    if hidden:
        del sys.modules["torchvision"]

SEQ2SEQ = {"vocab_size": V, "d_model": D, "decoder_start_token_id": 0, "pad_token_id": 0}
BART = {"encoder_layers": 1, "decoder_layers": 1, "encoder_ffn_dim": 48, "decoder_ffn_dim": 48, "init_std": 0.3}
BART |= {"encoder_attention_heads": 4, "decoder_attention_heads": 4, "dropout": 0.0}
T5 = {"d_kv": 8, "d_ff": 48, "num_layers": 1, "num_heads": 4, "dropout_rate": 0.0}
FAMILIES = {
    "llama": lambda: LlamaForCausalLM(LlamaConfig(**SMALL)),
    "llama, tied": lambda: LlamaForCausalLM(LlamaConfig(**SMALL, tie_word_embeddings=True)),
    "qwen2": lambda: Qwen2ForCausalLM(Qwen2Config(**SMALL)),
    "qwen3": lambda: Qwen3ForCausalLM(Qwen3Config(**SMALL, head_dim=8)),
    "gemma2, capped": lambda: Gemma2ForCausalLM(Gemma2Config(**SMALL, head_dim=8, final_logit_softcapping=3.0)),
    "gemma2, not capped": lambda: Gemma2ForCausalLM(Gemma2Config(**SMALL, head_dim=8, final_logit_softcapping=None)),
    "mistral": lambda: MistralForCausalLM(MistralConfig(**SMALL)),
    "phi, head with a bias": lambda: PhiForCausalLM(PhiConfig(**SMALL)),
    "phi3": lambda: Phi3ForCausalLM(Phi3Config(**SMALL)),
    "cohere, scaled": lambda: CohereForCausalLM(CohereConfig(**SMALL, logit_scale=0.37)),
    "granite, divided": lambda: GraniteForCausalLM(GraniteConfig(**SMALL, logits_scaling=2.5)),
    "mixtral, auxiliary loss": lambda: MixtralForCausalLM(MixtralConfig(**SMALL, **EXPERTS)),
    "gpt2, tied": lambda: GPT2LMHeadModel(GPT2Config(**GPT2, **NO_DROPOUT)),
    "bart, bias added": lambda: BartForConditionalGeneration(BartConfig(**SEQ2SEQ, **BART)),
    "t5": lambda: T5ForConditionalGeneration(T5Config(**SEQ2SEQ, **T5)),
}


def made(name: str = "llama", seed: int = 0) -> nn.Module:
    torch.manual_seed(seed)
    model = FAMILIES[name]().train()
    for key, values in [*model.named_parameters(), *model.named_buffers()]:
        if key.endswith(("lm_head.bias", "final_logits_bias")):
            nn.init.normal_(values)  # zeros would hide a missing bias
    return model


def batch(seed: int = 1, rows: int = 3, tokens: int = 11) -> dict[str, torch.Tensor]:
    ids = torch.randint(3, V, (rows, tokens), generator=torch.Generator().manual_seed(seed))
    labels = ids.clone()
    labels[0, :4] = -100
    return {"input_ids": ids, "labels": labels}


def gradients(model: nn.Module) -> torch.Tensor:
    return torch.cat([p.grad.flatten() for p in model.parameters() if p.grad is not None])


def trained(model: nn.Module, **inputs) -> tuple[torch.Tensor, torch.Tensor]:
    """Loss and all gradients of one step."""
    model.zero_grad()
    loss = model(**inputs)["loss"]
    loss.backward()
    return loss.detach(), gradients(model)
