"""The gradient cache and the drop-ins with settings drawn at random, for `python -m tests.random_calls`.

Each is beside a plain step or the formula of its library. Axes: n rows, m references, d features, e of an encoder.
"""

from __future__ import annotations

import random
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from types import SimpleNamespace
from typing import Any

import torch
import torch.nn.functional as F
from tests.losses.loss_cases import Maker, Problem
from tests.oracles import clip_dense, distillation_dense, info_nce_dense, nt_xent_dense, reduced, siglip_dense
from torch import Tensor, nn

import tilewise as tw
from tilewise.cache import Encoder, GradientCache, cached_loss
from tilewise.integrations import cublaze, info_nce_pytorch, lightly, open_clip, trl, verl
from tilewise.integrations import pytorch_metric_learning as pml

Settings = dict[str, Any]
CACHED = {"clip": (tw.clip_loss, clip_dense), "siglip": (tw.siglip_loss, siglip_dense)}


class Tower(nn.Module):
    """Two layers with dropout, whose mask is the same in all types."""

    def __init__(self, first: Tensor, second: Tensor, dropout: float) -> None:
        super().__init__()
        self.first, self.second = (nn.Parameter(w.detach(), requires_grad=w.requires_grad) for w in (first, second))
        self.dropout = dropout

    def forward(self, x: Tensor) -> Tensor:
        return encoded(x, self.first, self.second, self.dropout)


def encoded(x: Tensor, first: Tensor, second: Tensor, dropout: float) -> Tensor:
    """The representations of rows."""
    h = torch.tanh(x @ first)
    kept = torch.rand(h.shape, device=h.device) >= dropout
    kept[:, :2] = True  # a row of zeros has no direction
    return F.normalize((h * kept) @ second, dim=1)


class OwnBackward(torch.autograd.Function):
    """For `torch.autograd.grad`: a step whose backward adds to ``.grad``. ``run`` returns it and its own leaves."""

    @staticmethod
    def forward(ctx: Any, run: Callable[..., tuple[Tensor, list[Tensor]]], *leaves: Tensor) -> Tensor:
        with torch.enable_grad():
            ctx.value, ctx.leaves = run(*leaves)
        return ctx.value.detach()

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        with ThreadPoolExecutor(1) as other:  # in this thread, torch would see the call of `torch.autograd.grad`
            other.submit(ctx.value.backward, grad).result()
        return (None, *(leaf.grad for leaf in ctx.leaves))


def cache_settings(chance: random.Random) -> Settings:
    """How a step is cached."""
    return {
        "loss": chance.choice(sorted(CACHED)),
        "dropout": chance.choice([0.0, 0.3, 0.7]),
        "chunks": (chance.choice([1, 2, 3, 7]), chance.choice([1, 2, 5])),
        "shared": chance.random() < 0.3,
        "function": chance.random() < 0.3,
    }


def make_cached(
    make: Maker, *, loss: str, dropout: float, chunks: tuple[int, int], shared: bool, function: bool
) -> Problem:
    """Two towers, or one for both inputs. Without a reduction, the loss of what `GradientCache.encode` returns."""
    ours_of, dense_of = CACHED[loss]
    seed, sizes = int(make.integers(10**6, 1)), [-(-make.n // parts) for parts in chunks]
    names = ("x", "y", "scale", "bias") if loss == "siglip" else ("x", "y", "scale")
    leaves = {"x": make.random(make.n, make.d), "y": make.random(make.n, make.d)}
    leaves |= {"scale": make.number(5.0), "bias": make.number(-2.0)}
    leaves = {name: leaves[name] for name in names}
    for side in ("a",) if shared else ("a", "b"):
        leaves |= {f"{side}_in": make.random(make.d, 16) / make.d**0.5, f"{side}_out": make.random(16, 12)}

    def ours(p: Any, reduction: str = "mean", **how: Any) -> Tensor:
        def run(*values: Tensor) -> tuple[Tensor, list[Tensor]]:
            own = [value.detach().requires_grad_(value.requires_grad) for value in values]
            (x, y, *numbers), weights = own[: len(names)], own[len(names) :]
            towers = [Tower(*weights[k : k + 2], dropout) for k in range(0, len(weights), 2)]
            pair: list[Any] = towers * 2 if shared else towers
            if function:
                pair = [Encoder(lambda z, tower=tower: tower(z), (tower,)) for tower in pair]

            def of_reps(a: Tensor, b: Tensor) -> Tensor:
                return ours_of(a, b, *numbers, reduction=reduction, **how)

            if reduction == "none":
                value = of_reps(*GradientCache(pair, of_reps, chunk_size=sizes).encode(x, y))
            else:
                value = cached_loss(pair, [x, y], of_reps, chunk_size=sizes)
            return value, [x, y, *numbers, *(w for tower in towers for w in tower.parameters())]

        torch.manual_seed(seed)
        return OwnBackward.apply(run, *(getattr(p, name) for name in leaves))

    def dense(p: Any, reduction: str = "mean") -> Tensor:
        torch.manual_seed(seed)
        towers = [(getattr(p, f"{side}_in"), getattr(p, f"{side}_out")) for side in ("a", "a" if shared else "b")]
        reps = [
            torch.cat([encoded(part, *tower, dropout) for part in rows.split(size)])
            for rows, tower, size in zip((p.x, p.y), towers, sizes, strict=True)
        ]
        return dense_of(*reps, *(getattr(p, name) for name in names[2:]), reduction=reduction)

    return Problem(leaves, ours, dense)


def drop_in_settings(chance: random.Random) -> Settings:
    """A drop-in, and the temperature that it learns or keeps."""
    return {"name": chance.choice(sorted(DROP_INS)), "temperature": chance.choice([0.1, 0.5, 2.0])}


def make_drop_in(make: Maker, *, name: str, temperature: float) -> Problem:
    """A drop-in beside the formula of its library for each row. Its own reduction is the mean."""
    make.n = max(make.n, 4)
    leaves, own, rows = DROP_INS[name](make, temperature)

    def ours(p: Any, reduction: str = "mean", options: tw.TileOptions | None = None) -> Tensor:
        assert reduction == "mean"
        return own(p, options)

    return Problem(leaves, ours, lambda p, reduction="mean": reduced(rows(p), reduction))


Made = tuple[dict[str, Tensor], Callable[[Any, Any], Tensor], Callable[[Any], Tensor]]  # leaves, ours, dense rows


def two_views(make: Maker, **more: Tensor) -> dict[str, Tensor]:
    """Rows that are not normalized, so that it shows whether a loss normalizes."""
    return {"a": make.random(make.n, make.d), "b": make.random(make.n, make.d)} | more


def units(p: Any) -> list[Tensor]:
    return [F.normalize(x, dim=-1) for x in (p.a, p.b)]


def open_clip_softmax(make: Maker, temperature: float) -> Made:
    leaves = {"a": make.unit(make.n), "b": make.unit(make.n), "scale": make.number(1.0 / temperature)}
    return (
        leaves,
        lambda p, options: open_clip.ClipLoss(options=options)(p.a, p.b, p.scale),
        lambda p: clip_dense(p.a, p.b, p.scale, "none"),
    )


def open_clip_sigmoid(make: Maker, temperature: float) -> Made:
    leaves = {"a": make.unit(make.n), "b": make.unit(make.n), "scale": make.number(1.0 / temperature)}
    return (
        leaves | {"bias": make.number(-2.0)},
        lambda p, options: open_clip.SigLipLoss(options=options)(p.a, p.b, p.scale, p.bias),
        lambda p: siglip_dense(p.a, p.b, p.scale, p.bias, "none"),
    )


def lightly_batch(make: Maker, temperature: float) -> Made:
    return (
        two_views(make, t=make.number(temperature)),
        lambda p, options: lightly.NTXentLoss(p.t, options=options)(p.a, p.b),
        lambda p: nt_xent_dense(torch.cat(units(p)), p.t, "none"),
    )


def lightly_bank(make: Maker, temperature: float) -> Made:
    """The bank is new in every call, with the same random entries."""
    seed, size = int(make.integers(10**6, 1)), (make.n // 2 + 3, make.d)

    def module(options: Any = None) -> lightly.NTXentLoss:
        torch.manual_seed(seed)
        return lightly.NTXentLoss(temperature, size, options=options).to(make.device)

    def rows(p: Any) -> Tensor:
        negatives = module().bank.to(p.a.dtype)
        return info_nce_dense(*units(p), negatives, temperature, in_batch=False, reduction="none")

    return two_views(make), lambda p, options: module(options)(p.a, p.b), rows


def cublaze_pairs(make: Maker, temperature: float) -> Made:
    return (
        {"a": make.unit(make.n), "b": make.unit(make.n), "t": make.number(temperature)},
        lambda p, options: cublaze.InfoNCELoss(p.t)(torch.cat([p.a, p.b])),
        lambda p: nt_xent_dense(torch.cat([p.a, p.b]), p.t, "none"),
    )


def info_nce_with(shape: Callable[[int], tuple[int, ...]] | None, mode: str = "unpaired") -> Callable[..., Made]:
    """info-nce-pytorch with negatives of this shape, for n rows."""

    def made(make: Maker, temperature: float) -> Made:
        more = {} if shape is None else {"negatives": make.random(*shape(make.n), make.d)}

        def ours(p: Any, options: Any) -> Tensor:
            negatives = getattr(p, "negatives", None)
            return info_nce_pytorch.info_nce(p.a, p.b, negatives, p.t, negative_mode=mode, options=options)

        def rows(p: Any) -> Tensor:
            negatives = F.normalize(p.negatives, dim=-1) if more else None
            return info_nce_dense(*units(p), negatives, temperature=p.t, in_batch=not more, reduction="none")

        return two_views(make, t=make.number(temperature), **more), ours, rows

    return made


def metric_learning(softmax: bool, references: bool) -> Callable[..., Made]:
    """SupConLoss (``softmax``) or NTXentLoss of PyTorch Metric Learning, among the rows or against others."""

    def made(make: Maker, temperature: float) -> Made:
        place = torch.arange(make.n, device=make.device)
        labels = torch.where(place == make.n - 1, -1, place // 2 % max(2, make.n // 5))  # the last row is alone
        other = labels.roll(1)
        loss = pml.SupConLoss if softmax else pml.NTXentLoss

        def ours(p: Any, options: Any) -> Tensor:
            return loss(p.t, options=options)(p.a, labels, *([None, p.b, other] if references else []))

        def rows(p: Any) -> Tensor:
            z = F.normalize(p.a, dim=1)
            ref, ref_labels = (F.normalize(p.b, dim=1), other) if references else (z, labels)
            itself = torch.eye(make.n, dtype=torch.bool, device=make.device) & (not references)
            logits = (z @ ref.T / p.t).masked_fill(itself, -torch.inf)
            same = labels[:, None] == ref_labels[None, :]
            positive = same & ~itself
            if softmax:  # the mean over the rows with a positive
                log_p = torch.where(positive, logits.log_softmax(1), 0.0).sum(1) / positive.sum(1).clamp(min=1)
                return -log_p * make.n / positive.any(1).sum()
            negative = logits.masked_fill(same, -torch.inf).logsumexp(1, keepdim=True)
            pairs = torch.where(positive, torch.logaddexp(logits, negative) - logits.masked_fill(itself, 0.0), 0.0)
            return pairs.sum(1) * make.n / positive.sum()

        leaves = two_views(make, t=make.number(temperature))
        if not references:
            del leaves["b"]
        return leaves, ours, rows

    return made


def margin_loss(make: Maker, temperature: float) -> Made:
    """CosFaceLoss of PyTorch Metric Learning. The oracle of ArcFace is that of `margin_softmax_loss`."""
    classes, labels = make.n // 2 + 3, make.integers(make.n // 2 + 3, make.n)

    def ours(p: Any, options: Any) -> Tensor:
        loss = pml.CosFaceLoss(classes, make.d, 0.25, 1.0 / temperature, options=options).to(p.a)
        return torch.func.functional_call(loss, {"W": p.weight}, (p.a, labels))

    def rows(p: Any) -> Tensor:
        cosines = F.normalize(p.a, dim=1) @ F.normalize(p.weight, dim=0)
        own = torch.zeros_like(cosines).scatter(1, labels[:, None], 0.25)
        return F.cross_entropy((cosines - own) / temperature, labels, reduction="none")

    return {"a": make.random(make.n, make.d), "weight": make.random(make.d, classes)}, ours, rows


def token_head(make: Maker, temperature: float) -> Made:
    """verl's head: the log-probability of each label, less some of the entropy."""
    classes, labels = make.n + 41, make.integers(make.n + 41, make.n)
    labels[::3] = -100

    def ours(p: Any, options: Any) -> Tensor:
        log_prob, entropy = verl.linear_cross_entropy(p.hidden, p.weight, labels, temperature, options=options)
        return (-log_prob - 0.3 * entropy).mean()

    def rows(p: Any) -> Tensor:
        log_p = (p.hidden @ p.weight.T / temperature).log_softmax(-1)
        entropy = -(log_p.exp() * log_p).sum(-1)
        loss = F.nll_loss(log_p, labels, reduction="none") - 0.3 * entropy
        return loss.masked_fill(labels == -100, 0.0)

    leaves = {"hidden": make.random(make.n, make.d), "weight": make.random(classes, make.d) / make.d**0.5}
    return leaves, ours, rows


def divergence_head(make: Maker, temperature: float) -> Made:
    """TRL's divergence, with a teacher whose head has more classes."""
    classes, beta = make.n + 41, temperature / 2  # 0.05, 0.25, 1
    teacher = make.random(make.n, 40), make.random(classes + 7, 40) / 40**0.5
    trainer: Any = SimpleNamespace(_compute_loss=None)

    def ours(p: Any, options: Any) -> Tensor:
        head = trl.Divergence(trainer, trl, tw.TileOptions() if options is None else options)
        hidden, weight = (x.to(p.hidden.dtype) for x in teacher)
        divergence, _ = head.apply(p.hidden, p.weight, None, hidden, weight, None, beta, temperature)
        return divergence.mean()

    def rows(p: Any) -> Tensor:
        hidden, weight = (x.to(p.hidden.dtype) for x in teacher)
        return distillation_dense(p.hidden @ p.weight.T, hidden @ weight[:classes].T, beta, temperature)

    leaves = {"hidden": make.random(make.n, make.d), "weight": make.random(classes, make.d) / make.d**0.5}
    return leaves, ours, rows


DROP_INS: dict[str, Callable[..., Made]] = {
    "OpenCLIP ClipLoss": open_clip_softmax,
    "OpenCLIP SigLipLoss": open_clip_sigmoid,
    "lightly": lightly_batch,
    "lightly with a bank": lightly_bank,
    "cublaze": cublaze_pairs,
    "info-nce-pytorch": info_nce_with(None),
    "info-nce-pytorch unpaired": info_nce_with(lambda n: (n // 2 + 3,)),
    "info-nce-pytorch paired": info_nce_with(lambda n: (n, 3), "paired"),
    "metric learning CosFaceLoss": margin_loss,
    "TRL's divergence": divergence_head,
    "verl": token_head,
    "metric learning NTXentLoss": metric_learning(softmax=False, references=False),
    "metric learning NTXentLoss with references": metric_learning(softmax=False, references=True),
    "metric learning SupConLoss": metric_learning(softmax=True, references=False),
    "metric learning SupConLoss with references": metric_learning(softmax=True, references=True),
}
