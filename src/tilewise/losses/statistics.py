"""Statistics of scores that are never stored, for a loss of one's own.

Axes: n rows, m columns, d features, K columns that each row picks.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Literal

import torch
from torch import Tensor

from tilewise import _check
from tilewise.errors import ConfigError, DtypeError, ShapeError
from tilewise.kernels.spec import PairSpec, Positive, stat_dtype
from tilewise.losses.entry import entry
from tilewise.losses.logsumexp import check_bias, check_softcap
from tilewise.losses.sharded import refused
from tilewise.ops import autograd
from tilewise.ops.call import PairKeys, call_settings
from tilewise.ops.distributed.collectives import shard_of_columns
from tilewise.ops.small import Calls
from tilewise.options import TileOptions, check_choice, check_flag

# The name of each field of `PairStats`, and that of the statistic.
FIELDS = {
    "logsumexp": "row_lse",
    "col_logsumexp": "col_lse",
    "positive_sum": "row_pos",
    "num_positives": "num_positives",
    "entropy": "row_entropy",
    "log_sum_sq_prob": "row_sum_sq",
    "max": "row_top",
    "argmax": "row_top_col",
    "picked": "row_picked",
}
WANT = ("logsumexp", "col_logsumexp", "entropy", "log_sum_sq_prob", "max")
OF_SOFTMAX = {"entropy", "log_sum_sq_prob", "max"}  # they need the maximum of each row of a tile


@dataclass(frozen=True, kw_only=True)
class PairStats:
    """Statistics of the rows of a score matrix, (n,) each; None for one that was not requested.

    Float32, or float64 for float64 features. All have exact gradients, except ``num_positives``, ``max`` and
    ``argmax``, which have none.
    """

    logsumexp: Tensor | None = None  # over the columns that are not excluded; -inf if there are none
    col_logsumexp: Tensor | None = None  # (m,), of each column over the rows; a shift of rows does not change it
    positive_sum: Tensor | None = None  # sum of the scores of the positives
    num_positives: Tensor | None = None
    entropy: Tensor | None = None  # of the softmax, in nats
    log_sum_sq_prob: Tensor | None = None  # log of the sum of squared probabilities
    max: Tensor | None = None  # the largest score
    argmax: Tensor | None = None  # int64, its column; the lowest of equal ones
    picked: Tensor | None = None  # (n, K), the scores of the columns in ``pick``


@entry(refused("Redistribute all of them to [Shard(0)], and pass .to_local() of each and group=mesh.get_group()"))
def pair_stats(
    calls: Calls,
    a: Tensor,
    b: Tensor | None = None,
    *,
    want: Sequence[str] = ("logsumexp",),
    row_labels: Tensor | None = None,
    col_labels: Tensor | None = None,
    target: Tensor | None = None,
    row_ids: Tensor | None = None,
    col_ids: Tensor | None = None,
    exclude_self: bool = False,
    pick: Tensor | None = None,
    exclude_picked: bool = False,
    scale: float | Tensor = 1.0,
    bias: Tensor | None = None,
    softcap: float | None = None,
    shift: Tensor | None = None,
    shard: Literal["rows", "columns"] = "rows",
    group: torch.distributed.ProcessGroup | None = None,
    options: TileOptions | None = None,
) -> PairStats:
    """Statistics of the scores of all pairs, for a loss of one's own. The scores are never stored.

    With scores ``x = scale * a @ b.T + bias``, capped as ``softcap * tanh(x / softcap)``, minus ``shift[:, None]``, and
    -inf where a pair is excluded::

        logsumexp = x.logsumexp(1);  col_logsumexp = x.logsumexp(0);  picked = x.gather(1, pick)
        positive_sum = (x * positive).sum(1);  num_positives = positive.sum(1)
        p = x.softmax(1);  entropy = -(p * p.log()).sum(1);  log_sum_sq_prob = p.square().sum(1).log()
        max, argmax = x.max(1)

    Args:
        a: (n, d), the rows.
        b: (m, d), the columns; None for the rows themselves, at half of the cost where the scores are symmetric.
        want: among logsumexp, col_logsumexp, entropy, log_sum_sq_prob and max (with argmax).
        row_labels, col_labels: integers, (n,) and (m,). A pair of equal labels is positive.
        target: (n,) integers, the only positive column of each row, instead of labels; negative for none.
        row_ids, col_ids: integers, (n,) and (m,). A pair of equal ids is excluded, unless it is positive.
        exclude_self: exclude the pair of row i and column i, which is then never positive.
        pick: (n, K) integers, columns whose scores are returned as ``picked``; negative for none, whose score is 0.
        exclude_picked: leave the picked columns out of the log-sum-exp. No column may be picked twice in a row.
        scale: a tensor that requires grad gets its exact gradient.
        bias: (m,).
        softcap: None or 0 is no cap.
        shift: (n,), a number near the score that is compared with the log-sum-exp, without gradient. It keeps the
            digits of their difference: see docs/concepts/numerics.md.
        shard: what a rank of the group has: "rows" of its own and columns of its own, or all rows and "columns" of its
            own. Indices of columns are those of all ranks, in rank order.
        group: a process group. There is no factor for DDP: see docs/concepts/ring.md.
        options: how the statistics are computed; see `TileOptions`. No option changes them beyond rounding.

    Memory: the features, their gradients, O(n + m + n K) statistics, and a workspace.

    >>> stats = pair_stats(torch.eye(3), row_labels=torch.tensor([0, 0, 1]), exclude_self=True)
    >>> stats.logsumexp.exp(), stats.num_positives
    (tensor([2., 2., 2.]), tensor([1., 1., 0.]))
    """
    options, name = _check.check_options(options), _check.group_name(group)
    rows = _check.check_features("a", a)
    columns = rows if b is None else _check.check_features("b", b)
    _check.check_together(("a", "b"), rows, columns)
    factor = _check.check_scalar("scale", scale, rows, rows="multiply the rows of a by it")
    bias, cap = check_bias("bias", bias, columns), check_softcap(softcap)
    check_choice("shard", shard, ("rows", "columns"))
    check_flag("exclude_self", exclude_self)
    check_flag("exclude_picked", exclude_picked)
    names = _check_want(want)
    labels = _check_two(("row_labels", "col_labels"), row_labels, col_labels, rows, columns, same=b is None)
    ids = _check_two(("row_ids", "col_ids"), row_ids, col_ids, rows, columns, same=b is None)
    key = None if target is None else _check.check_ids("target", target, (rows.shape[0],), rows)
    picks = None if pick is None else check_pick("pick", pick, rows)
    _check_combination(
        names, picks, exclude_picked, exclude_self, ids[0], labels[0], key, sharded=shard == "columns" and bool(name)
    )
    symmetric = b is None and bias is None and names == {"logsumexp"} and picks is key is None
    positive: Positive = "one" if key is not None else "none" if labels[0] is None else "many"
    order = None
    if picks is not None and exclude_picked:
        picks, order = picks.sort(1)
    spec = PairSpec(
        row_lse=True,
        col_lse="col_logsumexp" in names,
        row_entropy="entropy" in names,
        row_sum_sq="log_sum_sq_prob" in names,
        row_top="max" in names,
        row_picked=picks is not None,
        skip_picked=exclude_picked,
        positive=positive,
        mask_self=exclude_self,
        symmetric=symmetric,
        softcap=cap,
        same_rows=shard == "columns" and bool(name),
    )
    settings = {"scale": scale, "pick": None if picks is None else picks.shape[1], "shift": shift is not None}
    must_match = call_settings(name, **settings)
    if spec.same_rows:
        shard_of_columns(columns, must_match, name)
    found = autograd.pair_stats(
        rows,
        None if symmetric else columns,
        factor,
        bias,
        keys=PairKeys(
            row_key=labels[0] if key is None else key,
            col_key=labels[1],
            row_skip=ids[0],
            col_skip=ids[1],
            row_shift=_check_shift(shift, rows),
            pick=picks,
        ),
        spec=spec,
        options=options,
        group_name=name,
        must_match=must_match,
        calls=calls,
    )
    stats = {field: getattr(found, statistic) for field, statistic in FIELDS.items()}
    if order is not None:
        stats["picked"] = stats["picked"].gather(1, order.argsort(1))
    return PairStats(**stats)


def _check_want(want: Sequence[str]) -> set[str]:
    known = ", ".join(WANT)
    if not isinstance(want, Iterable) or isinstance(want, Tensor):
        raise DtypeError(f"want is a sequence of names among {known}, got {want!r:.60}. Pass a tuple of names")
    names = (want,) if isinstance(want, str) else tuple(want)
    for field in names:
        check_choice("want", field, WANT)
    return {"logsumexp", *names}


def _check_two(
    names: tuple[str, str], one: Tensor | None, other: Tensor | None, a: Tensor, b: Tensor, *, same: bool
) -> tuple[Tensor | None, Tensor | None]:
    """Check integers of the rows and of the columns; ``same``: those of the rows also serve the columns."""
    if other is None and same:
        other = one
    if (one is None) != (other is None):
        missing, given = names if one is None else names[::-1]
        raise ConfigError(f"{names[0]} and {names[1]} belong together, got {given} alone. Pass {missing} too")
    if one is None or other is None:
        return None, None
    return _check.check_ids(names[0], one, (a.shape[0],), a), _check.check_ids(names[1], other, (b.shape[0],), b)


def check_pick(name: str, pick: Tensor, a: Tensor) -> Tensor:
    """Check K columns of each row. Returns them as int64."""
    _check.check_tensor(name, pick, "a tensor of columns")
    _check.check_integers(name, pick)
    if pick.dim() != 2 or pick.shape[0] != a.shape[0] or pick.shape[1] == 0:
        raise ShapeError(
            f"{name} has K columns for each row, ({a.shape[0]}, K), got {tuple(pick.shape)}. For one, use [:, None]"
        )
    _check.check_device((name, "the features"), pick, a)
    return pick.long()


def _check_shift(shift: Tensor | None, a: Tensor) -> Tensor | None:
    if shift is None:
        return None
    _check.check_floating("shift", shift, 1)
    _check.check_device(("shift", "the features"), shift, a)
    if shift.shape != a.shape[:1]:
        raise ShapeError(
            f"shift has one number for each row, ({a.shape[0]},), got {tuple(shift.shape)}. "
            f"{_check.reshape_advice(shift, a.shape[0])}"
        )
    _check.check_constant("shift", shift)
    return shift.to(stat_dtype(a.dtype))


def _check_combination(
    names: set[str],
    pick: Tensor | None,
    exclude_picked: bool,
    exclude_self: bool,
    ids: Tensor | None,
    labels: Tensor | None,
    target: Tensor | None,
    *,
    sharded: bool,
) -> None:
    """Refuse what one pass over the tiles does not compute together."""
    columns, softmax, picks = "col_logsumexp" in names, bool(names & OF_SOFTMAX), pick is not None
    conflicts = {
        ("row_labels", "target"): labels is not None and target is not None,
        ("col_logsumexp", "entropy, log_sum_sq_prob or max"): columns and softmax,
        ("col_logsumexp", "pick"): columns and picks,
        ("col_logsumexp", "shard='columns'"): columns and sharded,
        ("exclude_self", "pick"): exclude_self and picks,
        ("exclude_picked", "entropy, log_sum_sq_prob or max"): exclude_picked and softmax,
        ("exclude_picked", "row_ids, row_labels or target"): exclude_picked
        and any(key is not None for key in (ids, labels, target)),
    }
    for (one, other), wrong in conflicts.items():
        if wrong:
            raise ConfigError(f"one call computes {one} or {other}, got both. Call pair_stats for each of them")
    if exclude_picked and not picks:
        raise ConfigError("exclude_picked=True leaves out the columns in pick, got None. Pass pick, (n, K)")
