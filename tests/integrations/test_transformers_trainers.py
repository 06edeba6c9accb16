"""Accumulation, trainers, engines and adapters around a model: they log, train and evaluate as before."""

from __future__ import annotations

import pytest
import torch
from tests.compare import assert_close
from tests.integrations.model_families import batch, gradients, made, trained
from tests.integrations.tiny_models import V, trainer_arguments
from torch import nn

from tilewise.integrations.transformers import NoLogits, use_linear_cross_entropy

# Accumulation, by hand and by Trainer.


def test_accumulated_steps_are_one_large_step():
    """sum of losses / all items of all micro-batches, as `Trainer` does it: the gradient of the whole batch."""
    model, inputs = made(), batch(rows=6)
    inputs["labels"][4, 2:] = -100  # micro-batches of different weight
    want = trained(model, **inputs)[1].clone()
    items = (inputs["labels"][:, 1:] != -100).sum()
    use_linear_cross_entropy(model)
    model.zero_grad()
    for rows in (slice(0, 2), slice(2, 4), slice(4, 6)):
        part = {name: values[rows] for name, values in inputs.items()}
        model(**part, num_items_in_batch=items).loss.backward()
    assert_close(gradients(model), want, 2e-5)


def test_trainer_with_accumulation(tmp_path):
    from transformers import Trainer

    rows = batch(rows=12)
    rows["labels"][5, 1:8] = -100
    data = [{name: values[i] for name, values in rows.items()} for i in range(12)]

    def run(use: bool) -> tuple[list[float], float, nn.Module]:
        model = made("gpt2, tied")
        if use:
            use_linear_cross_entropy(model)
        arguments = trainer_arguments(tmp_path, max_steps=4, gradient_accumulation_steps=3)
        trainer = Trainer(model=model, args=arguments, train_dataset=data, eval_dataset=data)
        trainer.train()
        losses = [entry["loss"] for entry in trainer.state.log_history if "loss" in entry]
        return losses, trainer.evaluate()["eval_loss"], model

    want, want_eval, reference = run(use=False)
    got, got_eval, model = run(use=True)
    assert len(got) == 4
    assert got[-1] < got[0]
    assert got == pytest.approx(want, rel=1e-4)
    assert got_eval == pytest.approx(want_eval, rel=1e-4)
    for name, values in model.state_dict().items():
        assert_close(values, reference.state_dict()[name], 1e-4, name)


# Trainer, and other code that wraps a model or reads its logits.


def trainer_log(tmp_path, use: bool, **settings) -> tuple[list[float], dict[str, float]]:
    """Losses of three steps, and the result of evaluation."""
    from transformers import Trainer

    rows = [{name: values[0] for name, values in batch(seed).items()} for seed in range(8)]
    model = made()
    if use:
        use_linear_cross_entropy(model)
    arguments = trainer_arguments(tmp_path, max_steps=3, **settings)
    trainer = Trainer(model=model, args=arguments, train_dataset=rows, eval_dataset=rows, compute_metrics=accuracy)
    trainer.train()
    found = trainer.evaluate()
    losses = [entry["loss"] for entry in trainer.state.log_history if "loss" in entry]
    assert len(losses) == 3
    return losses, {name: found[name] for name in ("eval_loss", "eval_accuracy")}


def accuracy(prediction) -> dict[str, float]:
    logits, labels = prediction
    assert logits.shape == (*labels.shape, V)
    return {"accuracy": float((logits[:, :-1].argmax(-1) == labels[:, 1:]).mean())}


@pytest.mark.parametrize(
    "settings", [{}, {"label_smoothing_factor": 0.1}, {"gradient_checkpointing": True}, {"bf16": True}], ids=str
)
def test_trainer_trains_and_evaluates_as_before(tmp_path, settings):
    """Trainer's label smoothing removes the labels from the inputs and uses the logits."""
    want, want_found = trainer_log(tmp_path, use=False, **settings)
    got, found = trainer_log(tmp_path, use=True, **settings)
    close = 3e-2 if "bf16" in settings else 1e-4
    assert got == pytest.approx(want, rel=close)
    assert found == pytest.approx(want_found, rel=close, abs=close)


class Engine(nn.Module):
    """Contains the model and returns its output, as the engine of DeepSpeed does."""

    def __init__(self, module: nn.Module) -> None:
        super().__init__()
        self.module = module

    def forward(self, *args, **kwargs):
        return self.module(*args, **kwargs)


def test_wrapped_by_an_engine():
    model, inputs = made(), batch()
    want = model(**inputs).loss
    use_linear_cross_entropy(model)
    got = Engine(model).train()(**inputs)
    assert isinstance(got.logits, NoLogits)
    assert_close(got.loss, want, 1e-6)


# The packages themselves, if they are installed.


def tokenizer():
    tokenizers = pytest.importorskip("tokenizers")
    from transformers import PreTrainedTokenizerFast

    words = tokenizers.Tokenizer(tokenizers.models.WordLevel({f"w{i}": i for i in range(V)}, unk_token="w3"))
    return PreTrainedTokenizerFast(tokenizer_object=words, pad_token="w0", bos_token="w1", eos_token="w2")


@pytest.mark.slow
@pytest.mark.filterwarnings("default")  # of other packages
@pytest.mark.parametrize("when", ["before", "after"])
@pytest.mark.parametrize("lora", [False, True])
@pytest.mark.parametrize("loss_type", ["nll", "dft"])
def test_sft_trainer_logs_the_same(tmp_path, loss_type, lora, when):
    """With the loss installed before or after the trainer is built."""
    trl = pytest.importorskip("trl", minversion="1.15")
    datasets = pytest.importorskip("datasets")
    draw = torch.Generator().manual_seed(0)
    rows = [{"input_ids": torch.randint(3, V, (12 + i % 5,), generator=draw).tolist()} for i in range(24)]

    def run(use: bool) -> list[dict[str, float]]:
        arguments = trl.SFTConfig(
            output_dir=str(tmp_path),
            max_steps=3,
            per_device_train_batch_size=2,
            gradient_accumulation_steps=2,
            learning_rate=0.1,
            optim="sgd",
            logging_steps=1,
            loss_type=loss_type,
            report_to=[],
            use_cpu=True,
            bf16=False,
            save_strategy="no",
            dataloader_pin_memory=False,
        )
        adapter = pytest.importorskip("peft").LoraConfig(r=4, target_modules=["q_proj", "v_proj"]) if lora else None
        model = made()
        handle = use_linear_cross_entropy(model, statistics=True) if use and when == "before" else None
        trainer = trl.SFTTrainer(
            model=model,
            args=arguments,
            train_dataset=datasets.Dataset.from_list(rows),
            processing_class=tokenizer(),
            peft_config=adapter,
        )
        if use and when == "after":
            handle = use_linear_cross_entropy(trainer.model, statistics=True)
        trainer.train()
        assert not use or handle.token_stats is not None
        names = ("loss", "grad_norm", "entropy", "mean_token_accuracy")
        return [{name: entry[name] for name in names} for entry in trainer.state.log_history if "loss" in entry]

    want, got = run(use=False), run(use=True)
    assert len(got) == 3
    for ours, theirs in zip(got, want, strict=True):
        assert ours == pytest.approx(theirs, rel=1e-4)


ADAPTERS = {
    "on the backbone": {"target_modules": ["q_proj", "v_proj"]},
    "on the head": {"target_modules": ["q_proj", "lm_head"]},
    "DoRA on the head": {"target_modules": ["lm_head"], "use_dora": True},
    "a bias on the head": {"target_modules": ["lm_head"], "lora_bias": True},
    "a copy of the head": {"target_modules": ["q_proj"], "modules_to_save": ["lm_head"]},
}


@pytest.mark.filterwarnings("ignore")  # of other packages: a head without bias cannot be merged with a bias
@pytest.mark.parametrize("adapter", ADAPTERS)
@pytest.mark.parametrize("inside", [False, True])
def test_peft_adapters(adapter, inside):
    """With the loss installed on the wrapped model or on the model inside."""
    peft = pytest.importorskip("peft")
    results = []
    for use in (False, True):
        model = peft.get_peft_model(made(), peft.LoraConfig(r=4, **ADAPTERS[adapter]))
        torch.manual_seed(2)
        for name, values in model.named_parameters():
            if "lora_B" in name:
                nn.init.normal_(values, std=0.3)
        if use:
            use_linear_cross_entropy(model.get_base_model() if inside else model)
        output = model.train()(**batch())
        output.loss.backward()
        assert isinstance(output.logits, NoLogits) == use
        results.append((output.loss.detach(), gradients(model)))
    assert_close(results[1][0], results[0][0], 1e-6)
    assert_close(results[1][1], results[0][1], 2e-5)


@pytest.mark.filterwarnings("default")
@pytest.mark.parametrize("kind", ["IA3Config", "VeraConfig"])
def test_adapters_that_scale_each_class(kind):
    peft = pytest.importorskip("peft")
    more = {"feedforward_modules": []} if kind == "IA3Config" else {"r": 4}
    results = []
    for use in (False, True):
        model = peft.get_peft_model(made(), getattr(peft, kind)(target_modules=["lm_head"], **more))
        torch.manual_seed(2)
        for values in model.parameters():
            if values.requires_grad:
                nn.init.normal_(values, mean=1.0, std=0.3)
        if use:
            use_linear_cross_entropy(model)
        output = model.train()(**batch())
        output.loss.backward()
        results.append((output.loss.detach(), gradients(model)))
    assert results[0][1].abs().max() > 0
    assert_close(results[1][0], results[0][0], 1e-6)
    assert_close(results[1][1], results[0][1], 2e-5)
