"""Each drop-in equals the formula of its library, written here with all logits, and refuses other uses.

PyTorch Metric Learning and sentence-transformers have files of their own, apart from the signatures.
"""

from __future__ import annotations

import inspect

import pytest
import torch
import torch.nn.functional as F
from tests.integrations.drop_ins import EXACT, D, N, assert_same, normal, scalar, seed  # noqa: F401 - a fixture
from tests.oracles import clip_dense, info_nce_dense, nt_xent_dense, siglip_dense
from torch import nn

from tilewise.errors import ConfigError, DtypeError, GroupError, RangeError, ShapeError
from tilewise.integrations import cublaze, info_nce_pytorch, lightly, open_clip
from tilewise.integrations import pytorch_metric_learning as pml

FOUR = ("query_to_doc", "query_to_query", "doc_to_query", "doc_to_doc")


def names_and_defaults(thing):
    parameters = list(inspect.signature(thing).parameters.values())
    return [(p.name, p.default) for p in parameters if p.kind is p.POSITIONAL_OR_KEYWORD]


EMPTY = inspect.Parameter.empty


@pytest.mark.parametrize(
    "thing, wanted",
    [
        (
            open_clip.ClipLoss,
            [("local_loss", False), ("gather_with_grad", False), ("cache_labels", False), ("rank", 0)]
            + [("world_size", 1), ("use_horovod", False)],
        ),
        (
            open_clip.SigLipLoss,
            [("cache_labels", False), ("rank", 0), ("world_size", 1), ("dist_impl", None), ("chunk_size", 0)],
        ),
        (lightly.NTXentLoss, [("temperature", 0.5), ("memory_bank_size", 0), ("gather_distributed", False)]),
        (pml.NTXentLoss, [("temperature", 0.07)]),
        (pml.SupConLoss, [("temperature", 0.1)]),
        (info_nce_pytorch.InfoNCE, [("temperature", 0.1), ("reduction", "mean"), ("negative_mode", "unpaired")]),
        (cublaze.InfoNCELoss, [("temperature", 0.5), ("use_cublas", False)]),
        (
            open_clip.ClipLoss().forward,
            [("image_features", EMPTY), ("text_features", EMPTY), ("logit_scale", EMPTY), ("logit_bias", None)]
            + [("output_dict", False)],
        ),
        (
            pml.SupConLoss().forward,
            [("embeddings", EMPTY), ("labels", None), ("indices_tuple", None), ("ref_emb", None), ("ref_labels", None)],
        ),
    ],
)
def test_signatures_are_theirs(thing, wanted):
    assert names_and_defaults(thing) == wanted


def test_open_clip():
    image, text, scale, bias = normal(N, D), normal(N, D), scalar(4.0), scalar(-3.0)
    assert_same(open_clip.ClipLoss()(image, text, scale), clip_dense(image, text, scale), [image, text, scale])
    got = open_clip.SigLipLoss(chunk_size=8)(image, text, scale, bias, output_dict=True)
    assert list(got) == ["contrastive_loss"]
    assert_same(got["contrastive_loss"], siglip_dense(image, text, scale, bias), [image, text, scale, bias])
    assert_same(open_clip.SigLipLoss()(image, text, scale, None), siglip_dense(image, text, scale, 0.0), [image, scale])
    assert list(open_clip.ClipLoss()(image, text, scale, bias, True)) == ["contrastive_loss"]


def test_open_clip_refuses_unsupported_arguments():
    image, text = normal(N, D), normal(N, D)
    with pytest.raises(ConfigError, match="torchrun"):
        open_clip.ClipLoss(use_horovod=True)
    with pytest.raises(ConfigError, match="bidir"):
        open_clip.SigLipLoss(dist_impl="star")
    with pytest.raises(GroupError, match="init_process_group"):
        open_clip.ClipLoss(world_size=2)(image, text, 1.0)


@pytest.mark.parametrize("temperature", [0.5, 0.01])
def test_lightly(temperature):
    first, second = normal(N, D), normal(N, D)
    want = nt_xent_dense(F.normalize(torch.cat([first, second]), dim=1), temperature)
    assert_same(lightly.NTXentLoss(temperature)(first, second), want, [first, second])


def test_lightly_memory_bank_is_a_queue_with_the_only_negatives():
    loss = lightly.NTXentLoss(0.2, (2 * N + 5, D)).double()
    bank, place = loss.bank.clone(), 0
    for _ in range(4):
        first, second = normal(N, D), normal(N, D)
        a, b = F.normalize(first, dim=1), F.normalize(second, dim=1)
        logits = torch.cat([(a * b).sum(1, keepdim=True), a @ bank.T], 1) / 0.2
        want = F.cross_entropy(logits, torch.zeros(N, dtype=torch.long))
        assert_same(loss(first, second), want, [first, second])
        count = min(N, len(bank) - place)
        bank[place : place + count] = b[:count].detach()
        place = (place + count) % len(bank)
        assert torch.equal(loss.bank, bank)
    with torch.no_grad():
        loss(first, second)
    loss(first.detach(), second)
    assert torch.equal(loss.bank, bank), "evaluation must not change the bank"


def test_lightly_memory_bank_of_any_width():
    """With a number of entries alone, the first batch says how many features there are."""
    loss = lightly.NTXentLoss(0.2, 7)
    assert loss.bank is None
    first, second = normal(N, D), normal(N, D)
    got, bank = loss(first, second), F.normalize(second, dim=1)[:7]
    assert got.isfinite()
    assert torch.equal(loss.bank, bank)
    with pytest.raises(ShapeError, match=f"memory bank has {D} features"):
        loss(normal(N, D + 1), normal(N, D + 1))


def test_lightly_refuses_to_gather_without_torch_distributed(monkeypatch):
    monkeypatch.setattr(torch.distributed, "is_available", lambda: False)
    with pytest.raises(ConfigError, match=r"gather_distributed=True needs torch\.distributed"):
        lightly.NTXentLoss(gather_distributed=True)


def test_lightly_batch_of_one_is_exactly_zero():
    """One sample has no negatives."""
    temperature = nn.Parameter(torch.tensor(0.3))
    first, second = torch.randn(2, 1, D, requires_grad=True).unbind(0)
    loss = lightly.NTXentLoss(temperature)(first, second)
    grads = torch.autograd.grad(loss, [first, second, temperature])
    assert loss.item() == 0
    assert all(grad.abs().max() == 0 for grad in grads)


def test_lightly_needs_a_group_to_gather():
    for size in (0, (16, D)):
        loss = lightly.NTXentLoss(memory_bank_size=size, gather_distributed=True).double()
        with pytest.raises(GroupError, match=r"gather_distributed=True needs .*init_process_group"):
            loss(normal(N, D), normal(N, D))


def test_lightly_refuses():
    with pytest.raises(ConfigError, match=r"number of entries .* got -64"):
        lightly.NTXentLoss(memory_bank_size=-64)
    with pytest.raises(ConfigError, match="entries, features"):
        lightly.NTXentLoss(memory_bank_size=(4, 5, 6))
    with pytest.raises(ShapeError, match="two views"):
        lightly.NTXentLoss()(normal(N, D), normal(N + 1, D))
    with pytest.raises(ShapeError, match="memory bank has 5 features"):
        lightly.NTXentLoss(memory_bank_size=(8, 5))(normal(N, D), normal(N, D))
    with pytest.raises(RangeError, match="temperature"):
        lightly.NTXentLoss(temperature=0.0)(normal(N, D), normal(N, D))


@pytest.mark.parametrize("reduction", ["mean", "sum", "none"])
@pytest.mark.parametrize("mode", ["in batch", "unpaired", "paired"])
def test_info_nce_pytorch(mode, reduction):
    query, key = normal(N, D), normal(N, D)
    negatives = {"in batch": None, "unpaired": normal(9, D), "paired": normal(N, 4, D)}[mode]
    leaves = [query, key] if negatives is None else [query, key, negatives]
    unit = [F.normalize(x, dim=-1) for x in leaves]
    want = info_nce_dense(*unit, temperature=0.1, in_batch=negatives is None, reduction=reduction)
    settings = {} if negatives is None else {"negative_mode": mode}
    got = info_nce_pytorch.InfoNCE(reduction=reduction, **settings)(query, key, negatives)
    assert got.shape == want.shape
    weight = torch.rand(got.shape, dtype=torch.float64)
    assert_same((weight * got).sum(), (weight * want).sum(), leaves)


def test_info_nce_pytorch_refuses():
    query, key = normal(N, D), normal(N, D)
    with pytest.raises(ShapeError, match="is paired"):
        info_nce_pytorch.InfoNCE()(query, key, normal(N, 2, D))
    with pytest.raises(ConfigError, match="unpaired, paired"):
        info_nce_pytorch.InfoNCE(negative_mode="both")(query, key)
    with pytest.raises(DtypeError, match=r"query is a tensor, got list. Use torch.as_tensor"):
        info_nce_pytorch.InfoNCE()(query.tolist(), key)
    with pytest.raises(DtypeError, match=r"negative_keys is a tensor, got float. .* temperature="):
        info_nce_pytorch.info_nce(query, key, 0.1)


@pytest.mark.parametrize("use_cublas", [False, True])
def test_cublaze(use_cublas):
    z = F.normalize(normal(2 * N, D).detach(), dim=1).requires_grad_()
    assert_same(cublaze.InfoNCELoss(0.5, use_cublas)(z), nt_xent_dense(z, 0.5), [z])


def test_a_bank_of_lightly_that_was_made_without_gradients():
    """Validation may come before training, and a size of (0, d) is no bank."""
    x = torch.randn(4, 8)
    with_bank = lightly.NTXentLoss(memory_bank_size=16)
    with torch.inference_mode():
        with_bank(x.bfloat16(), x.bfloat16())
    assert with_bank.bank.dtype == torch.float32
    y = x.clone().requires_grad_()
    with_bank(y, x).backward()
    assert y.grad.isfinite().all()
    want = lightly.NTXentLoss()(x, x.flip(0))
    for size in ((0, 8), (0, 0), (0,)):
        assert torch.equal(lightly.NTXentLoss(memory_bank_size=size)(x, x.flip(0)), want)
    assert lightly.NTXentLoss(memory_bank_size=(4,)).entries == 4
    with pytest.raises(ConfigError, match="memory_bank_size"):
        lightly.NTXentLoss(memory_bank_size=(4, 0))
