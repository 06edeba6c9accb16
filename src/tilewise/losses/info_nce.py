"""InfoNCE with in-batch negatives, shared negatives, and negatives of each query."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import torch
from torch import Tensor

from tilewise import _check
from tilewise.errors import ConfigError
from tilewise.kernels.spec import PairSpec, stat_dtype
from tilewise.losses.entry import entry
from tilewise.losses.guide import CheckedGuide, Guide, check_guide
from tilewise.losses.hardness import HardnessMode, check_hardness, hard_logsumexp
from tilewise.losses.logsumexp import joined_logsumexp
from tilewise.losses.module import LossModule
from tilewise.losses.negatives import check_log_q, check_negative_ids, check_negatives
from tilewise.losses.per_token import divide_rows
from tilewise.losses.sharded import Pairs
from tilewise.ops.autograd import pair_loss, pair_stats
from tilewise.ops.call import NO_KEYS, PairKeys, call_settings
from tilewise.ops.distributed.collectives import shard_of_columns
from tilewise.ops.paired_scores import own_scores, positive_shift
from tilewise.ops.reduce import reduce_rows, row_weights
from tilewise.ops.small import Calls
from tilewise.options import DEFAULT_OPTIONS, TileOptions, check_flag

NAMES = ("query", "positive_key")
SOFTMAX = PairSpec(row_lse=True, positive="one")
BOTH_DIRECTIONS, GUIDED = replace(SOFTMAX, col_lse=True), replace(SOFTMAX, guide="mask")
# All keys but the query's own
OTHERS = {spec: replace(spec, positive="none", mask_self=True) for spec in (SOFTMAX, BOTH_DIRECTIONS, GUIDED)}
SHARDED = Pairs((*NAMES, "negative_keys", "query_ids", "key_ids", "negative_mask", "log_q"), scalars=("temperature",))


@entry(SHARDED)
def info_nce(
    calls: Calls,
    query: Tensor,
    positive_key: Tensor,
    negative_keys: Tensor | None = None,
    *,
    temperature: float | Tensor = 0.07,
    in_batch: bool = True,
    symmetric: bool = False,
    decoupled: bool = False,
    query_ids: Tensor | None = None,
    key_ids: Tensor | None = None,
    negative_mask: Tensor | None = None,
    log_q: Tensor | None = None,
    guide: Guide | None = None,
    hardness: float = 0.0,
    hardness_mode: HardnessMode = "all_negatives",
    reduction: _check.Reduction = "mean",
    group: torch.distributed.ProcessGroup | None = None,
    options: TileOptions | None = None,
) -> Tensor:
    """Cross entropy of each query against its own key, the other keys and the negatives. Its own key is the target.

    With shared negatives this equals, without building the logits::

        logits = cat([query @ positive_key.T, query @ negative_keys.T], 1) / temperature
        F.cross_entropy(logits, arange(n))

    Args:
        query, positive_key: (n, d) each; key i is the positive of query i. They are not normalized; normalize them
            first.
        negative_keys: (M, d), shared by all queries, or (n, K, d), K negatives for each query.
        temperature: divides the scores: a number, or (n,), one for each query, not with ``hardness``. A tensor that
            requires grad gets its exact gradient.
        in_batch: whether the keys of the other queries are negatives too. If False, a query is scored only against
            its own key and the negatives.
        symmetric: also score each key against all queries, and average the two directions. The direction from key to
            query does not use ``negative_keys``.
        decoupled: leave the query's own key out of the sum over the keys (decoupled contrastive loss, DCL). The loss is
            then the log-sum-exp over the negatives minus the own key's score, and may be negative. It is computed
            without the own key, not by subtracting it, so it is exact late in training too. A query without negatives
            has a loss of 0.
        query_ids, key_ids: integers, such as document ids. A query is not scored against a key of equal id, except
            its own: such a key would be a false negative. ``key_ids`` is (n,), or (n + M,) with the ids of shared
            negatives at the end. If one of the two is None, the other is used for both. Without ``key_ids`` of length
            n + M, ids exclude no shared negatives. Negatives of each query are never excluded by id.
        negative_mask: bool, (M,) or (n, K): True for a negative, False for padding. Values of padding, even NaN,
            change neither the loss nor its gradient.
        log_q: the logarithm of the probability with which each key is in a batch, (n,), or (n + M,) with those of
            shared negatives at the end. It is subtracted from their logits (log Q correction of a sampled softmax), the
            own key's included. Negatives of each query are not corrected.
        guide: embeddings of another model for the same texts. A negative whose guide score is above that of the query's
            own key, less a margin, is left out: it is probably a false negative. See `Guide`.
        hardness: raises the logit of a negative by ``hardness`` times its inner product with the query, without a
            gradient of its own: close negatives count more. 0 for none.
        hardness_mode: which negatives it raises: "all_negatives", "in_batch_negatives" (keys of other queries) or
            "hard_negatives" (``negative_keys``). The direction from key to query stays as it is.
        reduction: "none" returns (n,).
        group: a process group over whose ranks queries, keys and shared negatives are sharded. A "mean" or "sum" is
            scaled for DDP, which averages gradients over the ranks; see docs/concepts/ring.md.
        options: how the loss is computed; see `TileOptions`. No option changes its value beyond rounding.

    Memory: the features, their gradients, O(n + M + n K) statistics, and a workspace.

    >>> x = torch.eye(4)
    >>> round(info_nce(x, x, temperature=1.0).item(), 4)
    0.7437
    >>> round(info_nce(x, x, -x, temperature=1.0).item(), 4)
    1.2068
    """
    group_name, a, b, negatives = "", query, positive_key, negative_keys
    options = DEFAULT_OPTIONS if options is None else options
    if not calls.checked:
        _check.check_reduction(reduction)
        options, group_name = _check.check_options(options), _check.group_name(group)
        a, b = _check.check_sides(NAMES, a, b, paired=True)
        negatives = check_negatives(a, negatives, negative_mask)
        check_flag("in_batch", in_batch)
        check_flag("symmetric", symmetric)
        check_flag("decoupled", decoupled)
        if symmetric and not in_batch:
            raise ConfigError(
                "symmetric=True compares each key with all queries, so it needs in_batch=True. Pass in_batch=True"
            )
        if not in_batch and negatives is None:
            raise ConfigError("in_batch=False without negative_keys leaves no negatives. Pass negative_keys")
    query_id = key_id = negative_id = None
    if not (query_ids is key_ids is None):
        found = check_negative_ids(a, negatives, query_ids, key_ids, over_group=bool(group_name))
        query_id, key_id, negative_id = found
    bias, negative_bias = (None, None) if log_q is None else check_log_q(log_q, a, negatives)
    guided = None if guide is None else check_guide(guide, a, negatives)
    kinds = {"in_batch": in_batch, "negatives": negatives is not None}
    harder = check_hardness(hardness, hardness_mode, dtype=stat_dtype(a.dtype), **kinds)
    if hardness == 0.0:
        a, temperature = divide_rows(a, temperature)
    scale = _check.check_temperature(temperature, a, rows="pass hardness=0.0")
    # With a guide or with hardness, the scores of the two directions differ, so each has a pass of its own.
    apart = guided is not None or harder.in_batch > 0
    spec = GUIDED if guided is not None else BOTH_DIRECTIONS if symmetric and not apart else SOFTMAX
    more = {} if guided is None else guided.keys()
    keys = NO_KEYS if query_id is None and not more else PairKeys(row_skip=query_id, col_skip=key_id, **more)

    def full_keys() -> PairKeys:
        shift = positive_shift(a, b, scale, options=options)
        if shift is not None and bias is not None:
            shift = shift + bias
        return keys._replace(row_shift=shift, col_shift=shift)

    if (
        reduction != "none"
        and negatives is None
        and guided is None
        and not group_name
        and not harder.in_batch
        and not decoupled
    ):
        weights = row_weights(a, reduction, checked=calls.checked)
        call: dict[str, Any] = {"full_keys": full_keys, "spec": spec, "options": options, "calls": calls}
        return pair_loss(a, b, scale, bias, weights=weights, keys=keys, **call)
    kind = "none" if negatives is None else "shared" if negatives.dim() == 2 else "own"
    margin = {} if guide is None else {"margin": guide.margin, "margin_strategy": guide.margin_strategy}
    must_match = call_settings(
        group_name,
        reduction=reduction,
        temperature=temperature,
        in_batch=in_batch,
        negatives=kind,
        masked=negative_mask is not None,
        symmetric=symmetric,
        decoupled=decoupled,
        log_q=log_q is not None,
        hardness=hardness,
        hardness_mode=hardness_mode,
        **margin,
    )
    if not in_batch and kind == "own":
        # Only for its check over ranks. There are no scores with other ranks, so nothing later checks the calls.
        shard_of_columns(b, must_match, group_name)

    how: dict[str, Any] = {"options": options, "group_name": group_name, "must_match": must_match, "calls": calls}
    other = None  # the losses of the keys, in the other direction

    def above(lse: Tensor, pos: Tensor) -> Tensor:
        """How far the log-sum-exp is above the positive's score; 0 for a row without scores."""
        return torch.where(lse == -torch.inf, 0.0, lse - pos) if decoupled else lse - pos

    parts = []  # log-sum-exps and scores of each query, relative to `shift`: (n, any number) each
    stats = None
    if in_batch and not (harder.in_batch or decoupled):
        stats = pair_stats(a, b, scale, bias, keys=keys, full_keys=full_keys, spec=spec, **how)
        pos, shift = stats.row_pos, stats.row_shift
        parts.append(stats.row_lse[:, None])
    else:
        keys = full_keys()
        shift = keys.row_shift
        own_n = scale * own_scores(a, b[:, None, :], None, options.precision).squeeze(1)
        pos = _shifted((own_n if bias is None else own_n + bias)[:, None], shift).squeeze(1)
        if not decoupled:
            parts.append(pos[:, None])
        if in_batch and harder.in_batch:
            hard = hard_logsumexp(a, b, scale, bias, hardness=harder.in_batch, keys=keys, spec=OTHERS[spec], **how)
            parts.append(hard[:, None])
        elif in_batch:
            stats = pair_stats(a, b, scale, bias, keys=keys, spec=OTHERS[spec], **how)
            parts.append(stats.row_lse[:, None])
    if stats is not None and stats.col_lse is not None:
        other = above(stats.col_lse, pos)
    if symmetric and apart:
        more = {} if guided is None else guided.keys(swap=True)
        # The bias of a key is the same for all queries. As a part of the shift, it makes `pos` that of this direction.
        back = shift if bias is None else -bias if shift is None else shift - bias
        keys = PairKeys(row_skip=key_id, col_skip=query_id, row_shift=back, **more)
        stats = pair_stats(b, a, scale, keys=keys, spec=OTHERS[spec] if decoupled else spec, **how)
        # With row_pos from the same call, gradients of half types that cancel do so before they are rounded.
        other = above(stats.row_lse, pos if decoupled else stats.row_pos)
    if negatives is not None and negatives.dim() == 3:
        own_nk = own_scores(a, negatives, negative_mask, options.precision)
        x_nk = _shifted(scale * own_nk, shift)
        if harder.hard:
            x_nk = x_nk + harder.hard * own_nk.detach()
        if negative_mask is not None:
            x_nk = x_nk.masked_fill(~negative_mask, -torch.inf)
        if guided is not None:
            x_nk = x_nk.masked_fill(guided.excludes_own(options.precision), -torch.inf)
        parts.append(x_nk)
    elif negatives is not None:
        ids = query_id, negative_id
        shared = _shared_lse(
            a, negatives, scale, negative_bias, shift, ids, negative_mask, guided, hardness=harder.hard, **how
        )
        parts.append(shared[:, None])
    loss_n = above(joined_logsumexp(parts, maybe_empty=decoupled), pos).to(pos.dtype)  # both relative to `shift`
    if other is not None:
        loss_n = (loss_n + other) / 2
    return reduce_rows(loss_n, reduction, group_name)


def _shared_lse(
    a: Tensor,
    negatives: Tensor,
    scale: Tensor | float,
    bias: Tensor | None,
    shift: Tensor | None,
    ids: tuple[Tensor | None, Tensor | None],
    mask: Tensor | None,
    guided: CheckedGuide | None,
    **how: Any,
) -> Tensor:
    """Log-sum-exp of each query against the shared negatives: (n,). ``ids``: those of queries and of negatives."""
    if mask is not None:
        # A masked negative scores -inf. Its features are replaced by zeros, because they may hold NaN.
        negatives = torch.where(mask[:, None], negatives, torch.zeros((), dtype=a.dtype, device=a.device))
        bias = torch.zeros(mask.shape, dtype=stat_dtype(a.dtype), device=a.device) if bias is None else bias
        bias = bias.masked_fill(~mask, -torch.inf)
    query_id, negative_id = ids
    skip = query_id if negative_id is not None else None
    more = {} if guided is None else guided.negative_keys()
    keys = PairKeys(row_skip=skip, col_skip=negative_id, row_shift=shift, **more)
    spec = PairSpec(row_lse=True, guide="none" if guided is None else "mask")
    return hard_logsumexp(a, negatives, scale, bias, keys=keys, spec=spec, **how)


def _shifted(x_nk: Tensor, shift: Tensor | None) -> Tensor:
    """Scores minus the shift of their row."""
    return x_nk if shift is None else x_nk - shift[:, None]


class InfoNCELoss(LossModule):
    """`info_nce` as a Module that stores the settings."""

    function = staticmethod(info_nce)
    attributes = ("temperature",)

    def __init__(
        self,
        *,
        temperature: float | Tensor = 0.07,
        in_batch: bool = True,
        symmetric: bool = False,
        decoupled: bool = False,
        hardness: float = 0.0,
        hardness_mode: HardnessMode = "all_negatives",
        reduction: _check.Reduction = "mean",
        group: torch.distributed.ProcessGroup | None = None,
        options: TileOptions | None = None,
    ) -> None:
        super().__init__(locals())
