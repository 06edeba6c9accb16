"""TRL's small models and data sets without a download, made by TRL's own scripts.

The scripts take tokenizers from the hub. Here a tokenizer is trained on the texts of the data sets and gets the chat
template of the model's family, which TRL has.
"""

from __future__ import annotations

import importlib
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import datasets
import tokenizers
import torch
import transformers
import trl
from tools.peer_adapters.stand_in import publish

# Script of a model: chat template and end of a turn.
MODELS = {
    "for_causal_lm.qwen2_for_causal_lm_2_5": ("qwen2_5", "<|im_end|>"),
    "for_causal_lm.qwen3_for_causal_lm": ("qwen3", "<|im_end|>"),
    "for_causal_lm.qwen3_moe_for_causal_lm": ("qwen3", "<|im_end|>"),
    "for_causal_lm.gpt_oss_for_causal_lm": ("gptoss", "<|return|>"),
    "for_causal_lm.llama_for_causal_lm_3_2": ("llama3_2", "<|eot_id|>"),
    "for_causal_lm.remote_for_causal_lm": ("llama3_2", "<|eot_id|>"),
    "for_causal_lm.mistral_for_causal_lm_0_2": ("", "</s>"),
    "for_causal_lm.gemma2_for_causal_lm": ("gemma", "<eos>"),
    "for_causal_lm.gpt_neox_for_causal_lm": ("", "<|endoftext|>"),
    "for_causal_lm.cohere2_for_causal_lm": ("cohere2", "<|END_OF_TURN_TOKEN|>"),
    "for_causal_lm.glm4_moe_for_causal_lm": ("glm4moe", "<|user|>"),
    "for_causal_lm.lfm2_for_causal_lm": ("lfm2", "<|im_end|>"),
    "for_causal_lm.lfm2_for_causal_lm_2_5": ("lfm2_2_5", "<|im_end|>"),
    "for_causal_lm.nemotron_3_nano_for_causal_lm": ("nemotron_3_nano", "<|im_end|>"),
    "for_sequence_classification.qwen2_for_sequence_classification_2_5": ("qwen2_5", "<|im_end|>"),
    "for_sequence_classification.qwen3_for_sequence_classification": ("qwen3", "<|im_end|>"),
    "for_sequence_classification.llama_for_sequence_classification_3_2": ("llama3_2", "<|eot_id|>"),
}
DATA: dict[str, dict[str, datasets.DatasetDict]] = {}


def load_dataset(path: str, name: str = "", split: str | None = None, streaming: bool = False, **_: Any) -> Any:
    """The part of `datasets.load_dataset` that the tests use."""
    if path not in DATA:
        raise FileNotFoundError(f"{path} would be downloaded")
    found = DATA[path][name]
    if streaming:
        found = datasets.IterableDatasetDict({key: part.to_iterable_dataset() for key, part in found.items()})
    if split is None:
        return found
    part, count = re.fullmatch(r"(\w+)(?:\[:(\d+)\])?", split).groups()  # type: ignore[union-attr]
    return found[part].take(int(count)) if count else found[part]


def make_data() -> None:
    """Run the scripts that publish the data sets, and keep what they publish."""
    original = datasets.DatasetDict.push_to_hub
    for name in ("zen", "harmony", "toolcall"):
        kept = DATA[f"trl-internal-testing/{name}"] = {}
        datasets.DatasetDict.push_to_hub = lambda self, _, config_name, kept=kept: kept.update({config_name: self})
        importlib.import_module(f"scripts.generate_{name}_dataset").main(0.1, True, "")
    datasets.DatasetDict.push_to_hub = original


def texts(value: Any) -> Iterator[str]:
    """All strings inside of a row."""
    if isinstance(value, str):
        yield value
    elif isinstance(value, dict | list):
        for inside in value.values() if isinstance(value, dict) else value:
            yield from texts(inside)


def tokenizer(template: str, end: str) -> Any:
    """Byte pairs of the data sets' texts, with the special tokens of the chat template."""
    chat = (Path(trl.__file__).parent / "chat_templates" / f"{template}.jinja").read_text() if template else None
    special = sorted(set(re.findall(r"<\|\w+\|>|</?[a-z_]+>", chat or "")) | {end, "<|endoftext|>"})
    pairs = tokenizers.Tokenizer(tokenizers.models.BPE())
    pairs.pre_tokenizer = tokenizers.pre_tokenizers.ByteLevel(add_prefix_space=False)
    pairs.decoder = tokenizers.decoders.ByteLevel()
    trainer = tokenizers.trainers.BpeTrainer(
        vocab_size=1000,
        special_tokens=special,
        initial_alphabet=tokenizers.pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    zen = DATA["trl-internal-testing/zen"]
    pairs.train_from_iterator((text for data in zen.values() for row in data["train"] for text in texts(row)), trainer)
    made = transformers.PreTrainedTokenizerFast(tokenizer_object=pairs, eos_token=end, pad_token="<|endoftext|>")
    made.chat_template = chat
    return made


def make_models() -> None:
    """Run the scripts that publish the models, and save what they publish."""
    common = importlib.import_module("scripts.generate_tiny_models._common")
    for name in ("check_transformers_version", "smoke_test", "check_dtype_pattern", "print_config_diff"):
        setattr(common, name, lambda *_: None)

    def save(model: Any, words: Any, generation: Any, prefix: str, suffix: str = "") -> None:
        name = "-".join(filter(None, (prefix, type(model).__name__, suffix)))
        publish(f"trl-internal-testing/{name}", model, words, generation)

    common.push_to_hub = save  # type: ignore[attr-defined]
    loaders = (transformers.AutoTokenizer, transformers.AutoConfig, transformers.GenerationConfig)
    originals = [vars(loader)["from_pretrained"] for loader in loaders]
    for script, (template, end) in MODELS.items():
        words = tokenizer(template, end)
        family = script.split(".")[1].split("_")[0]

        def config(_: str, family: str = family, words: Any = words, **more: Any) -> Any:
            return transformers.AutoConfig.for_model(family, vocab_size=len(words), pad_token_id=0, **more)

        def generation(*_: Any, words: Any = words, **__: Any) -> Any:
            return transformers.GenerationConfig(eos_token_id=words.eos_token_id, pad_token_id=words.pad_token_id)

        for loader, made in zip(loaders, (lambda *_, words=words, **__: words, config, generation), strict=True):
            loader.from_pretrained = made
        torch.manual_seed(0)
        importlib.import_module(f"scripts.generate_tiny_models.{script}")
    for loader, original in zip(loaders, originals, strict=True):
        loader.from_pretrained = original
