"""The cases that every backend must answer like the dense oracle: written once, for any device, type and size.

    for name, pair, spec in pair_cases(torch.float32, "cuda", size=8):
        check_forward(backend, pair, spec); check_backward(backend, pair, spec)

Axes: n rows, m columns, d features.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Iterator

import torch
from tests.kernels.dense import dense_scores, dense_stats
from tests.kernels.pair_maker import Maker
from torch import Tensor

from tilewise.kernels.spec import GuideUse, Pair, PairSpec, stat_dtype

Case = tuple[Pair, PairSpec]
CASES: dict[str, Callable[[Maker], Case]] = {}
HARD = {"scores_1000", "scores_far_below_zero", "rows_of_unlike_size", "aligned_scale_100", "temperature_0.01"}
HARD |= {"tokens_surely_known", "guide_of_scores_1000"}


def case(make: Callable[[Maker], Case]) -> Callable[[Maker], Case]:
    """Adds a case to the table under the name of its function (``__`` reads as a dot)."""
    CASES[make.__name__.replace("__", ".")] = make
    return make


def make_case(name: str, dtype: torch.dtype, device: str = "cpu", size: int = 1) -> Case:
    return CASES[name](Maker(dtype, device, size))


def pair_cases(
    dtype: torch.dtype = torch.float64, device: str = "cpu", size: int = 1
) -> Iterator[tuple[str, Pair, PairSpec]]:
    """All cases; ``size`` multiplies the numbers of rows and columns."""
    for name in CASES:
        yield (name, *make_case(name, dtype, device, size))


# The losses' own specs ------------------------------------------------------------------------------------------


def _clip(make: Maker, scale: float = 14.0, n: int = 131, d: int = 33, noise: float | None = None) -> Case:
    n = make.rows(n)
    a, b = make.features(n, d), make.features(n, d)
    if noise is not None:
        a = torch.nn.functional.normalize(a.double(), dim=1)
        b = torch.nn.functional.normalize(a + noise * b.double(), dim=1).to(make.dtype)
        a = a.to(make.dtype)
    zero = scale * (a.double() * b.double()).sum(1).to(stat_dtype(make.dtype))
    index = make.index(n)
    pair = Pair(a=a, b=b, scale=make.number(scale), row_key=index, row_shift=zero, col_shift=zero)
    return pair, PairSpec(row_lse=True, col_lse=True, positive="one")


@case
def clip(make: Maker) -> Case:
    return _clip(make)


@case
def clip_by_position(make: Maker) -> Case:
    """Without a key, the positive of a row is the column of its own global index."""
    pair, spec = _clip(make)
    return dataclasses.replace(pair, row_key=None, row_start=40, col_start=30), spec


@case
def clip_wide(make: Maker) -> Case:
    return _clip(make, n=57, d=257)


@case
def aligned_scale_100(make: Maker) -> Case:
    return _clip(make, scale=100.0, d=64, noise=2.0)


@case
def temperature_0__01(make: Maker) -> Case:
    return _clip(make, scale=100.0)


@case
def scores_1000(make: Maker) -> Case:
    return _clip(make, scale=1000.0)


@case
def scores_far_below_zero(make: Maker) -> Case:
    """All scores are near -120, where exp underflows: a padded column of score 0 would win every maximum."""
    n, m = make.rows(67), make.rows(101)
    a, b = make.features(n, 8, 0.1) + 1.0, make.features(m, 8, 0.1) - 1.0
    pair = Pair(a=a, b=b, scale=make.number(15.0), row_key=make.index(n))
    return pair, PairSpec(row_lse=True, col_lse=True, positive="one")


@case
def rows_of_unlike_size(make: Maker) -> Case:
    """Rows whose scores differ by hundreds inside one tile: no single shift serves them all."""
    n, m = make.rows(67), make.rows(101)
    offset = torch.linspace(-30.0, 30.0, n, dtype=torch.float64)[:, None]
    a = torch.cat([make.features(n, 8).double().cpu(), offset], 1).to(make.device, make.dtype)
    b = torch.cat([make.features(m, 8).double().cpu(), torch.ones(m, 1)], 1).to(make.device, make.dtype)
    pair = Pair(a=a, b=b, scale=make.number(8.0), row_key=make.index(n))
    return pair, PairSpec(row_lse=True, col_lse=True, positive="one")


@case
def cross_entropy(make: Maker) -> Case:
    n, m = make.rows(71), make.rows(203)
    pair = Pair(
        a=make.features(n, 40, 2.0),
        b=make.features(m, 40, 2.0),
        scale=make.number(0.8),
        bias=make.vector(m),
        row_key=make.integers(m, n),
        row_shift=make.vector(n),
    )
    return pair, PairSpec(row_lse=True, positive="one")


@case
def cross_entropy_smoothed_and_capped(make: Maker) -> Case:
    pair, spec = cross_entropy(make)
    pair = dataclasses.replace(pair, col_weight=make.vector(pair.b.shape[0]).abs())
    return pair, dataclasses.replace(spec, row_sum=True, softcap=3.0)


@case
def cross_entropy_of_a_slice(make: Maker) -> Case:
    """A slice of the vocabulary: most rows have their target elsewhere."""
    pair, spec = cross_entropy(make)
    assert pair.row_key is not None
    return dataclasses.replace(pair, row_key=pair.row_key * 3 - 50, col_start=20), spec


@case
def tokens(make: Maker) -> Case:
    """What a language model's user asks for beside the loss: entropy, largest score."""
    pair, spec = cross_entropy(make)
    return pair, dataclasses.replace(spec, row_entropy=True, row_sum_sq=True, row_top=True, softcap=6.0)


@case
def tokens_masked_and_twice(make: Maker) -> Case:
    """A slice of the vocabulary, without positives: columns that a bias of -inf takes out, and all others twice."""
    pair, spec = tokens(make)
    assert pair.bias is not None
    half = pair.b.shape[0] // 2
    b, bias = pair.b.clone(), pair.bias.clone()
    bias[:half:3] = -torch.inf
    b[half : 2 * half], bias[half : 2 * half] = b[:half], bias[:half]
    pair = dataclasses.replace(pair, b=b, bias=bias, row_key=None, row_shift=None, col_start=20)
    return pair, dataclasses.replace(spec, positive="none", softcap=0.0)


@case
def tokens_surely_known(make: Maker) -> Case:
    """Scores of hundreds, entropies from 1e-9 to 1: what is small must not be a difference of what is large."""
    n, m = make.rows(67), make.rows(150)
    pair = Pair(
        a=make.features(n, 24, 8.0),
        b=make.features(m, 24, 8.0),
        scale=make.number(12.0),
        row_key=make.integers(m, n),
    )
    return pair, PairSpec(row_lse=True, row_entropy=True, row_top=True, positive="one")


@case
def tokens_with_labels(make: Maker) -> Case:
    """Token statistics beside a weighted sum and several positives in a row."""
    n, m = make.rows(40), make.rows(90)
    pair = Pair(
        a=make.features(n, 24, 1.0),
        b=make.features(m, 24, 1.0),
        scale=make.number(3.0),
        row_key=make.integers(7, n),
        col_key=make.integers(7, m),
        col_weight=make.features(m, 1, 1.0)[:, 0].to(make.number(1.0).dtype),
    )
    return pair, PairSpec(row_lse=True, row_entropy=True, row_sum_sq=True, row_top=True, row_sum=True, positive="many")


def _double(pair: Pair) -> Pair:
    """Every floating tensor in float64."""
    found = {name: value for name, value in vars(pair).items() if isinstance(value, Tensor)}
    return dataclasses.replace(
        pair, **{name: value.double() for name, value in found.items() if value.is_floating_point()}
    )


def _guided(make: Maker, guide: GuideUse, **more: object) -> Case:
    """Tokens with a teacher of another width."""
    pair, spec = cross_entropy(make)
    n, m = pair.a.shape[0], pair.b.shape[0]
    pair = dataclasses.replace(
        pair,
        guide_a=make.features(n, 72, 2.0),
        guide_b=make.features(m, 72, 2.0),
        guide_scale=make.number(1.1),
        guide_bias=make.vector(m),
    )
    return pair, dataclasses.replace(spec, guide=guide, **more)


@case
def guide_kl(make: Maker) -> Case:
    return _guided(make, "kl", row_entropy=True, softcap=6.0, guide_softcap=5.0, hot=2.5)


@case
def guide_reverse_kl(make: Maker) -> Case:
    pair, spec = _guided(make, "reverse_kl")
    pair = dataclasses.replace(pair, row_key=None, row_shift=None, bias=None, guide_bias=None, col_start=20)
    return pair, dataclasses.replace(spec, positive="none")


@case
def guide_jsd(make: Maker) -> Case:
    pair, spec = _guided(make, "jsd", beta=0.3, hot=0.5)
    stats = dense_stats(_double(pair), dataclasses.replace(spec, guide="kl"))
    assert stats.row_lse is not None
    assert stats.guide_lse is not None
    kind = stat_dtype(make.dtype)
    return dataclasses.replace(pair, row_norm=stats.row_lse.to(kind), guide_norm=stats.guide_lse.to(kind)), spec


@case
def guide_jsd_without_norms(make: Maker) -> Case:
    pair, spec = guide_jsd(make)
    return dataclasses.replace(pair, row_norm=None, guide_norm=None), spec


@case
def guide_of_the_same_scores(make: Maker) -> Case:
    """A teacher that is the student: no divergence."""
    pair, spec = cross_entropy(make)
    guide = {"guide_a": pair.a, "guide_b": pair.b, "guide_scale": pair.scale, "guide_bias": pair.bias}
    return dataclasses.replace(pair, row_shift=None, **guide), dataclasses.replace(spec, guide="kl")


@case
def guide_of_scores_1000(make: Maker) -> Case:
    """Scores of hundreds on both sides: all but a few probabilities underflow."""
    pair, spec = _guided(make, "reverse_kl")
    return dataclasses.replace(pair, scale=make.number(200.0), guide_scale=make.number(150.0)), spec


@case
def guide_mask(make: Maker) -> Case:
    """Scores are excluded where those of the guide are above a limit of the row; also by ids, and never a positive."""
    pair, spec = _guided(make, "mask")
    n, m = pair.a.shape[0], pair.b.shape[0]
    return dataclasses.replace(
        pair, row_limit=make.vector(n), row_skip=make.integers(20, n), col_skip=make.integers(20, m)
    ), spec


@case
def tokens_picked(make: Maker) -> Case:
    """Given classes of each token: some twice, some equal to the target, some padding."""
    pair, spec = tokens(make)
    n, m = pair.a.shape[0], pair.b.shape[0]
    assert pair.row_key is not None
    pick = make.integers(m, 6 * n).reshape(n, 6)
    pick[::2, 3], pick[::2, 4] = pick[::2, 0], pick[::2, 0]
    pick[::3, 1], pick[::5, 5] = pair.row_key[::3], -1
    return dataclasses.replace(pair, pick=pick), dataclasses.replace(spec, row_picked=True)


@case
def picked_of_a_slice(make: Maker) -> Case:
    """A slice of the vocabulary, without positives: most rows pick classes that are elsewhere."""
    pair, spec = cross_entropy(make)
    n, m = pair.a.shape[0], pair.b.shape[0]
    pick = make.integers(3 * m, 3 * n).reshape(n, 3)
    pair = dataclasses.replace(pair, pick=pick, row_key=None, row_shift=None, bias=None, col_start=20)
    return pair, dataclasses.replace(spec, positive="none", row_picked=True)


@case
def picks_left_out(make: Maker) -> Case:
    """The log-sum-exp of the columns that a row does not pick. Some are picked twice, some are elsewhere."""
    pair, spec = cross_entropy(make)
    n, m = pair.a.shape[0], pair.b.shape[0]
    pick = make.integers(m + 9, 20 * n).reshape(n, 20) - 5 + 20
    pick[::3, 4:] = pick[::3, :16] + 1
    pick = torch.where(pick % 5 == 0, -1, pick).sort(dim=1).values
    pair = dataclasses.replace(pair, pick=pick, row_key=None, row_scale=torch.exp2(make.vector(n)), col_start=20)
    return pair, dataclasses.replace(spec, positive="none", row_picked=True, skip_picked=True)


@case
def picks_left_out_of_scores_1000(make: Maker) -> Case:
    """Rows whose largest scores are all picked: the sums of what is left need other references."""
    pair, spec = picks_left_out(make)
    pair = dataclasses.replace(pair, scale=make.number(200.0), row_scale=None, col_start=0)
    x_nm = dense_scores(_double(pair), spec)[0]
    pick = x_nm.topk(min(7, x_nm.shape[1] - 1), dim=1).indices.sort(dim=1).values
    pair = dataclasses.replace(pair, pick=pick, row_key=pick[:, 3].contiguous())
    return pair, dataclasses.replace(spec, positive="one")


@case
def tokens_of_many_temperatures(make: Maker) -> Case:
    """A factor of each row, after the soft cap, from 1/16 to 16."""
    pair, spec = tokens_picked(make)
    pair = dataclasses.replace(pair, row_scale=torch.exp2(make.vector(pair.a.shape[0], 2.0).clamp(-4.0, 4.0)))
    return pair, dataclasses.replace(spec, row_top=False)


@case
def cross_entropy_of_many_temperatures(make: Maker) -> Case:
    pair, spec = cross_entropy(make)
    pair = dataclasses.replace(pair, row_scale=torch.exp2(make.vector(pair.a.shape[0])))
    pair = dataclasses.replace(pair, col_weight=make.vector(pair.b.shape[0]).abs())
    return pair, dataclasses.replace(spec, row_sum=True)


@case
def softcap_far_beyond(make: Maker) -> Case:
    """Scores of a hundred times the cap: tanh is flat, and nothing overflows on the way."""
    n, m = make.rows(37), make.rows(90)
    pair = Pair(a=make.features(n, 16), b=make.features(m, 16), scale=make.number(300.0))
    return pair, PairSpec(row_lse=True, col_lse=True, softcap=4.0)


@case
def nt_xent(make: Maker) -> Case:
    n = 2 * make.rows(65)
    z = make.features(n, 24)
    index = make.index(n)
    other = torch.roll(index, n // 2)
    zero = 9.0 * (z.double() * z.double()[other]).sum(1).to(stat_dtype(make.dtype))
    pair = Pair(a=z, b=z, scale=make.number(9.0), row_key=other, row_shift=zero)
    return pair, PairSpec(row_lse=True, positive="one", mask_self=True, symmetric=True)


@case
def supcon(make: Maker) -> Case:
    n = make.rows(133)
    z, labels = make.features(n, 24), make.integers(9, n)
    labels[3] = 1000  # has no positive
    pair = Pair(a=z, b=z, scale=make.number(9.0), row_key=labels, col_key=labels, row_shift=make.vector(n))
    return pair, PairSpec(row_lse=True, positive="many", mask_self=True, symmetric=True)


@case
def supcon_foreign_block(make: Maker) -> Case:
    """What a ring asks for: columns of another rank, some of which are the rows themselves."""
    n, m = make.rows(97), make.rows(121)
    pair = Pair(
        a=make.features(n, 24),
        b=make.features(m, 24),
        scale=make.number(9.0),
        row_key=make.integers(9, n),
        col_key=make.integers(9, m),
        row_start=200,
        col_start=150,
    )
    return pair, PairSpec(row_lse=True, positive="many", mask_self=True)


@case
def siglip(make: Maker) -> Case:
    n, m = make.rows(97), make.rows(121)
    pair = Pair(
        a=make.features(n, 24),
        b=make.features(m, 24),
        scale=make.number(10.0),
        bias=make.number(-4.0).expand(m),
        row_key=make.index(n) + 11,
    )
    return pair, PairSpec(softplus=True, positive="one")


@case
def siglip_many(make: Maker) -> Case:
    pair, _ = siglip(make)
    n, m = pair.a.shape[0], pair.b.shape[0]
    pair = dataclasses.replace(pair, row_key=make.integers(7, n), col_key=make.integers(7, m))
    return pair, PairSpec(softplus=True, positive="many")


@case
def ids_excluded(make: Maker) -> Case:
    n = make.rows(131)
    ids = make.integers(20, n)
    pair, spec = _clip(make, n=131)
    return dataclasses.replace(pair, row_skip=ids, col_skip=ids), spec


@case
def ids_excluded_many(make: Maker) -> Case:
    pair, spec = supcon_foreign_block(make)
    n, m = pair.a.shape[0], pair.b.shape[0]
    pair = dataclasses.replace(pair, row_skip=make.integers(5, n), col_skip=make.integers(5, m))
    return pair, dataclasses.replace(spec, col_lse=True)


@case
def a_row_that_meets_nobody(make: Maker) -> Case:
    """Excluded from every column, and a column from every row: log-sum-exp -inf, gradient 0."""
    n, m = make.rows(53), make.rows(91)
    row_skip, col_skip = make.index(n) + 1000, torch.full((m,), 7, device=make.device)
    row_skip[4], row_skip[5] = 7, 7
    pair = Pair(
        a=make.features(n, 16), b=make.features(m, 16), scale=make.number(5.0), row_skip=row_skip, col_skip=col_skip
    )
    return pair, PairSpec(row_lse=True)


@case
def columns_masked_by_bias(make: Maker) -> Case:
    n, m = make.rows(53), make.rows(91)
    bias = make.vector(m)
    bias[::3] = -torch.inf
    return Pair(a=make.features(n, 16), b=make.features(m, 16), scale=make.number(5.0), bias=bias), PairSpec(
        row_lse=True
    )


@case
def ruled_out_under_softcap(make: Maker) -> Case:
    """softcap * tanh(-inf) is -softcap: a column with a bias of -inf keeps a share, but has no slope."""
    n, m = make.rows(40), make.rows(90)
    bias = make.vector(m)
    bias[::3] = -torch.inf
    pair = Pair(a=make.features(n, 16), b=make.features(m, 16), scale=make.number(5.0), bias=bias)
    pair = dataclasses.replace(pair, row_key=make.integers(m, n))
    return pair, PairSpec(row_lse=True, col_lse=True, positive="one", softcap=3.0)


@case
def excluded_under_softcap(make: Maker) -> Case:
    pair, spec = ids_excluded(make)
    return dataclasses.replace(pair, row_shift=None, col_shift=None), dataclasses.replace(spec, softcap=6.0)


# Shapes and layouts ---------------------------------------------------------------------------------------------


def _rows_and_cols(make: Maker, n: int, m: int, d: int) -> Case:
    pair = Pair(
        a=make.features(n, d),
        b=make.features(m, d),
        scale=make.number(6.0),
        row_key=make.index(n),
    )
    return pair, PairSpec(row_lse=True, col_lse=True, positive="one")


@case
def one_row(make: Maker) -> Case:
    return _rows_and_cols(make, 1, make.rows(130), 16)


@case
def one_column(make: Maker) -> Case:
    return _rows_and_cols(make, make.rows(130), 1, 16)


@case
def one_pair(make: Maker) -> Case:
    return _rows_and_cols(make, 1, 1, 5)


@case
def one_feature(make: Maker) -> Case:
    return _rows_and_cols(make, make.rows(49), make.rows(81), 1)


@case
def few_rows_many_columns(make: Maker) -> Case:
    return _rows_and_cols(make, 5, make.rows(701), 20)


@case
def many_rows_few_columns(make: Maker) -> Case:
    return _rows_and_cols(make, make.rows(701), 3, 20)


@case
def columns_only(make: Maker) -> Case:
    pair, _ = _rows_and_cols(make, make.rows(90), make.rows(70), 20)
    return pair, PairSpec(col_lse=True)


@case
def transposed(make: Maker) -> Case:
    pair, spec = _clip(make)
    return dataclasses.replace(pair, a=pair.a.T.contiguous().T, b=pair.b.T.contiguous().T), spec


@case
def every_second_row_and_feature(make: Maker) -> Case:
    pair, spec = _clip(make)

    def spaced(x: Tensor) -> Tensor:
        wide = torch.full((2 * x.shape[0], 2 * x.shape[1]), torch.nan, dtype=x.dtype, device=x.device)
        wide[::2, ::2] = x
        return wide[::2, ::2]

    return dataclasses.replace(pair, a=spaced(pair.a), b=spaced(pair.b)), spec


@case
def expanded(make: Maker) -> Case:
    """All columns are one row in memory, and all rows are duplicates of another."""
    pair, spec = _rows_and_cols(make, make.rows(61), make.rows(90), 20)
    return dataclasses.replace(
        pair, a=pair.a[:1].expand(pair.a.shape[0], -1), b=pair.b[:1].expand(pair.b.shape[0], -1)
    ), spec


@case
def duplicate_rows(make: Maker) -> Case:
    pair, spec = _clip(make)
    index = make.index(pair.a.shape[0])
    return dataclasses.replace(pair, a=pair.a[index // 7], b=pair.b[index // 5]), spec
