"""What must hold whatever the numbers are, and the inputs on which such losses break elsewhere."""

import math

import pytest
import torch
import torch.nn.functional as F
from tests import oracles
from tests.compare import assert_close, relative_error
from tests.losses.loss_cases import CASES, Maker, converted, problem, solve, upstream_like

import tilewise as tw

EXACT = 1e-12
pytestmark = pytest.mark.usefixtures("nan_filled_empty")


def unit(n, d, seed=0, dtype=torch.float64):
    return Maker(dtype, d=d, seed=seed).unit(n).requires_grad_()


# How it is computed does not matter -----------------------------------------------------------------------------


@pytest.mark.parametrize("name", CASES)
def test_tile_sizes_do_not_matter(name, set_tiles):
    made = problem(name)
    want, want_grads = solve(made.ours, made.leaves)
    for rows, cols in ((16, 16), (1, 200), (200, 1), (33, 7), (130, 130)):
        set_tiles(rows, cols, max(rows, 16))
        loss, grads = solve(made.ours, made.leaves)
        assert_close(loss, want, 1e-13)
        for leaf in want_grads:
            assert_close(grads[leaf], want_grads[leaf], EXACT, leaf)


@pytest.mark.parametrize("name", ["clip", "supcon", "siglip", "cross_entropy_everything"])
def test_the_workspace_does_not_matter(name):
    made = problem(name, n=700, d=8)
    (want, want_grads), (loss, grads) = (
        solve(made.ours, made.leaves, options=tw.TileOptions(workspace_mib=mib)) for mib in (256, 1)
    )
    assert_close(loss, want, 1e-13)
    for leaf in want_grads:
        assert_close(grads[leaf], want_grads[leaf], EXACT, leaf)


@pytest.mark.usefixtures("small_tiles")
def test_permuting_the_pairs_permutes_the_losses():
    image, text = unit(130, 24), unit(130, 24, seed=1)
    order = torch.randperm(130, generator=torch.Generator().manual_seed(2))
    upstream = torch.rand(130, dtype=torch.float64)
    for loss in (
        lambda a, b: tw.clip_loss(a, b, 14.0, reduction="none"),
        lambda a, b: tw.siglip_loss(a, b, 14.0, -3.0, reduction="none"),
        lambda a, b: tw.info_nce(a, b, symmetric=True, reduction="none"),
    ):
        plain, shuffled = loss(image, text), loss(image[order], text[order])
        assert_close(shuffled, plain[order], EXACT)
        one = torch.autograd.grad(plain, [image, text], upstream)
        other = torch.autograd.grad(shuffled, [image, text], upstream[order])
        assert all(relative_error(x, y) < EXACT for x, y in zip(other, one, strict=True))


@pytest.mark.usefixtures("small_tiles")
def test_permuting_samples_permutes_their_losses():
    z, labels = unit(130, 24), torch.arange(130) % 9
    order = torch.randperm(130, generator=torch.Generator().manual_seed(2))
    assert_close(
        tw.supcon_loss(z[order], labels[order], reduction="none"),
        tw.supcon_loss(z, labels, reduction="none")[order],
        EXACT,
    )
    samples = order[order < 65]
    views = torch.cat([samples, samples + 65])
    assert_close(tw.nt_xent(z[views], reduction="none"), tw.nt_xent(z, reduction="none")[views], EXACT)


# What a softmax cannot see --------------------------------------------------------------------------------------


@pytest.mark.usefixtures("small_tiles")
def test_a_shift_of_all_scores_of_a_row_changes_nothing():
    query, key = unit(130, 24), unit(130, 24, seed=1)
    plain = tw.info_nce(query, key, temperature=0.1)
    moved = tw.info_nce(query, key + 3.0 * torch.ones(24, dtype=torch.float64), temperature=0.1)
    assert_close(moved, plain, EXACT)
    target, bias = torch.arange(130) % 77, torch.randn(130, dtype=torch.float64)
    low, high = (tw.linear_cross_entropy(query, key, target, linear_bias=bias + by) for by in (0.0, 1000.0))
    assert_close(high, low, EXACT)


@pytest.mark.usefixtures("small_tiles")
def test_gradients_of_the_scores_of_a_row_add_up_to_zero():
    """The last feature of every key is 1, so the gradient of a query's last feature is the sum over its scores."""
    query, key = unit(130, 24), unit(130, 24, seed=1)
    with torch.no_grad():
        key[:, -1] = 1.0
    upstream = torch.randn(130, dtype=torch.float64)
    (grad,) = torch.autograd.grad(tw.info_nce(query, key, reduction="none"), query, upstream)
    assert grad[:, -1].abs().max() < 1e-13 * grad.abs().max()


@pytest.mark.usefixtures("small_tiles")
def test_gradients_of_the_bias_add_up_to_zero():
    hidden, classifier = unit(60, 24), unit(130, 24, seed=1)
    bias = torch.randn(130, dtype=torch.float64, requires_grad=True)
    for settings in ({}, {"label_smoothing": 0.2}):
        loss = tw.linear_cross_entropy(hidden, classifier, torch.arange(60), linear_bias=bias, **settings)
        (grad,) = torch.autograd.grad(loss, bias)
        assert abs(grad.sum()) < 1e-14
        assert grad.abs().sum() > 0.5


def test_clip_is_symmetric_in_images_and_texts():
    image, text = unit(130, 24), unit(130, 24, seed=1)
    assert_close(tw.clip_loss(image, text, 14.0), tw.clip_loss(text, image, 14.0), EXACT)


def test_losses_that_are_one_another():
    image, text = unit(130, 24), unit(130, 24, seed=1)
    assert_close(tw.info_nce(image, text, temperature=0.1, symmetric=True), tw.clip_loss(image, text, 10.0), EXACT)
    labels = torch.arange(130) % 65
    assert_close(tw.supcon_loss(image, labels, temperature=0.5), tw.nt_xent(image), EXACT)
    row = tw.info_nce(image, text, temperature=0.1)
    assert_close(tw.linear_cross_entropy(image, text, torch.arange(130), logit_scale=10.0), row, EXACT)
    lse = tw.linear_logsumexp(image, text, scale=10.0)
    assert_close((lse - 10.0 * (image * text).sum(1)).mean(), row, EXACT)


# Hard inputs ----------------------------------------------------------------------------------------------------


@pytest.mark.usefixtures("small_tiles")
@pytest.mark.parametrize("size", [1000.0, 100.0])
@pytest.mark.parametrize("name", ["clip", "siglip", "nt_xent", "supcon", "info_nce_symmetric", "cross_entropy_bias"])
def test_large_scores(name, size):
    """Scores of +-1000, or a temperature of 0.001 to 0.01."""
    made = problem(name)
    leaves = dict(made.leaves)
    scalar = "scale" if "scale" in leaves else "temperature"
    value = size if scalar == "scale" else 1.0 / size
    leaves[scalar] = torch.tensor(value, dtype=torch.float64, requires_grad=True)
    loss, grads = solve(made.ours, leaves)
    want, want_grads = solve(made.dense, leaves)
    assert_close(loss, want, EXACT)
    for leaf in want_grads:
        assert_close(grads[leaf], want_grads[leaf], 1e-11 if leaf == scalar else EXACT, leaf)
    single, single_grads = solve(made.ours, converted(leaves, torch.float32))
    assert_close(single, want, 5e-6)
    assert all(grad.isfinite().all() for grad in single_grads.values())


def test_aligned_pairs_at_scale_100_keep_their_small_loss():
    """Scores of the answers are near 100 and the loss near 1e-4: a float32 difference of the two would be all noise."""
    image = unit(256, 128, dtype=torch.float32)
    text = F.normalize(image.detach() + 0.17 * torch.randn(256, 128, generator=torch.Generator().manual_seed(0)), dim=1)
    want_rows = oracles.clip_dense(image.double(), text.double(), 100.0, "none")
    want = want_rows.mean()
    assert 1e-4 < want < 1e-3, want
    rows = tw.clip_loss(image, text, 100.0, reduction="none")
    assert abs(rows.mean() / want - 1.0) < 1e-3
    assert rows.min() > -1e-6
    for loss, dense in (
        (tw.info_nce(image, text, temperature=0.01), oracles.info_nce_dense(image.double(), text.double(), None, 0.01)),
        (
            tw.linear_cross_entropy(image, text, torch.arange(256), logit_scale=100.0),
            F.cross_entropy(100.0 * image.double() @ text.double().T, torch.arange(256)),
        ),
    ):
        assert abs(loss / dense - 1.0) < 1e-3
    (grad,) = torch.autograd.grad(tw.clip_loss(image, text, 100.0), image)
    exact = image.detach().double().requires_grad_()
    (want_grad,) = torch.autograd.grad(oracles.clip_dense(exact, text.double(), 100.0), exact)
    assert_close(grad, want_grad, 1e-3)


@pytest.mark.usefixtures("small_tiles")
@pytest.mark.parametrize("name", CASES)
def test_layouts_in_memory_do_not_matter(name):
    made = problem(name)
    want, want_grads = solve(made.ours, made.leaves)

    def transposed(x):
        return x.detach().mT.contiguous().mT

    def spaced(x):
        wide = x.detach().new_full((*x.shape[:-1], 2 * x.shape[-1]), torch.nan)
        wide[..., ::2] = x.detach()
        return wide[..., ::2]

    for layout in (transposed, spaced):
        leaves = {
            leaf: layout(value).requires_grad_() if value.dim() > 1 else value for leaf, value in made.leaves.items()
        }
        assert not all(value.is_contiguous() for value in leaves.values())
        loss, grads = solve(made.ours, leaves)
        assert_close(loss, want, EXACT)
        for leaf in want_grads:
            assert_close(grads[leaf], want_grads[leaf], EXACT, leaf)


def test_expanded_features():
    row = unit(1, 24)
    other = unit(50, 24, seed=1)
    same = row.expand(50, 24)
    loss, want = tw.clip_loss(same, other, 14.0), oracles.clip_dense(same, other, 14.0)
    assert_close(loss, want, EXACT)
    assert_close(torch.autograd.grad(loss, row)[0], torch.autograd.grad(want, row)[0], EXACT)


@pytest.mark.usefixtures("small_tiles")
def test_duplicates_share_the_probability():
    row = unit(1, 24).detach()
    same = row.expand(130, 24)
    assert_close(tw.clip_loss(same, same, 100.0), torch.tensor(math.log(130), dtype=torch.float64), EXACT)
    assert_close(tw.nt_xent(same), torch.tensor(math.log(129), dtype=torch.float64), EXACT)


def test_one_row():
    image, text = unit(1, 24), unit(1, 24, seed=1)
    for loss in (
        tw.clip_loss(image, text, 100.0),
        tw.info_nce(image, text),
        tw.supcon_loss(image, torch.zeros(1).long()),
    ):
        assert loss.item() == 0.0
        assert not torch.autograd.grad(loss, image)[0].any()
    assert abs(tw.nt_xent(torch.cat([image, text])).item()) <= 1e-16
    assert_close(tw.siglip_loss(image, text, 10.0, -1.0), oracles.siglip_dense(image, text, 10.0, -1.0), EXACT)
    assert_close(
        tw.linear_cross_entropy(image, unit(7, 24), torch.tensor([3])),
        F.cross_entropy(image @ unit(7, 24).T, torch.tensor([3])),
        EXACT,
    )


@pytest.mark.parametrize("name", ["clip", "siglip", "info_nce_symmetric", "nt_xent", "supcon", "logsumexp"])
def test_no_rows(name):
    """The sum of nothing is 0 and its gradient too; the mean of nothing is NaN, as PyTorch has it."""
    made = problem(name, n=0)
    rows, _ = solve(made.ours, made.leaves, torch.zeros(0), reduction="none")
    total, grads = solve(made.ours, made.leaves, reduction="sum")
    assert rows.shape == (0,)
    assert total.item() == 0.0
    for leaf, grad in grads.items():
        assert grad.shape == made.leaves[leaf].shape
        assert not grad.any()
    mean, _ = solve(made.ours, made.leaves, reduction="mean")
    assert mean.isnan()


def test_no_columns():
    a = unit(5, 24)
    lse = tw.linear_logsumexp(a, a[:0])
    assert torch.equal(lse, torch.full((5,), -torch.inf, dtype=torch.float64))
    query, key = unit(5, 24), unit(5, 24, seed=1)
    want = tw.info_nce(query, key)
    assert_close(tw.info_nce(query, key, query[:0]), want, EXACT)
    assert_close(tw.info_nce(query, key, query[:, None][:, :0]), want, EXACT)


@pytest.mark.parametrize("reduction", ["mean", "sum", "none"])
@pytest.mark.parametrize("shape", [(0,), (6,), (2, 3), (0, 3)])
def test_all_rows_ignored_is_what_pytorch_says(shape, reduction):
    hidden = torch.randn(*shape, 24, dtype=torch.float64, requires_grad=True)
    classifier = unit(9, 24)
    target = torch.full(shape, -100)
    loss = tw.linear_cross_entropy(hidden, classifier, target, reduction=reduction, z_loss=0.1, label_smoothing=0.1)
    logits = (hidden @ classifier.T).reshape(-1, 9)
    want = F.cross_entropy(logits, target.reshape(-1), reduction=reduction, label_smoothing=0.1)
    assert torch.equal(loss.reshape(want.shape), want) or (loss.isnan() and want.isnan())
    if reduction != "mean":
        grads = torch.autograd.grad(loss.sum(), [hidden, classifier])
        assert not any(grad.any() for grad in grads)


def test_what_an_ignored_row_holds_does_not_matter():
    hidden, classifier = unit(8, 24), unit(9, 24, seed=1)
    target = torch.arange(8)
    target[2] = target[5] = -100
    spoiled = hidden.detach().clone()
    spoiled[2], spoiled[5] = torch.nan, torch.inf
    spoiled.requires_grad_()
    settings = {"label_smoothing": 0.1, "z_loss": 0.1, "softcap": 5.0}
    plain, other = (tw.linear_cross_entropy(x, classifier, target, **settings) for x in (hidden, spoiled))
    assert torch.equal(plain, other)
    one = torch.autograd.grad(plain, [hidden, classifier])
    two = torch.autograd.grad(other, [spoiled, classifier])
    assert all(torch.equal(x, y) for x, y in zip(one, two, strict=True))
    assert not two[0][2].any()


@pytest.mark.parametrize("shared", [True, False])
@pytest.mark.parametrize("in_batch", [True, False])
def test_what_a_masked_negative_holds_does_not_matter(shared, in_batch):
    query, key = unit(12, 24), unit(12, 24, seed=1)
    shape = (7,) if shared else (12, 7)
    mask = torch.rand(shape, generator=torch.Generator().manual_seed(0)) > 0.5
    mask[..., 3] = False
    clean = Maker(torch.float64, d=24, seed=2).unit(*shape).requires_grad_()
    spoiled = torch.where(mask[..., None], clean.detach(), torch.nan).requires_grad_()
    losses = [tw.info_nce(query, key, x, negative_mask=mask, in_batch=in_batch) for x in (clean, spoiled)]
    assert torch.equal(losses[0], losses[1])
    for loss, negatives in zip(losses, (clean, spoiled), strict=True):
        for grad in torch.autograd.grad(loss, [query, key, negatives]):
            assert grad.isfinite().all()
    nothing = torch.zeros(shape, dtype=torch.bool)
    alone = tw.info_nce(query, key, spoiled, negative_mask=nothing, in_batch=in_batch)
    assert_close(alone, tw.info_nce(query, key) if in_batch else torch.zeros((), dtype=torch.float64), EXACT)
    for grad in torch.autograd.grad(alone, [query, key, spoiled]):
        assert grad.isfinite().all()


def test_a_row_that_shares_its_id_with_all_keys():
    """Nothing is left but its own key: loss 0, and no NaN in any gradient."""
    query, key = unit(12, 24), unit(12, 24, seed=1)
    loss = tw.info_nce(query, key, symmetric=True, query_ids=torch.zeros(12).long(), reduction="none")
    assert loss.abs().max() < 1e-15
    for grad in torch.autograd.grad(loss.sum(), [query, key]):
        assert grad.isfinite().all()
        assert grad.abs().max() < 1e-12


@pytest.mark.parametrize("name", ["clip", "siglip", "info_nce_symmetric", "nt_xent", "supcon", "cross_entropy"])
def test_nan_in_a_feature_is_nan_in_the_loss(name):
    """Never a plausible number."""
    made = problem(name)
    leaf = next(iter(made.leaves))
    spoiled = made.leaves[leaf].detach().clone()
    spoiled[1, 3] = torch.nan
    loss, grads = solve(made.ours, made.leaves | {leaf: spoiled.requires_grad_()})
    assert loss.isnan()
    assert grads[leaf].isnan().any()


@pytest.mark.parametrize("name", CASES)
def test_features_that_are_all_nan_are_nan_in_the_loss(name):
    made = problem(name)
    first = next(iter(made.leaves))
    for leaf in (leaf for leaf, value in made.leaves.items() if value.dim() >= 2):
        spoiled = made.leaves | {leaf: torch.full_like(made.leaves[leaf], torch.nan).requires_grad_()}
        loss, want = (solve(function, spoiled)[0] for function in (made.ours, made.dense))
        assert loss.isnan() == want.isnan(), leaf
        assert want.isnan() or leaf != first


@pytest.mark.parametrize("strategy", ["absolute", "relative"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_a_guide_keeps_duplicates_of_the_positive(dtype, strategy):
    """Their guide score equals that of the positive, so it is not above it, however the products are rounded."""
    n, guide = 40, unit(20, 768, dtype=dtype).detach()
    guide = torch.cat([guide, guide])
    query, key = unit(n, 8, 1, dtype).detach(), unit(n, 8, 2, dtype).detach()
    given = tw.Guide(query=guide, key=guide, margin_strategy=strategy)
    many = tw.Guide(query=guide, key=guide, negative_keys=guide[:, None], margin_strategy=strategy)
    shared = tw.Guide(query=guide, key=guide, negative_keys=guide, margin_strategy=strategy)
    for more, kept in ((given, None), (shared, key), (many, key[:, None])):
        got = tw.info_nce(query, key, kept, guide=more, reduction="none")
        want = tw.info_nce(query, key, kept, reduction="none")  # nothing is above the limit, so nothing is left out
        assert_close(got, want, 1e-5)


# CuBlaze's table ------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "rows", [16, 64, 256, 1024, pytest.param(4096, marks=pytest.mark.slow), pytest.param(8192, marks=pytest.mark.slow)]
)
def test_cublaze_table(rows):
    """Stacked rows of width 256, temperature 0.5: errors below 1e-5 (loss) and 1e-4 (gradient), by far."""
    z = unit(rows, 256, dtype=torch.float32)
    loss, (grad,) = tw.nt_xent(z, temperature=0.5), torch.autograd.grad(tw.nt_xent(z, temperature=0.5), z)
    exact = z.detach().double().requires_grad_()
    # The float64 path has been held to 1e-12 of the oracle; the oracle itself would take 4 GiB here.
    want = tw.nt_xent(exact, temperature=0.5) if rows > 1024 else oracles.nt_xent_dense(exact, 0.5)
    (want_grad,) = torch.autograd.grad(want, exact)
    assert abs(loss.item() - want.item()) < 1e-5 / 10
    assert (grad - want_grad).abs().max() < 1e-4 / 100
    assert_close(loss, want, 2e-6)
    assert_close(grad, want_grad, 1e-5)


def test_random_upstream_is_random():
    assert upstream_like(torch.zeros(50)).std() > 0.5
