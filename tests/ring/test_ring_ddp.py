"""The scale of gradients: DDP around small encoders, against one process on the whole batch."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.nn.functional as F
from tests.compare import relative_error
from tests.ring.crew import Crew, crew  # noqa: F401
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel

import tilewise as tw

pytestmark = pytest.mark.group
SPLITS = [[12], [6, 6], [9, 3], [4, 4, 4], [7, 1, 4], [3, 3, 3, 3], [1, 6, 0, 5]]
LOSSES = ("clip", "clip-sum", "siglip", "info_nce", "nt_xent", "supcon")


class TwoTowers(nn.Module):
    """Two encoders, a learnable scale and a learnable bias."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(1)
        self.image = nn.Sequential(nn.Linear(10, 16), nn.GELU(), nn.Linear(16, 8))
        self.text = nn.Linear(6, 8)
        self.log_scale, self.bias = nn.Parameter(torch.tensor(2.0)), nn.Parameter(torch.tensor(-3.0))

    def forward(self, image: Tensor, text: Tensor) -> tuple[Tensor, ...]:
        a, b = F.normalize(self.image(image), dim=1), F.normalize(self.text(text), dim=1)
        return a, b, self.log_scale.exp(), self.bias


def loss_of(name: str, out: tuple[Tensor, ...], labels: Tensor, group: Any) -> Tensor:
    a, b, scale, bias = out
    if name == "clip":
        loss = tw.clip_loss(a, b, scale, group=group)
    elif name == "clip-sum":
        loss = tw.clip_loss(a, b, scale, reduction="sum", group=group)
    elif name == "siglip":
        loss = tw.siglip_loss(a, b, scale, bias, group=group)
    elif name == "info_nce":
        loss = tw.info_nce(a, b, temperature=1 / scale, group=group)
    elif name == "nt_xent":
        loss = tw.nt_xent(torch.cat([a, b]), temperature=1 / scale, group=group)
    else:
        loss = tw.supcon_loss(torch.cat([a, b]), torch.cat([labels, labels]), temperature=1 / scale, group=group)
    return loss + 0.0 * bias  # DDP needs a gradient of every parameter


def batch() -> tuple[Tensor, Tensor, Tensor]:
    random = torch.Generator().manual_seed(5)
    return (
        torch.randn(12, 10, generator=random),
        torch.randn(12, 6, generator=random),
        torch.randint(4, (12,), generator=random),
    )


def gradients(name: str, own: slice, group: Any) -> dict[str, Tensor]:
    model = TwoTowers()
    image, text, labels = (part[own] for part in batch())
    wrapped = model if group is None else DistributedDataParallel(model, process_group=group)
    loss = loss_of(name, wrapped(image, text), labels, group)
    loss.backward()
    found = {key: value.grad.clone() for key, value in model.named_parameters()}
    return {"loss": loss.detach(), **found}


def run_ddp(group: Any, split: list[int]) -> dict[str, dict[str, Tensor]]:
    own = slice(sum(split[: group.rank()]), sum(split[: group.rank() + 1]))
    return {name: gradients(name, own, group) for name in LOSSES}


def test_ddp_gives_the_gradient_of_the_global_loss(crew: Crew):  # noqa: F811
    want = {name: gradients(name, slice(None), None) for name in LOSSES}
    table, worst = [], 0.0
    for split in SPLITS:
        parts = crew.run(run_ddp, split, world=len(split))
        for name in LOSSES:
            mean = torch.stack([part[name]["loss"] for part in parts]).mean()
            errors = {"loss": relative_error(mean, want[name]["loss"])}
            keys = [key for key in want[name] if key != "loss" and (key != "bias" or name == "siglip")]
            for part in parts:  # after DDP every rank has the same gradient
                for key in keys:
                    kind = {"log_scale": "scale", "bias": "bias"}.get(key, "encoders")
                    error = relative_error(part[name][key], want[name][key])
                    errors[kind] = max(errors.get(kind, 0.0), error)
            worst = max(worst, *errors.values())
            shown = "  ".join(f"{kind} {error:.1e}" for kind, error in errors.items())
            table.append(f"W={len(split)} {split!s:14} {name:9} {shown}")
    print("\n".join(table))
    assert len(table) == len(SPLITS) * len(LOSSES)
    assert worst < 1e-5, "\n".join(table)
