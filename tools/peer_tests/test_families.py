"""Every language-model family of the installed transformers: loss and gradients with `use_linear_cross_entropy`.

Each family is built tiny from its default configuration, with large random weights. One forward and backward pass in
float32 runs with the model unchanged, and one with `use_linear_cross_entropy`. Relative errors: the loss within 1e-6,
all gradients together within 2e-5; each gradient within 1e-3 of its own norm plus 1e-7 of the norm of all. A family is
skipped with a reason if it cannot be built, or if its own pass fails, is not finite or not reproducible. Each runs in a
process of its own, with limits on time and memory.

`tools/peers.py --peer transformers` runs this file.
"""

from __future__ import annotations

import math
import multiprocessing
import resource
import traceback
from typing import Any

import numpy
import pytest
import torch
from tests.integrations.model_families import batch, transformers
from tools.peer_tests.family_list import SETTINGS, inputs_of
from tools.peer_tests.shrink import VOCABULARY, tiny
from torch import Tensor, nn
from transformers.models.auto.configuration_auto import CONFIG_MAPPING
from transformers.models.auto.modeling_auto import (
    MODEL_FOR_CAUSAL_LM_MAPPING_NAMES,
    MODEL_FOR_MASKED_LM_MAPPING_NAMES,
    MODEL_FOR_SEQ_TO_SEQ_CAUSAL_LM_MAPPING_NAMES,
)

from tilewise.integrations.transformers import use_linear_cross_entropy

KINDS = {
    "causal": MODEL_FOR_CAUSAL_LM_MAPPING_NAMES,
    "masked": MODEL_FOR_MASKED_LM_MAPPING_NAMES,
    "seq2seq": MODEL_FOR_SEQ_TO_SEQ_CAUSAL_LM_MAPPING_NAMES,
}
CASES = [(kind, name) for kind, names in KINDS.items() for name in names]
SECONDS, BYTES = 120, 8 * 2**30
HEAD_BIASES = ("lm_head.bias", "final_logits_bias", "decoder.bias", "predictions.bias")


def built(kind: str, name: str) -> nn.Module:
    """The tiny model in training mode, with weights that make its logits neither tiny nor equal."""
    torch.manual_seed(0)
    model_class = getattr(transformers, KINDS[kind][name])
    config_class = CONFIG_MAPPING[name]
    if not issubclass(config_class, model_class.config_class):  # the language model inside of another one
        config_class = model_class.config_class
    settings = SETTINGS.get(f"{kind} {name}", SETTINGS.get(name, {}))
    model = model_class(tiny(config_class, **settings)).float().train()
    for key, values in [*model.named_parameters(), *model.named_buffers()]:
        if isinstance(values, nn.Parameter) and values.dim() >= 2:
            nn.init.normal_(values, std=0.3)
        if key.endswith(HEAD_BIASES):
            nn.init.normal_(values)  # zeros would hide a missing bias
    return model


def one_step(model: nn.Module, inputs: dict[str, Tensor]) -> tuple[Tensor, dict[str, Tensor]]:
    """The loss and the gradient of each parameter that has one. Dropout masks are the same in each call."""
    torch.manual_seed(2)
    numpy.random.seed(2)  # Big Bird chooses random blocks with it
    model.zero_grad()
    loss = model(**inputs)["loss"]
    loss.backward()
    return loss.detach(), {key: p.grad.clone() for key, p in model.named_parameters() if p.grad is not None}


def norm_of(values: list[Tensor]) -> float:
    """The Euclidean norm of all values together."""
    return math.sqrt(sum(value.double().square().sum().item() for value in values))


def compare(kind: str, name: str) -> str:
    """Raise AssertionError if the loss or a gradient differs. Returns why the family was skipped, or ""."""
    inputs = inputs_of(name, batch())
    try:
        model = built(kind, name)
        want_loss, want = one_step(model, inputs or batch())
        if not want_loss.isfinite():
            return f"{name}: its own loss is {want_loss.item()}"
        if not torch.equal(one_step(model, inputs or batch())[0], want_loss):
            return f"{name}: its own loss is not reproducible with the same seed"
    except Exception as error:
        return f"{name}: {type(error).__name__}: {' '.join(str(error).split())[:160]}"
    assert abs(want_loss - math.log(VOCABULARY)) > 0.02, (
        "the loss is that of equal logits, so a wrong head would not be noticed"
    )
    with use_linear_cross_entropy(model, verify=inputs is None):
        loss, got = one_step(model, inputs or batch())
    assert abs(loss - want_loss) <= 1e-6 * want_loss, f"loss {loss.item()}, want {want_loss.item()}"
    assert got.keys() == want.keys(), f"gradients of other parameters: {sorted(got.keys() ^ want.keys())}"
    errors, total = {key: (got[key] - want[key]).norm().item() for key in want}, norm_of(list(want.values()))
    assert math.hypot(*errors.values()) <= 2e-5 * total, f"gradients differ by {math.hypot(*errors.values()) / total}"
    wrong = [key for key, error in errors.items() if not error <= 1e-3 * want[key].norm().item() + 1e-7 * total]
    assert not wrong, f"gradients that differ: {wrong}"
    return ""


def in_child(answers: Any, kind: str, name: str) -> None:
    """Send ("ok" | "skip" | "fail", message)."""
    resource.setrlimit(resource.RLIMIT_DATA, (BYTES, BYTES))
    try:
        why = compare(kind, name)
        answers.send(("skip", why) if why else ("ok", ""))
    except BaseException as error:
        answers.send(("fail", f"{type(error).__name__}: {error}\n{traceback.format_exc()}"))


@pytest.mark.parametrize("kind, name", CASES, ids=[f"{kind} {name}" for kind, name in CASES])
def test_family(kind, name):
    torch.set_num_threads(1)  # a child of a process with threads of OpenMP would hang
    context = multiprocessing.get_context("fork")
    ours, theirs = context.Pipe(duplex=False)
    child = context.Process(target=in_child, args=(theirs, kind, name))
    child.start()
    theirs.close()
    outcome, message = "fail", f"{name}: no result in {SECONDS} s"
    try:
        if ours.poll(SECONDS):
            outcome, message = ours.recv()
    except EOFError:
        outcome, message = "fail", f"the process of {name} died"
    finally:
        child.kill()
        child.join()
    if outcome == "skip":
        pytest.skip(message)
    if outcome == "fail":
        pytest.fail(message, pytrace=False)
