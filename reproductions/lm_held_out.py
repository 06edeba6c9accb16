"""The model of `reproductions.lm_figures` on held-out text: figure 3, the loss, and what the filter would drop.

Losses are float32, so a difference between two runs comes from their weights. They are computed from all logits, some
rows at a time, with torch's own products. `linear_cross_entropy` in float32 was slower on an H200.
"""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
from examples.train_lm import Settings
from torch import Tensor, nn

import tilewise as tw
from examples import train_lm
from tilewise.ops.filter_report import record_filtering

THRESHOLD = 2.0**-12
TOLERANCES = (1e-3, 1e-2)
Report = dict[str, Any]


@torch.no_grad()
def held_out_loss(model: nn.Module, tokens: Tensor, settings: Settings, rows: int = 1024) -> float:
    """The mean loss of a token. Leaves the model in evaluation mode."""
    hidden, target = train_lm.hidden_states(model, tokens, settings)
    head = model.get_output_embeddings().weight
    total = torch.zeros((), dtype=torch.float64, device=head.device)
    for block, own in zip(hidden.split(rows), target.split(rows), strict=True):
        total += F.cross_entropy(block @ head.T, own, reduction="sum")
    return total.item() / len(target)


@torch.no_grad()
def probability_by_rank(hidden: Tensor, head: Tensor, target: Tensor, rows: int = 512) -> tuple[Tensor, Report]:
    """(v,): the mean probability of the i-th most likely token over all positions. Also loss and accuracy."""
    curve = torch.zeros(len(head), dtype=torch.float64, device=head.device)
    loss, first, among_10 = torch.zeros(3, dtype=torch.float64, device=head.device).unbind()
    for block, own in zip(hidden.split(rows), target.split(rows), strict=True):
        log_p = (block.float() @ head.float().T).log_softmax(1)
        of_own = log_p.gather(1, own[:, None])
        rank = (log_p > of_own).sum(1)
        loss -= of_own.double().sum()
        first += (rank == 0).sum()
        among_10 += (rank < 10).sum()
        curve += log_p.exp_().sort(1, descending=True).values.double().sum(0)
    n = len(hidden)
    found = {"loss": loss.item() / n, "accuracy": first.item() / n, "among_10": among_10.item() / n}
    return curve / n, found


def figure_3(model: nn.Module, held_out: Tensor, other: Tensor, settings: Settings) -> Report:
    """The curve at ranks that are evenly spaced on a logarithmic axis, and where it crosses the paper's threshold."""
    hidden, target = train_lm.hidden_states(model, held_out, settings)
    head = model.get_output_embeddings().weight.detach()
    curve, found = probability_by_rank(hidden, head, target)
    curve = curve.cpu()
    ranks = torch.logspace(0, torch.log10(torch.tensor(float(len(curve)))), 200).round().long().clamp(1, len(curve))
    ranks = ranks.unique()
    report = {
        "tokens": len(hidden),
        **found,
        "rank": ranks.tolist(),
        "probability": curve[ranks - 1].tolist(),
        "first_rank_below_2^-12": int((curve >= THRESHOLD).sum()) + 1,
        "mass_below_2^-12": float(curve[curve < THRESHOLD].sum()),
        "skipping": {f"{t:g}": left_out(hidden, head, target, t, settings) for t in TOLERANCES},
    }
    if len(other) >= settings.length:
        hidden, target = train_lm.hidden_states(model, other, settings)
        skipping = {f"{t:g}": left_out(hidden, head, target, t, settings) for t in TOLERANCES}
        report["other"] = {"loss": held_out_loss(model, other, settings), "skipping": skipping}
    return report


def left_out(hidden: Tensor, head: Tensor, target: Tensor, tolerance: float, settings: Settings) -> Report:
    """What backward would drop for these tokens, in the type that training uses."""
    dtype = torch.bfloat16 if settings.device == "cuda" else torch.float32
    hidden, head = hidden.detach().to(dtype).requires_grad_(), head.detach().to(dtype)
    with record_filtering() as found:
        tw.linear_cross_entropy(hidden, head, target, options=tw.TileOptions(filter_tolerance=tolerance))
    return seen_of(found)


def seen_of(found: Any) -> Report:
    """The recorded call. If none was recorded, the call was exact and kept everything."""
    if not len(found):
        return {"kept_share": 1.0, "skips": False, "mean_dropped": 0.0, "largest_dropped": 0.0}
    dropped = {"mean_dropped": found.mean_dropped[0], "largest_dropped": found.largest_dropped[0]}
    return {"kept_share": found.kept_share[0], "skips": not found.dense[0], **dropped}
