"""Apple's cut_cross_entropy: its function and its log-sum-exp kernel, with our loss inside. The rest is the peer's."""

from __future__ import annotations

from typing import Any

import torch
from tools.peer_adapters.stand_in import module

import tilewise as tw

package = module("cut_cross_entropy", "cut_cross_entropy")
module("cut_cross_entropy.vocab_parallel", "cut_cross_entropy/vocab_parallel")


def linear_cross_entropy(
    e: torch.Tensor,
    c: torch.Tensor,
    targets: torch.Tensor,
    bias: torch.Tensor | None = None,
    *,
    softcap: float | None = None,
    reduction: Any = "mean",
    shift: bool | int = 0,
    return_lse: Any = False,
    impl: str = "",
    vocab_parallel_options: Any = None,
) -> Any:
    """The peer's signature. ``impl`` has no meaning here: there is one implementation."""
    group = None
    if vocab_parallel_options is not None:
        group = vocab_parallel_options.group or torch.distributed.group.WORLD
    settings = {"softcap": softcap, "reduction": reduction, "shift": shift, "return_lse": return_lse}
    return tw.linear_cross_entropy(e, c, targets, linear_bias=bias, group=group, **settings)


def cce_lse_forward_kernel(
    e: torch.Tensor, c: torch.Tensor, bias: torch.Tensor | None = None, softcap: float | None = None
) -> torch.Tensor:
    """`tw.linear_logsumexp` with the peer's signature."""
    return tw.linear_logsumexp(e, c, bias=bias, softcap=softcap)


package.linear_cross_entropy = linear_cross_entropy  # type: ignore[attr-defined]
module("cut_cross_entropy.cce_lse_forward", cce_lse_forward_kernel=cce_lse_forward_kernel)

from cut_cross_entropy.vocab_parallel.utils import VocabParallelOptions  # type: ignore[import-not-found]  # noqa: E402

package.VocabParallelOptions = VocabParallelOptions  # type: ignore[attr-defined]
