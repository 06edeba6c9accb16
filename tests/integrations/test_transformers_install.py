"""Installing the loss on a model: verification, one instance only, and removal."""

from __future__ import annotations

import copy
import inspect
import io
import pickle

import pytest
import torch
import torch.nn.functional as F
from tests.compare import assert_close
from tests.integrations.model_families import (
    GPT2Config,
    GPT2LMHeadModel,
    LlamaConfig,
    LlamaForCausalLM,
    LlamaModel,
    batch,
    made,
    trained,
)
from tests.integrations.tiny_models import GPT2, SMALL, D, V
from torch import nn

from tilewise.errors import ConfigError, RangeError
from tilewise.integrations.transformers import LossHandle, NoLogits, use_linear_cross_entropy

# Verification at installation.


class Elsewhere(LlamaForCausalLM):
    """Has a head and does not call it."""

    def forward(self, input_ids=None, labels=None, **kwargs):
        logits = self.model(input_ids).last_hidden_state @ self.lm_head.weight.T
        return {"loss": self.loss_function(logits, labels, V), "logits": logits}


class Otherwise(LlamaForCausalLM):
    """Its loss differs in training."""

    def forward(self, input_ids=None, labels=None, **kwargs):
        logits = self.lm_head(self.model(input_ids).last_hidden_state)
        factor = 1.01 if isinstance(logits, torch.Tensor) else 1.0
        return {"loss": factor * self.loss_function(logits, labels, V), "logits": logits}


class Picky(LlamaForCausalLM):
    def forward(self, input_ids=None, labels=None, *, pixels, **kwargs):
        return super().forward(input_ids, labels=labels)


@pytest.mark.parametrize(
    "kind, message",
    [(Elsewhere, "did not call its output embedding"), (Otherwise, "was not changed"), (Picky, "verify=False")],
)
def test_unsupported_models_are_refused(kind, message):
    model = kind(LlamaConfig(**SMALL)).train()
    with pytest.raises(ConfigError, match=message):
        use_linear_cross_entropy(model)
    assert "forward" not in vars(model)
    assert not model.lm_head._forward_hooks
    assert not model.lm_head._forward_pre_hooks


def test_verify_can_be_switched_off():
    model, inputs = Picky(LlamaConfig(**SMALL)).train(), batch()
    want = trained(model, **inputs, pixels=0)
    use_linear_cross_entropy(model, verify=False)
    for got, expected in zip(trained(model, **inputs, pixels=0), want, strict=True):
        assert_close(got, expected, 2e-5)


def test_verify_does_not_change_the_model():
    model = GPT2LMHeadModel(GPT2Config(**GPT2)).train()  # with dropout
    model.transformer.h[0].eval()
    modes = [module.training for module in model.modules()]
    before, state = {k: v.clone() for k, v in model.state_dict().items()}, torch.get_rng_state()
    handle = use_linear_cross_entropy(model)
    assert torch.equal(torch.get_rng_state(), state)
    assert [module.training for module in model.modules()] == modes
    assert all(p.grad is None for p in model.parameters())
    assert all(torch.equal(v, before[k]) for k, v in model.state_dict().items())
    handle.remove()


def test_verify_needs_weights():
    with torch.device("meta"):
        model = LlamaForCausalLM(LlamaConfig(**SMALL))
    with pytest.raises(ConfigError, match="meta device"):
        use_linear_cross_entropy(model)


def test_models_without_head_or_labels_are_refused():
    with pytest.raises(ConfigError, match="get_output_embeddings"):
        use_linear_cross_entropy(nn.Linear(2, 2))
    with pytest.raises(ConfigError, match="pass the model inside"):
        use_linear_cross_entropy(nn.DataParallel(made()))
    with pytest.raises(ConfigError, match=r"got OptimizedModule.*pass the model inside"):
        use_linear_cross_entropy(torch.compile(made(), backend="eager"))
    with pytest.raises(ConfigError, match="no output embedding"):
        use_linear_cross_entropy(LlamaModel(LlamaConfig(**SMALL)))
    model = made()
    model.get_output_embeddings = lambda: nn.ModuleList([nn.Linear(D, V), nn.Linear(D, V)])  # as in Musicgen
    with pytest.raises(ConfigError, match=r"several output embeddings \(heads\), 2"):
        use_linear_cross_entropy(model, verify=False)
    model = made()
    use_linear_cross_entropy(model)
    with pytest.raises(ConfigError, match="already"):
        use_linear_cross_entropy(model)


# One instance only, and removal.


def names_of(model: nn.Module):
    """Attributes and hooks of all modules of a model."""
    return [(name, set(vars(m)), [*m._forward_hooks], [*m._forward_pre_hooks]) for name, m in model.named_modules()]


def test_removal_is_exact_and_other_objects_do_not_change():
    model, other, inputs = made(), made(), batch()
    classes = {kind: dict(vars(kind)) for kind in {type(m) for m in model.modules()}}
    before, functional = names_of(model), F.cross_entropy
    want_loss, want = trained(model, **inputs)
    handle = use_linear_cross_entropy(model)
    trained(model, **inputs)
    assert F.cross_entropy is functional
    assert all(dict(vars(kind)) == attributes for kind, attributes in classes.items())
    assert torch.is_tensor(other(**inputs).logits)
    handle.remove()
    handle.remove()
    assert names_of(model) == before
    assert model.forward.__func__ is LlamaForCausalLM.forward
    loss, got = trained(model, **inputs)
    assert torch.equal(loss, want_loss)
    assert torch.equal(got, want)
    use_linear_cross_entropy(model)  # and again


def test_an_error_in_the_model_leaves_it_usable():
    model, inputs = made(), batch()
    want_loss, _ = trained(model, **inputs)
    use_linear_cross_entropy(model)
    with pytest.raises(RangeError):
        model(input_ids=inputs["input_ids"], labels=torch.full_like(inputs["labels"], V))
    assert torch.is_tensor(model.lm_head(torch.randn(2, D)))  # the head alone computes logits
    assert_close(trained(model, **inputs)[0], want_loss, 1e-6)


def test_an_earlier_replacement_of_forward_is_kept():
    model, inputs = made(), batch()
    inner, calls = model.forward, []

    def counted(*args, **kwargs):
        calls.append(1)
        return inner(*args, **kwargs)

    model.forward = counted
    handle = use_linear_cross_entropy(model, verify=False)
    assert isinstance(model(input_ids=inputs["input_ids"], labels=inputs["labels"]).logits, NoLogits)
    assert calls == [1]
    handle.remove()
    assert model.forward is counted


def test_a_later_replacement_of_forward():
    model, inputs = made(), batch()
    handle = use_linear_cross_entropy(model)
    ours = model.forward
    model.forward = lambda *args, **kwargs: ours(*args, **kwargs)
    assert isinstance(model(**inputs).logits, NoLogits)
    handle.remove()
    assert torch.is_tensor(model(**inputs).logits)


def test_copies_have_their_own_handle():
    model, inputs = made(), batch()
    use_linear_cross_entropy(model)
    want_loss, want = trained(model, **inputs)
    stream = io.BytesIO()
    pickle.dump(model, stream)
    for twin in (copy.deepcopy(model), pickle.loads(stream.getvalue())):
        assert isinstance(twin.forward, LossHandle)
        assert twin.forward.model is twin
        model.zero_grad()
        loss, got = trained(twin, **inputs)
        assert_close(loss, want_loss, 1e-6)
        assert_close(got, want, 1e-6)
        assert model.lm_head.weight.grad is None
        twin.forward.remove()
        assert torch.is_tensor(twin(**inputs).logits)
        assert isinstance(model(**inputs).logits, NoLogits)


def test_saved_as_before(tmp_path):
    model = made()
    names, signature = list(model.state_dict()), inspect.signature(model.forward)
    use_linear_cross_entropy(model)
    assert list(model.state_dict()) == names
    assert inspect.signature(model.forward) == signature
    model.save_pretrained(tmp_path)
    again = LlamaForCausalLM.from_pretrained(tmp_path)
    assert torch.equal(again.lm_head.weight, model.lm_head.weight)
    assert again.config.architectures == ["LlamaForCausalLM"]


def test_the_handle_has_a_repr():
    model = made()
    handle = use_linear_cross_entropy(model, z_loss=0.1, statistics=True)
    assert repr(handle) == "LossHandle(LlamaForCausalLM, active, z_loss=0.1, statistics=True)"
    handle.remove()
    assert repr(handle) == "LossHandle(LlamaForCausalLM, removed, z_loss=0.1, statistics=True)"


# The logits of an output.

USES = {
    "an attribute": lambda logits: logits.shape,
    "a method": lambda logits: logits.argmax(-1),
    "a function": lambda logits: F.softmax(logits, -1),
    "an index": lambda logits: logits[..., :-1, :],
    "a product": lambda logits: 2.0 * logits,
    "a division": lambda logits: logits / 0.7,
    "a tensor on the left": lambda logits: torch.ones(2) * logits,
    "a comparison": lambda logits: logits > 0,
    "a matrix product": lambda logits: logits @ torch.ones(2, 2),
    "len": len,
    "bool": bool,
    "float": float,
    "iteration": list,
    "numpy": lambda logits: logits.detach().cpu().numpy(),
}


@pytest.mark.parametrize("use", USES)
def test_logits_that_were_not_computed_say_so_when_used(use):
    model = made()
    use_linear_cross_entropy(model)
    logits = model(**batch()).logits
    with pytest.raises(ConfigError, match=r"not computed: use_linear_cross_entropy .*handle\.token_stats"):
        USES[use](logits)


def test_logits_that_were_not_computed_pass_through_frameworks():
    model = made()
    use_linear_cross_entropy(model)
    logits = model(**batch()).logits
    assert copy.deepcopy(logits) is logits
    assert pickle.loads(pickle.dumps(logits)) is logits
    assert not hasattr(logits, "dtype")
    assert "not computed" in repr(logits)


def test_calling_forward_directly_is_the_same():
    """Adapter libraries call ``model.forward`` and not ``model``."""
    model, inputs = made(), batch()
    use_linear_cross_entropy(model)
    assert isinstance(model.forward(**inputs).logits, NoLogits)
