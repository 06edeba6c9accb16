"""A model that trains without its logits has the same loss and gradients as with them."""

from __future__ import annotations

import math
from pathlib import Path

import pytest
import torch
import torch.nn.functional as F
from tests.compare import assert_close, relative_error
from tests.integrations.model_families import (
    FAMILIES,
    Gemma2Config,
    Gemma2ForCausalLM,
    GPT2Config,
    GPT2DoubleHeadsModel,
    LlamaConfig,
    LlamaForCausalLM,
    batch,
    gradients,
    made,
    trained,
)
from tests.integrations.tiny_models import GPT2, NO_DROPOUT, SMALL, V
from tests.test_docs import python_blocks

import tilewise as tw
from tilewise.errors import DtypeError, RangeError
from tilewise.integrations.transformers import NoLogits, use_linear_cross_entropy


@pytest.mark.parametrize("name", FAMILIES)
def test_loss_and_gradients_are_those_of_the_model(name):
    model, inputs = made(name), batch()
    want_loss, want = trained(model, **inputs)
    with use_linear_cross_entropy(model):
        output = model(**inputs)
        loss, got = trained(model, **inputs)
    assert isinstance(output.logits, NoLogits)
    assert list(output)[:2] == list(model(**inputs))[:2]
    assert_close(loss, want_loss, 1e-6, "loss")
    assert_close(got, want, 2e-5, "gradients")


def test_the_families_are_hard_enough():
    """A missing cap, scale or bias changes the loss: the logits are neither tiny nor equal."""
    for name in ("gemma2, capped", "cohere, scaled", "granite, divided", "phi, head with a bias"):
        model, inputs = made(name), batch()
        want, _ = trained(model, **inputs)
        states = model.model(inputs["input_ids"]).last_hidden_state
        naked = tw.linear_cross_entropy(states, model.lm_head.weight, inputs["labels"], shift=1)
        assert relative_error(naked, want) > 1e-2, name


@pytest.mark.parametrize("items", [7, torch.tensor(29)], ids=["int", "tensor"])
def test_num_items_in_batch(items):
    model, inputs = made(), batch()
    want_loss, want = trained(model, **inputs, num_items_in_batch=items)
    plain_loss, _ = trained(model, **inputs)
    use_linear_cross_entropy(model)
    loss, got = trained(model, **inputs, num_items_in_batch=items)
    assert relative_error(plain_loss, want_loss) > 1e-2
    assert_close(loss, want_loss, 1e-6)
    assert_close(got, want, 2e-5)


def test_shift_labels_and_labels_by_position():
    model, inputs = made(), batch()
    shifted = F.pad(inputs["labels"], (0, 1), value=-100)[:, 1:].contiguous()
    want_loss, want = trained(model, **inputs)
    use_linear_cross_entropy(model)
    assert_close(trained(model, **inputs, shift_labels=shifted)[1], want, 2e-5)
    model.zero_grad()
    output = model(inputs["input_ids"], None, None, None, None, inputs["labels"])
    assert isinstance(output.logits, NoLogits)
    assert_close(output.loss, want_loss, 1e-6)


def test_evaluation_and_generation_are_untouched():
    model, inputs = made(), batch()
    model.eval()
    want = model(**inputs)
    prompt = inputs["input_ids"][:, :4]
    tokens = model.generate(prompt, max_new_tokens=4, do_sample=False)
    use_linear_cross_entropy(model)
    got = model(**inputs)
    assert torch.equal(got.logits, want.logits)
    assert torch.equal(got.loss, want.loss)
    assert torch.equal(model.generate(prompt, max_new_tokens=4, do_sample=False), tokens)
    model.train()
    logits = model(inputs["input_ids"]).logits  # no labels: the logits are needed
    assert torch.equal(logits, want.logits)


def test_tuples_keep_their_length():
    model, inputs = made(), batch()
    want = model(**inputs, return_dict=False)
    use_linear_cross_entropy(model)
    got = model(**inputs, return_dict=False)
    assert len(got) == len(want)
    assert isinstance(got[1], NoLogits)
    assert_close(got[0], want[0], 1e-6)


def test_a_loss_without_loss_function_and_two_heads():
    torch.manual_seed(0)
    model, inputs = GPT2DoubleHeadsModel(GPT2Config(**GPT2, **NO_DROPOUT, summary_first_dropout=0.0)).train(), batch()
    choices = {"mc_token_ids": torch.tensor([3, 5, 7]), "input_ids": inputs["input_ids"], "labels": inputs["labels"]}
    want = model(**choices).loss
    want.backward()
    gradient = gradients(model).clone()
    model.zero_grad()
    use_linear_cross_entropy(model, verify=False)
    got = model(**choices)
    got.loss.backward()
    assert isinstance(got.logits, NoLogits)
    assert torch.is_tensor(got.mc_logits)
    assert_close(got.loss, want, 1e-6)
    assert_close(gradients(model), gradient, 2e-5)


def test_all_labels_ignored_is_nan_as_before():
    model, inputs = made(), batch()
    inputs["labels"].fill_(-100)
    assert model(**inputs).loss.isnan()
    use_linear_cross_entropy(model)
    assert model(**inputs).loss.isnan()


def test_gradient_checkpointing():
    model, inputs = made(), batch()
    want = trained(model, **inputs)[1]
    model.gradient_checkpointing_enable()
    model.config.use_cache = False
    use_linear_cross_entropy(model)
    assert_close(trained(model, **inputs)[1], want, 2e-5)


def test_compiled_in_one_graph():
    torch.manual_seed(0)
    config = Gemma2Config(**SMALL | {"num_hidden_layers": 1}, head_dim=8, final_logit_softcapping=3.0)
    model, inputs = Gemma2ForCausalLM(config).train(), batch()
    want_loss, want = trained(model, **inputs)
    use_linear_cross_entropy(model)
    torch._dynamo.reset()
    compiled = torch.compile(model, backend="eager", fullgraph=True)
    loss, got = trained(compiled, **inputs, use_cache=False)
    assert_close(loss, want_loss, 1e-6)
    assert_close(got, want, 2e-5)
    again = trained(compiled, **batch(2), use_cache=False)[0]
    model.forward.remove()
    assert_close(again, trained(model, **batch(2))[0], 1e-6)


# Memory.


def saved_sizes(model, inputs) -> list[int]:
    sizes = []

    def pack(tensor):
        sizes.append(tensor.numel())
        return tensor

    with torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor):
        loss = model(**inputs).loss
    loss.backward()
    return sizes


def test_nothing_of_tokens_by_vocabulary_is_saved():
    model, inputs = made(), batch(rows=8, tokens=40)
    logits = inputs["labels"].numel() * V
    assert max(saved_sizes(model, inputs)) >= logits  # the original model fails this check
    use_linear_cross_entropy(model)
    assert max(saved_sizes(model, inputs)) < logits / 4


def test_no_operator_makes_a_tensor_of_tokens_by_vocabulary():
    from torch.utils._python_dispatch import TorchDispatchMode

    class Largest(TorchDispatchMode):
        def __init__(self):
            super().__init__()
            self.numel = 0

        def __torch_dispatch__(self, func, types, args=(), kwargs=None):
            result = func(*args, **(kwargs or {}))
            for item in result if isinstance(result, (tuple, list)) else [result]:
                if isinstance(item, torch.Tensor):
                    self.numel = max(self.numel, item.numel())
            return result

    torch.manual_seed(0)
    model = LlamaForCausalLM(LlamaConfig(**SMALL | {"vocab_size": 20_000})).train()
    inputs = batch(rows=16, tokens=60)
    logits = inputs["labels"].numel() * 20_000
    options = tw.TileOptions(workspace_mib=1)
    with use_linear_cross_entropy(model, options=options, verify=False), Largest() as ours:
        model(**inputs).loss.backward()
    with Largest() as theirs:
        model(**inputs).loss.backward()
    assert theirs.numel >= logits
    assert ours.numel < logits / 16


# Settings.


def test_z_loss_is_added_and_has_its_gradient():
    model, inputs = made("gemma2, capped"), batch()
    model.zero_grad()
    output = model(**inputs)
    counted = F.pad(inputs["labels"], (0, 1), value=-100)[:, 1:] != -100
    want_loss = output.loss + 0.01 * output.logits.float().logsumexp(-1)[counted].square().mean()
    want_loss.backward()
    want = gradients(model).clone()
    use_linear_cross_entropy(model, z_loss=0.01)
    loss, got = trained(model, **inputs)
    assert_close(loss, want_loss, 1e-6)
    assert_close(got, want, 2e-5)


def test_settings_are_checked_at_once():
    with pytest.raises(DtypeError, match="TileOptions"):
        use_linear_cross_entropy(made(), options="fast")
    with pytest.raises(DtypeError, match="process group"):
        use_linear_cross_entropy(made(), group=0)
    with pytest.raises((DtypeError, RangeError), match="z_loss"):
        use_linear_cross_entropy(made(), z_loss="much")


# Precision.


def test_bfloat16_is_nearer_to_the_truth_than_the_original():
    model, inputs = made(), batch()
    want = trained(model, **inputs)[1].double()
    low = made().bfloat16()
    theirs = trained(low, **inputs)[1].double()
    use_linear_cross_entropy(low)
    ours = trained(low, **inputs)[1].double()
    assert relative_error(ours, want) <= 1.5 * relative_error(theirs, want) + 1e-6


def test_autocast():
    model, inputs = made("phi, head with a bias"), batch()
    with torch.autocast("cpu", torch.bfloat16):
        want_loss, want = trained(model, **inputs)
    use_linear_cross_entropy(model)
    with torch.autocast("cpu", torch.bfloat16):
        loss, got = trained(model, **inputs)
    assert loss.dtype == torch.float32
    assert_close(loss, want_loss, 5e-3)
    assert_close(got, want, 3e-2)


# Documentation.


def test_the_code_of_the_page_runs():
    """The code blocks need transformers, which is loaded here."""
    page = Path(__file__).parents[2] / "docs" / "concepts" / "transformers.md"
    blocks = [block for block in python_blocks(page.read_text()) if block.reason is not None]
    assert blocks
    names: dict[str, object] = {}
    for block in blocks:
        exec(compile("\n" * (block.line - 1) + block.source, str(page), "exec"), names)
    assert math.isfinite(float(names["loss"]))
