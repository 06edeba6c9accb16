"""The filter kernels in Triton's interpreter: same plan and gradients as the dense filter."""

import dataclasses
import doctest
import math

import pytest
import torch
from tests.compare import assert_close
from tests.dense_filter import DenseFilter, places_of
from tests.kernels.interpreted import BACKEND, IN_THE_INTERPRETER

from tilewise.kernels import filter_plan as plans
from tilewise.kernels.spec import GradStats, Needs, Pair, PairSpec, Stats, wanted_names
from tilewise.kernels.torch_impl.backend import TorchBackend
from tilewise.kernels.triton_impl import sizes
from tilewise.kernels.triton_impl.filtered import forward as filter_forward
from tilewise.kernels.triton_impl.filtered.backward import Blocks
from tilewise.kernels.triton_impl.filtered.strategy import TritonFilter
from tilewise.kernels.triton_impl.sizes import PairSizes
from tilewise.options import TileOptions

pytestmark = [*IN_THE_INTERPRETER, pytest.mark.usefixtures("never_dense")]
OPTIONS = TileOptions(backend="triton", precision="highest", filter_tolerance=1e-2)
ALL = Needs(a=True, b=True, scale=True, bias=True)


def make_pair(dtype, n=70, m=331, d=24, *, bias=True, zero=True):
    g = torch.Generator().manual_seed(0)
    rank = torch.randperm(m, generator=g) + 1
    rest = 2 * torch.randn(m, d - 1, generator=g) / math.sqrt(d - 1)
    key = torch.randint(0, m, (n,), generator=g)
    a = torch.cat([torch.full((n, 1), 4.0), torch.randn(n, d - 1, generator=g) + 2 * rest[key]], 1).to(dtype)
    b = torch.cat([(-rank.log() / 2)[:, None], rest], 1).to(dtype)
    offset = 0.3 * torch.randn(m, generator=g)
    offset[::50] = -torch.inf
    key[key % 50 == 0] += 1
    key[::9] = -1  # ignored
    pair = Pair(
        a=a,
        b=b,
        scale=torch.tensor(1.1),
        bias=offset if bias else None,
        row_key=key,
        row_shift=1.1 * (a.float() * b.float()[key]).sum(1) if zero else None,
    )
    valid = (key >= 0).float()
    grad = GradStats(row_lse=torch.randn(n, generator=g) * valid, row_pos=torch.randn(n, generator=g) * valid)
    return pair, grad


def check(pair, grad, *, softcap=0.0, options=OPTIONS, needs=ALL, tolerance=None, **fields):
    tolerance = tolerance or (2e-6 if pair.a.dtype == torch.float32 else 3e-3)
    spec = PairSpec(**{"row_lse": True, "positive": "one", "softcap": softcap, "drop_rows": True, **fields})
    stats, plan = TritonFilter().forward(pair, spec, options)
    want_stats, want = DenseFilter().forward(pair, spec, options)
    valid = pair.row_key >= 0
    for name in wanted_names(spec):
        got, right = getattr(stats, name)[valid], getattr(want_stats, name)[valid]
        if name == "row_top_col":
            assert torch.equal(got, right)
        else:
            assert_close(got, right, 1e-5, name)
    assert torch.equal(plan.order, want.order)
    assert torch.equal(plan.mass < 0, want.mass < 0)
    assert torch.equal(plan.kept, want.kept)
    assert_close(plan.mass, want.mass, 1e-3, "mass")
    assert_close(plan.mean, want.mean, 1e-3, "mean")
    assert plan.surprise.shape == want.surprise.shape
    if spec.row_entropy:
        assert_close(plan.surprise[valid], want.surprise[valid], 1e-4, "surprise")
    share = (plan.mass[:, valid] < 0).float().mean()
    assert 0.01 < share < 0.9
    known = Stats(row_lse=want_stats.row_lse, row_entropy=want_stats.row_entropy)
    got = TritonFilter().backward(pair, known, plan, grad, needs, spec, options)
    right = DenseFilter().backward(pair, known, want, grad, needs, spec, options)
    for name in ("a", "b", "scale", "bias"):
        value, expected = getattr(got, name), getattr(right, name)
        if not getattr(needs, name):
            assert value is None
            continue
        assert value.dtype == expected.dtype
        # The scale's gradient is one number, a difference of large ones.
        assert_close(value, expected, tolerance * (20 if name == "scale" else 1), name)
    if needs.a:
        assert (got.a[~valid] == 0).all()


def with_entropy(grad):
    """A gradient of the entropy of each row, beside those of its log-sum-exp and its positive."""
    entropy = torch.randn(len(grad.row_lse), generator=torch.Generator().manual_seed(3)) * (grad.row_lse != 0)
    return dataclasses.replace(grad, row_entropy=entropy)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16], ids=["float32", "float16"])
@pytest.mark.parametrize("softcap", [0.0, 12.0])
def test_entropy_and_largest_score(dtype, softcap):
    pair, grad = make_pair(dtype, zero=dtype == torch.float32)
    pair.b[100:110] = pair.b[40:50]  # ties
    pair.bias[100:110] = pair.bias[40:50]
    check(pair, with_entropy(grad), softcap=softcap, row_entropy=True, row_top=True)


@pytest.mark.parametrize("entropy", [False, True])
@pytest.mark.parametrize("softcap", [0.0, 12.0])
def test_picked_columns(softcap, entropy):
    """Some are picked twice, one is the positive, some are none. Their entries are kept."""
    pair, grad = make_pair(torch.float32)
    generator = torch.Generator().manual_seed(5)
    pick = torch.randint(0, 331, (70, 5), generator=generator)
    pick = torch.where(pick % 50 == 0, pick + 1, pick)  # a bias of -inf excludes these
    pick[::2, 1], pick[:, 2], pick[::3, 4] = pick[::2, 0], pair.row_key, -1
    valid = (pair.row_key >= 0)[:, None]
    coming = torch.randn(70, 5, generator=generator) * valid
    pair, grad = dataclasses.replace(pair, pick=pick), dataclasses.replace(grad, row_picked=coming)
    check(pair, with_entropy(grad) if entropy else grad, softcap=softcap, row_entropy=entropy, row_picked=True)
    spec = PairSpec(row_lse=True, positive="one", drop_rows=True, row_picked=True)
    _, plan = TritonFilter().forward(pair, spec, OPTIONS)
    place = places_of(plan.order, pair, pick)
    kept = plan.mass[(place // plans.tile_width(331)).clamp(min=0), torch.arange(70)[:, None]] < 0
    assert kept[valid & (place >= 0)].all()


def test_token_statistics_one_at_a_time():
    pair, grad = make_pair(torch.float32, n=40, m=200)
    alone = GradStats(row_entropy=with_entropy(grad).row_entropy)
    check(pair, alone, row_entropy=True, positive="none")
    check(pair, grad, row_top=True)


def test_token_statistics_in_a_small_workspace(monkeypatch):
    """Several chunks of columns and blocks of rows."""
    pair, grad = make_pair(torch.float32, n=150)
    monkeypatch.setattr(TileOptions, "workspace_bytes", 2**15)
    monkeypatch.setattr(sizes, "INTERPRETED_PAIRS", PairSizes(16, 32, 16, 1, 1, 1))
    check(pair, with_entropy(grad), row_entropy=True, row_top=True)


@pytest.mark.parametrize("entropy", [False, True], ids=["loss", "entropy"])
def test_the_tolerance_of_rounding(entropy):
    """Confident rows drop less. The scores are small enough that float16 does not take the exact path."""
    options = dataclasses.replace(OPTIONS, filter_tolerance="rounding")
    pair, grad = make_pair(torch.float16, n=40, m=600, zero=False)
    pair.a[:20] += pair.b[pair.row_key[:20]]
    check(pair, with_entropy(grad) if entropy else grad, options=options, row_entropy=entropy)


def test_nan_is_the_largest_score():
    pair, grad = make_pair(torch.float32, n=40, m=200)
    pair.a[7, 3] = torch.nan
    spec = PairSpec(row_lse=True, row_entropy=True, row_top=True, positive="one", drop_rows=True)
    stats, plan = TritonFilter().forward(pair, spec, OPTIONS)
    assert stats.row_top[7].isnan()
    assert stats.row_entropy[7].isnan()
    assert (plan.mass[:, 7] < 0).all()
    got = TritonFilter().backward(pair, stats, plan, with_entropy(grad), ALL, spec, OPTIONS)
    assert got.a[7].isnan().all()
    assert not got.a[8].isnan().any()


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16], ids=["float32", "float16"])
@pytest.mark.parametrize("softcap", [0.0, 12.0])
def test_beside_the_dense_filter(dtype, softcap):
    check(*make_pair(dtype, zero=dtype == torch.float32), softcap=softcap)


def test_rows_that_no_descriptor_can_read():
    pair, grad = make_pair(torch.float16, d=23, bias=False, zero=False)
    check(pair, grad, needs=Needs(a=True, b=True, scale=True))


def test_a_small_workspace(monkeypatch):
    """Several chunks of columns, blocks of rows, groups of tiles and batches of pairs."""
    pair, grad = make_pair(torch.float32, n=150)
    monkeypatch.setattr(TileOptions, "workspace_bytes", 2**14)
    monkeypatch.setattr(sizes, "INTERPRETED_PAIRS", PairSizes(16, 32, 16, 1, 1, 1))
    groups, batches = [], []
    plain_groups, plain_batches = Blocks.groups, Blocks.batches
    monkeypatch.setattr(Blocks, "groups", lambda *args: groups.append(made := list(plain_groups(*args))) or made)
    monkeypatch.setattr(Blocks, "batches", lambda *args: batches.append(made := list(plain_batches(*args))) or made)
    check(pair, grad)
    assert len(groups[0]) > 1
    assert max(len(batch) for batch in batches) > 1


@pytest.mark.parametrize("name", ["a", "b", "scale", "bias"])
def test_one_gradient_alone(name):
    wanted = {other: other == name for other in ("a", "b", "scale", "bias")}
    check(*make_pair(torch.float32, n=40, m=200), needs=Needs(**wanted))


def test_small_incoming_gradients_survive_float16():
    pair, grad = make_pair(torch.float16, zero=False)
    check(pair, GradStats(row_lse=grad.row_lse * 1e-4, row_pos=grad.row_pos * 1e-4))


def test_one_incoming_gradient():
    pair, grad = make_pair(torch.float32, n=40, m=200)
    check(pair, GradStats(row_lse=grad.row_lse))
    check(pair, GradStats(row_pos=grad.row_pos))


def test_what_is_not_a_number_is_kept():
    pair, grad = make_pair(torch.float32, n=40, m=200)
    pair.a[7, 3] = torch.nan
    spec = PairSpec(row_lse=True, positive="one", drop_rows=True)
    stats, plan = TritonFilter().forward(pair, spec, OPTIONS)
    assert stats.row_lse[7].isnan()
    assert (plan.mass[:, 7] < 0).all()
    got = TritonFilter().backward(pair, stats, plan, grad, ALL, spec, OPTIONS)
    assert got.a[7].isnan().all()
    assert not got.a[8].isnan().any()


@pytest.mark.parametrize("size", [1e2, 1e3, 1e4, 1e5])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float16], ids=["float32", "float16"])
def test_large_scores_keep_the_bound_or_take_the_exact_path(dtype, size):
    """Backward multiplies other shapes than forward. Where that rounding is not small, nothing is dropped."""
    pair, grad = make_pair(dtype, bias=False, zero=False)
    valid = pair.row_key >= 0
    products = pair.a.double() @ pair.b.double().T
    pair = dataclasses.replace(pair, scale=(size / products[valid].abs().max()).float())
    spec = PairSpec(row_lse=True, positive="one", drop_rows=True)
    needs = Needs(a=True, b=True)

    def exact(backend, pair):
        return backend.backward(pair, backend.forward(pair, spec, OPTIONS), grad, needs, spec, OPTIONS).a.double()

    stats, plan = TritonFilter().forward(pair, spec, OPTIONS)
    filtered = TritonFilter().backward(pair, stats, plan, grad, needs, spec, OPTIONS)
    assert (filtered is None) == (size >= 1e5)
    if filtered is None:
        assert torch.equal(stats.row_lse[valid], BACKEND.forward(pair, spec, OPTIONS).row_lse[valid])
        got = BACKEND.backward(pair, stats, grad, needs, spec, OPTIONS).a.double()
    else:
        got = filtered.a.double()
    wide = {name: getattr(pair, name).double() for name in ("a", "b", "scale")}
    want = exact(TorchBackend(), dataclasses.replace(pair, **wide))
    unit = pair.scale * grad.row_lse.abs() * pair.b.float().norm(dim=1).max()
    ours, plain = (((x - want).norm(dim=1)[valid] / unit[valid]).max() for x in (got, exact(BACKEND, pair)))
    assert ours <= max(OPTIONS.filter_tolerance, 1.5 * plain)


def test_too_many_pairs(monkeypatch):
    monkeypatch.setattr(plans, "DENSE_SHARE", 1e-6)
    pair, grad = make_pair(torch.float32, n=40, m=200)
    spec = PairSpec(row_lse=True, positive="one", drop_rows=True)
    stats, plan = TritonFilter().forward(pair, spec, OPTIONS)
    assert TritonFilter().backward(pair, stats, plan, grad, ALL, spec, OPTIONS) is None


def test_the_examples_of_the_host_side():
    assert doctest.testmod(filter_forward).failed == 0


@pytest.mark.parametrize("most", [16, 20, 64, 1000])
def test_blocks_cover_every_pair_once(most):
    counts = [0, 7, 1, 0, 64, 65, 3, 0]
    blocks = Blocks(torch.tensor(counts), 16)
    tiles, seen, number = [], [], 0
    for group in blocks.groups(70):
        tiles += range(group.start, group.stop)
        assert sum(counts[group]) <= 70
        for block, pairs in blocks.batches(group, most):
            assert block.start == number
            number = block.stop
            assert 0 < pairs.stop - pairs.start <= most
            seen += range(pairs.start, pairs.stop)
    assert tiles == list(range(8))
    assert seen == list(range(140))
    assert number == sum(-(-count // 16) for count in counts)
