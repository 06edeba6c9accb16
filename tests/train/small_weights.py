"""Write folders with tiny weights and tokenizers in the format of `transformers`."""

from pathlib import Path

import torch

from tilewise.train.models.pretrained import quiet_transformers, transformers

WORDS = ["[PAD]", "[UNK]", "[CLS]", "[SEP]", "[MASK]", "a", "cat", "dog", "red", "green", "blue"]
SMALL = {"hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 1, "num_attention_heads": 2}


def write_tokenizer(folder: Path) -> None:
    (folder / "vocab.txt").write_text("\n".join(WORDS))
    tokenizer = transformers().BertTokenizer(vocab=str(folder / "vocab.txt"))
    (folder / "vocab.txt").unlink()
    tokenizer.save_pretrained(folder)


def write_clip(folder: Path, tokenizer: bool = True, positions: int = 16, size: int = 16) -> Path:
    hf = transformers()
    torch.manual_seed(3)
    text = {**SMALL, "vocab_size": 64, "max_position_embeddings": positions, "eos_token_id": 3, "bos_token_id": 2}
    config = hf.CLIPConfig(
        text_config={**text, "pad_token_id": 0}, vision_config={**SMALL, "image_size": size, "patch_size": 8},
        projection_dim=24,
    )  # fmt: skip
    with quiet_transformers():
        hf.CLIPModel(config).save_pretrained(folder)
    if tokenizer:
        write_tokenizer(folder)
    return folder


def write_vit(folder: Path) -> Path:
    hf = transformers()
    torch.manual_seed(4)
    with quiet_transformers():
        hf.ViTModel(hf.ViTConfig(**SMALL, image_size=16, patch_size=8)).half().save_pretrained(folder)
    return folder


def write_bert(folder: Path) -> Path:
    hf = transformers()
    torch.manual_seed(5)
    with quiet_transformers():
        hf.BertModel(hf.BertConfig(**SMALL, vocab_size=len(WORDS), max_position_embeddings=128)).save_pretrained(folder)
    write_tokenizer(folder)
    return folder
