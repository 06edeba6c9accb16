"""Rounding of gradients computed from saved exponentials, and the share of the positives; in Triton's interpreter."""

import numpy as np
import pytest
import torch
from tests.compare import assert_close, assert_no_worse, relative_error

pytest.importorskip("triton", reason="triton is not installed on this platform")

import triton.language as tl
from tests.kernels.interpreted import IN_THE_INTERPRETER, run_steps
from tests.kernels.one_pass_pairs import ALL, ONE_PASS, SOFTMAX, softmax_pair, take_several_blocks
from triton.runtime import interpreter

from tilewise.kernels.spec import Needs, Pair, RowWeights
from tilewise.kernels.triton_impl.one_pass.products import Exponentials
from tilewise.kernels.triton_impl.one_pass.strategy import gradients, loss_and_gradients
from tilewise.kernels.triton_impl.scores import forget_programs, row_width
from tilewise.kernels.triton_impl.two_pass.rounded_positives import correct_positives

pytestmark = IN_THE_INTERPRETER


@pytest.fixture
def to_nearest(monkeypatch):
    """The interpreter cuts a float32 to a bfloat16; a GPU rounds it."""
    real = interpreter._convert_float

    def convert(values, source, target, mode):
        if (source, target) != (tl.float32, tl.bfloat16):
            return real(values, source, target, mode)
        return torch.tensor(values).bfloat16().view(torch.int16).numpy().view(np.uint16)

    monkeypatch.setattr(interpreter, "_convert_float", convert)


@pytest.fixture
def several_blocks(monkeypatch):
    """So little memory that a hundred rows need several blocks, and their gradients several pieces."""
    take_several_blocks(monkeypatch)


def exponentials_of(pair, dtype, each):
    """Features in ``dtype``, and their exponentials. Computed here: the interpreter gets bfloat16 products wrong."""
    half = Pair(**(vars(pair) | {"a": pair.a.to(dtype), "b": pair.b.to(dtype)}))
    x = pair.scale * half.a.float() @ half.b.float().T
    counts, column = each != 0, pair.row_key.clamp(min=0)
    e = (x - x.gather(1, column[:, None])).exp()
    total = e.sum(1)
    entry = torch.where(counts, 1.0 - total, 0.0)
    e[~counts] = 0.0
    e.scatter_(1, column[:, None], entry[:, None])
    column = torch.where(counts, column, -1).int()
    memory = torch.full((len(e), row_width(e.shape[1], dtype)), torch.nan, dtype=dtype)
    memory[:, : e.shape[1]] = e
    return half, Exponentials(e=memory, factor=each / total, entry=entry, column=column)


def dense_gradients(pair, each, k):
    """Of a and b, in their type."""
    leaves = [pair.a.detach().requires_grad_(), pair.b.detach().requires_grad_()]
    logits = pair.scale.item() * leaves[0] @ leaves[1].T
    logits = logits.float() if pair.a.dtype != torch.float64 else logits
    nats = torch.nn.functional.cross_entropy(logits, pair.row_key, reduction="none", ignore_index=-1)
    return torch.autograd.grad(k * (each.to(nats.dtype) * nats).sum(), leaves)


def as_float64(pair):
    return Pair(**(vars(pair) | {"a": pair.a.double(), "b": pair.b.double()}))


@pytest.mark.usefixtures("to_nearest")
def test_gradients_of_bfloat16_exponentials_are_rounded_once():
    """Their error is the same whatever comes in, and by our rule no worse than that of a dense loss."""
    pair, _ = softmax_pair(200, 300, 48, 3.0)
    each = torch.full((200,), 1 / 200)
    half, held = exponentials_of(pair, torch.bfloat16, each)
    errors = {}
    for k in (1.0, 3.0, 1.0 + 2.0**-9):
        grads = gradients(held, half, torch.tensor(k), Needs(scale=True, bias=True), ONE_PASS)
        exact = dense_gradients(as_float64(half), each, k)
        for got, theirs, want in zip((grads.a, grads.b), dense_gradients(half, each, k), exact, strict=True):
            assert got.dtype == torch.bfloat16
            assert_no_worse(got, theirs, want)
        errors[k] = relative_error(grads.a, exact[0]), relative_error(grads.b, exact[1])
        assert max(errors[k][0] / errors[1.0][0], errors[k][1] / errors[1.0][1]) < 1.05  # two roundings: 1.13 to 1.21
        assert_close(grads.scale, (exact[0] * half.a.double()).sum() / 3.0, 2e-3)


# The positives' share ----------------------------------------------------------------------------------------------


def flat(n=64, m=20_000, d=64):
    """Scores near 0: each row's gradient is its positive, and the rest drowns in rounding."""
    return softmax_pair(n, m, d, 1.0)[0], torch.full((n,), 1 / n)


def calibrated():
    """Rows that are nearly alike, and classes as frequent as predicted: the negatives' share cancels the positives'."""
    pair, _ = softmax_pair(512, 300, 64, 1.0)
    middle = torch.randn(1, 64, generator=torch.Generator().manual_seed(1))
    share = torch.log_softmax(-torch.arange(1, 301).float().log(), 0)
    pair.a.mul_(1.6).add_(middle)
    pair.b.mul_(0.1).add_(share[:, None] * middle / middle.square().sum())
    key = torch.multinomial(share.exp(), 512, replacement=True, generator=torch.Generator().manual_seed(2))
    return Pair(**(vars(pair) | {"row_key": key})), torch.full((512,), 1 / 512)


def repeated():
    """Few classes, one of them in most rows: more than a block of them."""
    pair, each = flat(n=200, m=3000)
    key = torch.where(torch.arange(200) % 5 < 3, 7, pair.row_key % 30)
    return Pair(**(vars(pair) | {"row_key": key})), each


def ignored():
    """Rows without a positive, and classes of different weight."""
    pair, each = flat(n=256, m=3000)
    key, each = pair.row_key.clone(), each * torch.linspace(0.5, 2.0, 256)
    key[::3], each[::3] = -1, 0.0
    return Pair(**(vars(pair) | {"row_key": key})), each


@pytest.mark.usefixtures("to_nearest")
@pytest.mark.parametrize("make, k", [(flat, 3.0), (calibrated, 3.0), (repeated, 1.0), (ignored, 3.0)])
def test_the_positives_share_is_as_exact_as_that_of_a_dense_loss(make, k):
    pair, each = make()
    half, held = exponentials_of(pair, torch.bfloat16, each)
    wanted = Needs(scale=True, bias=len(pair.b) < 10_000)  # slow in the interpreter
    grads = gradients(held, half, torch.tensor(k), wanted, ONE_PASS)
    exact, dense = dense_gradients(as_float64(half), each, k), dense_gradients(half, each, k)
    assert_no_worse(grads.a, dense[0], exact[0], "rows")
    assert_no_worse(grads.b, dense[1], exact[1], "columns")
    dots = (exact[0] * half.a.double()).sum(1) / pair.scale
    assert abs(grads.scale - dots.sum()) <= 1e-4 * dots.abs().sum()
    if wanted.bias:
        g = torch.softmax(pair.scale.double() * half.a.double() @ half.b.double().T, 1)
        g.scatter_add_(1, pair.row_key.clamp(min=0)[:, None], torch.full((len(g), 1), -1.0).double())
        assert_close(grads.bias, (k * each[:, None] * g).sum(0), 5e-4)


@pytest.mark.usefixtures("to_nearest")
def test_without_the_correction_it_is_not(monkeypatch):
    pair, each = flat()
    half, held = exponentials_of(pair, torch.bfloat16, each)
    exact, dense = dense_gradients(as_float64(half), each, 1.0), dense_gradients(half, each, 1.0)
    monkeypatch.setattr(Exponentials, "rounded", False)
    grads = gradients(held, half, torch.ones(()), Needs(), ONE_PASS)
    assert relative_error(grads.b, exact[1]) > 2.5 * relative_error(dense[1], exact[1])
    assert relative_error(grads.a, exact[0]) > 1.3 * relative_error(dense[0], exact[0])


def test_a_gradient_saved_in_float32_has_the_whole_share(monkeypatch, several_blocks):
    """All kernels, in float16: what is left is the rounding of E among the negatives."""
    made = flat(n=200, m=400, d=24)[0]
    pair = Pair(**(vars(made) | {"a": made.a.half(), "b": made.b.half()}))
    pair.row_key[:50] = 3
    _, grads = loss_and_gradients(pair, RowWeights(each=torch.ones(200)), ALL, SOFTMAX, ONE_PASS)
    exact = dense_gradients(as_float64(pair), torch.ones(200), 1.0)
    monkeypatch.setattr(Exponentials, "rounded", False)
    forget_programs()
    _, plain = loss_and_gradients(pair, RowWeights(each=torch.ones(200)), ALL, SOFTMAX, ONE_PASS)
    for got, before, want in zip((grads.a, grads.b), (plain.a, plain.b), exact, strict=True):
        assert got.dtype == torch.float32
        assert relative_error(got, want) < 3e-5 < 1e-4 < relative_error(before, want)
    assert_close(grads.scale, (exact[0] * pair.a.double()).sum() / pair.scale, 1e-4)


def correct(pair, grad, column, *, has_scale=False, **given):
    """`correct_positives` of ``grad``."""

    def build(scores, more):
        vectors = {name: more[name] for name in given}
        scale = scores.scale if has_scale else None
        correct_positives(scores, more["grad"], (more["sorted"], more["order"]), a=scores.a, scale=scale, **vectors)
        return []

    ascending, order = column.sort(stable=True)
    run_steps(build, pair, SOFTMAX, ONE_PASS, grad=grad, sorted=ascending, order=order, **given)


@pytest.mark.parametrize("most, scale", [(1, 1.5), (64, 1.5), (65, 1.0), (300, 1.5)])
def test_a_column_may_have_any_number_of_rows(most, scale):
    """Those of a long run are added up in several parts; a row without a positive has none."""
    generator = torch.Generator().manual_seed(most)
    n, d, columns = 330, 40, 50
    a, scaled = torch.randn(n, d, generator=generator), torch.randn(n, d, generator=generator).half()
    entry, factor = torch.randn(n, generator=generator), torch.rand(n, generator=generator)
    column = torch.randint(0, columns, (n,), generator=generator, dtype=torch.int32)
    column[torch.randperm(n, generator=generator)[:most]] = 7
    column[::30] = -1
    pair = Pair(a=a.half(), b=a.half(), scale=torch.tensor(1.5))
    grad = torch.zeros(columns, d)
    correct(pair, grad, column, has_scale=scale != 1.0, scaled=scaled, factor=factor, entry=entry)
    exact = scale * (factor * entry).double()[:, None] * pair.a.double()
    each = exact - entry.half().double()[:, None] * scaled.double()
    want = torch.zeros(columns, d).double().index_add_(0, column.clamp(min=0), each * (column >= 0)[:, None])
    assert_close(grad, want, 1e-6)


@pytest.mark.usefixtures("to_nearest")
@pytest.mark.parametrize("negatives", [0.0, 1e-3, 4e-3, 1.0])
def test_two_roundings_leave_little_more_than_one(negatives):
    """For any share of the negatives, most of the first rounding is removed."""
    generator = torch.Generator().manual_seed(0)
    a, other = (torch.randn(128, 200, generator=generator) for _ in range(2))
    a, entry = a.bfloat16(), -torch.rand(128, generator=generator) - 1.0
    factor, k = 1.0 / -entry, torch.tensor(3.0)
    scaled = (k * factor[:, None] * a).bfloat16()
    share = negatives * other
    grad = (share + entry.bfloat16()[:, None].float() * scaled.float()).bfloat16()
    column = torch.arange(128, dtype=torch.int32)
    pair = Pair(a=a, b=a, scale=torch.ones(()))
    correct(pair, grad, column, scaled=scaled, factor=k * factor, entry=entry)
    want = share.double() - 3.0 * a.double()
    assert relative_error(grad, want) <= 1.45 * relative_error(want.bfloat16(), want)


def test_nan_in_one_row_reaches_its_column_only_through_it():
    """A class that has no positive is not touched, and a NaN is not lost in what is estimated."""
    pair, each = flat(n=20, m=60)
    pair.a[3] = torch.nan
    half, held = exponentials_of(pair, torch.bfloat16, each)
    grads = gradients(held, half, torch.ones(()), Needs(), ONE_PASS)
    assert grads.a[3].isnan().all()
    assert grads.b[pair.row_key[3]].isnan().all()
    assert not grads.a[4:].isnan().any()
