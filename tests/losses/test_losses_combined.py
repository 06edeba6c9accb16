"""Combinations: types of numbers beside types of features, scores far apart, and what a compiled call cannot refuse."""

import pytest
import torch
import torch.nn.functional as F
from tests import oracles
from tests.compare import assert_close, relative_error

import tilewise as tw

pytestmark = pytest.mark.usefixtures("nan_filled_empty")
HALF = (torch.float16, torch.bfloat16)


def random(*shape, seed=0, dtype=torch.float64):
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64).to(dtype)


# Scores far apart -----------------------------------------------------------------------------------------------


def far_rows(n, d=8, seed=0):
    """Features whose products with one another, in the thousands, float32 holds without rounding."""
    return (random(n, d, seed=seed) * 64.0).round().clamp(-128, 128) / 4.0


def far_clip(a, b):
    return tw.clip_loss(a, b, 1.0, reduction="sum")


def dense_far_clip(a, b):
    x_nm, answer = a @ b.T, torch.arange(a.shape[0])
    return (F.cross_entropy(x_nm, answer, reduction="sum") + F.cross_entropy(x_nm.T, answer, reduction="sum")) / 2


def far_info_nce(a, b):
    return tw.info_nce(a, b, b.flip(0) * 2.0, temperature=1.0, reduction="sum")


def dense_far_info_nce(a, b):
    return F.cross_entropy(a @ torch.cat([b, b.flip(0) * 2.0]).T, torch.arange(a.shape[0]), reduction="sum")


def far_cross_entropy(a, b):
    return tw.linear_cross_entropy(
        a, b, torch.arange(a.shape[0]), reduction="sum", options=tw.TileOptions(gradients="backward")
    )


def dense_far_cross_entropy(a, b):
    return F.cross_entropy(a @ b.T, torch.arange(a.shape[0]), reduction="sum")


def far_filtered(a, b):
    options = tw.TileOptions(filter_tolerance=1e-6)
    return tw.linear_cross_entropy(a, b, torch.arange(a.shape[0]), reduction="sum", options=options)


def far_log_sum(a, b):
    return tw.linear_logsumexp(a, b).sum()


def dense_far_log_sum(a, b):
    return (a @ b.T).logsumexp(1).sum()


FAR = {
    "clip": (far_clip, dense_far_clip),
    "info_nce": (far_info_nce, dense_far_info_nce),
    "cross_entropy": (far_cross_entropy, dense_far_cross_entropy),
    "filtered": (far_filtered, dense_far_cross_entropy),
    "logsumexp": (far_log_sum, dense_far_log_sum),
    "nt_xent": (
        lambda a, b: tw.nt_xent(torch.cat([a, b]), temperature=1.0),
        lambda a, b: oracles.nt_xent_dense(torch.cat([a, b]), 1.0),
    ),
}


@pytest.mark.usefixtures("small_tiles")
@pytest.mark.parametrize("name", FAR)
def test_float32_gradients_of_a_loss_of_thousands(name):
    """A float32 log-sum-exp that is 4000 above the answer's score would have probabilities 1e-4 off."""
    ours, dense = FAR[name]
    a = far_rows(130)
    b = -a + far_rows(130, seed=1) / 4.0
    want = torch.autograd.functional.jacobian(dense, (a, b))
    leaves = a.float().requires_grad_(), b.float().requires_grad_()
    loss = ours(*leaves)
    assert_close(loss, dense(a, b), 1e-6)
    for got, right in zip(torch.autograd.grad(loss, leaves), want, strict=True):
        assert_close(got, right, 2e-6, name)


@pytest.mark.parametrize("seed", range(4))
def test_symmetric_scores_round_alike_from_both_ends(seed):
    """x_ij and x_ji stand for one another: rounded apart, a score of 1e5 has a probability 1e-2 off."""
    z = random(40, 3, seed=seed, dtype=torch.float32) * torch.exp(2.0 * random(40, 1, seed=seed + 9)).float()
    want = torch.autograd.functional.jacobian(lambda x: oracles.nt_xent_dense(x, 0.01), z.double())
    plain = torch.autograd.functional.jacobian(lambda x: oracles.nt_xent_dense(x, 0.01), z)
    got = torch.autograd.functional.jacobian(lambda x: tw.nt_xent(x, temperature=0.01), z)
    assert relative_error(got, want) <= 3.0 * relative_error(plain, want) + 1e-5


def test_a_row_far_longer_than_the_others_of_its_label():
    """Its score with itself is 1e6, and those with the others are near 3000: measured from 1e6 these have no digits."""
    z = F.normalize(random(1, 16) + 1e-3 * random(5, 16, seed=1), dim=1)
    z[0] *= 300.0
    z, labels = z.float(), torch.tensor([0, 0, 1, 1, 2])
    want = oracles.supcon_dense(z.double(), labels, 0.1, reduction="none")
    assert 1.0 < want[0] < 10.0
    got = tw.supcon_loss(z, labels, temperature=0.1, reduction="none")
    assert_close(got, want, 1e-6)
    assert_close(got[0], want[0], 5e-4)


@pytest.mark.usefixtures("small_tiles")
def test_many_positives_with_large_scores():
    """The scores of 120 equal rows with one another are 1700: their sum has no digits left in float32."""
    z = random(1, 17, dtype=torch.float32).expand(120, -1)
    labels = torch.arange(120) // 60
    want = oracles.supcon_dense(z.double(), labels, 0.01, reduction="none")
    assert_close(tw.supcon_loss(z, labels, temperature=0.01, reduction="none"), want, 2e-6)


def test_the_next_row_of_a_label():
    from tilewise.losses.supcon import _next_of_label

    assert _next_of_label(torch.tensor([5, -1, 5, 7, 5, -1])).tolist() == [2, 5, 4, 3, 0, 1]
    assert _next_of_label(torch.tensor([], dtype=torch.int64)).tolist() == []


# Types of numbers beside types of features ----------------------------------------------------------------------


TEMPERED = {
    "info_nce": lambda z, t: tw.info_nce(z, z.roll(1, 0), temperature=t),
    "own_negatives": lambda z, t: tw.info_nce(z, z.roll(1, 0), z[:, None] * 2.0, temperature=t, in_batch=False),
    "nt_xent": lambda z, t: tw.nt_xent(z, temperature=t),
    "supcon": lambda z, t: tw.supcon_loss(z, torch.arange(12) // 3, temperature=t),
}


@pytest.mark.parametrize("features", [torch.float64, torch.float32, torch.bfloat16])
@pytest.mark.parametrize("number", [torch.float32, *HALF])
@pytest.mark.parametrize("name", TEMPERED)
def test_a_temperature_is_divided_by_in_the_type_of_the_statistics(name, number, features):
    """1 / 0.07 in bfloat16 is another temperature, 4e-3 away."""
    z = F.normalize(random(12, 8), dim=1).to(features)
    temperature = torch.tensor(0.07, dtype=number, requires_grad=True)
    exact = temperature.detach().double().requires_grad_()
    loss, want = TEMPERED[name](z, temperature), TEMPERED[name](z.double(), exact)
    assert_close(loss, want, 1e-12 if features == torch.float64 else 2e-6)
    loss.backward()
    want.backward()
    assert_close(temperature.grad, exact.grad, 1e-5 if number == torch.float32 else torch.finfo(number).eps)


@pytest.mark.parametrize("gradients", ["forward", "backward"])
def test_a_float16_bias_gets_what_its_columns_could_not_hold(gradients):
    """Each of 300 columns has a gradient of 1e-8, which is 0 in float16; their sum is not."""
    x = F.normalize(random(300, 16, dtype=torch.float32), dim=1)
    bias = torch.tensor(-13.0, dtype=torch.float16, requires_grad=True)
    options = tw.TileOptions(gradients=gradients)
    (1e-8 * tw.siglip_loss(torch.zeros_like(x), x, 1.0, bias, reduction="sum", options=options)).backward()
    assert_close(bias.grad, torch.tensor(-3e-6), 2e-2)


def test_autocast_leaves_the_bias_of_float64_features_alone():
    a, b, bias = random(9, 4), random(20, 4, seed=1), random(20, seed=2).float()
    with torch.autocast("cpu", dtype=torch.bfloat16):
        inside = tw.linear_logsumexp(a, b, bias=bias)
    assert torch.equal(inside, tw.linear_logsumexp(a, b, bias=bias))


@pytest.mark.parametrize("gradients", ["forward", "backward"])
@pytest.mark.parametrize("default", [torch.float64, torch.float16])
def test_the_default_type_is_not_the_loss_s(gradients, default):
    a, c = random(8, 4, dtype=torch.float32).requires_grad_(), random(50, 4, dtype=torch.float32)
    held = torch.get_default_dtype()
    torch.set_default_dtype(default)
    try:
        loss = tw.linear_cross_entropy(a, c, torch.arange(8), options=tw.TileOptions(gradients=gradients))
    finally:
        torch.set_default_dtype(held)
    assert loss.dtype == torch.float32


@pytest.mark.parametrize("shape", [(3, 0), (2, 3, 0), (0, 0), (0,)])
def test_hidden_states_without_features(shape):
    """All logits are the bias, or 0."""
    hidden = torch.zeros(shape, dtype=torch.float64, requires_grad=True)
    weight, bias = torch.zeros(5, 0, dtype=torch.float64), random(5)
    target = torch.zeros(shape[:-1], dtype=torch.int64)
    got = tw.linear_cross_entropy(hidden, weight, target, linear_bias=bias, reduction="none")
    assert_close(got, (bias.logsumexp(0) - bias[0]).expand(shape[:-1]), 1e-12)
    got.sum().backward()
    assert hidden.grad.shape == shape
    assert tw.linear_token_stats(hidden, weight, target, linear_bias=bias).argmax.shape == shape[:-1]


# What a compiled call cannot refuse is not a number -------------------------------------------------------------


def compiled(call):
    torch._dynamo.reset()
    return torch.compile(call, fullgraph=True, backend="aot_eager")


@pytest.mark.parametrize("wrong", [-5, 60])
@pytest.mark.parametrize("gradients", ["forward", "backward"])
@pytest.mark.parametrize("reduction", ["mean", "sum"])
def test_a_target_out_of_range_is_nan(reduction, gradients, wrong):
    """On the CPU a row with a negative key is taken out; this one is not ignored, though, but wrong."""
    options = tw.TileOptions(gradients=gradients)
    a, c, y = random(8, 4).requires_grad_(), random(50, 4, seed=1), torch.arange(8)
    loss = compiled(lambda a, y: tw.linear_cross_entropy(a, c, y, reduction=reduction, options=options))
    y[3] = -100
    assert loss(a, y).isfinite()
    y[4] = wrong
    assert loss(a, y).isnan()


@pytest.mark.parametrize("name", TEMPERED)
def test_a_temperature_that_is_not_positive_is_nan(name):
    z = F.normalize(random(12, 8), dim=1)
    loss = compiled(TEMPERED[name])
    assert loss(z, torch.tensor(0.5)).isfinite()
    for value in (-0.5, 0.0):
        assert loss(z, torch.tensor(value)).isnan(), value


def test_compile_takes_settings_as_symbols():
    """With dynamic=True numbers are symbols, of which no string can be made."""
    a, c, y = random(8, 4).requires_grad_(), random(50, 4, seed=1), torch.arange(8)

    def loss(z_loss, smoothing, ignored, shift):
        return tw.linear_cross_entropy(
            a, c, y, z_loss=z_loss, label_smoothing=smoothing, ignore_index=ignored, shift=shift
        )

    torch._dynamo.reset()
    whole = torch.compile(loss, fullgraph=True, backend="aot_eager", dynamic=True)
    assert_close(whole(0.5, 0.25, 7, 2), loss(0.5, 0.25, 7, 2), 1e-12)
