"""Access to a model: its head, its number of classes, and its loss on a few random tokens."""

from __future__ import annotations

import inspect
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from tilewise.errors import ConfigError, TilewiseError
from tilewise.integrations.transformers.head_input import LINEAR

CHECK_TOKENS = (2, 8)


def head_of(model: nn.Module) -> nn.Module:
    """The output embedding of a model."""
    head = model.get_output_embeddings()  # type: ignore[operator]
    if not isinstance(head, nn.Module):
        raise ConfigError(f"{type(model).__name__} has no output embedding (head). Use a ...ForCausalLM model")
    if isinstance(head, nn.ModuleList):
        raise ConfigError(
            f"{type(model).__name__} has several output embeddings (heads), {len(head)}. Supported is one. Call "
            "tilewise.linear_cross_entropy for each head in a training loop of yours"
        )
    return head


def is_tensor_parallel(head: nn.Module) -> bool:
    """Whether transformers has sharded the head by the model's ``tp_plan``. Its forward gathers all logits.

    All ranks then have the same tokens. Raises `ConfigError` if the head's input is sharded, or if
    its weight is no DTensor.
    """
    forward = vars(head).get("forward")
    if not getattr(forward, "__module__", "").endswith(".tensor_parallel"):
        return False
    layout = getattr(inspect.getclosurevars(forward).nonlocals.get("self"), "input_layouts", None)  # type: ignore[arg-type]
    if layout is not None and not layout.is_replicate():
        raise ConfigError(
            f"the tp_plan of the model gives its head sharded hidden states ({layout}). use_linear_cross_entropy needs "
            'all of them on each rank: set the head to "colwise_gather_output" in the tp_plan, or call '
            "tilewise.linear_cross_entropy with DTensors"
        )
    if not all(hasattr(parameter, "device_mesh") for parameter in head.parameters()):
        raise ConfigError(
            "the weight of a head that transformers shards (tp_plan) is a DTensor, got a plain tensor: the head is "
            "quantized, or transformers is older than 5.22. Leave the head out of the tp_plan"
        )
    return True


@contextmanager
def plain_forward(head: nn.Module) -> Iterator[None]:
    """A context in which a sharded head runs torch's own ``F.linear`` on its weight as it is.

    A head of `is_tensor_parallel` has a forward that gathers logits, and DeepSpeed's ZeRO-3 replaces ``F.linear``.
    """
    forward = vars(head).get("forward")
    sharded = is_tensor_parallel(head)
    if sharded:
        del head.forward
    elif type(head) is nn.Linear and forward is None and F.linear is not LINEAR:
        vars(head)["forward"] = lambda hidden: LINEAR(hidden, head.weight, head.bias)
    try:
        yield
    finally:
        if forward is None:
            vars(head).pop("forward", None)
        else:
            head.forward = forward


def classes_of(head: nn.Module) -> int:
    """Number of rows of the largest linear layer in the head."""
    widths = [getattr(module, "out_features", None) for module in head.modules()]
    sizes = [width for width in widths if isinstance(width, int)]
    sizes = sizes or [weight.shape[0] for weight in head.parameters() if weight.dim() == 2]
    if not sizes:
        raise ConfigError(f"the head, a {type(head).__name__}, has no linear layer. Use a ...ForCausalLM model")
    return max(sizes)


def random_tokens(model: nn.Module) -> dict[str, Tensor]:
    """Random inputs and labels for a model. Two of the labels are ignored."""
    weight = next(iter(head_of(model).parameters()))
    if weight.device.type == "meta":
        raise ConfigError("the model has no weights yet (meta device). Load them first, or pass verify=False")
    embedding = model.get_input_embeddings()  # type: ignore[operator]
    classes = min(classes_of(head_of(model)), embedding.weight.shape[0])
    ids = torch.randint(classes, CHECK_TOKENS, generator=torch.Generator().manual_seed(0)).to(weight.device)
    labels = ids.clone()
    labels[0, :2] = -100
    return {"input_ids": ids, "labels": labels}


@contextmanager
def evaluation_mode(model: nn.Module) -> Iterator[None]:
    """Evaluation mode inside. Restores the mode of each module and the random state."""
    modes = [(module, module.training) for module in model.modules()]
    devices = {parameter.device for parameter in model.parameters() if parameter.device.type == "cuda"}
    try:
        model.eval()
        with torch.random.fork_rng(devices=list(devices)):
            yield
    finally:
        for module, training in modes:
            module.training = training


def loss_of(output: Any) -> float:
    """The loss in the output of a model, as a number."""
    loss = output[0] if isinstance(output, tuple) else output["loss"]
    if not isinstance(loss, Tensor):
        raise TilewiseError("the model returned no loss although it got labels")
    return float(loss)
