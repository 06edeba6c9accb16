"""Cases of the tables of "Cut Your Losses in Large-Vocabulary Language Models": the head of a language model.

A case is a table of the paper, the shape of a model, a kind of scores and a share of ignored tokens. A method is a way
to compute the mean cross entropy of the tokens that are not ignored, and its two gradients.

Axes: n tokens, m classes (the vocabulary), d features.
"""

from __future__ import annotations

import dataclasses
import functools
import math
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any

import torch
import torch.nn.functional as F
from benchmarks.measure import Step
from torch import Tensor

import tilewise as tw
from benchmarks import peers

TOKENS = 8192
IGNORED = -100
# Vocabulary and hidden size of the models of tables 1 and A2.
MODELS = {
    "Gemma 2 2B": (256_000, 2304),
    "Llama 3 8B": (128_256, 4096),
    "Mistral NeMo": (131_072, 5120),
    "Phi 3.5 Mini": (32_064, 3072),
    "Gemma 2 9B": (256_000, 3584),
    "Gemma 2 27B": (256_000, 4608),
}
# The same call as "tilewise" in most cases. The two rows show how much two measurements of one call differ.
BACKWARD = "tilewise, gradients in backward"
OURS = ("tilewise", "tilewise, gradients in forward", "tilewise, filter 1e-2", "tilewise, filter 1e-3", BACKWARD)
ONE_BLOCK = "tilewise, gradients in forward, workspace 2,400 MiB"
EVERYONE = (*OURS, "torch.compile", "CCE", "CCE exact", "Liger", "eager")
FILTERED = (*OURS, "torch.compile, filtered", "CCE", "Liger, filtered", "eager, filtered", "eager")
QUICK = (*OURS, "torch.compile", "CCE")


@dataclass(frozen=True, kw_only=True)
class LmCase:
    """One block of rows of a table.

    Args:
        table: table of the paper: "1", "A1" or "A2".
        model: a name in `MODELS`, shown to the reader.
        vocabulary, hidden, tokens: sizes of the scores and the features.
        decay: scores fall as -decay * ln(rank of the word), see `make_inputs`. 0 is flat.
        ignored: share of the tokens that are ignored.
        methods: the methods, most important first.
    """

    table: str
    model: str
    vocabulary: int
    hidden: int
    tokens: int = TOKENS
    decay: float = 1.8
    ignored: float = 0.0
    methods: tuple[str, ...] = EVERYONE

    @property
    def name(self) -> str:
        """Such as "table 1, Gemma 2 2B, a=1.8"."""
        scores = f"a={self.decay:g}" if self.decay else "flat"
        ignored = f", {100 * self.ignored:.0f} % ignored" if self.ignored else ""
        return f"table {self.table}, {self.model}, {scores}{ignored}"

    @property
    def counted(self) -> int:
        """Number of tokens that are not ignored."""
        return self.tokens - round(self.ignored * self.tokens)

    @property
    def unit_flops(self) -> int:
        """Operations of one product of the tokens that are not ignored with the classifier."""
        return 2 * self.counted * self.vocabulary * self.hidden


def _case(table: str, model: str, **more: Any) -> LmCase:
    vocabulary, hidden = MODELS[model]
    return LmCase(table=table, model=model, vocabulary=vocabulary, hidden=hidden, **more)


def all_cases() -> list[LmCase]:
    """All cases, most important first: an interrupted run has measured the first ones."""
    first, *others = MODELS
    wide = ("tilewise, filter 3e-2",)
    return [
        _case("1", first, decay=1.8, methods=EVERYONE + wide),
        _case("1", first, decay=1.5, methods=EVERYONE + wide),
        _case("1", first, decay=0.0),
        _case("A2", "Llama 3 8B", decay=1.8, methods=(*EVERYONE, ONE_BLOCK)),
        _case("A1", first, ignored=0.5, methods=FILTERED),
        _case("A1", first, ignored=0.9, methods=FILTERED),
        *(_case("A2", model, decay=1.8) for model in others if model != "Llama 3 8B"),
        *(_case("A2", model, decay=decay, methods=QUICK) for model in others for decay in (1.5, 0.0)),
    ]


def shrunk(case: LmCase) -> LmCase:
    """The same case at tiny sizes, for any machine."""
    sides = {"tokens": 128, "vocabulary": max(case.vocabulary // 256, 500), "hidden": case.hidden // 64}
    return replace(case, **sides)


# Inputs


def make_inputs(case: LmCase, device: torch.device, dtype: torch.dtype, seed: int = 0) -> peers.Inputs:
    """Leaves a (n, d) and b (m, d), and target (n,).

    Flat scores are N(0, 1). Peaked scores are like those of a trained model: ``-decay * ln(rank of the word) +
    N(0, 2)``, with the target raised by 7. One feature is constant in the hidden states and holds the word's frequency
    in the classifier. Words are in random order, and targets follow ``P(rank < r) = ln(r) / ln(m)``. With a decay of
    1.8 about 0.024 % of the probabilities are above 2**-12.
    """
    generator = torch.Generator(device).manual_seed(seed)

    def uniform(*shape: int) -> Tensor:
        return torch.rand(*shape, generator=generator, device=device)

    n, m, d = case.tokens, case.vocabulary, case.hidden
    a = torch.randn(n, d, generator=generator, device=device)
    b = torch.randn(m, d, generator=generator, device=device) / math.sqrt(d)
    target = (m * uniform(n)).long().clamp_(max=m - 1)
    if case.decay:
        b *= 2.0
        target = ((m + 1.0) ** uniform(n)).long().sub_(1).clamp_(0, m - 1)
        own = b[target]
        a += 7.0 * own / own.square().sum(1, keepdim=True)
        a[:, 0] = 1.0
        b[:, 0] = -case.decay * torch.arange(1, m + 1, device=device).log()
        place = torch.randperm(m, generator=generator, device=device)
        b, target = b[place.argsort()], place[target]
    dropped = uniform(n).argsort()[: n - case.counted]
    target[dropped] = IGNORED
    return {"a": a.to(dtype).requires_grad_(), "b": b.to(dtype).requires_grad_(), "target": target}


def exact_gradients(inputs: peers.Inputs, rows: int = 1024) -> tuple[Tensor, Tensor]:
    """Gradients of the mean loss in float32 from the same inputs, computed in blocks of tokens."""
    a, b, target = inputs["a"].detach(), inputs["b"].detach().float(), inputs["target"]
    keep = target != IGNORED
    grad_a, grad_b = torch.zeros(a.shape, device=a.device), torch.zeros_like(b)
    for block in keep.nonzero().squeeze(1).split(rows):
        x = a[block].float()
        g = (x @ b.T).softmax(1)
        g[torch.arange(len(block), device=a.device), target[block]] -= 1.0
        g /= keep.sum()
        grad_a[block] = g @ b
        grad_b.addmm_(g.T, x)
    return grad_a, grad_b


# Methods


def dense_loss(a: Tensor, b: Tensor, target: Tensor) -> Tensor:
    """The usual loss of model libraries: logits in the features' type, cross entropy in float32."""
    return F.cross_entropy((a @ b.T).float(), target, ignore_index=IGNORED)


@functools.cache
def compiled_loss() -> Callable[..., Tensor]:
    """One compiled function for all shapes, so that each shape is compiled once, whatever its scores."""
    torch._dynamo.config.recompile_limit = 64
    compiled: Callable[..., Tensor] = torch.compile(dense_loss, dynamic=False)
    return compiled


def tilewise_forward(x: peers.Inputs, **settings: Any) -> peers.Forward:
    """The loss of this library. Raises `PeerAbsent` if this version lacks an option."""
    missing = set(settings) - {field.name for field in dataclasses.fields(tw.TileOptions)}
    if missing:
        raise peers.PeerAbsent(f"this version of tilewise has no TileOptions({', '.join(sorted(missing))}=...)")
    options = tw.TileOptions(**settings)
    return lambda: tw.linear_cross_entropy(x["a"], x["b"], x["target"], ignore_index=IGNORED, options=options)


def without_ignored(x: peers.Inputs, loss: Callable[..., Tensor]) -> peers.Forward:
    """The loss after ignored tokens were removed (appendix A of the paper)."""

    def forward() -> Tensor:
        keep = x["target"] != IGNORED
        return loss(x["a"][keep], x["b"], x["target"][keep])

    return forward


def _liger_filtered(x: peers.Inputs) -> peers.Forward:
    peers.build("liger", x)  # raises if it is absent
    return without_ignored(x, lambda a, b, target: peers.build("liger", {"a": a, "b": b, "target": target})())


METHODS: dict[str, Callable[[peers.Inputs], peers.Forward]] = {
    "tilewise": tilewise_forward,
    "tilewise, gradients in forward": lambda x: tilewise_forward(x, gradients="forward"),
    ONE_BLOCK: lambda x: tilewise_forward(x, gradients="forward", workspace_mib=2400),
    BACKWARD: lambda x: tilewise_forward(x, gradients="backward"),
    "tilewise, filter 1e-3": lambda x: tilewise_forward(x, filter_tolerance=1e-3),
    "tilewise, filter 1e-2": lambda x: tilewise_forward(x, filter_tolerance=1e-2),
    "tilewise, filter 3e-2": lambda x: tilewise_forward(x, filter_tolerance=3e-2),
    "torch.compile": lambda x: lambda: compiled_loss()(x["a"], x["b"], x["target"]),
    "torch.compile, filtered": lambda x: without_ignored(x, compiled_loss()),
    "eager": lambda x: lambda: dense_loss(x["a"], x["b"], x["target"]),
    "eager, filtered": lambda x: without_ignored(x, dense_loss),
    "CCE": lambda x: peers.build("cce", x),
    "CCE exact": lambda x: peers.build("cce-exact", x),
    "Liger": lambda x: peers.build("liger", x),
    "Liger, filtered": _liger_filtered,
}


def build_step(method: str, inputs: peers.Inputs) -> Step:
    """The method on these inputs. Raises `peers.PeerAbsent` if it is not available."""
    return Step(METHODS[method](inputs), [inputs["a"], inputs["b"]])
