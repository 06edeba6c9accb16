"""Other modes and settings: evaluation without logits, label smoothing, and wrappers around the model."""

from __future__ import annotations

import sys
import types

import pytest
import torch
import torch.nn.functional as F
from tests.compare import assert_close
from tests.integrations.tiny_models import SMALL, V, trainer_arguments
from torch import nn

from tilewise.errors import ConfigError, DtypeError, RangeError, ShapeError
from tilewise.integrations.transformers import NoLogits, use_linear_cross_entropy

# A torchvision for another torch breaks the import of transformers, and no test here needs torchvision.
hidden = "torchvision" not in sys.modules
if hidden:
    sys.modules["torchvision"] = None
try:
    pytest.importorskip("transformers")
    from transformers import Gemma2Config, Gemma2ForCausalLM, LlamaConfig, LlamaForCausalLM
finally:
    if hidden:
        del sys.modules["torchvision"]


def llama() -> nn.Module:
    torch.manual_seed(0)
    return LlamaForCausalLM(LlamaConfig(**SMALL)).train()


def capped() -> nn.Module:
    torch.manual_seed(0)
    return Gemma2ForCausalLM(Gemma2Config(**SMALL, head_dim=8, final_logit_softcapping=3.0)).train()


def batch(seed: int = 1) -> dict[str, torch.Tensor]:
    ids = torch.randint(3, V, (3, 11), generator=torch.Generator().manual_seed(seed))
    labels = ids.clone()
    labels[0, :4] = -100
    return {"input_ids": ids, "labels": labels}


def trained(model: nn.Module, **inputs) -> tuple[torch.Tensor, torch.Tensor]:
    """Loss and all gradients of one step."""
    model.zero_grad()
    loss = model(**inputs).loss
    loss.backward()
    return loss.detach(), torch.cat([p.grad.flatten() for p in model.parameters()])


# Evaluation without logits.


def test_evaluation_without_logits():
    """The loss is the model's own: z_loss and label_smoothing apply to training only."""
    model, inputs = capped().eval(), batch()
    with torch.no_grad():
        want = model(**inputs)
        handle = use_linear_cross_entropy(model, evaluation=True, statistics=True, z_loss=0.1, label_smoothing=0.2)
        got = model(**inputs)
    assert isinstance(got.logits, NoLogits)
    assert_close(got.loss, want.loss, 1e-6)
    labels = inputs["labels"][:, 1:]
    right = (want.logits[:, :-1].argmax(-1) == labels)[labels != -100]
    assert handle.token_stats.accuracy == right.float().mean()

    assert torch.equal(model(input_ids=inputs["input_ids"]).logits, want.logits)  # no labels
    tokens = model.generate(inputs["input_ids"][:, :4], max_new_tokens=3, do_sample=False)
    assert model.train()(**inputs).loss > got.loss + 0.1
    handle.remove()
    assert torch.equal(model.eval().generate(inputs["input_ids"][:, :4], max_new_tokens=3, do_sample=False), tokens)
    assert torch.is_tensor(model(**inputs).logits)


def test_trainer_evaluates_without_logits(tmp_path):
    pytest.importorskip("accelerate")
    from transformers import Trainer, TrainingArguments

    rows = [{name: values[0] for name, values in batch(seed).items()} for seed in range(5)]
    arguments = TrainingArguments(
        output_dir=str(tmp_path), per_device_eval_batch_size=2, report_to=[], use_cpu=True, dataloader_pin_memory=False
    )
    found = []
    for evaluation in (False, True):
        model, made = llama(), []
        use_linear_cross_entropy(model, evaluation=evaluation)
        model.lm_head.register_forward_hook(lambda head, args, output, made=made: made.append(type(output).__name__))
        found.append(Trainer(model=model, args=arguments, eval_dataset=rows).evaluate()["eval_loss"])
        assert set(made) == ({"LazyLogits"} if evaluation else {"Tensor"})
    assert found[1] == pytest.approx(found[0], rel=1e-6)


# Label smoothing.


@pytest.mark.parametrize("statistics", [False, True])
def test_label_smoothing_is_that_of_cross_entropy(statistics):
    model, inputs = capped(), batch()
    logits = model(**inputs).logits
    labels = F.pad(inputs["labels"][:, 1:], (0, 1), value=-100)
    want_loss = F.cross_entropy(logits.flatten(0, 1), labels.flatten(), label_smoothing=0.3)
    want_loss.backward()
    want = torch.cat([p.grad.flatten() for p in model.parameters()])
    use_linear_cross_entropy(model, label_smoothing=0.3, statistics=statistics)
    loss, got = trained(model, **inputs)
    assert_close(loss, want_loss, 1e-6)
    assert_close(got, want, 2e-5)


def test_label_smoothing_is_that_of_trainer(tmp_path):
    """Trainer's label smoothing, which needs the logits, and ours give the same losses."""
    from transformers import Trainer

    rows = [{name: values[0] for name, values in batch(seed).items()} for seed in range(4)]
    losses = []
    for factor in (0.2, 0.0):
        model, made = llama(), []
        use_linear_cross_entropy(model, label_smoothing=0.2 - factor)
        model.lm_head.register_forward_hook(lambda head, args, output, made=made: made.append(type(output).__name__))
        arguments = trainer_arguments(tmp_path, max_steps=2, label_smoothing_factor=factor)
        trainer = Trainer(model=model, args=arguments, train_dataset=rows)
        trainer.train()
        losses.append([entry["loss"] for entry in trainer.state.log_history if "loss" in entry])
        assert set(made) == ({"Tensor"} if factor else {"LazyLogits"})
    assert len(losses[1]) == 2
    assert losses[1] == pytest.approx(losses[0], rel=1e-5)


def test_label_smoothing_is_checked_at_once():
    with pytest.raises(RangeError, match="label_smoothing"):
        use_linear_cross_entropy(llama(), label_smoothing=10)
    with pytest.raises(DtypeError, match="label_smoothing"):
        use_linear_cross_entropy(llama(), label_smoothing="some")


# Labels of a wrong shape.


@pytest.mark.parametrize("cut", [lambda labels: labels[:, :-2], lambda labels: labels[:2]], ids=["tokens", "rows"])
def test_labels_of_another_shape_say_so(cut):
    model, inputs = llama(), batch()
    use_linear_cross_entropy(model)
    with pytest.raises(ShapeError, match=r"33 tokens and 2\d labels.*shape of input_ids"):
        model(input_ids=inputs["input_ids"], labels=cut(inputs["labels"]))


# Wrappers around the model.


def test_made_a_method_of_the_model():
    """As accelerate's unwrap_model does with the forward of a model."""
    model, inputs = llama(), batch()
    want_loss, want = trained(model, **inputs)
    handle = use_linear_cross_entropy(model)
    model.forward = types.MethodType(model.forward, model)
    loss, got = trained(model, **inputs)
    assert_close(loss, want_loss, 1e-6)
    assert_close(got, want, 2e-5)
    assert isinstance(model(inputs["input_ids"], labels=inputs["labels"]).logits, NoLogits)  # input_ids by position
    with pytest.raises(ConfigError, match="already"):
        use_linear_cross_entropy(model)
    handle.remove()
    assert "forward" not in vars(model)
    assert torch.is_tensor(model(**inputs).logits)


def test_accelerate_wraps_and_unwraps():
    accelerate = pytest.importorskip("accelerate")
    results = []
    for use in (False, True):
        accelerate.state.AcceleratorState._reset_state(reset_partial_state=True)
        accelerator = accelerate.Accelerator(cpu=True, mixed_precision="bf16")
        model = llama()
        handle = use_linear_cross_entropy(model) if use else None
        prepared = accelerator.prepare(model)
        results.append(trained(prepared, **batch()))
        unwrapped = accelerator.unwrap_model(prepared, keep_fp32_wrapper=False)
        assert isinstance(unwrapped(**batch()).logits, NoLogits) == use
        if handle is not None:
            handle.remove()
            assert "forward" not in vars(unwrapped)
    accelerate.state.AcceleratorState._reset_state(reset_partial_state=True)
    assert_close(results[1][0], results[0][0], 1e-3)
    assert_close(results[1][1], results[0][1], 2e-2)


def test_verify_runs_the_hooks_of_the_model():
    """FSDP gathers weights in hooks, so verification must run them."""
    model, seen = llama(), []
    model.register_forward_pre_hook(lambda module, args: seen.append(module.training))
    handle = use_linear_cross_entropy(model)
    assert seen == [False, False]
    handle.remove()
    model.compile(backend="eager")
    model._compiled_call_impl = lambda *args, **kwargs: pytest.fail("compiled for the check")
    use_linear_cross_entropy(model)
    assert len(seen) == 4
