"""Losses with settings drawn at random, each with its oracle, for `python -m tests.random_calls`.

The cases of tests/losses/loss_cases.py have fixed settings; here any combination may occur.
Axes: n rows or tokens, m columns, d features, k entries of one row.
"""

from __future__ import annotations

import random
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from tests import oracles, random_programs
from tests.losses import loss_cases
from tests.losses.loss_cases import Maker, Problem
from tests.oracles import reduced
from torch import Tensor

import tilewise as tw

Settings = dict[str, Any]
COEFFICIENTS = {"log_prob": -1.0, "entropy": -0.3, "log_sum_sq_prob": 0.2, "mean_logit": 0.1, "logsumexp": 0.4}
IGNORED = -100


@dataclass(frozen=True)
class Family:
    """A loss whose settings are drawn, and how its problem is made of them."""

    draw: Callable[[random.Random], Settings]
    make: Callable[..., Problem]  # (maker, **settings)
    largest: int = 1 << 62  # rows
    reductions: tuple[str, ...] = ("mean", "mean", "sum", "none")


def some(chance: random.Random, settings: Settings, share: float = 0.4) -> Settings:
    """Each of the settings with this chance."""
    return {name: value for name, value in settings.items() if chance.random() < share}


def cross_entropy_settings(chance: random.Random) -> Settings:
    """Any combination of the settings of `linear_cross_entropy`."""
    maybe = {
        "bias": True,
        "weight": True,
        "label_smoothing": chance.choice([0.1, 0.5, 1.0]),
        "softcap": chance.choice([0, 2.0, 30.0]),
        "z_loss": chance.choice([1e-4, 0.1]),
        "shift": chance.choice([1, 2]),
        "ignore_index": chance.choice([-1, 0, 2, 10**6]),
    }
    return some(chance, maybe)


def info_nce_settings(chance: random.Random) -> Settings:
    """Any combination of the settings of `info_nce`; see `make_info_nce`."""
    negatives = chance.choice(["none", "shared", "own"])
    in_batch = negatives == "none" or chance.random() < 0.7
    hardness = chance.choice([0.0, 0.0, 1.0, 9.0])
    modes = ["all_negatives"]
    modes += ["in_batch_negatives"] * in_batch + ["hard_negatives"] * (negatives != "none")
    return {
        "negatives": negatives,
        "in_batch": in_batch,
        "symmetric": in_batch and chance.random() < 0.5,
        "masked": negatives != "none" and chance.random() < 0.5,
        "ids": in_batch and chance.random() < 0.5,
        "hardness": hardness,
        "hardness_mode": chance.choice(modes),
        "close": chance.random() < 0.3,
        "guide": chance.choice(
            [
                *({},) * 4,
                {"margin": chance.choice([-0.25, 0.0, 0.125, 0.5])},
                {"margin": chance.choice([0.0, 0.25, 0.5]), "margin_strategy": "relative"},
            ]
        ),
    }


def make_info_nce(
    make: Maker,
    *,
    negatives: str,
    in_batch: bool,
    symmetric: bool,
    masked: bool,
    ids: bool,
    hardness: float,
    hardness_mode: str,
    close: bool,
    guide: Settings,
) -> Problem:
    """The problem of these settings. ``close``: each key of a half type is near its query.

    Probabilities are then near 1, and gradients cancel. In float32 the loss would be as small as rounding errors.
    """
    shape = {"none": None, "shared": (make.n // 2 + 3,), "own": (make.n, 3)}[negatives]
    fixed: Settings = {"in_batch": in_batch, "symmetric": symmetric}
    fixed |= {"hardness": hardness, "hardness_mode": hardness_mode}
    if masked and shape is not None:
        fixed["negative_mask"] = make.flags(*shape)
    if ids:
        shared = shape[0] if negatives == "shared" and shape is not None else 0
        high = max(make.n // 2, 1)
        fixed |= {"query_ids": make.integers(high, make.n), "key_ids": make.integers(high, make.n + shared)}
    if guide:
        fixed["guide"] = loss_cases.make_guide(make, shape, **guide)
    made = loss_cases.info_nce_problem(make, None if shape is None else make.unit(*shape), **fixed)
    if close and make.dtype in (torch.bfloat16, torch.float16):
        loss_cases.bring_close(made.leaves["query"], made.leaves["key"], make)
    return made


def tokens_of(make: Maker, shift: int) -> tuple[int, ...]:
    """The shape of the tokens: sequences of 5 if they are shifted."""
    return (max(make.n // 5, 2), 5) if shift else (make.n,)


def head_leaves(make: Maker, tokens: tuple[int, ...], classes: int, *, bias: bool) -> dict[str, Tensor]:
    """Hidden states, a classifier, a scale, and perhaps a bias."""
    leaves = {
        "hidden": make.random(*tokens, make.d),
        "classifier": make.random(classes, make.d) / 2,
        "scale": make.number(0.7),
    }
    return leaves | ({"bias": make.random(classes)} if bias else {})


def head_arguments(p: Any, *, softcap: float, shift: int) -> Settings:
    """The settings of a head that all losses of tokens share."""
    return {"linear_bias": getattr(p, "bias", None), "logit_scale": p.scale, "softcap": softcap, "shift": shift}


def head_logits(p: Any, *, softcap: float, shift: int) -> Tensor:
    """The student's logits of the tokens that have a next one, dense."""
    hidden = p.hidden[..., :-shift, :] if shift else p.hidden
    logits = p.scale * hidden @ p.classifier.T
    if hasattr(p, "bias"):
        logits = logits + p.bias
    return softcap * torch.tanh(logits / softcap) if softcap else logits


def head_settings(chance: random.Random) -> Settings:
    """A bias, a soft cap and a shift, or not."""
    return {
        "bias": chance.random() < 0.4,
        "softcap": chance.choice([0.0, 0.0, 2.0, 30.0]),
        "shift": chance.choice([0, 0, 0, 1, 2]),
    }


def temperatures(make: Maker, tokens: tuple[int, ...], temperature: float | str) -> float | Tensor:
    """The temperature itself, or for "each" one of each token: numbers that are exact in every type."""
    if isinstance(temperature, float):
        return temperature
    count = torch.arange(torch.Size(tokens).numel(), device=make.device) % 3
    return (0.5 + 0.5 * count).reshape(tokens).to(make.dtype)


def token_settings(chance: random.Random) -> Settings:
    """Any combination of the settings of `linear_token_stats`."""
    target = chance.random() < 0.7
    want = [name for name in COEFFICIENTS if chance.random() < 0.5 and (target or name != "log_prob")]
    want += [name for name in ("argmax", "correct") if chance.random() < 0.3 and (target or name == "argmax")]
    if not set(want) & set(COEFFICIENTS):
        want.append("entropy")
    return head_settings(chance) | {
        "target": target,
        "want": tuple(want),
        "picks": chance.choice([0, 0, 1, 4]),
        "temperature": chance.choice([1.0, 0.5, 2.0, "each"]),
    }


def make_tokens(
    make: Maker, *, target: bool, want: tuple[str, ...], picks: int, temperature: float | str, bias: bool, **head: Any
) -> Problem:
    """A sum of the statistics of each token, with fixed coefficients. Tokens without a target count as 0."""
    classes, shift = make.n + 41, head["shift"]
    tokens = tokens_of(make, shift)
    t = temperatures(make, tokens, temperature)
    y = make.integers(classes, *tokens)
    y[..., ::3] = IGNORED
    pick = make.integers(classes, *tokens, picks) if picks else None
    coefficients = {name: value for name, value in COEFFICIENTS.items() if name in want}

    def ours(p: Any, reduction: str = "mean", **how: Any) -> Tensor:
        given = head_arguments(p, **head) | {"want": want, "pick": pick}
        given["temperature"] = t.to(p.hidden.dtype) if isinstance(t, Tensor) else t
        stats = tw.linear_token_stats(p.hidden, p.classifier, y if target else None, **given, **how)
        loss = sum(value * getattr(stats, name) for name, value in coefficients.items())
        return reduced(loss if stats.picked is None else loss - 0.3 * stats.picked.sum(-1), reduction)

    def dense(p: Any, reduction: str = "mean") -> Tensor:
        after = slice(shift, None)
        t_now = t[..., after, None].to(p.hidden.dtype) if isinstance(t, Tensor) else t
        logits = head_logits(p, **head) / t_now
        log_p, counted = logits.log_softmax(-1), y[..., after] != IGNORED
        found = {
            "log_prob": log_p.gather(-1, y[..., after].clamp(min=0)[..., None])[..., 0],
            "entropy": -(log_p.exp() * log_p).sum(-1),
            "log_sum_sq_prob": (2 * log_p).logsumexp(-1),
            "mean_logit": logits.mean(-1),
            "logsumexp": logits.logsumexp(-1),
        }
        loss = sum(value * found[name] for name, value in coefficients.items())
        if pick is not None:
            loss = loss - 0.3 * log_p.gather(-1, pick[..., after, :]).sum(-1)
        return reduced(torch.where(counted, loss, 0.0) if target else loss, reduction)

    return Problem(head_leaves(make, tokens, classes, bias=bias), ours, dense)


def sparse_settings(chance: random.Random) -> Settings:
    """Any combination of the settings of `linear_sparse_distillation_loss`."""
    return head_settings(chance) | {
        "divergence": chance.choice(["forward", "reverse", "cross_entropy"]),
        "tail": chance.choice(["ignore", "renormalize", "bucket"]),
        "temperature": chance.choice([1.0, 0.5, 1.5, "each"]),
        "masked": chance.random() < 0.5,
        "ids": chance.choice([1, 2, 4]),
    }


def make_sparse(
    make: Maker,
    *,
    divergence: str,
    tail: str,
    temperature: float | str,
    masked: bool,
    ids: int,
    bias: bool,
    **head: Any,
) -> Problem:
    """Some classes of each token, some of them padding; every fourth token has none."""
    classes, tokens = make.n + 41, tokens_of(make, head["shift"])
    t = temperatures(make, tokens, temperature)
    first = make.integers(classes, *tokens, 1)
    chosen = (first + torch.tensor([0, 7, 19, 30], device=make.device)[:ids]) % classes
    log_probs = torch.log_softmax(make.random(*tokens, ids + 2).double(), -1)[..., :ids].float()
    chosen[..., ::5, 0], chosen[..., ::4, :] = -1, -1
    mask = make.flags(*tokens) if masked else None
    kind = {"divergence": divergence, "tail": tail, "mask": mask}

    def temperature_in(p: Any) -> float | Tensor:
        return t.to(p.hidden.dtype) if isinstance(t, Tensor) else t

    def ours(p: Any, **how: Any) -> Tensor:
        given = head_arguments(p, **head) | kind | {"temperature": temperature_in(p)}
        return tw.linear_sparse_distillation_loss(p.hidden, p.classifier, chosen, log_probs, **given, **how)

    def dense(p: Any, reduction: str = "mean") -> Tensor:
        given = kind | head | {"temperature": temperature_in(p), "scale": p.scale, "bias": getattr(p, "bias", None)}
        return oracles.sparse_distillation_dense(
            p.hidden, p.classifier, chosen, log_probs, reduction=reduction, **given
        )

    return Problem(head_leaves(make, tokens, classes, bias=bias), ours, dense)


def distillation_settings(chance: random.Random) -> Settings:
    """Any combination of the settings of `linear_distillation_loss`."""
    return head_settings(chance) | {
        "beta": chance.choice([0.0, 1.0, 0.5, chance.uniform(0.02, 0.98)]),
        "temperature": chance.choice([1.0, 1.0, 0.5, 3.0]),
        "targets": chance.random() < 0.5,
        "masked": chance.random() < 0.5,
        "padding": chance.choice([0, 0, 7]),
        "teacher_bias": chance.random() < 0.3,
        "teacher_scale": chance.choice([1.0, 0.5, 2.0]),
        "teacher_softcap": chance.choice([0.0, 0.0, 5.0]),
        "teacher_width": chance.choice([8, 40, 130]),
        "target_weight": chance.choice([1.0, 0.25]),
    }


def make_distillation(
    make: Maker,
    *,
    beta: float,
    temperature: float,
    targets: bool,
    masked: bool,
    padding: int,
    teacher_bias: bool,
    teacher_scale: float,
    teacher_softcap: float,
    teacher_width: int,
    target_weight: float,
    bias: bool,
    **head: Any,
) -> Problem:
    """The problem of these settings. ``padding``: rows that only the student's classifier has."""
    classes, shift = make.n + 41, head["shift"]
    tokens = tokens_of(make, shift)
    target = make.integers(classes, *tokens)
    target[..., ::3] = IGNORED
    mask = make.flags(*tokens) if masked else None
    other = {
        "hidden": make.random(*tokens, teacher_width),
        "classifier": make.random(classes, teacher_width) / teacher_width**0.5,
    }
    other |= {"bias": make.random(classes)} if teacher_bias else {}

    def teacher_of(kind: torch.dtype) -> dict[str, Tensor]:
        return {name: values.to(kind) for name, values in other.items()}

    def ours(p: Any, **how: Any) -> Tensor:
        teacher = teacher_of(p.hidden.dtype)
        given = head_arguments(p, **head) | {"beta": beta, "temperature": temperature, "mask": mask}
        given |= {"teacher_bias": teacher.get("bias"), "teacher_logit_scale": teacher_scale}
        given |= {"teacher_softcap": teacher_softcap, "target_weight": target_weight}
        given |= {"classes": classes} if padding else {}
        both = p.hidden, p.classifier, teacher["hidden"], teacher["classifier"]
        return tw.linear_distillation_loss(*both, target if targets else None, **given, **how)

    def dense(p: Any, reduction: str = "mean") -> Tensor:
        logits, after = head_logits(p, **head)[..., :classes], slice(shift, None)
        teacher = teacher_of(p.hidden.dtype)
        hidden = teacher["hidden"][..., :-shift, :] if shift else teacher["hidden"]
        q = teacher_scale * hidden @ teacher["classifier"].T + teacher.get("bias", 0.0)
        q = teacher_softcap * torch.tanh(q / teacher_softcap) if teacher_softcap else q
        y = target[..., after]
        counted = torch.ones_like(y, dtype=torch.bool) if not targets else y != IGNORED
        counted = counted if mask is None else mask[..., after]
        loss = torch.where(counted, oracles.distillation_dense(logits, q, beta, temperature), 0.0)
        nll, has_target = torch.zeros_like(loss), counted & (y != IGNORED)
        if targets:
            y = torch.where(has_target, y, IGNORED)
            nll = F.cross_entropy(logits.flatten(0, -2), y.flatten(), reduction="none").reshape(y.shape)
        if reduction != "mean":
            return reduced(loss + target_weight * nll, reduction)
        mean = loss.sum() / counted.sum()
        return mean + target_weight * nll.sum() / has_target.sum() if targets else mean

    return Problem(head_leaves(make, tokens, classes + padding, bias=bias), ours, dense)


FAMILIES = {
    "any cross entropy": Family(cross_entropy_settings, loss_cases.cross_entropy_problem),
    "any info_nce": Family(info_nce_settings, make_info_nce),
    "any token statistics": Family(token_settings, make_tokens),
    "any distillation": Family(distillation_settings, make_distillation),
    "any sparse distillation": Family(sparse_settings, make_sparse, largest=300),  # its oracle visits each token
    "a cached step": Family(random_programs.cache_settings, random_programs.make_cached),
    "a drop-in": Family(random_programs.drop_in_settings, random_programs.make_drop_in, reductions=("mean",)),
}
