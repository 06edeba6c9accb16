"""Heads that are not a plain linear layer, such as adapters, and operations of models on their logits."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F
from tests.compare import assert_close, relative_error
from tests.integrations.model_families import LlamaConfig, LlamaForCausalLM, batch, made, trained
from tests.integrations.tiny_models import SMALL, D, V
from torch import nn

from tilewise.errors import ConfigError, ShapeError
from tilewise.integrations.transformers import LazyLogits, Term, use_linear_cross_entropy

# LoRA and other heads.


class LoRA(nn.Module):
    """A low-rank adapter on a linear layer, with the attributes that adapter libraries use."""

    def __init__(self, base_layer: nn.Linear, rank: int = 4, dropout: float = 0.0) -> None:
        super().__init__()
        self.base_layer = base_layer.requires_grad_(False)
        self.lora_A = nn.ModuleDict({"default": nn.Linear(base_layer.in_features, rank, bias=False)})
        self.lora_B = nn.ModuleDict({"default": nn.Linear(rank, base_layer.out_features, bias=False)})
        self.lora_dropout = nn.ModuleDict({"default": nn.Dropout(dropout)})
        self.scaling = {"default": 1.7}
        nn.init.normal_(self.lora_B["default"].weight)

    @property
    def weight(self):
        return self.base_layer.weight

    def forward(self, x, *args, **kwargs):
        result = self.base_layer(x, *args, **kwargs)
        dtype = result.dtype
        x = x.to(self.lora_A["default"].weight.dtype)
        low = self.lora_A["default"](self.lora_dropout["default"](x))
        result = result + self.lora_B["default"](low) * self.scaling["default"]
        return result.to(dtype)


@pytest.mark.parametrize("name", ["llama", "phi, head with a bias", "gemma2, capped"])
@pytest.mark.parametrize("dropout", [0.0, 0.4])
def test_lora_on_the_head_is_respected(name, dropout):
    model, inputs = made(name), batch()
    naked, _ = trained(model, **inputs)
    model.lm_head = LoRA(model.lm_head, dropout=dropout)
    torch.manual_seed(3)
    want_loss, want = trained(model, **inputs)
    assert relative_error(naked, want_loss) > 1e-3
    use_linear_cross_entropy(model)
    torch.manual_seed(3)
    loss, got = trained(model, **inputs)
    assert_close(loss, want_loss, 1e-6)
    assert_close(got, want, 2e-5)
    assert model.lm_head.lora_A["default"].weight.grad.norm() > 0
    assert model.lm_head.base_layer.weight.grad is None


def test_a_head_that_is_replaced_later_is_found():
    model, inputs = made(), batch()
    use_linear_cross_entropy(model)
    trained(model, **inputs)
    old = model.lm_head
    model.lm_head = LoRA(old)
    loss, got = trained(model, **inputs)
    model.forward.remove()
    want_loss, want = trained(model, **inputs)
    assert_close(loss, want_loss, 1e-6)
    assert_close(got, want, 2e-5)
    assert not old._forward_pre_hooks
    assert not old._forward_hooks


class NoLinear(nn.Linear):
    def forward(self, x):
        return torch.einsum("btd,vd->btv", x, self.weight)


class Normalized(nn.Linear):
    def forward(self, x):
        return F.linear(x, F.normalize(self.weight), self.bias)


class InTwo(nn.Linear):
    def forward(self, x):
        half = self.out_features // 2
        return torch.cat([F.linear(x, self.weight[:half]), F.linear(x, self.weight[half:])], dim=-1)


def test_a_head_with_a_computed_weight():
    model, inputs = made(), batch()
    model.lm_head = Normalized(D, V, bias=False)
    want_loss, want = trained(model, **inputs)
    use_linear_cross_entropy(model)
    loss, got = trained(model, **inputs)
    assert_close(loss, want_loss, 1e-6)
    assert_close(got, want, 2e-5)


@pytest.mark.parametrize("head", [NoLinear, InTwo])
def test_a_head_that_is_not_one_linear_layer_is_refused(head):
    model = made()
    model.lm_head = head(D, V, bias=False)
    with pytest.raises(ConfigError, match=rf"the head is a {head.__name__}.*F.linear"):
        use_linear_cross_entropy(model)
    assert "forward" not in vars(model)
    assert not model.lm_head._forward_hooks


def test_a_weight_that_was_freed_before_the_loss_is_refused():
    """A head that is sharded separately has its weight gathered before its forward and freed after it."""
    model, inputs = made(), batch()
    use_linear_cross_entropy(model)
    weight = model.lm_head.weight

    def free(*_):
        weight.data = weight.data.new_empty(0)

    model.lm_head.register_forward_hook(free)
    with pytest.raises(ConfigError, match="sharded separately"):
        model(**inputs)


# Operations on logits.


class Doing(LlamaForCausalLM):
    """Applies an operation to its logits before the loss."""

    what = staticmethod(lambda logits: logits)

    def forward(self, input_ids=None, labels=None, **kwargs):
        logits = self.what(self.lm_head(self.model(input_ids).last_hidden_state))
        loss = None if labels is None else self.loss_function(logits, labels, self.config.vocab_size)
        return {"loss": loss, "logits": logits}


def doing(what) -> Doing:
    torch.manual_seed(0)
    model = Doing(LlamaConfig(**SMALL)).train()
    model.what = what
    return model


def assigned(logits):
    logits[:, :, 5] = -1e9
    return logits


def scaled_in_place(logits):
    logits *= 0.3
    return logits


SUPPORTED = {
    "times": lambda logits: 0.5 * logits * torch.tensor(1.5),
    "over": lambda logits: logits / torch.tensor(2.0),
    "torch functions": lambda logits: torch.mul(torch.tanh(torch.div(logits, 3.0)), 2.0),
    "in place": scaled_in_place,
    "a bias on the left": lambda logits: torch.linspace(-1, 1, V) + logits,
    "a bias on the right, then a scale": lambda logits: (logits + torch.linspace(-1, 1, V)[None]) * 0.7,
    "a bias subtracted": lambda logits: logits - torch.linspace(-1, 1, V),
    "a factor for each class": lambda logits: torch.linspace(-1, 1, V) * (logits + torch.linspace(2, 0, V)),
    "a cap that is not one": lambda logits: 4.0 * torch.tanh(0.7 * logits) / 3.0,
    "doubled": lambda logits: logits + logits,
    "to and back": lambda logits: logits.to(torch.float64).to("cpu").to(logits.dtype),
    "reshaped": lambda logits: logits.flatten(0, 1).reshape(3, -1, V),
    "sliced": lambda logits: logits[:, :][..., :, :][:][:, torch.arange(logits.size(1))],
}
UNSUPPORTED = {
    "masked_fill": lambda logits: logits.masked_fill(torch.zeros(V, dtype=torch.bool), -1e9),
    "where": lambda logits: torch.where(torch.ones(V, dtype=torch.bool), logits, 0.0),
    "an assignment": assigned,
    "softmax": lambda logits: logits.softmax(-1),
    "a product": lambda logits: logits * torch.ones(1, 8, 1),
    "a product after the cap": lambda logits: logits.tanh() * torch.ones(V),
    "a division": lambda logits: logits / torch.ones(V),
    "a sum": lambda logits: logits + torch.ones(1, 1, 1),
    "exp": lambda logits: torch.exp(logits),
    "second tanh": lambda logits: logits.tanh().tanh(),
    "after the cap": lambda logits: logits.tanh() + torch.ones(V),
    "along the classes": lambda logits: logits[..., torch.arange(V)],
    "rsub": lambda logits: torch.ones(V) - logits,
    "this operator (minus)": lambda logits: -logits,
    "this operator (power)": lambda logits: logits**2,
    "this operator (larger)": lambda logits: logits > 0,
    "this operator (one by)": lambda logits: 1 / logits,
    "this operator (length)": lambda logits: logits * len(logits),
}


@pytest.mark.parametrize("what", SUPPORTED)
def test_supported_operations_on_logits(what):
    model = doing(SUPPORTED[what])
    inputs = batch()
    want_loss, want = trained(model, **inputs)
    use_linear_cross_entropy(model, verify=what != "reshaped")  # it needs three rows
    loss, got = trained(model, **inputs)
    assert_close(loss, want_loss, 1e-6)
    assert_close(got, want, 2e-5)


@pytest.mark.parametrize("what", UNSUPPORTED)
def test_unsupported_operations_on_logits_are_refused_at_installation(what):
    model = doing(UNSUPPORTED[what])
    with pytest.raises(ConfigError, match="not computed in training") as caught:
        use_linear_cross_entropy(model)
    assert what.split()[0] in str(caught.value) or what == "rsub"
    assert "forward" not in vars(model)


def test_indexing_along_the_classes_is_refused():
    settings = use_linear_cross_entropy(made(), verify=False).settings
    states, weight = torch.randn(2, 3, 4), torch.randn(7, 4)
    logits, dense = LazyLogits((Term(states, weight, weight.shape),), None, None, settings), states @ weight.T
    mask = torch.tensor([[True, False, True], [False, True, True]])
    good = [0, (0, 1), ..., (..., slice(None)), (slice(None), slice(1, None)), (..., slice(0, 2), slice(None)), mask]
    good += [(None, 0), (slice(None), [0, 2]), (mask, slice(None)), (0, ...), (0, 1, ...), (0, ..., slice(None))]
    for key in good:
        assert logits[key].shape == dense[key].shape, key
    bad = [(0, 0, 0), (..., 0), (..., slice(0, 2)), (slice(None), slice(None), slice(1, None)), (mask, 0)]
    bad += [(..., [0, 1]), (..., None), (0, ..., 1), torch.ones(2, 3, 7, dtype=torch.bool)]
    for key in bad:
        with pytest.raises(ConfigError, match="along the classes"):
            logits[key]
    assert not hasattr(logits, "argmax")
    assert "not computed" in repr(logits)
    with pytest.raises(ShapeError, match=r"config\.vocab_size"):
        logits.view(-1, 8)
