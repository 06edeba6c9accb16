"""TRL's trainers log the same losses and metrics with our head as with their own, in float32."""

from __future__ import annotations

import warnings
from types import SimpleNamespace

import pytest
import torch
from tests.integrations.model_families import made
from tests.integrations.tiny_models import V
from torch import nn

from tilewise.errors import ConfigError
from tilewise.integrations.transformers import use_linear_cross_entropy
from tilewise.integrations.trl import use_token_head

pytestmark = [pytest.mark.slow, pytest.mark.filterwarnings("default")]
STEPS = 2


def tokenizer():
    tokenizers = pytest.importorskip("tokenizers")
    from transformers import PreTrainedTokenizerFast

    words = tokenizers.Tokenizer(tokenizers.models.WordLevel({f"w{i}": i for i in range(V)}, unk_token="w3"))
    words.pre_tokenizer = tokenizers.pre_tokenizers.WhitespaceSplit()
    return PreTrainedTokenizerFast(tokenizer_object=words, pad_token="w0", bos_token="w1", eos_token="w2")


def sentence(seed: int, length: int = 6) -> str:
    draw = torch.Generator().manual_seed(seed)
    return " ".join(f"w{i}" for i in torch.randint(4, V, (length,), generator=draw).tolist())


def rows(kind: str) -> list[dict[str, object]]:
    found = []
    for i in range(12):
        row: dict[str, object] = {"prompt": sentence(i)}
        if kind == "DPO":
            row |= {"chosen": sentence(100 + i, 4 + i % 3), "rejected": sentence(200 + i, 5)}
        if kind == "KTO":
            row |= {"completion": sentence(100 + i, 4 + i % 3), "label": i % 3 != 0}
        if kind == "SFT":
            row = {"input_ids": tokenizer()(sentence(i, 10 + i % 4))["input_ids"]}
        found.append(row)
    return found


def share_of_small_words(completions, **_) -> list[float]:
    return [sum(int(word[1:]) < V // 2 for word in text.split()) / max(len(text.split()), 1) for text in completions]


SETTINGS = {
    "SFT": {},
    "DPO": {"use_weighting": True},
    "KTO": {},
    "GRPO": {"num_generations": 4, "max_completion_length": 6, "temperature": 0.7, "beta": 0.05},
    "RLOO": {"num_generations": 4, "max_completion_length": 6, "temperature": 1.3, "beta": 0.05},
}


def built(kind: str, folder, model: nn.Module, **more):
    trl = pytest.importorskip("trl", minversion="1.15")
    datasets = pytest.importorskip("datasets")
    arguments = getattr(trl, f"{kind}Config")(
        output_dir=str(folder),
        max_steps=STEPS,
        per_device_train_batch_size=4,
        learning_rate=0.05,
        optim="sgd",
        logging_steps=1,
        report_to=[],
        use_cpu=True,
        bf16=False,
        save_strategy="no",
        dataloader_pin_memory=False,
        seed=3,
        **SETTINGS[kind],
    )
    others = {"reward_funcs": share_of_small_words} if kind in ("GRPO", "RLOO") else {}
    if kind in ("DPO", "KTO"):
        others["ref_model"] = made(seed=5)
    data = datasets.Dataset.from_list(rows(kind))
    return getattr(trl, f"{kind}Trainer")(
        model=model, args=arguments, train_dataset=data, processing_class=tokenizer(), **others, **more
    )


def numbers(log: dict[str, float]) -> dict[str, float]:
    """Everything that does not depend on the clock."""
    skipped = ("time", "runtime", "per_second", "flos", "memory")
    return {name: value for name, value in log.items() if not any(word in name for word in skipped)}


def logs(kind: str, folder, when: str, lora: bool = False) -> list[dict[str, float]]:
    torch.manual_seed(0)
    more = {}
    if lora:
        more["peft_config"] = pytest.importorskip("peft").LoraConfig(r=4, target_modules=["q_proj", "v_proj"])
    model = made()
    if kind in ("GRPO", "RLOO"):  # these load their reference model from the path of the model
        model.save_pretrained(folder / "reference")
        model.config._name_or_path = str(folder / "reference")
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # of other packages
        if when == "before":
            use_linear_cross_entropy(model)
        trainer = built(kind, folder, model, **more)
        if when == "after":
            handle = use_token_head(trainer)
            assert "active" in repr(handle)
        torch.manual_seed(1)
        trainer.train()
    return [numbers(entry) for entry in trainer.state.log_history if "loss" in entry]


@pytest.mark.parametrize("when", ["before", "after"])
@pytest.mark.parametrize("kind", SETTINGS)
def test_trainers_log_the_same(kind, when, tmp_path):
    want, got = logs(kind, tmp_path, "never"), logs(kind, tmp_path, when)
    assert len(got) == STEPS
    assert any("entropy" in name for name in got[0]), "a metric of the head must be among them"
    for ours, theirs in zip(got, want, strict=True):
        assert ours == pytest.approx(theirs, rel=1e-5, abs=1e-5)


@pytest.mark.parametrize("kind", ["DPO", "GRPO"])
def test_with_lora(kind, tmp_path):
    want, got = logs(kind, tmp_path, "never", lora=True), logs(kind, tmp_path, "after", lora=True)
    for ours, theirs in zip(got, want, strict=True):
        assert ours == pytest.approx(theirs, rel=1e-5, abs=1e-5)


def test_other_objects_are_refused():
    with pytest.raises(ConfigError, match=r"trainer is a trainer of TRL 1\.15 or newer"):
        use_token_head(object())


def test_a_reference_model_that_fails_leaves_the_policy_as_it_was():
    from trl.trainer.utils import add_fused_lm_head

    models = [made("llama") for _ in range(2)]
    for model in models:
        add_fused_lm_head(model)
    before = models[0].forward
    models[1].lm_head.weight.data[0, 0] = torch.nan
    with pytest.raises(ConfigError):
        use_token_head(SimpleNamespace(model=models[0], ref_model=models[1]))
    assert models[0].forward == before
    use_token_head(SimpleNamespace(model=models[0]))


def test_no_labels_give_the_loss_of_the_fused_head():
    from trl.trainer.utils import add_fused_lm_head

    model, tokens = made("llama"), torch.randint(0, V, (2, 7))
    add_fused_lm_head(model)
    none = {"input_ids": tokens, "labels": torch.full_like(tokens, -100), "fused_lm_head": True}
    want = model(**none).loss.item()
    with use_token_head(SimpleNamespace(model=model)):
        assert model(**none).loss.item() == want == 0.0
