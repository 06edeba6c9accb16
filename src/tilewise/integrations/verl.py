"""`linear_cross_entropy` with the signature and the conventions of verl's fused head.

- from verl.utils.kernel.linear_cross_entropy import linear_cross_entropy
+ from tilewise.integrations.verl import linear_cross_entropy
"""

from __future__ import annotations

import torch
from torch import Tensor

from tilewise.losses.token_stats import linear_token_stats
from tilewise.options import TileOptions, check_choice

REDUCTIONS = ("none", "sum", "mean")


def linear_cross_entropy(
    hidden: Tensor,
    weight: Tensor,
    labels: Tensor,
    temperature: float = 1.0,
    reduction: str = "none",
    dist_process_group: torch.distributed.ProcessGroup | None = None,
    *,
    options: TileOptions | None = None,
) -> tuple[Tensor, Tensor]:
    """Log-probabilities of the labels and the entropy of each token, without storing logits.

    With ``log_p = (hidden @ weight.T / temperature).log_softmax(-1)``, returns ``log_p`` at the labels and
    ``-(log_p.exp() * log_p).sum(-1)``. As in verl, both are flat: one number for each token.

    Args:
        hidden: (n, d) or (b, t, d).
        weight: (V, d); with a group, this rank's part of the vocabulary, in rank order.
        labels: (n,) or (b, t), classes of the whole vocabulary. A token with the label -100 is ignored: both of its
            numbers are 0, and "mean" still divides by all tokens.
        temperature: divides the logits; positive.
        reduction: of the log-probabilities: "none", "sum" or "mean". The entropy is never reduced.
        dist_process_group: tensor-parallel ranks, which all hold the same hidden states and labels. The gradient of
            ``hidden`` is then this rank's part, as in verl: the sum over the ranks is the whole gradient.
        options: how to compute it. No option changes the result beyond rounding.

    >>> log_prob, entropy = linear_cross_entropy(torch.eye(2), torch.zeros(4, 2), torch.tensor([0, 3]))
    >>> [round(value, 4) for value in (log_prob[0].item(), entropy[0].item())]
    [-1.3863, 1.3863]
    """
    check_choice("reduction", reduction, REDUCTIONS)
    states = hidden.reshape(-1, hidden.shape[-1])
    if dist_process_group is not None and states.requires_grad:
        # Ours is the whole gradient on every rank. verl adds up the gradients of the ranks afterwards.
        states = states.view_as(states)
        world = torch.distributed.get_world_size(dist_process_group)
        states.register_hook(lambda grad: grad / world)
    stats = linear_token_stats(
        states,
        weight,
        labels.reshape(-1),
        want=("log_prob", "entropy"),
        temperature=temperature,
        group=dist_process_group,
        options=options,
    )
    log_prob, entropy = stats.log_prob, stats.entropy
    assert log_prob is not None
    assert entropy is not None
    if reduction != "none":
        log_prob = log_prob.sum() if reduction == "sum" else log_prob.mean()
    return log_prob, entropy
