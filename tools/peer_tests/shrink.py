"""Tiny configurations of transformers' model families: the default configuration with small sizes."""

from __future__ import annotations

from typing import Any

VOCABULARY, WIDTH, LAYERS, HEADS = 211, 32, 2, 4
IDS = {"pad_token_id": 0, "bos_token_id": 1, "eos_token_id": 2, "decoder_start_token_id": 1, "sep_token_id": 2}
IDS |= {"cls_token_id": 1}
GROUPS = (
    (VOCABULARY, "vocab_size decoder_vocab_size vocab_size_per_layer_input pronunciation_vocab_size shape_vocab_size"),
    (
        WIDTH,
        "hidden_size d_model n_embd embedding_size word_embed_proj_dim emb_dim attention_hidden_size lru_width "
        "input_embedding_size output_embedding_size pronunciation_embed_dim shape_embed_dim embedding_dim "
        "backbone_hidden_size output_hidden_size dim_model_base kv_lora_rank q_lora_rank o_lora_rank mamba_d_ssm",
    ),
    (
        48,
        "intermediate_size moe_intermediate_size shared_expert_intermediate_size decoder_ffn_dim encoder_ffn_dim "
        "n_inner ffn_dim ffn_hidden_size dim_ff dff d_inner intermediate_size_mlp expert_ffn_hidden_size "
        "dense_intermediate_size moe_shared_expert_intermediate_size shared_intermediate_size feed_forward_size "
        "prompt_mid_dim",
    ),
    (
        LAYERS,
        "num_hidden_layers n_layer n_layers num_layers decoder_layers encoder_layers num_decoder_layers "
        "num_encoder_layers num_blocks depth num_layers_per_stack",
    ),
    (
        HEADS,
        "num_attention_heads n_head n_heads num_heads decoder_attention_heads encoder_attention_heads "
        "attention_heads num_encoder_attention_heads num_decoder_attention_heads swa_num_attention_heads "
        "linear_num_heads linear_num_value_heads index_n_heads mamba_n_heads n_mamba_heads mamba_num_heads",
    ),
    (
        2,
        "num_key_value_heads num_kv_heads swa_num_key_value_heads linear_num_key_heads n_group n_groups o_groups "
        "num_expert_group num_experts_per_tok num_experts_per_token moe_topk moe_k top_k_experts topk_group",
    ),
    (
        8,
        "head_dim swa_head_dim qk_rope_head_dim v_head_dim qk_nope_head_dim index_head_dim mamba_d_state "
        "state_size linear_key_head_dim linear_value_head_dim linear_head_dim ssm_state_size time_step_rank "
        "mamba_dt_rank dim_head attention_head_size d_head kv_channels attention_head_dim query_pre_attn_scalar "
        "rotary_dim hidden_size_per_layer_input laurel_rank prompt_length gated_norm_rank router_hidden_size "
        "adapter_rank d_kv image_seq_length mm_tokens_per_image chunk_size mamba_chunk_size global_head_dim",
    ),
    (16, "mamba_d_head mamba_head_dim mamba_headdim qk_head_dim"),
    (4, "num_experts n_routed_experts num_local_experts moe_num_experts zero_expert_num"),
    (
        64,
        "max_position_embeddings n_positions n_ctx max_seq_len context_length max_source_positions "
        "max_target_positions model_max_length",
    ),
)
SIZES = {name: size for size, names in GROUPS for name in names.split()}


def tiny(config_class: type, **given: Any) -> Any:
    """The configuration with small sizes, also of the configurations inside. ``given`` overrides."""
    return config_class(**_changes(config_class(), given))


def _changes(default: Any, given: dict[str, Any]) -> dict[str, Any]:
    values = default.to_dict()
    inside = set(getattr(default, "sub_configs", None) or ())
    changes: dict[str, Any] = {}
    for name, value in values.items():
        if name in inside:
            nested = getattr(default, name)
            if nested is not None:
                changes[name] = _changes(nested, given.get(name, {})) | {"model_type": nested.model_type}
        elif name in SIZES and isinstance(value, int) and not isinstance(value, bool):
            changes[name] = min(SIZES[name], value)
        elif name in IDS and value is not None:
            changes[name] = IDS[name]
    kinds = list(dict.fromkeys(values.get("layer_types") or ()))
    if len(kinds) > 1:  # one layer of each kind
        changes |= {"layer_types": kinds, "num_hidden_layers": len(kinds)}
    if "kv_lora_rank" in values and "num_key_value_heads" in values:  # these expand keys to all heads
        changes["num_key_value_heads"] = HEADS
    return changes | {name: value for name, value in given.items() if name not in inside}
