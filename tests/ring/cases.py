"""Every loss as a function of sharded tensors. The same call serves one process and any group."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

import tilewise as tw

Tensors = dict[str, Tensor]
ROW_WISE = ("a", "b", "own", "own_mask", "ids", "labels", "places", "weights", "a_log_q")  # sharded like the rows
NEGATIVE_WISE = ("c", "c_ids", "c_mask", "c_guide", "c_log_q")  # sharded like the shared negatives
LEAVES = ("a", "b", "own", "c", "scale", "bias")


def make_tensors(rows: int, negatives: int, dtype: torch.dtype, device: str = "cpu", seed: int = 0) -> Tensors:
    """The whole batch."""
    random = torch.Generator().manual_seed(seed)

    def features(*shape: int) -> Tensor:
        return F.normalize(torch.randn(*shape, 12, generator=random, dtype=torch.float64), dim=-1)

    def integers(high: int, *shape: int) -> Tensor:
        return torch.randint(high, shape, generator=random)

    found = {
        "a": features(rows),
        "b": features(rows),
        "c": features(negatives),
        "own": features(rows, 3),
        "scale": torch.tensor(9.0, dtype=torch.float64),
        "bias": torch.tensor(-2.0, dtype=torch.float64),
        "ids": integers(max(rows - 2, 1), rows),
        "c_ids": integers(max(rows - 2, 1), negatives),
        "labels": integers(4, rows),
        "places": torch.arange(rows),
        "own_mask": integers(3, rows, 3) > 0,
        "c_mask": integers(3, negatives) > 0,
        "weights": torch.randn(rows, generator=random, dtype=torch.float64),
        "c_guide": features(negatives),
        "a_log_q": -torch.rand(rows, generator=random, dtype=torch.float64),
        "c_log_q": -torch.rand(negatives, generator=random, dtype=torch.float64),
    }
    return {name: (value.to(dtype) if value.is_floating_point() else value).to(device) for name, value in found.items()}


def cut(tensors: Tensors, rank: int, rows: Sequence[int], negatives: Sequence[int]) -> Tensors:
    """A rank's shard."""

    def part(name: str, value: Tensor) -> Tensor:
        sizes = rows if name in ROW_WISE else negatives
        if name not in ROW_WISE + NEGATIVE_WISE:
            return value
        return value[sum(sizes[:rank]) : sum(sizes[: rank + 1])]

    return {name: part(name, value) for name, value in tensors.items()}


def _shared(x: Tensors, **how: Any) -> Tensor:
    return tw.info_nce(
        x["a"],
        x["b"],
        x["c"],
        temperature=1 / x["scale"],
        query_ids=x["ids"],
        key_ids=torch.cat([x["ids"], x["c_ids"]]),
        negative_mask=x["c_mask"],
        **how,
    )


def _soft_labels(x: Tensors, **how: Any) -> Tensor:
    """Own targets, and two that may be on another rank; then each rank's queries against themselves."""
    target = torch.stack([x["places"], x["ids"], -x["own_mask"][:, 0].long()], 1)
    weight = torch.stack([x["weights"] + 3.0, 0.5 * x["weights"], torch.ones_like(x["weights"])], 1)
    given = {"temperature": 1 / x["scale"], **how}
    return tw.soft_info_nce(x["a"], x["b"], target, weight, label_smoothing=0.2, **given) + tw.soft_info_nce(
        x["a"], x["a"], target[:, 1:], exclude_self=True, **given
    )


def _logsumexp(x: Tensors, **how: Any) -> Tensor:
    lse = tw.linear_logsumexp(
        x["a"],
        x["c"],
        scale=x["scale"],
        bias=x["bias"] * x["c_ids"] / 7,
        softcap=6.0,
        **how,
    )
    world = how["group"].size() if how.get("group") is not None else 1
    return world * (x["weights"] * lse).sum()


def _statistics(x: Tensors, **how: Any) -> Tensor:
    """Rows and columns of each rank, and targets by their index among the columns of all ranks."""
    stats = tw.pair_stats(
        x["a"], x["b"], scale=x["scale"], want=["col_logsumexp"], target=x["ids"], shift=x["weights"], **how
    )
    others = tw.pair_stats(x["a"], row_labels=x["labels"], exclude_self=True, **how)
    each = x["weights"] * (stats.logsumexp - stats.positive_sum + others.positive_sum) + stats.col_logsumexp
    world = how["group"].size() if how.get("group") is not None else 1
    return world * each.sum()


CASES: dict[str, Callable[..., Tensor]] = {
    "clip": lambda x, **how: tw.clip_loss(x["a"], x["b"], x["scale"], x["bias"], **how),
    "clip-sum": lambda x, **how: tw.clip_loss(x["a"], x["b"], x["scale"], reduction="sum", **how),
    "siglip": lambda x, **how: tw.siglip_loss(x["a"], x["b"], x["scale"], x["bias"], **how),
    "info_nce": lambda x, **how: tw.info_nce(x["a"], x["b"], temperature=1 / x["scale"], **how),
    "info_nce-symmetric": lambda x, **how: tw.info_nce(
        x["a"], x["b"], temperature=1 / x["scale"], symmetric=True, query_ids=x["ids"], **how
    ),
    "info_nce-shared": _shared,
    "info_nce-shared-only": lambda x, **how: _shared(x, in_batch=False, **how),
    "info_nce-own": lambda x, **how: tw.info_nce(
        x["a"], x["b"], x["own"], temperature=1 / x["scale"], negative_mask=x["own_mask"], **how
    ),
    "info_nce-own-only": lambda x, **how: tw.info_nce(
        x["a"], x["b"], x["own"], temperature=1 / x["scale"], in_batch=False, **how
    ),
    "info_nce-hardness": lambda x, **how: _shared(x, hardness=4.0, symmetric=True, **how),
    "info_nce-hardness-own": lambda x, **how: tw.info_nce(
        x["a"], x["b"], x["own"], temperature=1 / x["scale"], hardness=4.0, query_ids=x["ids"], **how
    ),
    "info_nce-guided": lambda x, **how: tw.info_nce(
        x["a"],
        x["b"],
        x["c"],
        temperature=1 / x["scale"],
        symmetric=True,
        guide=tw.Guide(
            query=x["own"][:, 0].detach(), key=x["own"][:, 1].detach(), negative_keys=x["c_guide"], margin=0.2
        ),
        **how,
    ),
    "clip_distillation": lambda x, **how: tw.clip_distillation_loss(
        x["a"], x["b"], x["scale"], x["own"][:, 0].detach(), x["own"][:, 1].detach(), 7.0, teacher_entropy=True, **how
    ),
    "info_nce-decoupled": lambda x, **how: _shared(
        x, symmetric=True, decoupled=True, log_q=torch.cat([x["a_log_q"], x["c_log_q"]]), **how
    ),
    "nt_xent-decoupled-queue": lambda x, **how: tw.nt_xent(
        torch.cat([x["a"], x["b"]]), temperature=1 / x["scale"], decoupled=True, queue=x["c"], **how
    ),
    "supcon-queue": lambda x, **how: tw.supcon_loss(
        x["a"], x["labels"], temperature=1 / x["scale"], queue=x["c"], queue_labels=x["c_ids"], **how
    ),
    "nt_xent": lambda x, **how: tw.nt_xent(torch.cat([x["a"], x["b"]]), temperature=1 / x["scale"], **how),
    "supcon": lambda x, **how: tw.supcon_loss(x["a"], x["labels"], temperature=1 / x["scale"], **how),
    "soft_info_nce": _soft_labels,
    "logsumexp": _logsumexp,
    "pair_stats": _statistics,
}


def loss_and_gradients(name: str, tensors: Tensors, **how: Any) -> Tensors:
    """The loss of a case and the gradients of all leaves that it uses."""
    leaves = {key: tensors[key].clone().requires_grad_() for key in LEAVES}
    loss = CASES[name]({**tensors, **leaves}, **how)
    found = torch.autograd.grad(loss, list(leaves.values()), allow_unused=True)
    grads = {key: grad for key, grad in zip(leaves, found, strict=True) if grad is not None}
    return {"loss": loss.detach(), **grads}


def joined(parts: Sequence[Tensors]) -> Tensors:
    """Combine the results of the ranks as DDP does: concatenate shards, average everything over the ranks."""
    world = len(parts)

    def join(name: str) -> Tensor:
        values = [part[name] for part in parts]
        if name in ROW_WISE + NEGATIVE_WISE:
            return torch.cat(values) / world
        return torch.stack(values).mean(0)

    return {name: join(name) for name in parts[0]}
