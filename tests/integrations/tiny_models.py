"""Sizes of the tiny language models of the tests, and arguments of a `Trainer` for them."""

import pytest

V, D = 211, 32
SMALL = {
    **{"vocab_size": V, "hidden_size": D, "intermediate_size": 48, "num_hidden_layers": 2, "num_attention_heads": 4},
    **{"num_key_value_heads": 2, "initializer_range": 0.3, "max_position_embeddings": 64},
    **{"pad_token_id": 0, "bos_token_id": 1, "eos_token_id": 2},
}
GPT2 = {"vocab_size": V, "n_embd": D, "n_layer": 2, "n_head": 4, "n_positions": 64, "initializer_range": 0.3}
GPT2 |= {"bos_token_id": 1, "eos_token_id": 2}
NO_DROPOUT = {"resid_pdrop": 0.0, "embd_pdrop": 0.0, "attn_pdrop": 0.0}
EXPERTS = {"num_local_experts": 4, "output_router_logits": True, "router_aux_loss_coef": 0.5}


def trainer_arguments(folder, **settings):
    """Arguments of a `Trainer` that runs on the CPU, logs each step and writes nothing else."""
    pytest.importorskip("accelerate")
    from transformers import TrainingArguments

    plain = {"learning_rate": 0.1, "optim": "sgd", "per_device_train_batch_size": 2, "logging_steps": 1}
    quiet = {"report_to": [], "save_strategy": "no", "disable_tqdm": True}
    return TrainingArguments(
        output_dir=str(folder), use_cpu=True, dataloader_pin_memory=False, **plain, **quiet, **settings
    )
