"""The cases that every backend must answer like the dense oracle: written once, for any device, type and size.

    for name, pair, spec in pair_cases(torch.float32, "cuda", size=8):
        check_forward(backend, pair, spec); check_backward(backend, pair, spec)

Axes: n rows, m columns, d features.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Iterator

import torch
from tests.compare import assert_close, assert_no_worse, relative_error
from torch import Tensor

from tilewise.kernels.dense import dense_scores, dense_stats
from tilewise.kernels.spec import Backend, Grads, GradStats, Needs, Pair, PairSpec, Stats, stat_dtype
from tilewise.options import TileOptions

STATS = ("row_lse", "row_pos", "row_softplus", "row_sum", "row_entropy", "col_lse")
CONSTANT = ("row_hits", "row_top", "row_top_col")  # have no gradient
LOOSE = {torch.float64: (1e-12, 1e-12), torch.float32: (2e-6, 1e-5)}  # of statistics and of gradients


class Maker:
    """Random tensors of one type on one device, the same numbers for all of them (up to rounding)."""

    def __init__(self, dtype: torch.dtype, device: str = "cpu", size: int = 1, seed: int = 0) -> None:
        self.dtype, self.device, self.size = dtype, device, size
        self.generator = torch.Generator().manual_seed(seed)

    def rows(self, count: int) -> int:
        """A number of rows at this size; never a multiple of a power of two above 1."""
        return count if count < 3 or self.size == 1 else count * self.size + (count * self.size) % 2 + 1

    def features(self, n: int, d: int, length: float = 1.0) -> Tensor:
        """(n, d), rows of about this length."""
        return self._to(torch.randn(n, d, generator=self.generator, dtype=torch.float64) * (length / max(d, 1) ** 0.5))

    def vector(self, n: int, spread: float = 1.0) -> Tensor:
        """(n,) in the type of the statistics."""
        values = torch.randn(n, generator=self.generator, dtype=torch.float64) * spread
        return values.to(self.device, stat_dtype(self.dtype))

    def number(self, value: float) -> Tensor:
        return torch.tensor(value, device=self.device, dtype=stat_dtype(self.dtype))

    def integers(self, high: int, n: int) -> Tensor:
        return torch.randint(0, high, (n,), generator=self.generator).to(self.device)

    def index(self, n: int) -> Tensor:
        return torch.arange(n, device=self.device)

    def _to(self, values: Tensor) -> Tensor:
        return values.to(self.device, self.dtype)


Case = tuple[Pair, PairSpec]
CASES: dict[str, Callable[[Maker], Case]] = {}
HARD = {"scores_1000", "scores_far_below_zero", "rows_of_unlike_size", "aligned_scale_100", "temperature_0.01"}
HARD |= {"tokens_surely_known"}


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
    pair = Pair(a=a, b=b, scale=make.number(scale), row_key=index, row_zero=zero, col_zero=zero)
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
        row_zero=make.vector(n),
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
    return pair, dataclasses.replace(spec, row_entropy=True, row_top=True, softcap=6.0)


@case
def tokens_masked_and_twice(make: Maker) -> Case:
    """A slice of the vocabulary, without positives: columns that a bias of -inf takes out, and all others twice."""
    pair, spec = tokens(make)
    assert pair.bias is not None
    half = pair.b.shape[0] // 2
    b, bias = pair.b.clone(), pair.bias.clone()
    bias[:half:3] = -torch.inf
    b[half : 2 * half], bias[half : 2 * half] = b[:half], bias[:half]
    pair = dataclasses.replace(pair, b=b, bias=bias, row_key=None, row_zero=None, col_start=20)
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
    pair = Pair(a=z, b=z, scale=make.number(9.0), row_key=other, row_zero=zero)
    return pair, PairSpec(row_lse=True, positive="one", itself=True, symmetric=True)


@case
def supcon(make: Maker) -> Case:
    n = make.rows(133)
    z, labels = make.features(n, 24), make.integers(9, n)
    labels[3] = 1000  # has no positive
    pair = Pair(a=z, b=z, scale=make.number(9.0), row_key=labels, col_key=labels, row_zero=make.vector(n))
    return pair, PairSpec(row_lse=True, positive="many", itself=True, symmetric=True)


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
    return pair, PairSpec(row_lse=True, positive="many", itself=True)


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
    return dataclasses.replace(pair, row_zero=None, col_zero=None), dataclasses.replace(spec, softcap=6.0)


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


# What it means to be right --------------------------------------------------------------------------------------


def leaves_of(pair: Pair, dtype: torch.dtype | None = None) -> Pair:
    """The same pair with leaves that require grad, features in ``dtype`` and vectors to match."""
    dtype = dtype or pair.a.dtype
    stat = stat_dtype(dtype)

    def leaf(value: Tensor, dtype: torch.dtype) -> Tensor:
        return value.detach().to(dtype).clone().requires_grad_()

    a = leaf(pair.a, dtype)
    vectors = {
        name: None if getattr(pair, name) is None else getattr(pair, name).to(stat)
        for name in ("row_zero", "col_zero", "col_weight")
    }
    return dataclasses.replace(
        pair,
        a=a,
        b=a if pair.b is pair.a else leaf(pair.b, dtype),
        scale=leaf(pair.scale, stat),
        bias=None if pair.bias is None else leaf(pair.bias, stat),
        **vectors,
    )


def incoming_gradients(stats: Stats, seed: int = 1) -> GradStats:
    """A random gradient for each statistic; 0 where it is -inf, as no loss can ask for that one's gradient."""
    generator = torch.Generator().manual_seed(seed)

    def draw(value: Tensor | None) -> Tensor | None:
        if value is None:
            return None
        random = torch.randn(value.shape, generator=generator, dtype=torch.float64)
        stat = stat_dtype(value.dtype)
        return torch.where(value.isfinite(), random.to(value.device), 0.0).to(stat)

    return GradStats(**{name: draw(getattr(stats, name)) for name in STATS})


def dense_grads(pair: Pair, spec: PairSpec, grad: GradStats) -> Grads:
    """Gradients by autograd through the oracle; ``pair`` has leaves."""
    stats = dense_stats(pair, spec)
    total = sum(
        torch.where(getattr(grad, name) != 0, getattr(stats, name) * getattr(grad, name), 0.0).sum()
        for name in STATS
        if getattr(grad, name) is not None
    )
    named = {"a": pair.a, "scale": pair.scale}
    if pair.b is not pair.a:
        named["b"] = pair.b
    if pair.bias is not None:
        named["bias"] = pair.bias
    values = torch.autograd.grad(total, list(named.values()))
    return Grads(**dict(zip(named, values, strict=True)))


def all_needs(pair: Pair) -> Needs:
    return Needs(a=True, b=pair.b is not pair.a, scale=True, bias=pair.bias is not None)


def stats_asked(stats: Stats) -> dict[str, Tensor]:
    return {name: getattr(stats, name) for name in (*STATS, *CONSTANT) if getattr(stats, name) is not None}


def grads_asked(grads: Grads) -> dict[str, Tensor]:
    return {name: getattr(grads, name) for name in ("a", "b", "scale", "bias") if getattr(grads, name) is not None}


def comparable(stats: Stats, pair: Pair) -> dict[str, Tensor]:
    """Statistics as numbers of a meaningful size: a positive that was measured from its own score is all rounding,
    so it is compared as a score, and against its row's log-sum-exp."""
    named = stats_asked(stats)
    named.pop("row_top_col", None)  # see `check_top`
    if stats.row_top is not None and pair.row_zero is not None:
        named["row_top"] = stats.row_top + pair.row_zero
    for name in ("row_lse", "col_lse"):  # a logarithm: an error of 1e-7 is one of 1e-7 in the sum, even where it is 0
        if name in named:
            named[name] = torch.cat([named[name], torch.ones_like(named[name])])
    if stats.row_pos is not None and pair.row_zero is not None:
        assert stats.row_hits is not None
        named["row_pos"] = stats.row_pos + stats.row_hits * pair.row_zero
        if stats.row_lse is not None:
            named["row_nll"] = stats.row_lse * stats.row_hits - stats.row_pos
    return named


def finite(values: Tensor, where: Tensor) -> Tensor:
    return values[where.isfinite().to(values.device)]


def check_forward(
    backend: Backend,
    pair: Pair,
    spec: PairSpec,
    options: TileOptions | None = None,
    *,
    hard: bool = False,
    tolerance: float | None = None,
) -> Stats:
    """Statistics against the oracle in float64; ``hard`` and half types against what dense makes of them."""
    stats = backend.forward(pair, spec, options or TileOptions())
    exact, dense = dense_stats(leaves_of(pair, torch.float64), spec), dense_stats(pair, spec)
    types = {name: value.dtype for name, value in stats_asked(stats).items()}
    assert types.pop("row_top_col", torch.int64) == torch.int64
    wide = {name for name in types if name.endswith("lse") and types[name] == torch.float64}
    assert {types[name] for name in types if name not in wide} <= {pair.stat_dtype}
    check_top(stats, pair, spec)
    got, want, yardstick = (comparable(answer, pair) for answer in (stats, exact, dense))
    assert got.keys() == want.keys()
    for name in want:
        assert torch.equal(got[name].isfinite().cpu(), want[name].isfinite().cpu()), name
        mine, right = finite(got[name], want[name]), finite(want[name], want[name])
        if pair.a.dtype not in LOOSE or (hard and pair.a.dtype != torch.float64):
            dense_one = finite(yardstick[name], want[name])
            if dense_one.isfinite().all():
                assert_no_worse(mine, dense_one, right, name)
            else:  # dense half types overflow or give NaN where ours do not
                assert_close(mine, right, 1e-3, name)
        else:
            assert_close(mine, right, tolerance or LOOSE[pair.a.dtype][0], name)
    return stats


def check_top(stats: Stats, pair: Pair, spec: PairSpec) -> None:
    """The column has the largest score, up to the rounding of scores, and none before it has the same."""
    if stats.row_top_col is None or 0 in (pair.a.shape[0], pair.b.shape[0]):
        return
    x_nm = dense_scores(leaves_of(pair, torch.float64), spec)[0].detach()
    index = stats.row_top_col - pair.col_start
    found = x_nm.gather(1, index[:, None]).squeeze(1)
    best = x_nm.max(1)
    same = found == best.values
    assert (same | (best.values - found <= 1e-5 * (1.0 + best.values.abs()))).all()
    assert torch.equal(index[same], best.indices[same])
    assert same.double().mean() > 0.9


def check_backward(
    backend: Backend,
    pair: Pair,
    spec: PairSpec,
    options: TileOptions | None = None,
    *,
    hard: bool = False,
    tolerance: float | None = None,
    grad_dtype: torch.dtype | None = None,
    floor: float = 0.0,
) -> Grads:
    """Gradients of all arguments against autograd through the oracle in float64.

    ``floor``: an error that is always allowed to the scale of half types, whose sum is taken of a rounded G.
    """
    options = options or TileOptions()
    stats = backend.forward(pair, spec, options)
    grad = incoming_gradients(stats)
    grads = backend.backward(pair, stats, grad, all_needs(pair), spec, options, grad_dtype=grad_dtype)
    exact_pair = leaves_of(pair, torch.float64)
    wide = GradStats(**{name: None if value is None else value.double() for name, value in vars(grad).items()})
    got, want = grads_asked(grads), grads_asked(dense_grads(exact_pair, spec, wide))
    yardstick = grads_asked(dense_grads(leaves_of(pair), spec, grad))
    assert got.keys() == want.keys()
    for name in want:
        is_feature = name in ("a", "b")
        assert got[name].dtype == ((grad_dtype or pair.a.dtype) if is_feature else pair.stat_dtype)
        assert got[name].shape == want[name].shape
    # The scale's gradient is <A, dA> / scale, a sum that may cancel: its error is relative to the size of the terms.
    terms = (exact_pair.a.norm() * want["a"].norm() / exact_pair.scale.abs()).detach()
    for answer in (got, want, yardstick):
        answer["scale"] = torch.stack([answer["scale"].double(), terms])
    if pair.a.dtype in LOOSE:
        limit = tolerance or LOOSE[pair.a.dtype][1]
        if hard:  # in float32 a score of 1,000 is known to 6e-5 only, and exp(x) no better
            limit = max(limit, torch.finfo(pair.a.dtype).eps / 2 * largest_score(exact_pair, spec))
    for name in want:
        if pair.a.dtype in LOOSE:
            assert_close(got[name], want[name], limit, name)
        elif name != "scale" or relative_error(got[name], want[name]) > floor:
            assert_no_worse(got[name], yardstick[name], want[name], name)
    return grads


def largest_score(pair: Pair, spec: PairSpec) -> float:
    scores = dense_scores(pair, spec)[0].detach().flatten()
    return max(scores[scores.isfinite()].abs().tolist(), default=0.0)
