"""Whether every kernel computes the right numbers with a row of tile sizes. `tilewise tune` keeps no other row.

The measurements time only a few of the kernels, and the same sizes serve many more. So each kind of kernel is called
once, and its loss and gradients are compared with those of the torch backend, in float64 where the call is small. The
filter is compared with dense float32 products.
"""

from __future__ import annotations

import dataclasses
import functools
import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor

import tilewise as tw
from tilewise.kernels import filter_plan, registry
from tilewise.kernels.precision import matmul_precision
from tilewise.kernels.spec import GradStats, Needs, Pair
from tilewise.ops import limits

TYPES = {"bfloat16": (torch.bfloat16, torch.float16), "float32": (torch.float32,)}  # those that share their sizes
# Largest difference, as a share of the largest number. A half type rounds the gradient of each score.
CLOSE = {torch.bfloat16: 3e-2, torch.float16: 5e-3, torch.float32: 1e-3}
CLOSE_LOSS = 1e-3
ROWS = 1100  # more than a strip of tiles, and no whole number of them
RANK = 16  # of the matrix of features: scores then differ enough for every column to matter
SCALE = 10.0
# Rows, classes, features and multiply-adds of a head so large that forward saves columns (`two_pass.saved`)
HEAD_ROWS, HEAD_CLASSES, HEAD_WIDTH, HEAD_PRODUCTS = 4096, 32768, 1024, 2**38
FILTER_ROWS, FILTER_COLUMNS = 300, 33_000  # tiles of the filter then have 256 columns


class WrongNumbers(Exception):
    """The result of a kernel differs from the reference."""


@dataclass
class Inputs:
    """The features of all calls."""

    x: Tensor  # (n, d), with a gradient
    y: Tensor  # (m, d), with a gradient; row i is close to x_i
    u: Tensor  # (n, d), rows of a second model
    v: Tensor  # (n, d), columns of the second model
    whole: Tensor  # (n, d), whole numbers, whose products are exact
    bias: Tensor  # (m,), with a gradient
    number: Tensor  # (n,), 0, 1, 2, ...

    @property
    def leaves(self) -> dict[str, Tensor]:
        """What has a gradient."""
        return {"x": self.x, "y": self.y, "the bias": self.bias}

    def exact(self) -> Inputs:
        """The same numbers in float64."""
        found = {field.name: getattr(self, field.name).detach() for field in dataclasses.fields(self)}
        wide = {name: value.double() if value.is_floating_point() else value for name, value in found.items()}
        for name in ("x", "y", "bias"):
            wide[name].requires_grad_()
        return Inputs(**wide)


def inputs(device: torch.device, dtype: torch.dtype, width: int, rows: int, cols: int) -> Inputs:
    """Random features, the same in every call."""
    draw = torch.Generator(device).manual_seed(0)

    def features(count: int) -> Tensor:
        low = torch.randn(count, RANK, device=device, generator=draw)
        return F.normalize(low @ torch.randn(RANK, width, device=device, generator=draw), dim=1)

    x, u, v, y = features(rows), features(rows), features(rows), features(cols)
    y[:rows] = F.normalize(y[:rows] + x, dim=1)
    return Inputs(
        x=x.to(dtype).requires_grad_(),
        y=y.to(dtype).requires_grad_(),
        u=u.to(dtype),
        v=v.to(dtype),
        whole=torch.randint(-2, 3, (rows, width), device=device, generator=draw).to(dtype),
        bias=torch.randn(cols, device=device, generator=draw).requires_grad_(),
        number=torch.arange(rows, device=device),
    )


Loss = Callable[[Inputs, tw.TileOptions], Tensor]


def head(i: Inputs, o: tw.TileOptions) -> Tensor:
    """Cross-entropy."""
    found = tw.linear_cross_entropy(i.x, i.y, i.number, logit_scale=SCALE, options=o)
    assert isinstance(found, Tensor)
    return found


def capped_head(i: Inputs, o: tw.TileOptions) -> Tensor:
    """Cross-entropy with a bias and a soft cap."""
    found = tw.linear_cross_entropy(
        i.x, i.y, i.number, linear_bias=i.bias, softcap=30.0, logit_scale=SCALE, z_loss=1e-4, options=o
    )
    assert isinstance(found, Tensor)
    return found


def smoothed_head(i: Inputs, o: tw.TileOptions) -> Tensor:
    """Cross-entropy with label smoothing."""
    found = tw.linear_cross_entropy(i.x, i.y, i.number, label_smoothing=0.1, logit_scale=SCALE, options=o)
    assert isinstance(found, Tensor)
    return found


def token_stats(i: Inputs, o: tw.TileOptions) -> Tensor:
    """Log-probabilities, entropies and picked classes."""
    pick = torch.stack([i.number, i.number.flip(0)], 1)
    found = tw.linear_token_stats(
        i.x, i.y, i.number, linear_bias=i.bias, softcap=30.0, logit_scale=SCALE, pick=pick, options=o
    )
    assert found.entropy is not None
    assert found.log_prob is not None
    assert found.picked is not None
    return (found.entropy - found.log_prob).mean() - found.picked.mean()


def guided(i: Inputs, o: tw.TileOptions) -> Tensor:
    """Negatives that a guide leaves out; its scores are exact, so rounding cannot change which ones."""
    return tw.info_nce(i.x, i.y, guide=tw.Guide(query=i.whole, key=i.whole.flip(1)), options=o)


def distillation(beta: float) -> Loss:
    """A divergence of two heads."""

    def loss(i: Inputs, o: tw.TileOptions) -> Tensor:
        return tw.linear_distillation_loss(
            i.x, i.y, i.u, i.v, beta=beta, logit_scale=SCALE, teacher_logit_scale=SCALE, options=o
        )

    return loss


BOTH: dict[str, Loss] = {  # in two passes, and in one
    "clip_loss": lambda i, o: tw.clip_loss(i.x, i.y, SCALE, options=o),
    "siglip_loss": lambda i, o: tw.siglip_loss(i.x, i.y, SCALE, -3.0, options=o),
    "info_nce": lambda i, o: tw.info_nce(i.x, i.y, options=o),
    "linear_cross_entropy": head,
    "linear_cross_entropy with a soft cap": capped_head,
}
TWO_PASS: dict[str, Loss] = {
    "linear_cross_entropy with label smoothing": smoothed_head,
    "info_nce with ids": lambda i, o: tw.info_nce(
        i.x, i.y, query_ids=i.number // 2, key_ids=i.number // 2, symmetric=True, options=o
    ),
    "nt_xent": lambda i, o: tw.nt_xent(torch.cat([i.x, i.y]), temperature=0.1, options=o),
    "supcon_loss": lambda i, o: tw.supcon_loss(i.x, i.number // 4, options=o),
    "linear_token_stats": token_stats,
    "info_nce with a guide": guided,
    "linear_distillation_loss, forward KL": distillation(0.0),
    "linear_distillation_loss, reverse KL": distillation(1.0),
    "linear_distillation_loss, Jensen-Shannon": distillation(0.5),
    "clip_distillation_loss": lambda i, o: tw.clip_distillation_loss(i.x, i.y, SCALE, i.u, i.v, SCALE, options=o),
}
INVARIANT: dict[str, Loss] = {
    "linear_cross_entropy, batch invariant": head,
    "linear_token_stats, batch invariant": token_stats,
}


def why_not_all(device: torch.device, item: int, row: object, widths: Sequence[int]) -> str | None:
    """Why some call cannot be computed with a row of sizes, or which numbers are wrong; None if all is well.

    Args:
        device: the card.
        item: bytes of a number.
        row: a row of the size table.
        widths: numbers of features to check.
    """
    sizes, module = registry.size_table(), registry.tuner()
    # Small batches have kernels of their own, without sizes to choose.
    with limits.changed(small=0, small_cpu=0), sizes.trying(device, item, row):
        for dtype in next(types for types in TYPES.values() if types[0].itemsize == item):
            for width in widths:
                module.forget_programs()  # they have other sizes
                try:
                    for check in checks(device, dtype, width):
                        check()
                    if device.type == "cuda":
                        torch.cuda.synchronize(device)
                except Exception as error:
                    return f"{type(error).__name__}: {error}"
                finally:
                    module.forget_programs()
    return None


def checks(
    device: torch.device,
    dtype: torch.dtype,
    width: int,
    rows: int = ROWS,
    filter_rows: int = FILTER_ROWS,
    filter_columns: int = FILTER_COLUMNS,
) -> Iterator[Callable[[], None]]:
    """One check for each kind of kernel. It raises `WrongNumbers`, or what a kernel raises that cannot be run."""
    given = inputs(device, dtype, width, rows, rows)
    named = functools.partial(tw.TileOptions, backend="triton", precision="highest")
    ways = (
        (named(gradients="backward"), BOTH | TWO_PASS),
        (named(gradients="forward"), BOTH),
        (named(batch_invariant=True), INVARIANT),
    )
    for options, losses in ways:
        for name, loss in losses.items():
            yield functools.partial(check_loss, name, loss, given, options)
    yield functools.partial(check_ranks, given)
    yield functools.partial(check_filter, device, dtype, width, filter_rows, filter_columns)
    if dtype == torch.bfloat16 and width >= HEAD_WIDTH:
        yield functools.partial(check_saved_columns, device, dtype, width)


def check_loss(name: str, loss: Loss, given: Inputs, options: tw.TileOptions, exact: Inputs | None = None) -> None:
    """Compare a loss and its gradients with those of the torch backend, by default in float64."""
    exact = exact or given.exact()
    got, got_grads = loss_and_gradients(loss, given, options)
    want, want_grads = loss_and_gradients(loss, exact, tw.TileOptions(backend="torch", precision="highest"))
    compare(name, "the loss", got, want, CLOSE_LOSS)
    for leaf, grad in want_grads.items():
        compare(name, f"the gradient of {leaf}", got_grads[leaf], grad, CLOSE[given.x.dtype])


def loss_and_gradients(loss: Loss, given: Inputs, options: tw.TileOptions) -> tuple[Tensor, dict[str, Tensor]]:
    """A loss, and the gradients of the inputs that it has."""
    for leaf in given.leaves.values():
        leaf.grad = None
    value = loss(given, options)
    value.backward()
    return value.detach(), {name: leaf.grad for name, leaf in given.leaves.items() if leaf.grad is not None}


def compare(name: str, what: str, got: Tensor, want: Tensor, close: float) -> None:
    """Raise `WrongNumbers` if the largest difference is more than the share ``close`` of the largest number."""
    error = float((got.to(want.dtype) - want).abs().amax() / want.abs().amax())
    if math.isnan(error) or error > close:
        raise WrongNumbers(f"{name}: {what} differs from the reference by {error:.1e} of its largest number")


def check_ranks(given: Inputs) -> None:
    """Ranks by places and by ids, equal to those of the torch backend: the scores are whole numbers."""
    items, ids = given.whole.flip(1), given.number % 7
    for mine, theirs in ((None, None), (ids, ids.flip(0))):
        got, want = (
            tw.retrieval_ranks_both(
                given.whole,
                items,
                query_ids=mine,
                gallery_ids=theirs,
                options=tw.TileOptions(backend=backend, precision="highest"),
            )
            for backend in ("triton", "torch")
        )
        for one, other in zip(got, want, strict=True):
            if not torch.equal(one, other):
                raise WrongNumbers(f"retrieval_ranks: {int((one != other).sum())} of {len(one)} ranks are wrong")


def check_filter(device: torch.device, dtype: torch.dtype, width: int, rows: int, cols: int) -> None:
    """The log-sum-exps of the filter, and the gradients if every eighth entry is kept and the others are 0."""
    filtered = registry.load_backend("triton").filtered
    assert filtered is not None
    spec = registry.tuner().FILTER
    options = tw.TileOptions(backend="triton", precision="highest", filter_tolerance=1e-2)
    given = inputs(device, dtype, width, rows, cols)
    a, b = given.x.detach(), given.y.detach()
    scale, shift = torch.tensor(SCALE, device=device), torch.zeros(rows, device=device)
    pair = Pair(a=a, b=b, scale=scale, row_key=given.number, row_shift=shift)
    stats, plan = filtered.forward(pair, spec, options)
    wide_a, wide_b = a.float(), b.float()
    with matmul_precision("highest"):
        x = SCALE * (wide_a @ wide_b.T)
    lse = x.logsumexp(1)
    assert stats.row_lse is not None
    compare("the filter", "the log-sum-exp", stats.row_lse, lse, CLOSE_LOSS)
    keep = torch.zeros(plan.mass.shape, dtype=torch.bool, device=device)  # (tiles, rows)
    keep.view(-1)[::8] = True
    mass = torch.where(keep, filter_plan.KEPT, 0.0).to(plan.mass)
    count = keep.sum(1, dtype=torch.int32)
    plan = dataclasses.replace(plan, mass=mass, kept=count, keep_all=torch.zeros_like(plan.keep_all))
    ones = torch.ones(rows, device=device)
    got = filtered.backward(pair, stats, plan, GradStats(row_lse=ones, row_pos=-ones), Needs(), spec, options)
    assert got is not None
    g = (x - lse[:, None]).exp()
    g[given.number, given.number] -= 1.0
    place = torch.empty(cols, dtype=torch.int64, device=device)
    place[plan.order.long()] = torch.arange(cols, device=device)
    g *= keep[place // filter_plan.tile_width(cols)].T
    with matmul_precision("highest"):
        wanted = {"x": (got.a, SCALE * g @ wide_b), "y": (got.b, SCALE * g.T @ wide_a)}
    for leaf, (grad, want) in wanted.items():
        assert grad is not None
        compare("the filter", f"the gradient of {leaf}", grad, want, CLOSE[dtype])


def check_saved_columns(device: torch.device, dtype: torch.dtype, width: int) -> None:
    """A head so large that forward saves columns for backward. It is compared with the torch backend in float32."""
    given = inputs(device, dtype, width, HEAD_ROWS, head_classes(width))
    leaves = {name: getattr(given, name).detach().float().requires_grad_() for name in ("x", "y")}
    options = tw.TileOptions(backend="triton", gradients="backward")
    check_loss("a large linear_cross_entropy", head, given, options, dataclasses.replace(given, **leaves))


def head_classes(width: int) -> int:
    """Classes of a head whose columns are saved."""
    return max(HEAD_CLASSES, HEAD_PRODUCTS // (HEAD_ROWS * width))
