"""A model trained without its logits has the loss and the gradients that it has with them."""

from __future__ import annotations

import copy
import inspect
import io
import math
import pickle
import sys
from pathlib import Path

import pytest
import torch
import torch.nn.functional as F
from tests.compare import assert_close, relative_error
from tests.integrations.tiny_models import EXPERTS, GPT2, NO_DROPOUT, SMALL, D, V
from tests.test_docs import python_blocks
from torch import nn

import tilewise as tw
from tilewise.errors import ConfigError, DtypeError, RangeError, ShapeError
from tilewise.integrations.transformers import LossHandle, Term, UnbuiltLogits, use_linear_cross_entropy

# A torchvision that does not fit the installed torch breaks the import, and nothing here needs one.
hidden = "torchvision" not in sys.modules
if hidden:
    sys.modules["torchvision"] = None
try:
    transformers = pytest.importorskip("transformers")
    from transformers import (  # loaded now, while torchvision is out of sight
        BartConfig,
        BartForConditionalGeneration,
        CohereConfig,
        CohereForCausalLM,
        Gemma2Config,
        Gemma2ForCausalLM,
        GPT2Config,
        GPT2DoubleHeadsModel,
        GPT2LMHeadModel,
        GraniteConfig,
        GraniteForCausalLM,
        LlamaConfig,
        LlamaForCausalLM,
        LlamaModel,
        MistralConfig,
        MistralForCausalLM,
        MixtralConfig,
        MixtralForCausalLM,
        Phi3Config,
        Phi3ForCausalLM,
        PhiConfig,
        PhiForCausalLM,
        Qwen2Config,
        Qwen2ForCausalLM,
        Qwen3Config,
        Qwen3ForCausalLM,
        T5Config,
        T5ForConditionalGeneration,
    )
finally:
    if hidden:
        del sys.modules["torchvision"]

SEQ2SEQ = {"vocab_size": V, "d_model": D, "decoder_start_token_id": 0, "pad_token_id": 0}
BART = {"encoder_layers": 1, "decoder_layers": 1, "encoder_ffn_dim": 48, "decoder_ffn_dim": 48, "init_std": 0.3}
BART |= {"encoder_attention_heads": 4, "decoder_attention_heads": 4, "dropout": 0.0}
T5 = {"d_kv": 8, "d_ff": 48, "num_layers": 1, "num_heads": 4, "dropout_rate": 0.0}
FAMILIES = {
    "llama": lambda: LlamaForCausalLM(LlamaConfig(**SMALL)),
    "llama, tied": lambda: LlamaForCausalLM(LlamaConfig(**SMALL, tie_word_embeddings=True)),
    "qwen2": lambda: Qwen2ForCausalLM(Qwen2Config(**SMALL)),
    "qwen3": lambda: Qwen3ForCausalLM(Qwen3Config(**SMALL, head_dim=8)),
    "gemma2, capped": lambda: Gemma2ForCausalLM(Gemma2Config(**SMALL, head_dim=8, final_logit_softcapping=3.0)),
    "gemma2, not capped": lambda: Gemma2ForCausalLM(Gemma2Config(**SMALL, head_dim=8, final_logit_softcapping=None)),
    "mistral": lambda: MistralForCausalLM(MistralConfig(**SMALL)),
    "phi, head with a bias": lambda: PhiForCausalLM(PhiConfig(**SMALL)),
    "phi3": lambda: Phi3ForCausalLM(Phi3Config(**SMALL)),
    "cohere, scaled": lambda: CohereForCausalLM(CohereConfig(**SMALL, logit_scale=0.37)),
    "granite, divided": lambda: GraniteForCausalLM(GraniteConfig(**SMALL, logits_scaling=2.5)),
    "mixtral, auxiliary loss": lambda: MixtralForCausalLM(MixtralConfig(**SMALL, **EXPERTS)),
    "gpt2, tied": lambda: GPT2LMHeadModel(GPT2Config(**GPT2, **NO_DROPOUT)),
    "bart, bias added": lambda: BartForConditionalGeneration(BartConfig(**SEQ2SEQ, **BART)),
    "t5": lambda: T5ForConditionalGeneration(T5Config(**SEQ2SEQ, **T5)),
}


def made(name: str = "llama", seed: int = 0) -> nn.Module:
    torch.manual_seed(seed)
    model = FAMILIES[name]().train()
    for key, values in [*model.named_parameters(), *model.named_buffers()]:
        if key.endswith(("lm_head.bias", "final_logits_bias")):
            nn.init.normal_(values)  # zeros would hide a bias that is left out
    return model


def batch(seed: int = 1, rows: int = 3, tokens: int = 11) -> dict[str, torch.Tensor]:
    ids = torch.randint(3, V, (rows, tokens), generator=torch.Generator().manual_seed(seed))
    labels = ids.clone()
    labels[0, :4] = -100
    return {"input_ids": ids, "labels": labels}


def gradients(model: nn.Module) -> torch.Tensor:
    return torch.cat([p.grad.flatten() for p in model.parameters() if p.grad is not None])


def trained(model: nn.Module, **inputs) -> tuple[torch.Tensor, torch.Tensor]:
    """Loss and all gradients of one step."""
    model.zero_grad()
    loss = model(**inputs)["loss"]
    loss.backward()
    return loss.detach(), gradients(model)


@pytest.mark.parametrize("name", FAMILIES)
def test_loss_and_gradients_are_those_of_the_model(name):
    model, inputs = made(name), batch()
    want_loss, want = trained(model, **inputs)
    with use_linear_cross_entropy(model):
        output = model(**inputs)
        loss, got = trained(model, **inputs)
    assert output.logits is None
    assert "logits" not in output
    assert_close(loss, want_loss, 1e-6, "loss")
    assert_close(got, want, 2e-5, "gradients")


def test_the_families_are_hard_enough():
    """A cap, scale or bias left out would show: the logits are neither tiny nor equal."""
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
    assert output.logits is None
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
    logits = model(inputs["input_ids"]).logits  # no labels: somebody wants the logits
    assert torch.equal(logits, want.logits)


def test_tuples_keep_their_places():
    model, inputs = made(), batch()
    want = model(**inputs, return_dict=False)
    use_linear_cross_entropy(model)
    got = model(**inputs, return_dict=False)
    assert len(got) == len(want)
    assert got[1] is None
    assert_close(got[0], want[0], 1e-6)


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
    assert max(saved_sizes(model, inputs)) >= logits  # the original is caught
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


# LoRA and other heads.


class LoRA(nn.Module):
    """An adapter of low rank on a linear layer, in the shape that adapter libraries give it."""

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


def test_a_weight_that_is_gone_by_the_time_of_the_loss_is_refused():
    """As it is when the head alone is sharded: gathered before it runs, freed behind it."""
    model, inputs = made(), batch()
    use_linear_cross_entropy(model)
    weight = model.lm_head.weight

    def free(*_):
        weight.data = weight.data.new_empty(0)

    model.lm_head.register_forward_hook(free)
    with pytest.raises(ConfigError, match="sharded by itself"):
        model(**inputs)


# What a model may not do to its logits.


class Doing(LlamaForCausalLM):
    """Does something to its logits before the loss."""

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


FINE = {
    "times": lambda logits: 0.5 * logits * torch.tensor(1.5),
    "over": lambda logits: logits / torch.tensor(2.0),
    "torch functions": lambda logits: torch.mul(torch.tanh(torch.div(logits, 3.0)), 2.0),
    "in place": scaled_in_place,
    "a bias at the left": lambda logits: torch.linspace(-1, 1, V) + logits,
    "a bias at the right, then a scale": lambda logits: (logits + torch.linspace(-1, 1, V)[None]) * 0.7,
    "a bias taken away": lambda logits: logits - torch.linspace(-1, 1, V),
    "a factor for each class": lambda logits: torch.linspace(-1, 1, V) * (logits + torch.linspace(2, 0, V)),
    "a cap that is not one": lambda logits: 4.0 * torch.tanh(0.7 * logits) / 3.0,
    "doubled": lambda logits: logits + logits,
    "to and back": lambda logits: logits.to(torch.float64).to("cpu").to(logits.dtype),
    "reshaped": lambda logits: logits.flatten(0, 1).reshape(3, -1, V),
    "sliced": lambda logits: logits[:, :][..., :, :][:][:, torch.arange(logits.size(1))],
}
WRONG = {
    "masked_fill": lambda logits: logits.masked_fill(torch.zeros(V, dtype=torch.bool), -1e9),
    "where": lambda logits: torch.where(torch.ones(V, dtype=torch.bool), logits, 0.0),
    "an assignment": assigned,
    "softmax": lambda logits: logits.softmax(-1),
    "a product": lambda logits: logits * torch.ones(1, 8, 1),
    "a product behind the cap": lambda logits: logits.tanh() * torch.ones(V),
    "a division": lambda logits: logits / torch.ones(V),
    "a sum": lambda logits: logits + torch.ones(1, 1, 1),
    "exp": lambda logits: torch.exp(logits),
    "tanh, twice": lambda logits: logits.tanh().tanh(),
    "behind the cap": lambda logits: logits.tanh() + torch.ones(V),
    "along the classes": lambda logits: logits[..., torch.arange(V)],
    "rsub": lambda logits: torch.ones(V) - logits,
}


@pytest.mark.parametrize("what", FINE)
def test_what_a_model_may_do_to_its_logits(what):
    model = doing(FINE[what])
    inputs = batch()
    want_loss, want = trained(model, **inputs)
    use_linear_cross_entropy(model, verify=what != "reshaped")  # which is written for three rows
    loss, got = trained(model, **inputs)
    assert_close(loss, want_loss, 1e-6)
    assert_close(got, want, 2e-5)


@pytest.mark.parametrize("what", WRONG)
def test_what_a_model_may_not_do_is_refused_when_it_is_installed(what):
    model = doing(WRONG[what])
    with pytest.raises(ConfigError, match="not built in training") as caught:
        use_linear_cross_entropy(model)
    assert what.split()[0] in str(caught.value) or what == "rsub"
    assert "forward" not in vars(model)


def test_indexing_never_reaches_the_classes():
    settings = use_linear_cross_entropy(made(), verify=False).settings
    states, weight = torch.randn(2, 3, 4), torch.randn(7, 4)
    logits, dense = UnbuiltLogits((Term(states, weight, weight.shape),), None, None, settings), states @ weight.T
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
    assert "never built" in repr(logits)
    with pytest.raises(ShapeError, match=r"config\.vocab_size"):
        logits.view(-1, 8)


# The check when it is installed.


class Elsewhere(LlamaForCausalLM):
    """Has a head, and does not use it."""

    def forward(self, input_ids=None, labels=None, **kwargs):
        logits = self.model(input_ids).last_hidden_state @ self.lm_head.weight.T
        return {"loss": self.loss_function(logits, labels, V), "logits": logits}


class Otherwise(LlamaForCausalLM):
    """Its loss in training is another one."""

    def forward(self, input_ids=None, labels=None, **kwargs):
        logits = self.lm_head(self.model(input_ids).last_hidden_state)
        factor = 1.01 if isinstance(logits, torch.Tensor) else 1.0
        return {"loss": factor * self.loss_function(logits, labels, V), "logits": logits}


class Picky(LlamaForCausalLM):
    def forward(self, input_ids=None, labels=None, *, pixels, **kwargs):
        return super().forward(input_ids, labels=labels)


@pytest.mark.parametrize(
    "kind, message",
    [(Elsewhere, "did not call its output embedding"), (Otherwise, "left unchanged"), (Picky, "verify=False")],
)
def test_models_that_cannot_be_served_are_refused(kind, message):
    model = kind(LlamaConfig(**SMALL)).train()
    with pytest.raises(ConfigError, match=message):
        use_linear_cross_entropy(model)
    assert "forward" not in vars(model)
    assert not model.lm_head._forward_hooks
    assert not model.lm_head._forward_pre_hooks


def test_verify_can_be_left_out():
    model, inputs = Picky(LlamaConfig(**SMALL)).train(), batch()
    want = trained(model, **inputs, pixels=0)
    use_linear_cross_entropy(model, verify=False)
    for got, expected in zip(trained(model, **inputs, pixels=0), want, strict=True):
        assert_close(got, expected, 2e-5)


def test_verify_leaves_no_trace():
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


def test_verify_wants_weights():
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
    use_linear_cross_entropy(model)
    with pytest.raises(ConfigError, match="already"):
        use_linear_cross_entropy(model)


# One instance, and undone.


def names_of(model: nn.Module):
    """Attributes and hooks of all its modules."""
    return [(name, set(vars(m)), [*m._forward_hooks], [*m._forward_pre_hooks]) for name, m in model.named_modules()]


def test_undone_exactly_and_nobody_else_is_touched():
    model, other, inputs = made(), made(), batch()
    classes = {kind: dict(vars(kind)) for kind in {type(m) for m in model.modules()}}
    before, functional = names_of(model), F.cross_entropy
    want_loss, want = trained(model, **inputs)
    handle = use_linear_cross_entropy(model)
    trained(model, **inputs)
    assert F.cross_entropy is functional
    assert all(dict(vars(kind)) == attributes for kind, attributes in classes.items())
    assert other(**inputs).logits is not None
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
    assert torch.is_tensor(model.lm_head(torch.randn(2, D)))  # the head by itself is a head
    assert_close(trained(model, **inputs)[0], want_loss, 1e-6)


def test_somebody_elses_forward_is_kept():
    model, inputs = made(), batch()
    inner, calls = model.forward, []

    def counted(*args, **kwargs):
        calls.append(1)
        return inner(*args, **kwargs)

    model.forward = counted
    handle = use_linear_cross_entropy(model, verify=False)
    assert model(input_ids=inputs["input_ids"], labels=inputs["labels"]).logits is None
    assert calls == [1]
    handle.remove()
    assert model.forward is counted


def test_somebody_who_wraps_us_afterwards():
    model, inputs = made(), batch()
    handle = use_linear_cross_entropy(model)
    ours = model.forward
    model.forward = lambda *args, **kwargs: ours(*args, **kwargs)
    assert model(**inputs).logits is None
    handle.remove()
    assert model(**inputs).logits is not None


def test_copies_have_their_own():
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
        assert twin(**inputs).logits is not None
        assert model(**inputs).logits is None


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


def test_calling_forward_directly_is_the_same():
    """Adapter libraries call ``model.forward`` and not ``model``."""
    model, inputs = made(), batch()
    use_linear_cross_entropy(model)
    assert model.forward(**inputs).logits is None


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
    assert got.logits is None
    assert got.mc_logits is not None
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
    pytest.importorskip("accelerate")
    from transformers import Trainer, TrainingArguments

    rows = batch(rows=12)
    rows["labels"][5, 1:8] = -100
    data = [{name: values[i] for name, values in rows.items()} for i in range(12)]

    def run(use: bool) -> tuple[list[float], float, nn.Module]:
        model = made("gpt2, tied")
        if use:
            use_linear_cross_entropy(model)
        arguments = TrainingArguments(
            output_dir=str(tmp_path),
            max_steps=4,
            per_device_train_batch_size=2,
            gradient_accumulation_steps=3,
            learning_rate=0.1,
            optim="sgd",
            logging_steps=1,
            report_to=[],
            use_cpu=True,
            save_strategy="no",
            disable_tqdm=True,
            dataloader_pin_memory=False,
        )
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


# Words.


def test_the_page_says_what_is_true():
    """Its blocks need transformers with a torchvision that loads, or none; here it has been loaded."""
    page = Path(__file__).parents[2] / "docs" / "concepts" / "transformers.md"
    blocks = [block for block in python_blocks(page.read_text()) if block.reason is not None]
    assert blocks
    names: dict[str, object] = {}
    for block in blocks:
        exec(compile("\n" * (block.line - 1) + block.source, str(page), "exec"), names)
    assert math.isfinite(float(names["loss"]))
