"""Faults that were found in other libraries for this job. None of them may ever be ours.

Those that need a process group, a GPU, the gradient cache or retrieval are tested with those parts.
"""

import math

import pytest
import torch
import torch.nn.functional as F
from tests import oracles
from tests.compare import assert_close, relative_error

import tilewise as tw
from tilewise.kernels.spec import Pair, PairSpec, Stats
from tilewise.kernels.torch_impl.backend import TorchBackend
from tilewise.options import TileOptions

pytestmark = pytest.mark.usefixtures("nan_filled_empty", "small_tiles")


def unit(n, d, seed=0, dtype=torch.float32):
    rows = torch.randn(n, d, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)
    return F.normalize(rows, dim=1).to(dtype).requires_grad_()


def gradients(loss, *leaves):
    return torch.autograd.grad(loss, leaves)


# Inf-CLIP -------------------------------------------------------------------------------------------------------


def test_infclip_ring_without_the_maximum_is_nan_at_scale_100():
    """Blocks are merged with their maxima, whatever the scores."""
    a, b = unit(60, 8).detach(), unit(90, 8, 1).detach()
    spec = PairSpec(row_lse=True)
    for scale in (100.0, 1000.0, 1e5):
        merged = Stats()
        for start in range(0, 90, 30):
            block = Pair(a=a, b=b[start : start + 30], scale=torch.tensor(scale))
            merged = merged.merge(TorchBackend().forward(block, spec, TileOptions()))
        want = torch.logsumexp(scale * a.double() @ b.double().T, 1)
        assert_close(merged.row_lse, want, 1e-6)


@pytest.mark.parametrize("n", [1, 2, 3, 31, 63, 64, 65, 96, 127, 128, 129, 191])
def test_infclip_and_memeff_wrong_when_rows_do_not_fill_a_tile(n):
    a, b = unit(n, 16, dtype=torch.float64), unit(n, 16, 1, torch.float64)
    loss, want = tw.clip_loss(a, b, 14.0), oracles.clip_dense(a, b, 14.0)
    assert abs(loss - want) < 1e-12
    for got, right in zip(gradients(loss, a, b), gradients(want, a, b), strict=True):
        assert (got - right).abs().max() < 1e-13


def test_infclip_padded_columns_enter_the_maximum():
    """All scores near -120: a padded score of 0 would be the maximum, and the sum would underflow to -inf."""
    a = (torch.ones(50, 16) + 0.01 * torch.randn(50, 16, generator=torch.Generator().manual_seed(0))).requires_grad_()
    b = (-a.detach()).requires_grad_()
    loss, want = tw.clip_loss(a, b, 7.5), oracles.clip_dense(a.double(), b.double(), 7.5)
    assert_close(loss, want, 2e-6)
    lse = tw.linear_logsumexp(a, b, scale=7.5)
    assert lse.max() < -110
    assert_close(lse, torch.logsumexp(7.5 * a.double() @ b.double().T, 1), 1e-6)


def test_infclip_strided_inputs_silently_wrong():
    wide = torch.randn(100, 64, generator=torch.Generator().manual_seed(0), dtype=torch.float64)
    a, b = wide[:, ::2], wide.T[:32, :].T
    assert not a.is_contiguous()
    assert not b.is_contiguous()
    assert_close(tw.clip_loss(a, b, 0.3), oracles.clip_dense(a.contiguous(), b.contiguous(), 0.3), 1e-12)


@pytest.mark.parametrize("d", [1, 2, 3, 5, 17, 100, 255, 257, 300, 768])
def test_infclip_widths_that_are_no_power_of_two(d):
    a, b = unit(40, d, dtype=torch.float64), unit(40, d, 1, torch.float64)
    loss, want = tw.clip_loss(a, b, 14.0), oracles.clip_dense(a, b, 14.0)
    assert_close(loss, want, 1e-12)
    for got, right in zip(gradients(loss, a, b), gradients(want, a, b), strict=True):
        assert_close(got, right, 1e-12)


def test_infclip_truncated_products_make_the_loss_negative_at_scale_100():
    a = unit(200, 64)
    rows = tw.clip_loss(a, a, 100.0, reduction="none")
    want = oracles.clip_dense(a.double(), a.double(), 100.0, "none")
    assert rows.min() > -1e-6
    assert (rows - want).abs().max() < 1e-6


def test_infclip_under_autocast_the_positive_is_computed_in_bfloat16():
    """At scale 100 a positive rounded to bfloat16 is off by 0.25. Ours is that of the rounded features, exactly."""
    a, b = unit(100, 32), unit(100, 32, 1)
    with torch.autocast("cpu", torch.bfloat16):
        rows = tw.clip_loss(a, b, 100.0, reduction="none")
    want = oracles.clip_dense(a.bfloat16().double(), b.bfloat16().double(), 100.0, "none")
    assert (rows - want).abs().max() < 1e-4


# memeff ---------------------------------------------------------------------------------------------------------


def test_memeff_temperature_is_not_learnable():
    a, b = unit(70, 16, dtype=torch.float64), unit(70, 16, 1, torch.float64)
    scale = torch.tensor(9.0, dtype=torch.float64, requires_grad=True)
    (grad,) = gradients(tw.clip_loss(a, b, scale), scale)
    (want,) = gradients(oracles.clip_dense(a, b, scale), scale)
    assert_close(grad, want, 1e-12)
    assert want.abs() > 1e-3


def test_memeff_default_rescales_the_gradient():
    a, b = unit(70, 16, dtype=torch.float64), unit(70, 16, 1, torch.float64)
    for scale in (1.0, 10.0, 100.0):
        (grad,) = gradients(tw.clip_loss(a, b, scale), a)
        (want,) = gradients(oracles.clip_dense(a, b, scale), a)
        assert_close(grad, want, 1e-12)


def test_memeff_fixed_shift_underflows_near_temperature_0_01():
    """Shifted by 1 / T = 100, the exponentials of scores near -100 vanish in float32."""
    a = unit(70, 16)
    b = (-a.detach()).requires_grad_()
    loss, want = tw.info_nce(a, b, temperature=0.01), oracles.info_nce_dense(a.double(), b.double(), None, 0.01)
    assert_close(loss, want, 2e-6)
    exact = a.detach().double().requires_grad_()
    (want_grad,) = gradients(oracles.info_nce_dense(exact, b.double(), None, 0.01), exact)
    assert_close(gradients(loss, a)[0], want_grad, 1e-5)


# siglip-kernel --------------------------------------------------------------------------------------------------


def test_siglip_kernel_accumulates_the_loss_in_bfloat16():
    a, b = unit(300, 16, dtype=torch.bfloat16), unit(300, 16, 1, torch.bfloat16)
    loss = tw.siglip_loss(a, b, 10.0, -5.0)
    assert loss.dtype == torch.float32
    assert_close(loss, oracles.siglip_dense(a.double(), b.double(), 10.0, -5.0), 1e-6)


def test_siglip_kernel_accumulates_text_gradients_in_bfloat16():
    """A sum of a thousand equal terms stops growing in bfloat16 at 256 times a term."""
    a = unit(1, 16, dtype=torch.bfloat16).detach().expand(1000, 16)
    b = unit(1000, 16, 1, torch.bfloat16)
    (grad,) = gradients(tw.siglip_loss(a, b, 10.0, 0.0, reduction="sum"), b)
    exact = b.detach().double().requires_grad_()
    (want,) = gradients(oracles.siglip_dense(a.double(), exact, 10.0, 0.0, "sum"), exact)
    assert grad.dtype == torch.bfloat16
    assert relative_error(grad, want) < 2.0**-8


def test_siglip_kernel_takes_gradient_products_even_under_no_grad(monkeypatch):
    monkeypatch.setattr(TorchBackend, "backward", None)
    a, b = unit(40, 16), unit(40, 16, 1)
    with torch.no_grad():
        assert tw.siglip_loss(a, b, 10.0, -5.0).isfinite()


# CCE, Liger, PyTorch --------------------------------------------------------------------------------------------


def test_cce_padded_columns_add_exp_of_the_cap():
    """Capped scores of -5 each: a padded column at -cap would add as much as a real one."""
    hidden = torch.ones(30, 8, dtype=torch.float64, requires_grad=True)
    classifier = torch.full((50, 8), -100.0, dtype=torch.float64)
    loss = tw.linear_cross_entropy(hidden, classifier, torch.arange(30), softcap=5.0)
    assert_close(loss, torch.tensor(math.log(50), dtype=torch.float64), 1e-12)
    lse = tw.linear_logsumexp(hidden, classifier, softcap=5.0)
    assert_close(lse, torch.full((30,), math.log(50) - 5.0, dtype=torch.float64), 1e-12)


def test_cce_default_filter_drops_mass_of_flat_scores():
    """Every class has probability near 1/4000, below CCE's 2**-12: its default loses most of the gradient."""
    classes = 5000
    mean = torch.ones(1, 16, dtype=torch.float64)
    hidden = unit(40, 16, dtype=torch.float64)
    classifier = (mean + 0.1 * unit(classes, 16, 1, torch.float64)).detach().requires_grad_()
    target = torch.arange(40)
    got = gradients(tw.linear_cross_entropy(hidden, classifier, target), hidden, classifier)
    want = gradients(F.cross_entropy(hidden @ classifier.T, target), hidden, classifier)
    for one, other in zip(got, want, strict=True):
        assert_close(one, other, 1e-12)


def test_cce_sums_depend_on_the_order_of_execution():
    a, b = unit(300, 16), unit(400, 16, 1)
    runs = [gradients(tw.linear_cross_entropy(a, b, torch.arange(300), logit_scale=20.0), a, b) for _ in range(3)]
    assert all(torch.equal(one, other) for run in runs[1:] for one, other in zip(runs[0], run, strict=True))


def test_pytorch_native_accumulates_the_loss_in_bfloat16():
    hidden = unit(64, 32, dtype=torch.bfloat16)
    classifier = (3.0 * unit(9000, 32, 1, torch.float64)).bfloat16()
    target = torch.arange(64) * 100
    loss = tw.linear_cross_entropy(hidden, classifier, target)
    want = F.cross_entropy(hidden.double() @ classifier.double().T, target)
    assert loss.dtype == torch.float32
    assert abs(loss - want) < 1e-5


@pytest.mark.parametrize("shape", [(), (12,), (3, 4), (2, 3, 2)])
def test_pytorch_native_refuses_leading_dimensions(shape):
    rows = math.prod(shape)
    hidden, classifier = unit(rows, 16, dtype=torch.float64), unit(50, 16, 1, torch.float64)
    target = torch.arange(rows) * 3
    shaped = tw.linear_cross_entropy(hidden.reshape(*shape, 16), classifier, target.reshape(shape), reduction="none")
    want = F.cross_entropy(hidden @ classifier.T, target, reduction="none")
    assert shaped.shape == shape
    assert_close(shaped.reshape(-1), want, 1e-12)


def test_liger_wrong_gradients_for_reduction_none():
    hidden, classifier = unit(40, 16, dtype=torch.float64), unit(90, 16, 1, torch.float64)
    target = torch.arange(40)
    weights = torch.linspace(-2.0, 3.0, 40, dtype=torch.float64)
    loss = (tw.linear_cross_entropy(hidden, classifier, target, reduction="none") * weights).sum()
    want = (F.cross_entropy(hidden @ classifier.T, target, reduction="none") * weights).sum()
    for one, other in zip(gradients(loss, hidden, classifier), gradients(want, hidden, classifier), strict=True):
        assert_close(one, other, 1e-12)


def test_liger_accumulates_the_classifier_gradient_in_bfloat16():
    """2,000 tokens of one class, each adding about the same to its row."""
    hidden = (torch.ones(2000, 8) + 0.01 * torch.randn(2000, 8, generator=torch.Generator().manual_seed(0))).bfloat16()
    classifier = unit(30, 8, 1, torch.bfloat16)
    target = torch.full((2000,), 7)
    (grad,) = gradients(tw.linear_cross_entropy(hidden, classifier, target, reduction="sum"), classifier)
    exact = classifier.detach().double().requires_grad_()
    (want,) = gradients(F.cross_entropy(hidden.double() @ exact.T, target, reduction="sum"), exact)
    assert relative_error(grad, want) < 2.0**-8


# sentence-transformers, lightly ---------------------------------------------------------------------------------


def test_sentence_transformers_scale_gets_its_gradient_during_forward():
    a, b = unit(40, 16), unit(40, 16, 1)
    scale = torch.nn.Parameter(torch.tensor(20.0))
    loss = tw.clip_loss(a, b, scale)
    assert scale.grad is None
    (0.5 * loss).backward()
    (want,) = gradients(oracles.clip_dense(a, b, scale), scale)
    assert_close(scale.grad, 0.5 * want, 1e-5)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_lightly_and_solo_learn_nan_at_temperature_0_01(dtype):
    z = unit(80, 16, dtype=dtype)
    loss = tw.nt_xent(z, temperature=0.01)
    assert_close(loss, oracles.nt_xent_dense(z.double(), 0.01), 1e-5)
    assert gradients(loss, z)[0].isfinite().all()


def test_nothing_is_nan_when_a_query_has_only_padding_as_negatives():
    """open_clip and NeMo: hard negatives padded with -inf or NaN poison the gradient."""
    query, key = unit(20, 16), unit(20, 16, 1)
    negatives = torch.full((20, 3, 16), torch.nan, requires_grad=True)
    mask = torch.zeros(20, 3, dtype=torch.bool)
    loss = tw.info_nce(query, key, negatives, negative_mask=mask)
    assert_close(loss, tw.info_nce(query, key), 1e-6)
    for grad in gradients(loss, query, key, negatives):
        assert grad.isfinite().all()
