"""What some of transformers' model families need beside small sizes (`shrink`): settings and inputs."""

from __future__ import annotations

from typing import Any

import torch
from tools.peer_tests.shrink import VOCABULARY
from torch import Tensor

HEAD_DIM = {"head_dim": 8}
HYBRID = {"layers_block_type": ["linear_attention", "hybrid", "hybrid"], "num_hidden_layers": 3}
HYBRID |= {"attention_hidden_size": 64, "attention_head_dim": 16}
FULL = {"attention_type": "original_full"}  # chosen in the first call otherwise, which then differs from the others
STARTED = {"decoder_start_token_id": 0}
INDEXER = {"indexer_n_heads": 2, "indexer_kv_heads": 1, "indexer_head_dim": 8, "indexer_budget": 8}
INDEXER |= {"indexer_compress_ratio": 4}
# Reformer draws seeds from the clock for its hashes and its dropout.
LOCAL = {"attn_layers": ["local"] * 2, "local_attn_chunk_length": 4, "axial_pos_embds": False}
LOCAL |= {"hidden_dropout_prob": 0.0, "local_attention_probs_dropout_prob": 0.0}
ROPE = {"rope_type": "default", "rope_theta": 10000.0}
# By family, or kind and family: settings whose default is None, depends on the number of layers, or cannot be made
# small by its name alone.
SETTINGS: dict[str, dict[str, Any]] = {
    "bamba": {"attn_layer_indices": [1]},
    "big_bird": FULL,
    "bigbird_pegasus": FULL,
    "cohere": {"logit_scale": 0.5},
    "cohere2_moe": {"logit_scale": 0.5},
    "cohere_compass_text": {"rope_parameters": {"full_attention": {**ROPE, "mrope_section": [2, 1, 1]}}},
    "dbrx": {"attn_config": {"rope_theta": 10000.0, "clip_qkv": 8.0}},
    "deepseek_v2": {"num_experts_per_tok": 2},
    "dots1": {"n_routed_experts": 4, "num_experts_per_tok": 2, "n_shared_experts": 1},
    "esm": {"vocab_size": VOCABULARY, "mask_token_id": 4, "pad_token_id": 0},
    "esmc": {"num_key_value_heads": 4, "vocab_size": VOCABULARY},
    "gemma3n_text": {"num_kv_shared_layers": 0, "activation_sparsity_pattern": [0.5, 0.0]},
    "gpt_neo": {"attention_types": [[["global", "local"], 1]]},
    "granitemoehybrid": {"layer_types": ["linear_attention", "full_attention"]},
    "hrm_text": {"use_cache": False},
    "hunyuan_v1_dense": HEAD_DIM,
    "hunyuan_v1_moe": HEAD_DIM,
    "inkling_text": {"logits_mup_width_multiplier": 2.0},
    "jamba": {"attn_layer_period": 2, "attn_layer_offset": 1},
    "lfm2_moe": {"layer_types": ["conv", "full_attention"]},
    "longt5": STARTED,
    "mamba2": {"head_dim": 16},
    "ministral": HEAD_DIM,
    "nemotron": {"num_key_value_heads": 2},
    "qwen4_exp": INDEXER,
    "qwen4_exp_text": INDEXER,
    "causal reformer": LOCAL | {"is_decoder": True},
    "masked reformer": LOCAL,
    "switch_transformers": STARTED,
    "t5": STARTED,
    "xlstm": {"hidden_size": 128, "embedding_dim": 128},
    "xmod": {"default_language": "en_XX"},
    "zamba": HYBRID,
    "zamba2": HYBRID,
}


def inputs_of(name: str, plain: dict[str, Tensor]) -> dict[str, Tensor] | None:
    """Inputs of the family, or None for ``plain``: token ids and labels alone."""
    generator = torch.Generator().manual_seed(3)
    if name == "git":
        return plain | {"pixel_values": torch.randn(3, 3, 224, 224, generator=generator)}
    if name in ("musicgen", "musicgen_melody"):  # rows of input_ids are codebooks, four of each sample
        ids = torch.randint(3, VOCABULARY, (8, 11), generator=generator)
        return {"input_ids": ids, "labels": ids.reshape(2, 4, 11).transpose(1, 2).contiguous()}
    if name == "reformer":  # a multiple of the chunks
        return {key: value[:, :8].contiguous() for key, value in plain.items()}
    return None
