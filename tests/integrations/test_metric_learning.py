"""The losses of PyTorch Metric Learning equal its formulas, written here with all logits, and refuse other uses."""

from __future__ import annotations

import math

import pytest
import torch
import torch.nn.functional as F
from tests.compare import assert_close
from tests.integrations.drop_ins import EXACT, D, N, assert_same, cosines, normal, seed  # noqa: F401 - a fixture
from tests.oracles import margin_softmax_dense, supcon_dense

from tilewise.errors import ConfigError, DtypeError, RangeError, ShapeError
from tilewise.integrations import pytorch_metric_learning as pml


def metric_learning_nt_xent(z, labels, ref, ref_labels, temperature, mask_self):
    logits = cosines(z, ref) / temperature
    same = labels[:, None] == ref_labels[None, :]
    negative = logits.masked_fill(same, -torch.inf).logsumexp(1, keepdim=True)
    positive = same & ~torch.eye(len(z), dtype=torch.bool) if mask_self else same
    return (torch.logaddexp(logits, negative) - logits)[positive].mean()


def metric_learning_supcon(z, labels, ref, ref_labels, temperature):
    logits = cosines(z, ref) / temperature
    same = (labels[:, None] == ref_labels[None, :]).double()
    count = same.sum(1)
    loss = -(same * logits.log_softmax(1)).sum(1)[count > 0] / count[count > 0]
    return loss.mean()


LABELS = {
    "two of each": lambda: torch.arange(18).repeat(2),
    "many of each": lambda: torch.randint(0, 7, (N,)),
    "some alone": lambda: torch.randint(0, 60, (N,)),
    "one pair": lambda: torch.cat([torch.arange(N - 1), torch.tensor([0])]),
    "negative and huge": lambda: torch.randint(-3, 4, (N,)) * 2**40,
}


@pytest.mark.parametrize("kind", LABELS)
def test_metric_learning(kind):
    labels = LABELS[kind]()
    z = normal(len(labels), D)
    want = metric_learning_nt_xent(z, labels, z, labels, 0.07, mask_self=True)
    assert_same(pml.NTXentLoss()(z, labels), want, [z])
    rows = supcon_dense(F.normalize(z, dim=1), labels, 0.1, "none")
    assert_same(pml.SupConLoss()(z, labels), rows.sum() / (rows > 0).sum(), [z])


@pytest.mark.parametrize("kind", ["many of each", "some alone"])
def test_metric_learning_with_references(kind):
    z, ref, labels = normal(N, D), normal(N + 9, D), LABELS[kind]()
    ref_labels = torch.cat([LABELS[kind](), torch.arange(9)])
    want = metric_learning_nt_xent(z, labels, ref, ref_labels, 0.07, mask_self=False)
    assert_same(pml.NTXentLoss()(z, labels, None, ref, ref_labels), want, [z, ref])
    want = metric_learning_supcon(z, labels, ref, ref_labels, 0.1)
    assert_same(pml.SupConLoss()(z, labels, None, ref, ref_labels), want, [z, ref])


@pytest.mark.parametrize(
    "loss, margins",
    [(pml.ArcFaceLoss, {"m2": math.radians(28.6)}), (pml.CosFaceLoss, {"m2": 0.0, "m3": 0.35})],
)
def test_metric_learning_margins(loss, margins):
    labels, z = torch.randint(0, 50, (N,)), normal(N, D)
    ours = loss(num_classes=50, embedding_size=D, weight_init_func=torch.nn.init.xavier_uniform_).double()
    assert ours.W.shape == (D, 50)
    assert_same(ours(z, labels), margin_softmax_dense(z, ours.W.T, labels, **margins), [z, ours.W])
    assert_close(ours.get_logits(z), 64 * cosines(z, ours.W.T), EXACT)


@pytest.mark.parametrize("loss", [pml.NTXentLoss(), pml.SupConLoss()])
@pytest.mark.parametrize("labels", [torch.zeros(N, dtype=torch.long), torch.arange(N)], ids=["all equal", "all alone"])
def test_metric_learning_without_negatives_or_positives_is_zero(loss, labels):
    z = normal(N, D)
    value = loss(z, labels)
    (grad,) = torch.autograd.grad(value, z)
    assert value.item() == 0
    assert grad.abs().max().item() == 0


def memory_pairs(labels, ref_labels, own):
    """The pairs that CrossBatchMemory passes: all of them, without (row, its own entry)."""
    same = labels[:, None] == ref_labels[None, :]
    positive = same.clone()
    positive[torch.arange(len(labels)), own] = False
    return (*positive.nonzero(as_tuple=True), *(~same).nonzero(as_tuple=True))


@pytest.mark.parametrize("start", [0, 5, 30])
@pytest.mark.parametrize("kind", ["two of each", "many of each", "some alone"])
def test_metric_learning_against_a_memory_that_contains_the_batch(kind, start):
    """What CrossBatchMemory calls: the batch is in the memory, and no row is compared with its own entry."""
    labels = LABELS[kind]()
    n, m = len(labels), len(labels) + 9
    z, ref = normal(n, D), normal(m, D)
    own = (start + torch.arange(n)) % m  # the memory is a ring buffer
    ref_labels = LABELS[kind]()[torch.randint(0, n, (m,))]
    ref_labels[own] = labels
    pairs = memory_pairs(labels, ref_labels, own)
    for temperature in (0.1, 1.0):
        logits = cosines(z, ref) / temperature
        positive = torch.zeros(n, m, dtype=torch.bool)
        positive[pairs[:2]] = True
        negative = labels[:, None] != ref_labels[None, :]
        negative_lse = logits.masked_fill(~negative, -torch.inf).logsumexp(1, keepdim=True)
        want = (torch.logaddexp(logits, negative_lse) - logits)[positive].mean()
        assert_same(pml.NTXentLoss(temperature)(z, labels, pairs, ref, ref_labels), want, [z, ref])
        logits = cosines(z, ref) / temperature
        lse = logits.masked_fill(~(positive | negative), -torch.inf).logsumexp(1)
        count, some = positive.sum(1), positive.any(1)
        want = (lse[some] - (positive * logits).sum(1)[some] / count[some]).mean()
        assert_same(pml.SupConLoss(temperature)(z, labels, pairs, ref, ref_labels), want, [z, ref])


@pytest.mark.parametrize("loss", [pml.NTXentLoss(), pml.SupConLoss()])
def test_metric_learning_with_pairs_refuses_miners(loss):
    labels, ref_labels = torch.arange(N) % 5, torch.arange(N + 3) % 5
    z, ref = normal(N, D), normal(N + 3, D)
    a, p, b, n = memory_pairs(labels, ref_labels, torch.arange(N))
    for mined in (
        (a, p, b[1:], n[1:]),  # a negative is missing
        (a, p, b[[0, *range(len(b) - 1)]], n[[0, *range(len(n) - 1)]]),  # one twice, one missing
        (a[2:], p[2:], b, n),  # two positives of a row are missing
        (torch.cat([a, a[:1]]), torch.cat([p, p[:1]]), b, n),  # a positive twice
        (a, p, a),  # triplets
    ):
        with pytest.raises(ConfigError, match="CrossBatchMemory passes without a miner"):
            loss(z, labels, mined, ref, ref_labels)
    everything = (labels[:, None] == ref_labels[None, :]).nonzero(as_tuple=True)  # rows that are not in the memory
    want = loss(z, labels, None, ref, ref_labels)
    assert_close(loss(z, labels, (*everything, b, n), ref, ref_labels), want, EXACT)
    alone = memory_pairs(labels[:1], ref_labels[:2], torch.zeros(1, dtype=torch.long))
    assert loss(z[:1], labels[:1], alone, ref[:2], ref_labels[:2]).item() == 0


def test_metric_learning_refuses():
    z, labels = normal(N, D), torch.arange(N) % 5
    loss = pml.SupConLoss()
    with pytest.raises(ConfigError, match="indices_tuple"):
        loss(z, labels, (labels, labels, labels))
    with pytest.raises(ConfigError, match="labels are needed"):
        loss(z)
    with pytest.raises(ConfigError, match="ref_labels"):
        loss(z, labels, None, z)
    with pytest.raises(ConfigError, match="clone"):
        loss(z, labels, None, normal(N, D), labels)
    with pytest.raises(ConfigError, match="distance"):
        pml.NTXentLoss(distance=object())
    with pytest.raises(DtypeError, match="long"):
        loss(z, labels.double())
    with pytest.raises(DtypeError, match=r"labels is a tensor of integers, got list. Use torch.as_tensor"):
        loss(z, labels.tolist())
    with pytest.raises(ShapeError, match="one entry for each row"):
        loss(z, labels[:-1])


@pytest.mark.parametrize("temperature", [0.0, -1.0])
def test_a_temperature_is_checked_with_references_too(temperature):
    loss = pml.SupConLoss(temperature=temperature)
    x, y = torch.randn(4, 3), torch.tensor([0, 0, 1, 1])
    with pytest.raises(RangeError, match="temperature must be positive"):
        loss(x, y, ref_emb=x, ref_labels=y.clone())
