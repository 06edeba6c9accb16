"""Whether kernels compute the same numbers with a row of tile sizes as with the row in use. `tilewise tune` asks this.

The measurements time only a few of the kernels, and the same sizes serve many more. So some losses run with both rows:
a kernel that cannot be compiled or launched with the sizes raises, and wrong numbers differ.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Callable, Iterator, Sequence
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

import tilewise as tw
from tilewise.kernels import registry
from tilewise.ops import limits

TYPES = {"bfloat16": (torch.bfloat16, torch.float16), "float32": (torch.float32,)}  # those that share their sizes
# Largest difference, as a share of the largest number. A half type rounds the gradient of each score.
CLOSE = {torch.bfloat16: 3e-2, torch.float16: 5e-3, torch.float32: 1e-3}
CLOSE_LOSS = 1e-3
ROWS = 1100  # more than a strip of tiles, and no whole number of them
RANK = 16  # of the matrix of features: scores then differ enough for every column to matter
SCALE, PEAKED_SCALE = 10.0, 100.0  # of scores, and of those of which the filter drops most
# Rows, classes, features and multiply-adds of a head so large that forward saves columns (`two_pass.saved`)
HEAD_ROWS, HEAD_CLASSES, HEAD_WIDTH, HEAD_PRODUCTS = 4096, 32768, 1024, 2**38
FILTER_ROWS, FILTER_COLUMNS = 300, 33_000  # tiles of the filter then have 256 columns


class WrongNumbers(Exception):
    """The result of a kernel differs from that with the sizes in use."""


class Inputs(NamedTuple):
    """The features of a call."""

    x: Tensor  # (n, d), with a gradient
    y: Tensor  # (m, d), with a gradient; row i is close to x_i
    whole: Tensor  # (n, d), whole numbers, whose products are exact
    bias: Tensor  # (m,), with a gradient
    number: Tensor  # (n,), 0, 1, 2, ...


class Case(NamedTuple):
    """A call: a function of `Inputs` and options, whose results are a loss, or tensors without a gradient."""

    name: str
    call: Callable[[Inputs, tw.TileOptions], Any]
    settings: dict[str, Any]  # of the options
    rows: int
    cols: int


def inputs(device: torch.device, dtype: torch.dtype, width: int, rows: int, cols: int) -> Inputs:
    """Random features, the same in every call."""
    draw = torch.Generator(device).manual_seed(0)

    def features(count: int) -> Tensor:
        low = torch.randn(count, RANK, device=device, generator=draw)
        return F.normalize(low @ torch.randn(RANK, width, device=device, generator=draw), dim=1)

    x, y = features(rows), features(cols)
    y[:rows] = F.normalize(y[:rows] + x, dim=1)
    return Inputs(
        x=x.to(dtype).requires_grad_(),
        y=y.to(dtype).requires_grad_(),
        whole=torch.randint(-2, 3, (rows, width), device=device, generator=draw).to(dtype),
        bias=torch.randn(cols, device=device, generator=draw).requires_grad_(),
        number=torch.arange(rows, device=device),
    )


def head(i: Inputs, o: tw.TileOptions, scale: float = SCALE) -> Any:
    """Cross-entropy."""
    return tw.linear_cross_entropy(i.x, i.y, i.number, logit_scale=scale, options=o)


def token_stats(i: Inputs, o: tw.TileOptions) -> Tensor:
    """Log-probabilities, entropies and picked classes."""
    pick = torch.stack([i.number, i.number.flip(0)], 1)
    how: dict[str, Any] = {"linear_bias": i.bias, "softcap": 30.0, "logit_scale": SCALE, "pick": pick}
    found: Any = tw.linear_token_stats(i.x, i.y, i.number, options=o, **how)
    return (found.entropy - found.log_prob).mean() - found.picked.mean()


def guided(i: Inputs, o: tw.TileOptions) -> Tensor:
    """Negatives that a guide leaves out; its scores are exact, so rounding cannot change which ones."""
    return tw.info_nce(i.x, i.y, guide=tw.Guide(query=i.whole, key=i.whole.flip(1)), options=o)


def divergence(i: Inputs, o: tw.TileOptions) -> Tensor:
    """The Jensen-Shannon divergence of two heads."""
    return tw.linear_distillation_loss(
        i.x, i.y, i.y, i.x, beta=0.5, logit_scale=SCALE, teacher_logit_scale=SCALE, options=o
    )


LOSSES: dict[str, Callable[[Inputs, tw.TileOptions], Any]] = {
    "clip_loss": lambda i, o: tw.clip_loss(i.x, i.y, SCALE, options=o),
    "siglip_loss": lambda i, o: tw.siglip_loss(i.x, i.y, SCALE, -3.0, options=o),
    "supcon_loss": lambda i, o: tw.supcon_loss(i.x, i.number // 4, options=o),
    "linear_cross_entropy": head,
    "linear_token_stats": token_stats,
    "info_nce with a guide": guided,
    "linear_distillation_loss": divergence,
}


def cases(
    dtype: torch.dtype,
    width: int,
    rows: int = ROWS,
    filter_rows: int = FILTER_ROWS,
    filter_columns: int = FILTER_COLUMNS,
) -> Iterator[Case]:
    """The calls that are compared. `LOSSES` take one pass where there is one, and two passes."""
    for name, loss in LOSSES.items():
        for gradients in ("forward", "backward"):
            yield Case(name, loss, {"gradients": gradients}, rows, rows)
    yield Case("linear_token_stats, batch invariant", token_stats, {"batch_invariant": True}, rows, rows)
    yield Case("retrieval_ranks", ranks, {}, rows, rows)
    yield Case("retrieval_ranks with ids", functools.partial(ranks, ids=True), {}, rows, rows)
    peaked = {"filter_tolerance": 1e-2}
    yield Case("the filter", functools.partial(head, scale=PEAKED_SCALE), peaked, filter_rows, filter_columns)
    if dtype == torch.bfloat16 and width >= HEAD_WIDTH:
        yield Case("a large head", head, {"gradients": "backward"}, HEAD_ROWS, head_classes(width))


def ranks(i: Inputs, o: tw.TileOptions, ids: bool = False) -> Any:
    """Ranks in both directions, by places or by ids. The scores are whole numbers."""
    mine, theirs = (i.number % 7, (i.number % 7).flip(0)) if ids else (None, None)
    return tw.retrieval_ranks_both(i.whole, i.whole.flip(1), query_ids=mine, gallery_ids=theirs, options=o)


def head_classes(width: int) -> int:
    """Classes of a head whose columns are saved."""
    return max(HEAD_CLASSES, HEAD_PRODUCTS // (HEAD_ROWS * width))


def why_not_all(device: torch.device, item: int, row: object, widths: Sequence[int]) -> str | None:
    """Why some call cannot be computed with a row of sizes, or which numbers differ; None if all is well.

    Args:
        device: the card.
        item: bytes of a number.
        row: a row of the size table.
        widths: numbers of features to check.
    """
    sizes, module = registry.size_table(), registry.tuner()
    types = next(types for types in TYPES.values() if types[0].itemsize == item)
    # Small batches have kernels of their own, without sizes to choose.
    with limits.changed(small=0, small_cpu=0, worth_filtering=0):
        try:
            for dtype, width, case in [(kind, w, case) for kind in types for w in widths for case in cases(kind, w)]:
                given = inputs(device, dtype, width, case.rows, case.cols)
                module.forget_programs()  # they have other sizes
                want = results(case, given)
                module.forget_programs()
                with sizes.trying(device, item, row):
                    got = results(case, given)
                for name, value in want.items():
                    close = CLOSE_LOSS if name == "the loss" else CLOSE[dtype] if value.is_floating_point() else 0.0
                    compare(f"{case.name}: {name}", got[name], value, close)
            if device.type == "cuda":
                torch.cuda.synchronize(device)
        except Exception as error:
            return f"{type(error).__name__}: {error}"
        finally:
            module.forget_programs()
    return None


def results(case: Case, given: Inputs) -> dict[str, Tensor]:
    """A loss with its gradients, or other tensors."""
    found = case.call(given, tw.TileOptions(backend="triton", precision="highest", **case.settings))
    if not isinstance(found, Tensor):
        return {f"result {place}": value for place, value in enumerate(found)}
    leaves = given.x, given.y, given.bias
    grads = zip(("x", "y", "the bias"), torch.autograd.grad(found, leaves, allow_unused=True), strict=True)
    return {"the loss": found.detach(), **{f"the gradient of {name}": grad for name, grad in grads if grad is not None}}


def compare(name: str, got: Tensor, want: Tensor, close: float) -> None:
    """Raise `WrongNumbers` if the largest difference is more than the share ``close`` of the largest number."""
    error = float((got.double() - want.double()).abs().amax() / want.double().abs().amax())
    if math.isnan(error) or error > close:
        raise WrongNumbers(f"{name} differs by {error:.1e} of its largest number from that with the sizes in use")
