"""Every argument of the public functions and Modules gets absurd values: each call works or raises a TilewiseError."""

from __future__ import annotations

import inspect
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn

import tilewise as tw
from tilewise.cache import Encoder, GradientCache, cached_encode, cached_loss, cached_step
from tilewise.errors import TilewiseError
from tilewise.train.plan_lm import Cluster, ModelShape, find_model, plan_lm

ABSURD: dict[str, Callable[[], Any]] = {
    "None": lambda: None,
    "no text": lambda: "",
    "text": lambda: "x",
    "no list": lambda: [],
    "a list of numbers": lambda: [0.5, 2.0],
    "a list of lists": lambda: [[1, 2], [3, 4]],
    "a dict": lambda: {},
    "an object": lambda: object(),
    "2**70": lambda: 2**70,
    "-2**70": lambda: -(2**70),
    "-1": lambda: -1,
    "nan": lambda: float("nan"),
    "inf": lambda: float("inf"),
    "complex": lambda: 1j,
    "a 0-d tensor": lambda: torch.tensor(1.5),
    "a 0-d tensor of integers": lambda: torch.tensor(2),
    "a matrix": lambda: torch.ones(2, 2),
    "an empty tensor": lambda: torch.ones(0),
    "a bool tensor": lambda: torch.tensor([True, False]),
    "a complex tensor": lambda: torch.ones(6, 4, dtype=torch.complex64),
    "an array": lambda: np.ones((2, 2)),
    "a number of NumPy": lambda: np.float32(0.5),
    "a class": lambda: type("Thing", (), {}),
    "True": lambda: True,
}
X, Z = torch.randn(6, 4, generator=torch.Generator().manual_seed(0)), torch.eye(6, 4)
Y, HEAD = torch.arange(6), torch.randn(6, 4, generator=torch.Generator().manual_seed(1))
CLIP = {"image_features": X, "text_features": Z, "logit_scale": 1.0}
TEACHERS = {"teacher_image_features": X, "teacher_text_features": Z, "teacher_logit_scale": 1.0}
INFO = {"query": X, "positive_key": Z, "negative_keys": HEAD}
TOKENS = {"input": X, "linear_weight": HEAD, "target": Y}
STUDENT = {"input": X, "linear_weight": HEAD, "teacher_input": Z, "teacher_weight": HEAD, "target": Y}
SPARSE = {"input": X, "linear_weight": HEAD, "teacher_ids": Y[:, None], "teacher_log_probs": -torch.ones(6, 1)}
PAIRS = {"queries": X, "gallery": Z}
CALLS: dict[Callable[..., Any], dict[str, Any]] = {
    tw.clip_loss: CLIP,
    tw.siglip_loss: CLIP | {"logit_bias": 0.0},
    tw.clip_distillation_loss: CLIP | TEACHERS,
    tw.info_nce: INFO,
    tw.nt_xent: {"features": X},
    tw.supcon_loss: {"features": X, "labels": Y},
    tw.soft_info_nce: {"query": X, "key": Z, "target": Y[:, None], "target_weight": torch.ones(6, 1)},
    tw.margin_softmax_loss: TOKENS,
    tw.MarginSoftmaxLoss: {"in_features": 4, "num_classes": 6},
    tw.Matryoshka: {"loss": tw.clip_loss, "widths": (4, 2)},
    tw.StreamingLogQ: {"num_buckets": 10},
    tw.linear_cross_entropy: TOKENS,
    tw.linear_token_stats: TOKENS,
    tw.linear_distillation_loss: STUDENT,
    tw.linear_distillation_stats: STUDENT,
    tw.linear_sparse_distillation_loss: SPARSE,
    tw.linear_logsumexp: {"a": X, "b": Z},
    tw.pair_stats: {"a": X, "b": Z},
    tw.mine_hard_negatives: PAIRS,
    tw.nearest: PAIRS | {"k": 2},
    tw.retrieval_ranks: PAIRS,
    tw.retrieval_ranks_both: PAIRS,
    tw.recall_at_k: {"ranks": Y},
    tw.retrieval_metrics: {"ranks": Y},
    tw.TileOptions: {},
    tw.Guide: {"query": X, "key": Z},
    ModelShape: {"name": "a", "vocabulary": 100, "hidden": 8, "layers": 2, "parameters": 1000},
    Cluster: {},
    find_model: {"name": "gemma 2 2b"},
    plan_lm: {"shape": find_model("gemma 2 2b")},
}
MODULES: dict[type[nn.Module], Callable[..., Any]] = {
    tw.ClipLoss: tw.clip_loss,
    tw.SigLipLoss: tw.siglip_loss,
    tw.ClipDistillationLoss: tw.clip_distillation_loss,
    tw.InfoNCELoss: tw.info_nce,
    tw.NTXentLoss: tw.nt_xent,
    tw.SupConLoss: tw.supcon_loss,
    tw.SoftInfoNCELoss: tw.soft_info_nce,
    tw.LinearCrossEntropyLoss: tw.linear_cross_entropy,
    tw.LinearDistillationLoss: tw.linear_distillation_loss,
    tw.LinearSparseDistillationLoss: tw.linear_sparse_distillation_loss,
}


class Tower(nn.Module):
    """Takes any rows: what an encoder of the user raises is not our error."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(2))

    def forward(self, *rows: torch.Tensor, **more: torch.Tensor) -> torch.Tensor:
        return torch.ones(len([*rows, *more.values()][0]), 1) * self.weight


TOWER = Tower()
# Arguments that are called: what a class raises when it is called is not our error.
CALLED = {"encoders", "encoder", "loss", "chunk_size", "progress"}
STEP = {"encoders": TOWER, "inputs": [X], "loss": lambda z: z.square().mean(), "chunk_size": 4}
SETTINGS = {"offload": None, "sync": "last", "buffers": "once", "progress": None}
CALLS |= {
    cached_loss: STEP | SETTINGS,
    cached_step: STEP | SETTINGS,
    cached_encode: {"encoder": TOWER, "batch": X, "chunk_size": 4} | SETTINGS,
    GradientCache: {"encoders": TOWER, "loss": STEP["loss"], "chunk_size": 4} | SETTINGS,
    Encoder: {"call": TOWER},
}


def names_of(function: Callable[..., Any], good: dict[str, Any]) -> list[str]:
    found = inspect.signature(function).parameters.values()
    named = [p.name for p in found if p.kind not in (p.VAR_KEYWORD, p.VAR_POSITIONAL)]
    return list(dict.fromkeys([*named, *good]))


def failures(call: Callable[..., Any], good: dict[str, Any], names: list[str]) -> list[str]:
    """The calls that end in another exception than a TilewiseError."""
    found = []
    for name in names:
        for kind, make in ABSURD.items():
            if kind == "a class" and name in CALLED:
                continue
            try:
                call(**(good | {name: make()}))
            except TilewiseError:
                pass
            except Exception as error:
                found.append(f"{name}={kind}: {type(error).__name__}: {str(error)[:150]}")
    return found


@pytest.mark.parametrize("function", CALLS, ids=lambda function: function.__name__)
def test_functions(function):
    good = CALLS[function]
    function(**good)
    assert failures(function, good, names_of(function, good)) == []


@pytest.mark.parametrize("module", MODULES, ids=lambda module: module.__name__)
def test_modules(module):
    good = CALLS[MODULES[module]]

    def whole(**settings: Any) -> None:
        module(**settings)(**good)

    whole()
    assert failures(whole, {}, names_of(module, {})) == []
    assert failures(module(), good, names_of(module.forward, good)[1:]) == []


def test_every_public_function_and_module_is_here():
    public = {getattr(tw, name) for name in tw.__all__ if callable(getattr(tw, name))}
    results = {tw.TokenStats, tw.PairStats, tw.DistillationStats, tw.TilewiseError, tw.explain, tw.record_filtering}
    assert public - results == (set(CALLS) | set(MODULES)) & public
