"""A guide for contrastive losses: embeddings of another model. They mark negatives that are probably positives."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Literal

import torch
from torch import Tensor

from tilewise import _check
from tilewise.errors import ConfigError, RangeError, ShapeError
from tilewise.kernels.spec import PairSpec, stat_dtype
from tilewise.ops.autograd import pair_stats
from tilewise.ops.call import PairKeys
from tilewise.ops.paired_scores import own_scores
from tilewise.options import TileOptions, check_choice

STRATEGIES = ("absolute", "relative")
ROUNDINGS = 16  # largest difference of two sums of the same products, in units of the last place


@dataclass(frozen=True, kw_only=True)
class Guide:
    """Embeddings of a guide model, for `info_nce`. They get no gradient.

    A negative is left out if its guide score is above a limit of its row::

        score = query @ key.T
        limit = score.diagonal() - margin                             "absolute"
        limit = score.diagonal() - margin * abs(score.diagonal())     "relative"

    Args:
        query, key: (n, e) each, of the queries and of their keys, in the type of the trained embeddings. For cosine
            similarities, normalize them first.
        negative_keys: of the negatives that `info_nce` gets, (M, e) or (n, K, e).
        margin: see above. A larger margin leaves out more. With 0, a negative is left out if the guide finds it closer
            than the query's own key. A duplicate of that key stays.
        margin_strategy: "absolute" or "relative".
    """

    query: Tensor
    key: Tensor
    negative_keys: Tensor | None = None
    margin: float = 0.0
    margin_strategy: Literal["absolute", "relative"] = "absolute"

    def __post_init__(self) -> None:
        check_choice("margin_strategy", self.margin_strategy, STRATEGIES)
        _check.check_number("margin", self.margin)
        if self.margin_strategy == "relative" and not 0.0 <= self.margin <= 1.0:
            raise RangeError(f"a relative margin is in [0, 1], got {self.margin}. It is a share of the score")


@dataclass(frozen=True, kw_only=True)
class CheckedGuide:
    """A `Guide` whose tensors fit the call, detached."""

    query: Tensor
    key: Tensor
    negatives: Tensor | None
    limit: Tensor  # (n,), in the type of the statistics
    one: Tensor  # the scale of its scores

    def keys(self, *, swap: bool = False) -> dict[str, Any]:
        """The fields of `PairKeys` for queries against keys; ``swap``: for keys against queries."""
        rows, cols = (self.key, self.query) if swap else (self.query, self.key)
        return {"guide_a": rows, "guide_b": cols, "guide_scale": self.one, "row_limit": self.limit}

    def negative_keys(self) -> dict[str, Any]:
        """The fields of `PairKeys` for queries against shared negatives."""
        return self.keys() | {"guide_b": self.negatives}

    def excludes_own(self, precision: str) -> Tensor:
        """Which of each query's own negatives are left out: (n, K) bool."""
        assert self.negatives is not None
        return own_scores(self.query, self.negatives, None, precision) > self.limit[:, None]


def check_guide(guide: Guide | None, a: Tensor, negatives: Tensor | None) -> CheckedGuide | None:
    """Check a guide against the queries ``a``, (n, d), and their negatives."""
    if guide is None:
        return None
    if not isinstance(guide, Guide):
        raise ConfigError(
            f"guide is a tilewise.Guide, got {type(guide).__name__}. Use tilewise.Guide(query=..., key=...)"
        )
    query = _check.check_features("guide.query", guide.query).detach()
    key = _check.check_features("guide.key", guide.key).detach()
    _check.check_same_rows(("query", "guide.query"), a, query)
    _check.check_same_rows(("query", "guide.key"), a, key)
    _check.check_together(("guide.query", "guide.key"), query, key)
    _check.check_device_and_type(("guide.query", "query"), query, a, "all embeddings of the guide")
    others = None
    if (negatives is None) != (guide.negative_keys is None):
        have, lack = ("guide", "loss") if negatives is None else ("loss", "guide")
        raise ConfigError(f"the {have} has negative_keys and the {lack} has none. Pass both, row by row, or neither")
    if negatives is not None and guide.negative_keys is not None:
        others = _check.check_features("guide.negative_keys", guide.negative_keys, negatives.dim()).detach()
        if others.shape[:-1] != negatives.shape[:-1]:
            raise ShapeError(
                f"guide.negative_keys has one embedding for each negative, {tuple(negatives.shape[:-1])}, got "
                f"{tuple(others.shape[:-1])}. Encode the same negatives with both models"
            )
        _check.check_together(("guide.query", "guide.negative_keys"), query, others)
    one = torch.ones((), dtype=stat_dtype(a.dtype), device=a.device)
    limit = guide_limit(query, key, guide.margin, guide.margin_strategy)
    return CheckedGuide(query=query, key=key, negatives=others, limit=limit, one=one)


def guide_limit(query: Tensor, key: Tensor, margin: float, margin_strategy: str) -> Tensor:
    """The largest guide score of a negative that stays, per row: (n,), in the type of the statistics. See `Guide`.

    A little larger than defined, so that a duplicate of the positive stays, however its score is rounded.
    """
    stat = stat_dtype(query.dtype)
    products = query.to(stat) * key.to(stat)
    own = products.sum(1)
    slack = ROUNDINGS * torch.finfo(stat).eps * products.abs().sum(1)
    return own + slack - (margin * own.abs() if margin_strategy == "relative" else margin)


def guided_logsumexp(
    rows: Tensor,
    columns: Tensor,
    scale: Tensor,
    guide_rows: Tensor,
    guide_columns: Tensor,
    limit: Tensor,
    *,
    row_shift: Tensor | None = None,
    options: TileOptions,
    group_name: str = "",
) -> Tensor:
    """``logsumexp(scale * rows @ columns.T)`` over the columns whose guide score is at most the limit of the row: (n,).

    Without a positive. -inf for a row that has no columns left. With ``row_shift``, (n,), relative to it.
    """
    keys = PairKeys(
        row_shift=row_shift,
        guide_a=guide_rows.detach(),
        guide_b=guide_columns.detach(),
        guide_scale=torch.ones_like(scale.detach(), dtype=stat_dtype(rows.dtype)),
        row_limit=limit,
    )
    spec = PairSpec(row_lse=True, guide="mask")
    stats = pair_stats(rows, columns, scale, keys=keys, spec=spec, options=options, group_name=group_name)
    return stats.row_lse
