"""Softmax loss of cosines with a margin: ArcFace, CosFace and SphereFace, without storing the logits.

Axes: n rows, V classes, d features.
"""

from __future__ import annotations

import math
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from tilewise import _check
from tilewise.errors import RangeError
from tilewise.kernels.spec import PairSpec
from tilewise.losses.cross_entropy import _check_target, check_head, check_ignore_index
from tilewise.losses.entry import entry
from tilewise.losses.module import settings_of
from tilewise.losses.sharded import refused
from tilewise.ops.autograd import pair_stats
from tilewise.ops.call import Function, PairKeys, call_settings
from tilewise.ops.distributed.collectives import shard_of_columns, sum_over_ranks
from tilewise.ops.paired_scores import target_cosines
from tilewise.ops.small import Calls
from tilewise.options import TileOptions, check_flag

SPEC = PairSpec(row_lse=True, row_picked=True, skip_picked=True, drop_rows=True)
SHARDED = PairSpec(row_lse=True, row_picked=True, skip_picked=True, drop_rows=True, same_rows=True)
SHORTEST = 1e-12  # a shorter vector is divided by this, as in torch.nn.functional.normalize


@entry(
    refused(
        "Redistribute input and target to [Replicate()] and linear_weight to [Shard(0)], and pass .to_local() of each "
        "and group=mesh.get_group()"
    )
)
def margin_softmax_loss(
    calls: Calls,
    input: Tensor,
    linear_weight: Tensor,
    target: Tensor,
    *,
    m1: float = 1.0,
    m2: float = 0.5,
    m3: float = 0.0,
    logit_scale: float | Tensor = 64.0,
    sample_rate: float = 1.0,
    sparse_grad: bool = False,
    reduction: _check.Reduction = "mean",
    ignore_index: int | None = -100,
    group: torch.distributed.ProcessGroup | None = None,
    options: TileOptions | None = None,
) -> Tensor:
    """Cross entropy of cosines, with a margin that lowers the score of the target: ArcFace, CosFace, SphereFace.

    With ``cos = normalize(input) @ normalize(linear_weight).T`` and theta the angle between a row and its target, the
    target's cosine is replaced before `torch.nn.functional.cross_entropy`::

        cos[i, target[i]] = torch.cos(m1 * theta[i] + m2) - m3
        F.cross_entropy(logit_scale * cos, target, ignore_index=..., reduction=...)

    ArcFace has m2 = 0.5, CosFace m2 = 0 and m3 = 0.35, SphereFace m1 = 1.35 and m2 = 0. Both sides are normalized here.

    Beyond ``m1 * theta + m2 = pi`` the cosine would rise again. There the loss goes on as in the original codes: with
    ``m1 = 1`` as ``cos(theta) - m2 * sin(m2) - m3`` (ArcFace), otherwise as ``(-1)**k * cos(m1 * theta + m2) - 2 * k -
    m3`` with ``k = floor((m1 * theta + m2) / pi)`` (SphereFace).

    At an angle of 0 or pi the derivative by the cosine is infinite. Angles that are closer to these than the square
    root of the machine epsilon of the features' type use the derivative at that distance. So gradients are finite, and
    go to 0 with the angle. The angle itself is computed in float64.

    Args:
        input: (..., d), embeddings.
        linear_weight: (V, d), one row for each class.
        target: (...) integers in [0, V), or ``ignore_index`` (None is -100).
        m1, m2, m3: the margins: a factor of the angle, an angle in radians, and a difference of cosines.
        logit_scale: multiplies the cosines; a tensor that requires grad gets its exact gradient.
        sample_rate: the part of the classes that are scored, in (0, 1]: all targets of the batch, and random others.
            The loss is then that of these classes alone (Partial FC), drawn with PyTorch's generator.
        sparse_grad: with a ``sample_rate`` below 1, the gradient of ``linear_weight`` is a sparse tensor with the rows
            of the sampled classes, for torch.optim.SGD and torch.optim.SparseAdam.
        reduction: "none" returns the shape of ``target``.
        group: a process group over whose ranks the classes are sharded, in rank order. Every rank has all rows.
        options: how the loss is computed; see `TileOptions`. No option changes its value beyond rounding.

    Memory: the inputs, their normalized copies, their gradients, O(n) statistics, and a workspace.

    >>> x, labels = torch.eye(3), torch.arange(3)
    >>> round(margin_softmax_loss(x, x, labels, logit_scale=4.0).item(), 4)
    0.0581
    >>> round(margin_softmax_loss(x, x, labels, m2=0.0, m3=0.35, logit_scale=4.0).item(), 4)
    0.1385
    """
    _check.check_reduction(reduction)
    options, name = _check.check_options(options), _check.group_name(group)
    margins, rate = _check_margins(m1, m2, m3), _check_sample_rate(sample_rate)
    check_flag("sparse_grad", sparse_grad)
    ignore_index = check_ignore_index(ignore_index)
    a, c, _, _, shape = check_head(input, linear_weight, None, None, 0)
    scale = _check.check_scalar("logit_scale", logit_scale, a, positive=True, rows="use reduction='none'")
    settings = {"logit_scale": logit_scale, "sample_rate": sample_rate, "ignore_index": ignore_index}
    must_match = call_settings(name, reduction=reduction, m1=m1, m2=m2, m3=m3, **settings)
    start, classes = shard_of_columns(c, must_match, name)
    y, _ = _check_target(target, input, 0, ignore_index, classes)
    valid = y != ignore_index
    inside = valid & (y >= 0) & (y < classes)
    key = torch.where(inside, y, -1)
    own = key - start
    if rate < 1.0:
        c, own, start = _sample(c, own, rate, sparse_grad, name)
        key = sum_over_ranks(torch.where(own >= 0, own + start + 1, 0), name) - 1
    cosine = sum_over_ranks(target_cosines(a, c, own), name)
    stats = pair_stats(
        _UnitRows.apply(a),
        _UnitRows.apply(c),
        scale,
        keys=PairKeys(row_key=key, pick=key[:, None]),
        spec=SHARDED if name else SPEC,
        options=options,
        group_name=name,
        calls=calls,
    )
    others = stats.row_lse.double()
    # The engine's cosine carries the gradient. The value of the target's score is that of the exact angle.
    rough = stats.row_picked[:, 0].double() / scale.double()
    value, slope = _with_margin(cosine, margins, torch.finfo(a.dtype).eps ** 0.5)
    score = scale.double() * (value + slope * (rough - rough.detach()))
    loss_n = torch.logaddexp(others - score, torch.zeros_like(score))
    loss_n = torch.where(valid, torch.where(inside, loss_n, torch.nan), 0.0).to(stats.row_lse.dtype)
    if reduction == "none":
        return loss_n.reshape(shape)
    return loss_n.sum() / valid.sum() if reduction == "mean" else loss_n.sum()


def _with_margin(cosine: Tensor, margins: tuple[float, float, float], closest: float) -> tuple[Tensor, Tensor]:
    """The target's cosine after the margin, and its derivative by the cosine: (n,) float64 each, without gradient."""
    theta = torch.atan2(((1.0 - cosine) * (1.0 + cosine)).clamp(min=0.0).sqrt(), cosine)
    value, _ = _margin_at(theta, margins)
    _, slope = _margin_at(theta.clamp(closest, math.pi - closest), margins)
    return value, slope


def _margin_at(theta: Tensor, margins: tuple[float, float, float]) -> tuple[Tensor, Tensor]:
    """Value and derivative at angles: (n,) each."""
    m1, m2, m3 = margins
    phi = m1 * theta + m2
    turns = (phi / math.pi).floor()
    sign = 1.0 - 2.0 * turns.remainder(2.0)
    value, slope = sign * phi.cos() - 2.0 * turns, sign * m1 * phi.sin() / theta.sin()
    if m1 == 1.0:
        beyond = phi > math.pi
        value = torch.where(beyond, theta.cos() - m2 * math.sin(m2), value)
        slope = torch.where(beyond, 1.0, slope)
    return value - m3, slope


def _sample(c: Tensor, own: Tensor, rate: float, sparse: bool, group_name: str) -> tuple[Tensor, Tensor, Any]:
    """The rows of sampled classes, (k, d), positions of the targets among them, or -1: (n,), and where they start."""
    classes = c.shape[0]
    here = (own >= 0) & (own < classes)
    size = min(classes, max(math.ceil(rate * classes), own.shape[0]))
    # Targets come first. One entry more takes the targets of other ranks and the rows that do not count.
    order = torch.rand(classes + 1, device=c.device).index_fill(0, torch.where(here, own, classes), 2.0)
    index = order[:classes].topk(size, sorted=False).indices.sort().values
    sampled = F.embedding(index, c, sparse=sparse)
    start, _ = shard_of_columns(sampled, "", group_name)
    return sampled, torch.where(here, torch.searchsorted(index, own), -1), start


class _UnitRows(Function):
    """Rows of length 1: (n, d). It allocates one tensor of this size in forward, and two in backward."""

    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        length = torch.linalg.vector_norm(x, dim=1, keepdim=True, dtype=torch.promote_types(x.dtype, torch.float32))
        length = length.clamp(min=SHORTEST)
        unit = torch.div(x, length, out=x.new_empty(x.shape))
        ctx.save_for_backward(unit, length)
        return unit

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> Tensor:
        (grad,), (unit, length) = grads, ctx.saved_tensors
        along = (grad * unit).sum(1, keepdim=True, dtype=length.dtype)
        return torch.addcmul(grad, unit, along.to(grad.dtype), value=-1.0).div_(length)


def _check_margins(m1: float, m2: float, m3: float) -> tuple[float, float, float]:
    first, second, third = (_check.check_number(f"m{i}", m) for i, m in enumerate((m1, m2, m3), 1))
    if first <= 0.0 or second < 0.0 or third < 0.0:
        raise RangeError(
            f"m1 is above 0, m2 and m3 are at least 0, got {m1}, {m2} and {m3}. Without a margin they are 1, 0 and 0"
        )
    return first, second, third


def _check_sample_rate(rate: float) -> float:
    number = _check.check_number("sample_rate", rate)
    if not 0.0 < number <= 1.0:
        raise RangeError(f"sample_rate is above 0 and at most 1, got {rate}. Pass 1 for all classes")
    return number


def _check_size(name: str, size: int) -> int:
    number = _check.check_index(name, size, "Pass a whole number")
    if number < 1:
        raise RangeError(f"{name} is at least 1, got {size}. Pass one for each class and for each feature")
    return number


class MarginSoftmaxLoss(nn.Module):
    """`margin_softmax_loss` with a ``weight`` of its own, (num_classes, in_features).

    Over a group, each rank has the weight of its shard of the classes. It belongs to this rank alone, so do not wrap
    this Module in DistributedDataParallel, and save it on each rank.

    Args:
        in_features: d, the width of the embeddings.
        num_classes: V, the classes of all ranks.
        m1, m2, m3, logit_scale, sample_rate, sparse_grad, reduction, ignore_index, group, options: as in
            `margin_softmax_loss`.

    >>> module = MarginSoftmaxLoss(512, 1000)
    >>> module.weight.shape, module(torch.randn(8, 512), torch.arange(8)).dim()
    (torch.Size([1000, 512]), 0)
    """

    def __init__(
        self,
        in_features: int,
        num_classes: int,
        *,
        m1: float = 1.0,
        m2: float = 0.5,
        m3: float = 0.0,
        logit_scale: float | Tensor = 64.0,
        sample_rate: float = 1.0,
        sparse_grad: bool = False,
        reduction: _check.Reduction = "mean",
        ignore_index: int | None = -100,
        group: torch.distributed.ProcessGroup | None = None,
        options: TileOptions | None = None,
    ) -> None:
        super().__init__()
        self.settings = settings_of(locals(), "in_features", "num_classes", "logit_scale")
        self.logit_scale = logit_scale  # attribute assignment registers an nn.Parameter, which is then learned
        _check.group_name(group)
        rank, world = (0, 1) if group is None else (group.rank(), group.size())
        classes, width = (_check_size("num_classes", num_classes), _check_size("in_features", in_features))
        classes = classes * (rank + 1) // world - classes * rank // world
        self.weight = nn.Parameter(torch.empty(classes, width))
        self.reset_parameters()

    def reset_parameters(self) -> None:
        """Random directions. With the same seed on all ranks, the shards still differ."""
        group = self.settings["group"]
        draw = torch.Generator(self.weight.device) if self.weight.device.type != "meta" else None
        if draw is not None:
            draw.manual_seed(int(torch.randint(2**62, ())) + (0 if group is None else group.rank()))
        nn.init.normal_(self.weight, std=0.01, generator=draw)

    def forward(self, input: Tensor, target: Tensor) -> Tensor:
        """The loss of embeddings (..., in_features) with targets (...); see `margin_softmax_loss`."""
        return margin_softmax_loss(input, self.weight, target, logit_scale=self.logit_scale, **self.settings)
