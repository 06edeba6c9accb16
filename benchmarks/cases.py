"""Named cases, their inputs, and the methods that compute them.

A case is a loss with its sizes. A method is a way to compute it. Every method of a case gets the same tensors and
returns the same mean loss. Forward and backward are measured together.

Axes: n rows, m columns (the batch again, or the vocabulary), d features.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any, Literal

import torch
import torch.nn.functional as F
from torch import Tensor

import tilewise as tw
from benchmarks import peers
from benchmarks.measure import Step

Loss = Literal["clip", "siglip", "nt_xent", "cross_entropy", "retrieval"]
Scores = Literal["flat", "peaked"]
Inputs = peers.Inputs
Forward = peers.Forward

DTYPES = {"float32": torch.float32, "bf16": torch.bfloat16}


@dataclass(frozen=True, kw_only=True)
class Case:
    """A loss with its sizes and its methods.

    The first method is ours. Times and memory are divided by those of `baseline`.
    """

    loss: Loss
    rows: int
    cols: int
    width: int
    dtype: Literal["float32", "bf16"]
    methods: tuple[str, ...]
    baseline: str = "dense"
    scores: Scores = "flat"
    slope: float = 1.8  # of peaked scores, over the logarithm of the rank

    @property
    def name(self) -> str:
        """Such as "clip-65536-512-bf16". Cross-entropy adds its vocabulary, and peaked scores add "peaked"."""
        sizes = [self.rows, self.width] + ([self.cols] if self.loss == "cross_entropy" else [])
        peaked = ["peaked"] if self.scores == "peaked" else []
        return "-".join([self.loss, *map(str, sizes), self.dtype, *peaked])

    @property
    def unit_flops(self) -> int:
        """Operations of one product of rows and columns."""
        return 2 * self.rows * self.cols * self.width

    @property
    def flops(self) -> int:
        """Operations of an exact two-pass loss: 1 product in forward and 3 in backward. Ranks need 1."""
        return self.unit_flops * (1 if self.loss == "retrieval" else 4)


def square(loss: Loss, rows: int, width: int, dtype: Any, *methods: str, baseline: str = "dense") -> Case:
    """A case with as many columns as rows."""
    return Case(loss=loss, rows=rows, cols=rows, width=width, dtype=dtype, methods=methods, baseline=baseline)


def vocabulary(rows: int, width: int, cols: int, dtype: Any, *methods: str, **more: Any) -> Case:
    """A linear cross-entropy."""
    return Case(loss="cross_entropy", rows=rows, cols=cols, width=width, dtype=dtype, methods=methods, **more)


def cpu_suite() -> list[Case]:
    """Cases for any machine: ours against dense PyTorch."""
    return [
        *(square("clip", n, 256, "float32", "tilewise", "dense") for n in (1024, 2048, 4096, 8192, 16384)),
        square("siglip", 4096, 256, "float32", "tilewise", "dense"),
        square("nt_xent", 4096, 256, "float32", "tilewise", "dense"),
        vocabulary(2048, 256, 32064, "float32", "tilewise", "dense", "torch-native"),
        square("retrieval", 8192, 256, "float32", "tilewise", "dense"),
    ]


def gpu_suite() -> list[Case]:
    """Cases for a GPU in bf16, most important first: ours against every peer.

    The slowest peers are left out at sizes where they would take most of the time. Cross entropy has more tables in
    `reproductions.lm_tables`.
    """
    clip = {
        8192: ("dense", "compile", "memeff", "inf_cl"),
        16384: ("dense", "compile", "memeff", "inf_cl"),
        32768: ("dense", "compile", "memeff", "inf_cl"),
        65536: ("dense", "compile", "memeff", "inf_cl"),
        131072: ("dense", "memeff", "inf_cl"),
        262144: ("dense", "memeff"),
        1048576: ("dense",),
    }
    everyone = ("tilewise", "dense", "compile", "cce", "cce-exact", "liger", "torch-native")
    peaked = ("tilewise", "tilewise-filter", "compile", "cce")
    symmetric = {n: square("clip", n, 512, "bf16", "tilewise", *others) for n, others in clip.items()}
    return [
        *(symmetric[n] for n in (8192, 16384, 32768, 65536)),
        square("siglip", 65536, 768, "bf16", "tilewise", "tilewise-backward", "dense", "compile", "siglip-kernel"),
        square("nt_xent", 65536, 256, "bf16", "tilewise", "dense", "clip_loss", baseline="clip_loss"),
        square("clip", 65536, 768, "bf16", "tilewise", "dense", "compile", "memeff"),
        symmetric[1048576],
        vocabulary(8192, 2304, 256000, "bf16", *everyone, baseline="compile"),
        vocabulary(8192, 2304, 256000, "bf16", *peaked, baseline="compile", scores="peaked"),
        vocabulary(8192, 4096, 128256, "bf16", "tilewise", "tilewise-forward", *everyone[2:4], baseline="compile"),
        square("retrieval", 131072, 512, "bf16", "tilewise", "dense"),
        symmetric[131072],
        symmetric[262144],
    ]


SUITES: dict[str, Callable[[], list[Case]]] = {"cpu": cpu_suite, "gpu": gpu_suite}


def shrunk(case: Case, largest: int = 2048) -> Case:
    """The same case with no side above `largest`. Shows that it runs; the times mean nothing."""
    return replace(case, rows=min(case.rows, largest), cols=min(case.cols, largest))


# Inputs


def make_inputs(case: Case, device: torch.device, seed: int = 0) -> Inputs:
    """Leaves a (n, d) and b (m, d), and the other arguments of the loss. Contrastive losses get unit vectors."""
    generator = torch.Generator(device).manual_seed(seed)

    def normal(rows: int, width: int) -> Tensor:
        return torch.randn(rows, width, generator=generator, device=device)

    dtype = DTYPES[case.dtype]
    scale = {"siglip": 10.0, "nt_xent": 2.0}.get(case.loss, 1 / 0.07)
    inputs: Inputs = {"scale": torch.tensor(scale, device=device)}
    if case.loss == "cross_entropy":
        a, b, target = _head(case, normal, generator)
        inputs["target"] = target
    else:
        a = F.normalize(normal(case.rows, case.width))
        b = a if case.loss == "nt_xent" else F.normalize(normal(case.cols, case.width))
        inputs["bias"] = torch.tensor(-10.0, device=device)
    inputs["a"], inputs["b"] = a.to(dtype), b.to(dtype)
    for leaf in leaves_of(case, inputs):
        leaf.requires_grad_()
    return inputs


def _head(case: Case, normal: Callable[[int, int], Tensor], generator: torch.Generator) -> tuple[Tensor, ...]:
    """Hidden states, classifier and targets.

    Flat scores are N(0, 1). Peaked scores are like those of a trained model: -slope ln(rank of the word) + N(0, 2),
    with the target raised by 7. With the slope 1.8, about 0.024 % of the probabilities are above 2**-12. One feature is
    constant in the hidden states and holds the frequency of the word in the classifier. Words are in random order.
    """
    n, m, d = case.rows, case.cols, case.width
    a, b = normal(n, d), normal(m, d) / math.sqrt(d)
    target = torch.randint(m, (n,), generator=generator, device=a.device)
    if case.scores == "peaked":
        b *= 2.0
        target = ((m + 1.0) ** torch.rand(n, generator=generator, device=a.device)).long() - 1
        own = b[target]
        a += 7.0 * own / own.square().sum(1, keepdim=True)
        a[:, 0] = 1.0
        b[:, 0] = -case.slope * torch.arange(1, m + 1, device=a.device).log()
        place = torch.randperm(m, generator=generator, device=a.device)
        b, target = b[place.argsort()], place[target]
    return a, b, target


def leaves_of(case: Case, inputs: Inputs) -> list[Tensor]:
    """The tensors that require a gradient."""
    names = {
        "clip": ["a", "b", "scale"],
        "siglip": ["a", "b", "scale", "bias"],
        "nt_xent": ["a"],
        "cross_entropy": ["a", "b"],
        "retrieval": [],
    }
    return [inputs[name] for name in names[case.loss]]


# Methods

OPTIONS = {
    "tilewise-filter": tw.TileOptions(filter_tolerance=1e-2),
    "tilewise-backward": tw.TileOptions(gradients="backward"),
    "tilewise-forward": tw.TileOptions(gradients="forward", workspace_mib=2400),
}


def tilewise_loss(case: Case, x: Inputs, options: tw.TileOptions | None = None) -> Tensor:
    """The loss, computed by this library."""
    if case.loss == "clip":
        return tw.clip_loss(x["a"], x["b"], x["scale"], options=options)
    if case.loss == "siglip":
        return tw.siglip_loss(x["a"], x["b"], x["scale"], x["bias"], options=options)
    if case.loss == "nt_xent":
        return tw.nt_xent(x["a"], temperature=1 / x["scale"], options=options)
    if case.loss == "cross_entropy":
        return tw.linear_cross_entropy(x["a"], x["b"], x["target"], options=options)
    return tw.retrieval_ranks(x["a"], x["b"], options=options).double().mean()


def dense_loss(case: Case, x: Inputs) -> Tensor:
    """The loss in plain PyTorch, with all scores stored."""
    a, b = x["a"], x["b"]
    answer = torch.arange(case.rows, device=a.device)
    if case.loss == "cross_entropy":
        return F.cross_entropy(a @ b.T, x["target"])
    if case.loss == "nt_xent":
        mask_self = torch.eye(case.rows, dtype=torch.bool, device=a.device)
        logits = (x["scale"] * a @ a.T).masked_fill(mask_self, -torch.inf)
        return F.cross_entropy(logits, (answer + case.rows // 2) % case.rows)
    if case.loss == "retrieval":
        scores = a @ b.T
        return (scores > scores.diagonal()[:, None]).sum(1).double().mean()
    logits = x["scale"] * a @ b.T
    if case.loss == "siglip":
        sign = 2 * torch.eye(case.rows, dtype=a.dtype, device=a.device) - 1
        return -F.logsigmoid(sign * (logits + x["bias"])).sum() / case.rows
    return (F.cross_entropy(logits, answer) + F.cross_entropy(logits.T, answer)) / 2


def build_step(case: Case, method: str, inputs: Inputs) -> Step:
    """The method on these inputs, ready to run. Raises `peers.PeerAbsent` if it is not available."""
    return Step(_forward(case, method, inputs), leaves_of(case, inputs))


def _forward(case: Case, method: str, inputs: Inputs) -> Forward:
    if method == "tilewise":
        return lambda: tilewise_loss(case, inputs)
    if method in OPTIONS:
        return lambda: tilewise_loss(case, inputs, OPTIONS[method])
    if method == "clip_loss":
        other = inputs["a"].detach().clone().requires_grad_()
        return lambda: tw.clip_loss(inputs["a"], other, inputs["scale"])
    if method == "dense":
        return lambda: dense_loss(case, inputs)
    if method == "compile":
        torch._dynamo.reset()  # compile every size separately, as in a training run
        compiled = torch.compile(dense_loss, dynamic=False)
        return lambda: compiled(case, inputs)
    return peers.build(method, inputs)


def memory_target(case: dict[str, Any], method: str) -> tuple[Callable[[], Any], Callable[[], Any]]:
    """Target of `measure.cpu_peak_bytes`: a small step of the same kind to warm up, and the step itself."""
    full, device = Case(**case), torch.device("cpu")
    small = shrunk(full, 256)
    warm_up = build_step(small, method, make_inputs(small, device))
    return warm_up, build_step(full, method, make_inputs(full, device))
