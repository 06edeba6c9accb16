"""Settings in a narrow type: they are widened before they are divided, whatever the type of the features."""

import pytest
import torch
import torch.nn.functional as F

import tilewise as tw

N, D, CLASSES, T = 60, 16, 80, 0.7


def made(dtype=torch.bfloat16):
    torch.manual_seed(0)
    x, w, bias = torch.randn(N, D), torch.randn(CLASSES, D), 8 * torch.randn(CLASSES)
    return x.to(dtype), w.to(dtype), bias.to(dtype)


def log_probs(x, w, bias, scale):
    return ((scale * x.double() @ w.double().T + bias.double()) / T).log_softmax(-1)


NARROW = [torch.tensor(1.2, dtype=torch.bfloat16), 1.0, torch.tensor(1.3, dtype=torch.float16)]


@pytest.mark.parametrize("scale", NARROW)
def test_token_stats(scale):
    x, w, bias = made()
    target = torch.randint(0, CLASSES, (N,))
    settings = {"linear_bias": bias, "logit_scale": scale, "temperature": T}
    got = tw.linear_token_stats(x, w, target, **settings).log_prob
    want = log_probs(x, w, bias, float(scale)).gather(1, target[:, None])[:, 0]
    assert (got - want).abs().max() < 1e-4
    with torch.autocast("cpu", dtype=torch.bfloat16):
        got = tw.linear_token_stats(x, w, target, **settings | {"linear_bias": bias.float()}).log_prob
    assert (got - want).abs().max() < 1e-4
    ids, chances = torch.arange(4).expand(N, 4), torch.full((N, 4), 0.25).log()
    got = tw.linear_sparse_distillation_loss(x, w, ids, chances, reduction="none", **settings)
    want = (chances.exp() * (chances - log_probs(x, w, bias, float(scale))[:, :4])).sum(1)
    assert (got - want).abs().max() < 1e-3


@pytest.mark.parametrize("scale", NARROW)
def test_distillation(scale):
    x, w, bias = made()
    teacher = x.flip(0)
    settings = {"linear_bias": bias, "teacher_bias": bias, "logit_scale": scale, "teacher_logit_scale": scale}
    got = tw.linear_distillation_loss(x, w, teacher, w, temperature=T, reduction="none", **settings)
    p, q = (log_probs(rows, w, bias, float(scale)) for rows in (x, teacher))
    want = F.kl_div(p, q, log_target=True, reduction="none").sum(1)
    assert (got - want).abs().max() < 1e-3 * want.max()


def test_a_scale_that_only_fits_the_statistics():
    x, w, _ = made(torch.float16)
    scale = torch.tensor(100.0, dtype=torch.float16)
    assert (
        tw.linear_token_stats(x, w, torch.zeros(N, dtype=torch.long), logit_scale=scale, temperature=0.001)
        .log_prob.isfinite()
        .all()
    )


def test_the_type_of_a_clip_loss_does_not_depend_on_its_bias():
    x, _, _ = made(torch.float32)
    for reduction in ("mean", "sum", "none"):
        bias = torch.tensor(0.5, dtype=torch.float64)
        assert tw.clip_loss(x, x, 2.0, bias, reduction=reduction).dtype == torch.float32


def test_a_guide_leaves_duplicates_of_the_key_under_autocast():
    query, key = (F.normalize(torch.randn(64, 32), dim=1) for _ in range(2))
    own = F.normalize(torch.randn(64, 3, 32), dim=2)
    guide_query, guide_key = (F.normalize(torch.randn(64, 48), dim=1) for _ in range(2))
    guide = tw.Guide(query=guide_query, key=guide_key, negative_keys=guide_key[:, None].expand(64, 3, 48))
    with torch.autocast("cpu", dtype=torch.bfloat16):
        guided, plain = (tw.info_nce(query, key, own, in_batch=False, guide=g, reduction="none") for g in (guide, None))
    assert torch.equal(guided, plain), "every negative has the guide score of the key, so all of them stay"


def test_own_negatives_have_the_precision_of_the_options(monkeypatch):
    seen, plain = [], torch.bmm

    def watched(*args, **more):
        seen.append(torch.get_float32_matmul_precision())
        return plain(*args, **more)

    monkeypatch.setattr(torch, "bmm", watched)
    before = torch.get_float32_matmul_precision()
    try:
        torch.set_float32_matmul_precision("high")
        x, own = torch.randn(9, 8, requires_grad=True), torch.randn(9, 2, 8)
        tw.info_nce(x, x.detach(), own, options=tw.TileOptions(precision="highest")).backward()
        assert set(seen) == {"highest"}
        assert len(seen) >= 2
        assert torch.get_float32_matmul_precision() == "high"
    finally:
        torch.set_float32_matmul_precision(before)
