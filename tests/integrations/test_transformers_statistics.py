"""Token statistics in addition to the loss, and TRL's fused head, which returns them instead of logits."""

from __future__ import annotations

import copy
import functools
import sys
import types
from dataclasses import dataclass

import pytest
import torch
from tests.compare import assert_close
from tests.integrations.tiny_models import EXPERTS, GPT2, NO_DROPOUT, SMALL, V
from torch import nn

from tilewise.errors import ConfigError
from tilewise.integrations.transformers import NoLogits, use_linear_cross_entropy

# A torchvision for another torch breaks the import of transformers, and no test here needs torchvision.
hidden = "torchvision" not in sys.modules
if hidden:
    sys.modules["torchvision"] = None
try:
    pytest.importorskip("transformers")
    from transformers import (
        Gemma2Config,
        Gemma2ForCausalLM,
        GPT2Config,
        GPT2LMHeadModel,
        LlamaConfig,
        LlamaForCausalLM,
        MixtralConfig,
        MixtralForCausalLM,
    )
    from transformers.utils import ModelOutput
finally:
    if hidden:
        del sys.modules["torchvision"]

FAMILIES = {
    "llama": lambda: LlamaForCausalLM(LlamaConfig(**SMALL)),
    "gpt2": lambda: GPT2LMHeadModel(GPT2Config(**GPT2, **NO_DROPOUT)),
    "gemma2": lambda: Gemma2ForCausalLM(Gemma2Config(**SMALL, head_dim=8, final_logit_softcapping=3.0)),
    "mixtral": lambda: MixtralForCausalLM(MixtralConfig(**SMALL, **EXPERTS)),
}


def made(name: str = "llama") -> nn.Module:
    torch.manual_seed(0)
    return FAMILIES[name]().train()


def batch(seed: int = 1) -> dict[str, torch.Tensor]:
    ids = torch.randint(3, V, (3, 11), generator=torch.Generator().manual_seed(seed))
    labels = ids.clone()
    labels[0, :4] = -100
    return {"input_ids": ids, "labels": labels}


def gradients(model: nn.Module) -> torch.Tensor:
    return torch.cat([p.grad.flatten() for p in model.parameters() if p.grad is not None])


# Statistics in addition to the loss.


@pytest.mark.parametrize("z_loss", [0.0, 0.01])
@pytest.mark.parametrize("items", [None, 17])
@pytest.mark.parametrize("name", FAMILIES)
def test_statistics_come_with_the_same_loss(name, items, z_loss):
    inputs = batch() | ({} if items is None else {"num_items_in_batch": torch.tensor(items)})
    results = []
    for statistics in (False, True):
        model = made(name)
        handle = use_linear_cross_entropy(model, z_loss=z_loss, statistics=statistics)
        loss = model(**inputs).loss
        loss.backward()
        results.append((loss.detach(), gradients(model)))
    assert_close(results[1][0], results[0][0], 1e-6)
    assert_close(results[1][1], results[0][1], 2e-5)
    assert handle.token_stats.log_prob.grad_fn is None

    logits = made(name)(**batch()).logits[:, :-1]
    labels = inputs["labels"][:, 1:]
    valid, log_p = labels != -100, logits.detach().log_softmax(-1)
    stats = handle.token_stats
    assert stats.valid.sum() == valid.sum()
    assert_close(stats.entropy[stats.valid], -(log_p.exp() * log_p).sum(-1)[valid], 1e-5)
    assert torch.equal(stats.correct[stats.valid], (logits.argmax(-1) == labels)[valid])
    assert stats.accuracy == (logits.argmax(-1) == labels)[valid].float().mean()


def test_statistics_are_kept_only_on_request():
    model = made()
    handle = use_linear_cross_entropy(model)
    model(**batch())
    assert handle.token_stats is None


def test_copies_with_statistics_have_their_own():
    model = made()
    handle = use_linear_cross_entropy(model, statistics=True)
    model(**batch())
    twin = copy.deepcopy(model)
    twin.forward.token_stats = None
    twin(**batch())
    assert_close(twin.forward.token_stats.log_prob, handle.token_stats.log_prob, 1e-6)
    assert twin.forward.token_stats is not handle.token_stats


# A trainer's fused head, with the interface of TRL.


@dataclass
class HeadOutput(ModelOutput):
    loss: torch.Tensor | None = None
    log_probs: torch.Tensor | None = None
    entropy: torch.Tensor | None = None
    log_sum_sq_probs: torch.Tensor | None = None
    mean_logits: torch.Tensor | None = None
    is_top1: torch.Tensor | None = None
    label_mask: torch.Tensor | None = None
    aux_loss: torch.Tensor | None = None
    rank: torch.Tensor | None = None


def give_head(
    model: nn.Module, temperature: float = 1.0, *, everything: bool = False, sharpness: float = 1.0, rank: bool = False
) -> None:
    """The interface of TRL's add_fused_lm_head, implemented with all logits. TRL has no sharpness and no rank."""
    original = model.forward

    @functools.wraps(type(model).forward)
    def forward(self, *args, fused_lm_head=False, labels=None, shift_labels=None, **kwargs):
        if not fused_lm_head:
            names = {"labels": labels, "shift_labels": shift_labels}
            return original(*args, **kwargs | {name: value for name, value in names.items() if value is not None})
        output = original(*args, **kwargs)
        logits = output.logits * sharpness / temperature
        targets = labels if shift_labels is None else shift_labels
        if shift_labels is None:
            logits, targets = logits[:, :-1], targets[:, 1:]
        mask = targets != -100
        log_p = logits.log_softmax(-1)
        log_probs = log_p.gather(-1, targets.clamp(min=0)[..., None])[..., 0] * mask
        return HeadOutput(
            loss=-log_probs.sum() / mask.sum(),
            log_probs=log_probs,
            entropy=-(log_p.exp() * log_p).sum(-1) * mask,
            log_sum_sq_probs=(2 * log_p).logsumexp(-1) * mask if everything else None,
            mean_logits=logits.mean(-1) * mask if everything else None,
            is_top1=(logits.argmax(-1) == targets) & mask,
            label_mask=mask,
            aux_loss=getattr(output, "aux_loss", None),
            rank=mask.long() if rank else None,
        )

    model.forward = types.MethodType(forward, model)


@pytest.mark.parametrize("order", ["head first", "head last"])
@pytest.mark.parametrize("shifted", [False, True])
@pytest.mark.parametrize("name", FAMILIES)
def test_a_fused_head_returns_our_statistics(name, shifted, order):
    """Before or after the trainer adds its head."""
    inputs = batch()
    if shifted:
        labels = inputs.pop("labels")
        inputs["shift_labels"] = nn.functional.pad(labels[:, 1:], (0, 1), value=-100)
    results, seen = [], []
    for use in (False, True):
        model = made(name)
        if use and order == "head last":
            use_linear_cross_entropy(model)
        give_head(model)
        if use and order == "head first":
            use_linear_cross_entropy(model)
        if use:
            model.get_output_embeddings().register_forward_hook(lambda head, args, output: seen.append(output))
        output = model(**inputs, fused_lm_head=True)
        (-output.log_probs * output.log_probs.exp().detach()).sum().backward()  # some loss
        results.append((output, gradients(model)))
    assert type(seen[-1]).__name__ == "LazyLogits"  # the calls before it compare the two heads
    (want, want_gradient), (got, got_gradient) = results
    assert type(got) is HeadOutput
    assert got.keys() == want.keys()
    assert_close(got.log_probs, want.log_probs, 1e-5)
    assert_close(got.entropy, want.entropy, 1e-5)
    assert torch.equal(got.is_top1, want.is_top1)
    assert torch.equal(got.label_mask, want.label_mask)
    assert_close(got_gradient, want_gradient, 2e-5)
    if name == "mixtral":
        assert_close(got.aux_loss, want.aux_loss, 1e-6)


@pytest.mark.parametrize("inside", [False, True], ids=["the adapted model", "the model inside"])
def test_prompt_tuning_makes_sequences_longer(inside):
    """PEFT puts virtual tokens before each sequence, with labels that are ignored."""
    peft = pytest.importorskip("peft")
    results = []
    for use in (False, True):
        torch.manual_seed(0)
        model = made()
        give_head(model)
        model = peft.get_peft_model(model, peft.PromptTuningConfig(task_type="CAUSAL_LM", num_virtual_tokens=4))
        if use:
            use_linear_cross_entropy(model.get_base_model() if inside else model)
        output = model(**batch(), fused_lm_head=True)
        output.log_probs.exp().sum().backward()
        results.append((output, gradients(model)))
    (want, want_gradient), (got, got_gradient) = results
    assert got.log_probs.shape == want.log_probs.shape
    assert got.log_probs.shape[1] == batch()["labels"].shape[1] + 3
    assert_close(got.log_probs, want.log_probs, 1e-5)
    assert_close(got_gradient, want_gradient, 2e-5)


@pytest.mark.parametrize("where", ["around the call", "inside the forward"])
def test_under_autocast_the_trainers_head_may_round_its_logits(where):
    """The trainer's head is compared with ours where training starts, which is under autocast.

    Accelerate enables autocast inside the forward of a model that is not trained, such as the reference model of DPO.
    """
    model, autocast = made(), torch.autocast("cpu", torch.bfloat16)
    with torch.no_grad():
        model.get_output_embeddings().weight.mul_(5.0)  # logits so large that bfloat16 changes them visibly
    give_head(model)
    if where == "inside the forward":
        model.forward = autocast(model.forward)
        use_linear_cross_entropy(model)
        output = model(**batch(), fused_lm_head=True)
    else:
        with autocast:
            use_linear_cross_entropy(model)
            output = model(**batch(), fused_lm_head=True)
    exact = made()
    exact.load_state_dict(model.state_dict())
    give_head(exact)
    assert_close(output.log_probs, exact(**batch(), fused_lm_head=True).log_probs, 2e-2)


def test_a_batch_of_ignored_labels_has_a_gradient_of_zero():
    model, inputs = made(), batch()
    give_head(model)
    use_linear_cross_entropy(model)
    inputs["labels"].fill_(-100)
    output = model(**inputs, fused_lm_head=True)
    assert not output.label_mask.any()
    (-output.log_probs.sum()).backward()
    assert not gradients(model).any()


@pytest.mark.parametrize("order", ["head first", "head last"])
def test_evaluation_uses_the_head_of_the_trainer(order):
    model, inputs = made(), batch()
    if order == "head last":
        use_linear_cross_entropy(model)
    give_head(model)
    if order == "head first":
        use_linear_cross_entropy(model)
    model.eval()
    assert torch.equal(model(**inputs, fused_lm_head=True).label_mask, inputs["labels"][:, 1:] != -100)
    assert torch.is_tensor(model(**inputs).logits)
    model.train()
    assert isinstance(model(**inputs).logits, NoLogits)


@pytest.mark.parametrize("order", ["head first", "head last"])
@pytest.mark.parametrize("temperature", [1.0, 0.7])
def test_a_fused_head_with_a_temperature_and_all_fields(temperature, order):
    results = []
    for use in (False, True):
        model = made("gemma2")  # with a soft cap: the temperature comes after it
        if use and order == "head last":
            use_linear_cross_entropy(model)
        give_head(model, temperature, everything=True)
        if use and order == "head first":
            use_linear_cross_entropy(model)
        output = model(**batch(), fused_lm_head=True)
        output.log_probs.sum().backward()
        results.append((output, gradients(model)))
    (want, want_gradient), (got, got_gradient) = results
    for name in ("loss", "log_probs", "entropy", "log_sum_sq_probs", "mean_logits"):
        assert_close(got[name], want[name], 1e-5, name)
    assert_close(got_gradient, want_gradient, 2e-5)


@pytest.mark.parametrize("verify", [True, False])
@pytest.mark.parametrize(
    "head, message",
    [
        ({"sharpness": 0.7}, "differs from the cross-entropy"),
        ({"sharpness": float("nan")}, "is NaN, so it cannot be compared"),
        ({"rank": True}, "also computes rank"),
    ],
)
def test_a_head_with_other_values_is_refused(head, message, verify):
    model = made()
    give_head(model, **head)
    with pytest.raises(ConfigError, match=message):  # noqa: PT012 - at once, or in the first call
        use_linear_cross_entropy(model, verify=verify)
        model(**batch(), fused_lm_head=True)


@pytest.mark.parametrize("lost", [{"z_loss": 0.1}, {"label_smoothing": 0.1}])
def test_settings_without_effect_on_the_trainers_loss_are_refused(lost):
    model = made()
    give_head(model)
    use_linear_cross_entropy(model, **lost)
    with pytest.raises(ConfigError, match="z_loss, label_smoothing and group have no effect"):
        model(**batch(), fused_lm_head=True)


def test_a_fused_head_added_afterwards_is_served_and_left_in_place():
    model, inputs = made(), batch()
    want = made()
    give_head(want)
    want = want(**inputs, fused_lm_head=True)
    handle = use_linear_cross_entropy(model, statistics=True)
    give_head(model)
    theirs = model.forward
    for _ in range(2):
        handle.token_stats = None
        got = model(**inputs, fused_lm_head=True)
        assert_close(got.log_probs, want.log_probs, 1e-5)
        assert handle.token_stats is not None
        assert isinstance(model(**inputs).logits, NoLogits)  # a plain call in between
    handle.remove()
    assert model.forward == theirs
    assert not model._forward_pre_hooks
    assert torch.equal(model(**inputs, fused_lm_head=True).log_probs, want.log_probs)
    assert torch.is_tensor(model(**inputs).logits)


def test_a_fused_head_that_is_called_without_hooks():
    """PEFT calls ``forward`` of the model inside. The first call is the trainer's, all later ones are ours."""
    model, inputs = made(), batch()
    handle = use_linear_cross_entropy(model, statistics=True)
    give_head(model)
    theirs = model.forward
    seen = []
    for _ in range(3):
        output = model.forward(**inputs, fused_lm_head=True)
        seen.append((output.log_probs, handle.token_stats is not None))
    assert [ours for _, ours in seen] == [False, True, True]
    assert_close(seen[2][0], seen[0][0], 1e-5)
    assert isinstance(model.forward(**inputs).logits, NoLogits)
    model.eval()
    assert torch.equal(model.forward(**inputs, fused_lm_head=True).log_probs, seen[0][0])
    model.train()
    handle.remove()
    assert model.forward == theirs
    assert torch.is_tensor(model.forward(**inputs).logits)
    assert torch.equal(model.forward(**inputs, fused_lm_head=True).log_probs, seen[0][0])


def test_a_forward_that_bypasses_the_handle_is_an_error():
    model = made()
    handle = use_linear_cross_entropy(model)
    model.forward = functools.partial(LlamaForCausalLM.forward, model)
    with pytest.raises(ConfigError, match="does not call it"):
        model(**batch(), fused_lm_head=True)
    handle.remove()
    assert torch.is_tensor(model(**batch()).logits)
