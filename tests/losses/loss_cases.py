"""Every loss with its arguments and its oracle: written once, used by every test that asks all losses the same thing.

Axes: n rows, m columns, d features, k negatives of one row.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from types import SimpleNamespace
from typing import Any

import torch
import torch.nn.functional as F
from tests import oracles
from tests.oracles import reduced
from torch import Tensor

import tilewise as tw
from tilewise.kernels.spec import stat_dtype

Loss = Callable[..., Tensor]  # (arguments, reduction=..., options=...) -> loss


@dataclass(frozen=True)
class Problem:
    """Differentiable arguments by name, our loss of them, and the dense one."""

    leaves: dict[str, Tensor]
    ours: Loss
    dense: Loss


class Maker:
    """Random arguments of one type and size, the same numbers for all types (up to rounding)."""

    def __init__(self, dtype: torch.dtype, n: int = 130, d: int = 24, seed: int = 0, device: str = "cpu") -> None:
        self.dtype, self.n, self.d, self.device = dtype, n, d, device
        self.generator = torch.Generator().manual_seed(seed)

    def random(self, *shape: int) -> Tensor:
        """Normal numbers of the type of the features."""
        values = torch.randn(*shape, generator=self.generator, dtype=torch.float64)
        return values.to(self.device, self.dtype)

    def unit(self, *shape: int) -> Tensor:
        """Rows of length 1."""
        values = torch.randn(*shape, self.d, generator=self.generator, dtype=torch.float64)
        return F.normalize(values, dim=-1).to(self.device, self.dtype)

    def number(self, value: float) -> Tensor:
        """A learnable number, such as a temperature: never in a half type."""
        return torch.tensor(value, device=self.device, dtype=stat_dtype(self.dtype))

    def integers(self, high: int, *shape: int) -> Tensor:
        return torch.randint(0, high, shape, generator=self.generator).to(self.device)

    def flags(self, *shape: int) -> Tensor:
        return (torch.rand(*shape, generator=self.generator) > 0.4).to(self.device)


CASES: dict[str, Callable[[Maker], Problem]] = {}


def case(make: Callable[[Maker], Problem]) -> Callable[[Maker], Problem]:
    CASES[make.__name__] = make
    return make


def problem(name: str, dtype: torch.dtype = torch.float64, **size: Any) -> Problem:
    """The case of that name, with leaves that require grad."""
    made = CASES[name](Maker(dtype, **size))
    for leaf in made.leaves.values():
        leaf.requires_grad_()
    return made


def solve(
    loss: Loss, leaves: dict[str, Tensor], upstream: Tensor | None = None, **how: Any
) -> tuple[Tensor, dict[str, Tensor]]:
    """The loss and the gradient of each leaf; ``upstream`` is the gradient that comes in (1 for a scalar)."""
    value = loss(SimpleNamespace(**leaves), **how)
    wanted = {name: leaf for name, leaf in leaves.items() if leaf.requires_grad}
    grads = torch.autograd.grad(value, list(wanted.values()), None if upstream is None else upstream.to(value.dtype))
    return value.detach(), dict(zip(wanted, grads, strict=True))


def converted(leaves: dict[str, Tensor], dtype: torch.dtype) -> dict[str, Tensor]:
    """Copies of all leaves in another type."""
    return {name: leaf.detach().to(dtype).requires_grad_() for name, leaf in leaves.items()}


def upstream_like(loss: Tensor, seed: int = 5) -> Tensor:
    """A random incoming gradient, float64."""
    return torch.randn(loss.shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)


def along_all_leaves(loss: Loss, leaves: dict[str, Tensor], **how: Any) -> Tensor:
    """The derivative of the loss along a random direction of all leaves: a gradient differentiated in grad_output.

    The direction is exact in every type.
    """
    generator = torch.Generator().manual_seed(3)
    along = [
        (torch.randn(leaf.shape, generator=generator) * 64).round().clamp(-255, 255).to(leaf) / 64
        for leaf in leaves.values()
    ]

    def of_values(*values: Tensor) -> Tensor:
        return loss(SimpleNamespace(**dict(zip(leaves, values, strict=True))), **how)

    here = tuple(leaf.detach() for leaf in leaves.values())
    change: Tensor = torch.autograd.functional.jvp(of_values, here, tuple(along))[1]
    return change


@case
def clip(make: Maker) -> Problem:
    return Problem(
        {"image": make.unit(make.n), "text": make.unit(make.n), "scale": make.number(14.0)},
        lambda p, **how: tw.clip_loss(p.image, p.text, p.scale, **how),
        lambda p, **how: oracles.clip_dense(p.image, p.text, p.scale, **how),
    )


@case
def clip_with_bias(make: Maker) -> Problem:
    return Problem(
        {"image": make.unit(make.n), "text": make.unit(make.n), "scale": make.number(14.0), "bias": make.number(-2.0)},
        lambda p, **how: tw.clip_loss(p.image, p.text, p.scale, p.bias, **how),
        lambda p, **how: oracles.clip_dense(p.image, p.text, p.scale, **how) + 0.0 * p.bias,
    )


@case
def siglip(make: Maker) -> Problem:
    return Problem(
        {"image": make.unit(make.n), "text": make.unit(make.n), "scale": make.number(10.0), "bias": make.number(-4.0)},
        lambda p, **how: tw.siglip_loss(p.image, p.text, p.scale, p.bias, **how),
        lambda p, **how: oracles.siglip_dense(p.image, p.text, p.scale, p.bias, **how),
    )


@case
def nt_xent(make: Maker) -> Problem:
    return Problem(
        {"z": make.unit(make.n // 2 * 2), "temperature": make.number(0.2)},
        lambda p, **how: tw.nt_xent(p.z, temperature=p.temperature, **how),
        lambda p, **how: oracles.nt_xent_dense(p.z, p.temperature, **how),
    )


@case
def nt_xent_decoupled_with_queue(make: Maker) -> Problem:
    return Problem(
        {"z": make.unit(make.n // 2 * 2), "temperature": make.number(0.2), "queue": make.unit(make.n + 7)},
        lambda p, **how: tw.nt_xent(p.z, temperature=p.temperature, decoupled=True, queue=p.queue, **how),
        lambda p, **how: oracles.nt_xent_dense(p.z, p.temperature, decoupled=True, queue=p.queue, **how),
    )


@case
def supcon_with_queue(make: Maker) -> Problem:
    """Some rows have positives in the queue alone."""
    labels, others = make.integers(make.n, make.n), make.integers(make.n, make.n + 7)

    def ours(p: Any, **how: Any) -> Tensor:
        return tw.supcon_loss(p.z, labels, temperature=p.temperature, queue=p.queue, queue_labels=others, **how)

    def dense(p: Any, **how: Any) -> Tensor:
        return oracles.supcon_dense(p.z, labels, p.temperature, queue=p.queue, queue_labels=others, **how)

    return Problem(
        {"z": make.unit(make.n), "temperature": make.number(0.1), "queue": make.unit(make.n + 7)}, ours, dense
    )


def _supcon(make: Maker, labels: Tensor) -> Problem:
    return Problem(
        {"z": make.unit(make.n), "temperature": make.number(0.1)},
        lambda p, **how: tw.supcon_loss(p.z, labels, temperature=p.temperature, **how),
        lambda p, **how: oracles.supcon_dense(p.z, labels, p.temperature, **how),
    )


@case
def supcon(make: Maker) -> Problem:
    return _supcon(make, make.integers(5, make.n))


@case
def supcon_lonely_rows(make: Maker) -> Problem:
    """Labels so many that about a third of the rows have no positive; negative and huge ones too."""
    return _supcon(make, make.integers(make.n, make.n) * 2**40 - 2**41)


def bring_close(queries: Tensor, keys: Tensor, make: Maker) -> None:
    """Write each key near its query, as unit vectors."""
    keys.copy_(F.normalize(queries.float() + 0.02 * make.unit(*queries.shape[:-1]).float(), dim=-1))


@dataclass(frozen=True)
class MadeGuide:
    """A guide's embeddings, float64, and its margin. Its scores are exact in every type; see `make_guide`."""

    query: Tensor
    key: Tensor
    negatives: Tensor | None
    settings: dict[str, Any]

    def in_type(self, dtype: torch.dtype) -> tw.Guide:
        others = None if self.negatives is None else self.negatives.to(dtype)
        return tw.Guide(query=self.query.to(dtype), key=self.key.to(dtype), negative_keys=others, **self.settings)

    def left_out(self) -> tuple[Tensor, Tensor, Tensor | None]:
        """Which keys of a query, queries of a key and negatives of a query are left out."""
        scores, margin = self.query @ self.key.T, self.settings.get("margin", 0.0)
        relative = self.settings.get("margin_strategy") == "relative"
        own = scores.diagonal()
        limit = (own - margin * (own.abs() if relative else 1.0))[:, None]
        others = torch.eye(len(own), dtype=torch.bool, device=own.device).logical_not()
        negatives = None
        if self.negatives is not None:
            form = "nd,md->nm" if self.negatives.dim() == 2 else "nd,nkd->nk"
            negatives = torch.einsum(form, self.query, self.negatives) > limit
        return (scores > limit) & others, (limit < scores.T) & others, negatives


def make_guide(make: Maker, negatives: tuple[int, ...] | None = None, **settings: Any) -> MadeGuide:
    """A guide that finds each key close to its query, but not always the closest. ``negatives``: their shape without d.

    Its embeddings, and margins, are multiples of 1/256, so its scores and limits are exact in every type: a score that
    is rounded to the other side of a limit would change the answer.
    """

    def coarse(values: Tensor) -> Tensor:
        return (256 * values.double()).round() / 256

    query, noise = coarse(make.unit(make.n)), make.unit(make.n)
    key = coarse(F.normalize(query + 1.5 * noise.double(), dim=1))
    return MadeGuide(query, key, None if negatives is None else coarse(make.unit(*negatives)), settings)


def info_nce_problem(
    make: Maker, negatives: Tensor | None = None, *, guide: MadeGuide | None = None, **fixed: Any
) -> Problem:
    """`info_nce` with these settings."""
    leaves = {"query": make.unit(make.n), "key": make.unit(make.n), "temperature": make.number(0.1)}
    if negatives is not None:
        leaves["negatives"] = negatives

    def ours(p: Any, **how: Any) -> Tensor:
        more = {} if guide is None else {"guide": guide.in_type(p.query.dtype)}
        return tw.info_nce(
            p.query, p.key, getattr(p, "negatives", None), temperature=p.temperature, **more, **fixed, **how
        )

    def dense(p: Any, **how: Any) -> Tensor:
        more = {} if guide is None else {"left_out": guide.left_out()}
        return oracles.info_nce_dense(
            p.query, p.key, getattr(p, "negatives", None), p.temperature, **more, **fixed, **how
        )

    return Problem(leaves, ours, dense)


@case
def info_nce(make: Maker) -> Problem:
    return info_nce_problem(make)


@case
def info_nce_symmetric(make: Maker) -> Problem:
    return info_nce_problem(make, symmetric=True)


@case
def info_nce_shared_negatives(make: Maker) -> Problem:
    return info_nce_problem(make, make.unit(make.n // 2 + 3))


@case
def info_nce_shared_masked(make: Maker) -> Problem:
    count = make.n // 2 + 3
    return info_nce_problem(make, make.unit(count), negative_mask=make.flags(count))


@case
def info_nce_only_shared_negatives(make: Maker) -> Problem:
    return info_nce_problem(make, make.unit(make.n // 2 + 3), in_batch=False)


@case
def info_nce_ids(make: Maker) -> Problem:
    ids = make.integers(make.n // 2, make.n)
    return info_nce_problem(make, symmetric=True, query_ids=ids, key_ids=ids)


@case
def info_nce_ids_one_way(make: Maker) -> Problem:
    ids = make.integers(make.n // 2, make.n)
    return info_nce_problem(make, query_ids=ids, key_ids=ids)


@case
def info_nce_ids_of_negatives(make: Maker) -> Problem:
    count = make.n // 2 + 3
    key_ids = make.integers(make.n // 2, make.n + count)
    return info_nce_problem(
        make, make.unit(count), symmetric=True, query_ids=make.integers(make.n // 2, make.n), key_ids=key_ids
    )


@case
def info_nce_own_negatives(make: Maker) -> Problem:
    return info_nce_problem(make, make.unit(make.n, 4))


@case
def info_nce_own_masked(make: Maker) -> Problem:
    return info_nce_problem(make, make.unit(make.n, 4), negative_mask=make.flags(make.n, 4), symmetric=True)


@case
def info_nce_only_own_negatives(make: Maker) -> Problem:
    return info_nce_problem(make, make.unit(make.n, 4), in_batch=False)


@case
def info_nce_hardness(make: Maker) -> Problem:
    """Close keys of other queries count more."""
    return info_nce_problem(make, hardness=9.0)


@case
def info_nce_hardness_ids(make: Maker) -> Problem:
    ids = make.integers(make.n // 2, make.n)
    return info_nce_problem(make, hardness=5.0, symmetric=True, query_ids=ids, key_ids=ids)


@case
def info_nce_hardness_shared(make: Maker) -> Problem:
    count = make.n // 2 + 3
    return info_nce_problem(make, make.unit(count), hardness=5.0, negative_mask=make.flags(count), symmetric=True)


@case
def info_nce_hardness_of_own_negatives(make: Maker) -> Problem:
    return info_nce_problem(make, make.unit(make.n, 4), hardness=5.0, hardness_mode="hard_negatives")


@case
def info_nce_hardness_in_batch(make: Maker) -> Problem:
    return info_nce_problem(make, make.unit(make.n, 4), hardness=5.0, hardness_mode="in_batch_negatives")


@case
def info_nce_decoupled(make: Maker) -> Problem:
    return info_nce_problem(make, symmetric=True, decoupled=True)


@case
def info_nce_decoupled_and_corrected(make: Maker) -> Problem:
    """The sampling probabilities are exact in every type."""
    count = make.n // 2 + 3
    guide = make_guide(make, (count,), margin=0.25)
    log_q = -(torch.arange(make.n + count, device=make.device) % 8).to(make.dtype)
    how = {"negative_mask": make.flags(count), "symmetric": True, "decoupled": True, "log_q": log_q}
    return info_nce_problem(make, make.unit(count), guide=guide, **how)


@case
def info_nce_log_q(make: Maker) -> Problem:
    log_q = -(torch.arange(make.n, device=make.device) % 8).to(make.dtype)
    return info_nce_problem(make, symmetric=True, log_q=log_q)


@case
def info_nce_guided(make: Maker) -> Problem:
    """Negatives that a second model finds too close are left out."""
    return info_nce_problem(make, guide=make_guide(make, margin=0.125))


@case
def info_nce_guided_symmetric_with_negatives(make: Maker) -> Problem:
    count = make.n // 2 + 3
    guide = make_guide(make, (count,), margin=0.25, margin_strategy="relative")
    return info_nce_problem(make, make.unit(count), symmetric=True, guide=guide)


@case
def clip_distillation(make: Maker) -> Problem:
    image, text = make.random(make.n, 40) / 6, make.random(make.n, 40) / 6

    def ours(p: Any, **how: Any) -> Tensor:
        teacher = image.to(p.image.dtype), text.to(p.image.dtype)
        return tw.clip_distillation_loss(p.image, p.text, p.scale, *teacher, 9.0, **how)

    def dense(p: Any, reduction: str = "mean") -> Tensor:
        kind = p.image.dtype
        student, teacher = p.scale * p.image @ p.text.T, 9.0 * (image.to(kind) @ text.to(kind).T)
        both = [oracles.distillation_dense(x, y, 0) for x, y in ((student, teacher), (student.T, teacher.T))]
        return reduced((both[0] + both[1]) / 2, reduction)

    return Problem({"image": make.unit(make.n), "text": make.unit(make.n), "scale": make.number(14.0)}, ours, dense)


def _distillation(make: Maker, beta: float, *, targets: bool = False, **fixed: Any) -> Problem:
    classes, t = make.n + 41, fixed.get("temperature", 1.0)
    counted = make.flags(make.n)
    target = make.integers(classes, make.n)
    target[::3] = -100
    teacher, head = make.random(make.n, 40), make.random(classes, 40) / 3
    leaves = {
        "hidden": make.random(make.n, make.d),
        "classifier": make.random(classes, make.d) / 2,
        "scale": make.number(0.7),
        "bias": make.random(classes),
    }

    def ours(p: Any, **how: Any) -> Tensor:
        given = {"beta": beta, "linear_bias": p.bias, "logit_scale": p.scale, "mask": counted}
        y = target if targets else None
        other = teacher.to(p.hidden.dtype), head.to(p.hidden.dtype)
        return tw.linear_distillation_loss(p.hidden, p.classifier, *other, y, **given, **fixed, **how)

    def dense(p: Any, reduction: str = "mean") -> Tensor:
        kind = p.hidden.dtype
        logits, other = p.scale * p.hidden @ p.classifier.T + p.bias, teacher.to(kind) @ head.to(kind).T
        if "softcap" in fixed:
            logits, other = (fixed["softcap"] * torch.tanh(x / fixed["softcap"]) for x in (logits, other))
        loss = torch.where(counted, oracles.distillation_dense(logits, other, beta, t), 0.0)
        has_target = counted & (target != -100)
        nll = torch.zeros_like(loss)
        if targets:
            nll = F.cross_entropy(logits, torch.where(has_target, target, -100), reduction="none")
        if reduction != "mean":
            return reduced(loss + nll, reduction)
        mean = loss.sum() / counted.sum()
        return mean + nll.sum() / has_target.sum() if targets else mean

    return Problem(leaves, ours, dense)


@case
def distillation_kl(make: Maker) -> Problem:
    return _distillation(make, 0.0, softcap=5.0, teacher_softcap=5.0)


@case
def distillation_reverse_with_targets(make: Maker) -> Problem:
    return _distillation(make, 1.0, targets=True, temperature=2.0)


@case
def distillation_jsd_with_targets(make: Maker) -> Problem:
    return _distillation(make, 0.3, targets=True)


def cross_entropy_problem(make: Maker, *, bias: bool = False, weight: bool = False, **fixed: Any) -> Problem:
    """`linear_cross_entropy` with these settings."""
    tokens = 5 if fixed.get("shift") else None
    rows = (max(make.n // 5, 2), tokens) if tokens else (make.n,)
    classes = make.n + 41
    target = make.integers(classes, *rows)
    target[..., ::3] = fixed.get("ignore_index", -100)
    leaves = {
        "hidden": make.random(*rows, make.d),
        "classifier": make.random(classes, make.d) / 2,
        "scale": make.number(0.7),
    }
    if bias:
        leaves["bias"] = make.random(classes)
    of_class = make.random(classes).abs() if weight else None

    def ours(p: Any, **how: Any) -> Tensor:
        return tw.linear_cross_entropy(
            p.hidden,
            p.classifier,
            target,
            linear_bias=getattr(p, "bias", None),
            weight=of_class,
            logit_scale=p.scale,
            **fixed,
            **how,
        )

    def dense(p: Any, **how: Any) -> Tensor:
        bias = getattr(p, "bias", None)
        of_type = None if of_class is None else of_class.to(p.hidden.dtype)
        return oracles.linear_cross_entropy_dense(
            p.hidden, p.classifier, target, bias, of_type, scale=p.scale, **fixed, **how
        )

    return Problem(leaves, ours, dense)


@case
def cross_entropy(make: Maker) -> Problem:
    return cross_entropy_problem(make)


@case
def cross_entropy_bias(make: Maker) -> Problem:
    return cross_entropy_problem(make, bias=True)


@case
def cross_entropy_ignoring_a_class(make: Maker) -> Problem:
    return cross_entropy_problem(make, ignore_index=2)


@case
def cross_entropy_weighted(make: Maker) -> Problem:
    return cross_entropy_problem(make, weight=True)


@case
def cross_entropy_smoothed(make: Maker) -> Problem:
    return cross_entropy_problem(make, bias=True, label_smoothing=0.2)


@case
def cross_entropy_smoothed_weighted(make: Maker) -> Problem:
    return cross_entropy_problem(make, weight=True, label_smoothing=0.3)


@case
def cross_entropy_smoothed_only(make: Maker) -> Problem:
    return cross_entropy_problem(make, label_smoothing=1.0)


@case
def cross_entropy_softcap(make: Maker) -> Problem:
    return cross_entropy_problem(make, softcap=2.0)


@case
def cross_entropy_z_loss(make: Maker) -> Problem:
    return cross_entropy_problem(make, z_loss=0.01)


@case
def cross_entropy_shift(make: Maker) -> Problem:
    return cross_entropy_problem(make, shift=2)


@case
def cross_entropy_everything(make: Maker) -> Problem:
    return cross_entropy_problem(make, bias=True, weight=True, label_smoothing=0.1, softcap=3.0, z_loss=0.01, shift=1)


def _margin_softmax(make: Maker, **fixed: float) -> Problem:
    classes = make.n + 41
    target = make.integers(classes, make.n)
    target[::3] = -100
    leaves = {
        "hidden": make.random(make.n, make.d),
        "classifier": make.random(classes, make.d) / 2,
        "scale": make.number(6.0),
    }
    return Problem(
        leaves,
        lambda p, **how: tw.margin_softmax_loss(p.hidden, p.classifier, target, logit_scale=p.scale, **fixed, **how),
        lambda p, **how: oracles.margin_softmax_dense(p.hidden, p.classifier, target, scale=p.scale, **fixed, **how),
    )


@case
def margin_arcface(make: Maker) -> Problem:
    """A margin of 1.7 takes many angles beyond pi."""
    return _margin_softmax(make, m2=1.7, m3=0.1)


@case
def margin_sphereface(make: Maker) -> Problem:
    return _margin_softmax(make, m1=2.5, m2=0.0)


@case
def soft_labels(make: Maker) -> Problem:
    """Four targets of each query with weights, some twice, some padding; some queries have none."""
    keys = make.n + 9
    target, weight = make.integers(keys, make.n, 4), make.integers(5, make.n, 4) / 8
    target[::3, 2], target[::5, 0], target[::4, 1], target[::7] = -1, -1, target[::4, 3], -1

    def ours(p: Any, **how: Any) -> Tensor:
        given = {"temperature": p.temperature, "label_smoothing": 0.25}
        return tw.soft_info_nce(p.queries, p.keys, target, weight, **given, **how)

    def dense(p: Any, **how: Any) -> Tensor:
        given = {"temperature": p.temperature, "label_smoothing": 0.25}
        return oracles.soft_info_nce_dense(p.queries, p.keys, target, weight, **given, **how)

    leaves = {"queries": make.unit(make.n), "keys": make.unit(keys), "temperature": make.number(0.1)}
    return Problem(leaves, ours, dense)


@case
def logsumexp(make: Maker) -> Problem:
    columns = make.n + 9

    def ours(p: Any, reduction: str = "mean", **how: Any) -> Tensor:
        lse = tw.linear_logsumexp(p.a, p.b, scale=p.scale, bias=p.bias, softcap=6.0, **how)
        return reduced(lse, reduction)

    def dense(p: Any, reduction: str = "mean") -> Tensor:
        scores = p.scale * p.a @ p.b.T + p.bias
        return reduced(torch.logsumexp(6.0 * torch.tanh(scores / 6.0), 1), reduction)

    leaves = {
        "a": make.random(make.n, make.d),
        "b": make.random(columns, make.d),
        "scale": make.number(0.7),
        "bias": make.random(columns),
    }
    return Problem(leaves, ours, dense)


@case
def pair_statistics(make: Maker) -> Problem:
    """Two calls: one with labels, ids and a shift, and one that leaves out the columns that it picks."""
    columns = make.n + 9
    row_labels, col_labels = make.integers(5, make.n), make.integers(5, columns)
    row_ids, col_ids = make.integers(columns, make.n), make.integers(columns, columns)
    pick = (make.integers(columns, make.n, 1) + torch.tensor([9, 0, 4], device=make.device)) % columns
    shift = (torch.arange(make.n, device=make.device) % 3).double()
    shares = torch.tensor([0.5, 0.25, 0.125], device=make.device)

    def ours(p: Any, reduction: str = "mean", **how: Any) -> Tensor:
        given = {"scale": p.scale, "bias": p.bias, **how}
        keys = {"row_labels": row_labels, "col_labels": col_labels, "row_ids": row_ids, "col_ids": col_ids}
        one = tw.pair_stats(p.a, p.b, want=("entropy", "log_sum_sq_prob"), shift=shift, softcap=6.0, **keys, **given)
        other = tw.pair_stats(p.a, p.b, pick=pick, exclude_picked=True, **given)
        count = one.num_positives.clamp(min=1)
        sums = one.logsumexp - one.positive_sum / count + 0.3 * one.entropy + 0.2 * one.log_sum_sq_prob
        return reduced(sums + other.logsumexp - (other.picked * shares.to(other.picked)).sum(1), reduction)

    def dense(p: Any, reduction: str = "mean") -> Tensor:
        plain = p.scale * p.a @ p.b.T + p.bias
        positive = row_labels[:, None] == col_labels
        x = 6.0 * torch.tanh(plain / 6.0) - shift.to(plain.dtype)[:, None]
        x = x.masked_fill((row_ids[:, None] == col_ids) & ~positive, -torch.inf)
        log_p = x.log_softmax(1)
        entropy = -(log_p.exp() * log_p.masked_fill(x == -torch.inf, 0.0)).sum(1)
        mean = x.masked_fill(~positive, 0.0).sum(1) / positive.sum(1).clamp(min=1)
        sums = x.logsumexp(1) - mean + 0.3 * entropy + 0.2 * (2 * log_p).logsumexp(1)
        rest = plain.scatter(1, pick, -torch.inf).logsumexp(1)
        return reduced(sums + rest - (plain.gather(1, pick) * shares.to(plain)).sum(1), reduction)

    leaves = {
        "a": make.random(make.n, make.d),
        "b": make.random(columns, make.d) / 2,
        "scale": make.number(0.7),
        "bias": make.random(columns),
    }
    return Problem(leaves, ours, dense)


@case
def tokens_picked(make: Maker) -> Problem:
    """Log-probabilities of given classes of each token, some twice, at a temperature of each token."""
    classes = make.n + 41
    target, pick = make.integers(classes, make.n), make.integers(classes, 4 * make.n).reshape(make.n, 4)
    target[::3], pick[::2, 1] = -100, pick[::2, 0]
    counted, weight = target != -100, torch.tensor([0.5, -0.2, 0.4, 0.3], device=target.device)
    each = 0.5 + 0.5 * (torch.arange(make.n, device=target.device) % 3)  # exact in every type

    def ours(p: Any, reduction: str = "mean", **how: Any) -> Tensor:
        given = {"linear_bias": p.bias, "logit_scale": p.scale, "softcap": 9.0, "want": ("log_prob",)}
        stats = tw.linear_token_stats(
            p.hidden, p.classifier, target, pick=pick, temperature=each.to(p.hidden.dtype), **given, **how
        )
        return reduced(-stats.log_prob - (stats.picked * weight).sum(1), reduction)

    def dense(p: Any, reduction: str = "mean") -> Tensor:
        logits = 9.0 * torch.tanh((p.scale * p.hidden @ p.classifier.T + p.bias) / 9.0)
        log_p = (logits / each.to(p.hidden.dtype)[:, None]).log_softmax(1)
        own = log_p.gather(1, target.clamp(min=0)[:, None])[:, 0]
        return reduced(torch.where(counted, -own - (log_p.gather(1, pick) * weight).sum(1), 0.0), reduction)

    leaves = {
        "hidden": make.random(make.n, make.d),
        "classifier": make.random(classes, make.d) / 2,
        "scale": make.number(0.7),
        "bias": make.random(classes),
    }
    return Problem(leaves, ours, dense)


def _sparse_distillation(make: Maker, **how: Any) -> Problem:
    """Four classes of each token, some of them padding; every fourth token has no classes, or is masked."""
    classes = make.n + 41
    ids = (make.integers(classes, make.n, 1) + torch.tensor([0, 7, 19, 30], device=make.device)) % classes
    log_probs = torch.log_softmax(make.random(make.n, 6).double(), 1)[:, :4].float()
    ids[::3, 2], ids[::5, 0], ids[::4], mask = -1, -1, -1, torch.arange(make.n, device=make.device) % 4 != 2

    def ours(p: Any, reduction: str = "mean", **more: Any) -> Tensor:
        given = {"linear_bias": p.bias, "logit_scale": p.scale, "mask": mask, "reduction": reduction}
        return tw.linear_sparse_distillation_loss(p.hidden, p.classifier, ids, log_probs, **given, **how, **more)

    def dense(p: Any, reduction: str = "mean") -> Tensor:
        given = {"bias": p.bias, "scale": p.scale, "mask": mask, "reduction": reduction}
        return oracles.sparse_distillation_dense(p.hidden, p.classifier, ids, log_probs, **given, **how)

    leaves = {
        "hidden": make.random(make.n, make.d),
        "classifier": make.random(classes, make.d) / 2,
        "scale": make.number(0.7),
        "bias": make.random(classes),
    }
    return Problem(leaves, ours, dense)


@case
def sparse_distillation(make: Maker) -> Problem:
    return _sparse_distillation(make, tail="bucket")


@case
def sparse_distillation_reverse(make: Maker) -> Problem:
    return _sparse_distillation(make, divergence="reverse", tail="bucket", softcap=9.0, temperature=1.5)


@case
def tokens_with_entropy(make: Maker) -> Problem:
    """What a policy gradient with an entropy bonus asks for; every third token does not count."""
    classes = make.n + 41
    target = make.integers(classes, make.n)
    target[::3] = -100
    counted = target != -100

    def ours(p: Any, reduction: str = "mean", **how: Any) -> Tensor:
        want = ("log_prob", "entropy", "log_sum_sq_prob", "mean_logit")
        given = {"linear_bias": p.bias, "logit_scale": p.scale, "want": want}
        stats = tw.linear_token_stats(p.hidden, p.classifier, target, **given, **how)
        extra = 0.2 * stats.log_sum_sq_prob + 0.1 * stats.mean_logit
        return reduced(-stats.log_prob - 0.3 * stats.entropy + extra, reduction)

    def dense(p: Any, reduction: str = "mean") -> Tensor:
        logits = p.scale * p.hidden @ p.classifier.T + p.bias
        log_p = logits.log_softmax(1)
        own = log_p.gather(1, target.clamp(min=0)[:, None])[:, 0]
        extra = 0.2 * (2 * log_p).logsumexp(1) + 0.1 * logits.mean(1)
        return reduced(torch.where(counted, -own + 0.3 * (log_p.exp() * log_p).sum(1) + extra, 0.0), reduction)

    leaves = {
        "hidden": make.random(make.n, make.d),
        "classifier": make.random(classes, make.d) / 2,
        "scale": make.number(0.7),
        "bias": make.random(classes),
    }
    return Problem(leaves, ours, dense)
