"""Each drop-in equals the formula of its library, written here with all logits, and refuses other uses."""

from __future__ import annotations

import inspect
import sys
import types

import pytest
import torch
import torch.nn.functional as F
from tests.compare import assert_close
from tests.integrations.matryoshka import shortened
from tests.oracles import clip_dense, info_nce_dense, nt_xent_dense, siglip_dense, supcon_dense
from torch import nn

from tilewise.errors import ConfigError, DtypeError, GroupError, RangeError, ShapeError
from tilewise.integrations import cublaze, info_nce_pytorch, lightly, open_clip
from tilewise.integrations import pytorch_metric_learning as pml
from tilewise.integrations import sentence_transformers as st

N, D = 37, 12
EXACT = 1e-12
FOUR = ("query_to_doc", "query_to_query", "doc_to_query", "doc_to_doc")


@pytest.fixture(autouse=True)
def seed():
    torch.manual_seed(0)


def normal(*shape):
    return torch.randn(*shape, dtype=torch.float64, requires_grad=True)


def scalar(value):
    return torch.tensor(value, dtype=torch.float64, requires_grad=True)


def assert_same(got, want, leaves):
    """Compare the loss and every gradient, with a grad_output of 3."""
    assert_close(got, want, EXACT, "loss")
    ours, theirs = torch.autograd.grad(3 * got, leaves), torch.autograd.grad(3 * want, leaves)
    for index, (mine, other) in enumerate(zip(ours, theirs, strict=True)):
        assert other.norm() > 0
        assert_close(mine, other, EXACT, f"gradient {index}")


def cosines(a, b):
    return F.normalize(a, dim=1) @ F.normalize(b, dim=1).T


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


def ranking_dense(columns, scale, directions, partition_mode, similarity=cosines, ids=None):
    query, *docs = columns
    n, own = len(query), torch.eye(len(query), dtype=torch.bool)
    same = own if ids is None else ids[:, None] == ids[None, :]
    false = same & ~own
    hard = torch.zeros(n, (len(docs) - 1) * n, dtype=torch.bool)
    masks = {
        "query_to_doc": torch.cat([false, hard], 1),
        "query_to_query": same,
        "doc_to_query": false,
        "doc_to_doc": same.repeat(1, len(docs)),
    }
    terms = {
        "query_to_doc": scale * similarity(query, torch.cat(docs)),
        "query_to_query": scale * similarity(query, query),
        "doc_to_query": scale * similarity(docs[0], query),
        "doc_to_doc": scale * similarity(docs[0], torch.cat(docs)),
    }
    terms = {name: scores.masked_fill(masks[name], -torch.inf) for name, scores in terms.items()}
    scores = [terms[name] for name in directions]
    answer = scores[0][torch.arange(n), torch.arange(n)]
    if partition_mode == "joint":
        return (torch.cat(scores, 1).logsumexp(1) - answer).mean()
    return (sum(part.logsumexp(1) for part in scores) / len(scores) - answer).mean()


class Bag(nn.Module):
    """A small sentence encoder: adds "sentence_embedding" to the features. With dropout."""

    def __init__(self, dropout=0.0):
        super().__init__()
        self.table = nn.Embedding(50, D, dtype=torch.float64)
        self.dropout = nn.Dropout(dropout)
        self.largest = 0

    def forward(self, features):
        self.largest = max(self.largest, len(features["input_ids"]))
        weight = features["attention_mask"].double()[:, :, None]
        features["sentence_embedding"] = self.dropout((self.table(features["input_ids"]) * weight).sum(1))
        return features


def sentences(columns):
    return [
        {"input_ids": torch.randint(0, 50, (N, 6)), "attention_mask": torch.rand(N, 6) < 0.8, "task": "search"}
        for _ in range(columns)
    ]


RANKING = [
    (2, ("query_to_doc",), "joint"),
    (4, ("query_to_doc",), "joint"),
    (2, ("query_to_doc", "doc_to_query"), "per_direction"),
    (4, ("query_to_doc", "doc_to_query"), "per_direction"),
    (3, ("query_to_doc", "doc_to_query"), "joint"),
    (2, ("query_to_doc", "query_to_query"), "joint"),
    (4, ("query_to_doc", "query_to_query"), "joint"),
    (2, FOUR, "joint"),
    (4, FOUR, "joint"),
]


@pytest.mark.parametrize("count, directions, partition_mode", RANKING)
def test_ranking(count, directions, partition_mode):
    model, batch, scale = Bag(), sentences(count), nn.Parameter(scalar(7.0).detach())
    loss = st.MultipleNegativesRankingLoss(model, scale, directions=directions, partition_mode=partition_mode)
    columns = [model(dict(features))["sentence_embedding"] for features in batch]
    want = ranking_dense(columns, scale, directions, partition_mode)
    assert_same(loss(batch, None), want, [model.table.weight, scale])
    assert "sentence_embedding" in batch[0], "the model must get the caller's dictionary, as in sentence-transformers"


@pytest.mark.parametrize("cached", [False, True])
@pytest.mark.parametrize("count, directions, partition_mode", RANKING)
def test_ranking_masks_false_negatives_by_id(count, directions, partition_mode, cached):
    model, batch, ids = Bag(), sentences(count), torch.randint(-3, 9, (N,))
    settings = {"directions": directions, "partition_mode": partition_mode, "labels_as_ids": True}
    kind = st.CachedMultipleNegativesRankingLoss if cached else st.MultipleNegativesRankingLoss
    columns = [model(dict(features))["sentence_embedding"] for features in batch]
    want = ranking_dense(columns, 20.0, directions, partition_mode, ids=ids)
    (want_grad,) = torch.autograd.grad(want, model.table.weight)
    unmasked = kind(model, **settings | {"labels_as_ids": False})(batch, ids)
    assert (unmasked - want).abs() > 1e-3, "the ids must matter here, and only with labels_as_ids"
    for labels in (ids, [f"document {number}" for number in ids.tolist()], ids.tolist(), ids[:, None]):
        model.zero_grad()
        got = kind(model, **settings)(batch, labels)
        got.backward()
        assert_close(got, want, EXACT)
        assert_close(model.table.weight.grad, want_grad, EXACT)


def test_ids_of_strings():
    ids = st.hash_ids(["b", "a", "b", ""])
    assert ids.dtype == torch.int64
    assert ids.tolist() == st.hash_ids(["b", "a", "b", ""]).tolist()
    assert ids.unique().numel() == 3
    assert ids[1].item() == 4681665781835383343  # the same in every process and release
    assert st.hash_ids(torch.tensor([3, -1]).numpy()).tolist() == [3, -1]
    with pytest.raises(RangeError, match="fit into 64 bits"):
        st.hash_ids([2**63])
    loss = st.MultipleNegativesRankingLoss(None, labels_as_ids=True)
    columns = [normal(N, D), normal(N, D)]
    with pytest.raises(ConfigError, match="column of integers named 'label'"):
        loss.compute_loss_from_embeddings(columns)
    with pytest.raises(DtypeError, match="one string or integer per row"):
        loss.compute_loss_from_embeddings(columns, "documents")
    with pytest.raises(DtypeError, match="one string or integer per row"):
        loss.compute_loss_from_embeddings(columns, [0.5] * N)
    with pytest.raises(ShapeError, match="labels"):
        loss.compute_loss_from_embeddings(columns, ["a"])
    with pytest.raises(DtypeError, match="labels holds integers"):
        loss.compute_loss_from_embeddings(columns, torch.zeros(N))


def test_columns_are_embedded_by_the_function_of_sentence_transformers(monkeypatch):
    """From 6.2 on it merges columns, which changes the dropout masks, and its wrappers may switch that off."""
    calls = []

    def embed(model, columns):
        calls.append((model, columns))
        return [model(features)["sentence_embedding"] for features in columns]

    names = ["sentence_transformers", "base", "losses", "merged_forward"]
    for depth in range(1, 5):
        module = types.ModuleType(".".join(names[:depth]))
        module.__path__ = []
        monkeypatch.setitem(sys.modules, module.__name__, module)
    module.embed_columns = embed
    model, batch = Bag(), sentences(3)
    loss = st.MultipleNegativesRankingLoss(model)
    value = loss(iter(batch))
    assert calls == [(model, batch)]
    monkeypatch.delitem(sys.modules, module.__name__)  # an older release
    assert torch.equal(loss(batch), value)
    assert len(calls) == 1


def test_ranking_by_dot_product():
    columns = [normal(N, D) for _ in range(3)]

    def dot_score(a, b):
        return a @ b.T

    loss = st.MultipleNegativesRankingLoss(Bag(), 0.3, similarity_fct=dot_score)
    want = ranking_dense(columns, 0.3, ("query_to_doc",), "joint", dot_score)
    assert_same(loss.compute_loss_from_embeddings(columns), want, columns)
    assert loss.get_config_dict()["similarity_fct"] == "dot_score"


@pytest.mark.parametrize("count, directions, partition_mode", [RANKING[1], RANKING[8]])
def test_cached_ranking_equals_plain_ranking_in_small_steps(count, directions, partition_mode):
    model, batch = Bag(), sentences(count)
    settings = {"directions": directions, "partition_mode": partition_mode}
    plain = st.MultipleNegativesRankingLoss(model, **settings)(batch)
    model.largest = 0
    cached = st.CachedMultipleNegativesRankingLoss(model, mini_batch_size=8, **settings)(batch)
    (want,) = torch.autograd.grad(3 * plain, model.table.weight)
    assert_close(cached, plain, EXACT)
    (3 * cached).backward()
    assert_close(model.table.weight.grad, want, EXACT)
    assert model.largest == 8


def test_cached_ranking_in_chunks_of_so_many_tokens():
    model, batch = Bag(), sentences(2)
    want = torch.autograd.grad(st.MultipleNegativesRankingLoss(model)(batch), model.table.weight)[0]
    loss, seen = st.CachedMultipleNegativesRankingLoss(model, mini_batch_num_tokens=11, show_progress_bar=True), []
    model.register_forward_pre_hook(lambda _, inputs: seen.append(inputs[0]["attention_mask"]))
    loss(batch).backward()
    assert_close(model.table.weight.grad, want, EXACT)
    counts = [int(mask.sum()) for mask in seen]
    assert all(count <= 11 for count in counts)
    assert len(counts) < 2 * 2 * N, "a chunk has several rows"
    assert all(mask[:, -1].any() for mask in seen), "without padding in all rows"


def test_matryoshka_around_cached_ranking():
    model, batch, sizes = Bag(), sentences(3), (D, D // 2)
    columns = [model(dict(features))["sentence_embedding"] for features in batch]
    plain, loss = (
        st.MultipleNegativesRankingLoss(model),
        st.CachedMultipleNegativesRankingLoss(model, mini_batch_size=4),
    )
    want = sum(plain.compute_loss_from_embeddings([column[:, :size] for column in columns]) for size in sizes) / 2
    (want_grad,) = torch.autograd.grad(3 * want, model.table.weight)
    loss.calculate_loss = shortened(loss.calculate_loss, sizes)
    got = loss(batch)
    (3 * got).backward()
    assert_close(got, want, EXACT)
    assert_close(model.table.weight.grad, want_grad, EXACT)
    with torch.no_grad():
        assert_close(loss(batch), want, EXACT)


def test_cached_ranking_replays_dropout():
    """Compares backward with a finite difference of the loss at the same random numbers."""
    model, batch = Bag(dropout=0.4), sentences(2)
    loss = st.CachedMultipleNegativesRankingLoss(model, mini_batch_size=10)
    direction = torch.randn_like(model.table.weight)

    def at(step):
        torch.manual_seed(7)
        with torch.no_grad():
            model.table.weight.add_(step * direction)
            value = loss(batch)
            model.table.weight.sub_(step * direction)
        return value

    torch.manual_seed(7)
    loss(batch).backward()
    slope = (at(1e-5) - at(-1e-5)) / 2e-5
    assert_close((model.table.weight.grad * direction).sum(), slope, 1e-6)


def test_ranking_refuses():
    model = Bag()
    with pytest.raises(RangeError, match="scale"):
        st.MultipleNegativesRankingLoss(model, scale=0.0)
    with pytest.raises(ConfigError, match="contains the target"):
        st.MultipleNegativesRankingLoss(model, directions=("doc_to_query",))
    with pytest.raises(ConfigError, match="no direction"):
        st.MultipleNegativesRankingLoss(model, directions=("query_to_doc", "sideways"))
    with pytest.raises(ConfigError, match=r"tuple of names, got 'query_to_doc'. Write .*\('query_to_doc',\)"):
        st.MultipleNegativesRankingLoss(model, directions="query_to_doc")
    with pytest.raises(ConfigError, match="joint"):
        st.MultipleNegativesRankingLoss(model, directions=FOUR, partition_mode="per_direction")
    with pytest.raises(ConfigError, match="Add 'doc_to_query'"):
        st.MultipleNegativesRankingLoss(model, directions=("query_to_doc", "doc_to_doc"))
    with pytest.raises(ConfigError, match="hardness_mode"):
        st.MultipleNegativesRankingLoss(model, hardness_mode="hard_negatives", hardness_strength=5.0)
    with pytest.raises(ConfigError, match="cos_sim or dot_score"):
        st.MultipleNegativesRankingLoss(model, similarity_fct=torch.cdist)
    with pytest.raises(ConfigError, match="Use mini_batch_size instead"):
        st.CachedMultipleNegativesRankingLoss(model, mini_batch_num_tokens=100)([{"input_ids": torch.ones(2, 3)}] * 2)
    with pytest.raises(ShapeError, match="two columns"):
        st.MultipleNegativesRankingLoss(model)(sentences(1))
    with pytest.raises(ShapeError, match="same shape"):
        st.MultipleNegativesRankingLoss(model).compute_loss_from_embeddings([normal(N, D), normal(N - 1, D)])


def test_a_model_that_is_none_is_refused_where_it_is_needed():
    for model in (None, "bert-base-uncased"):
        with pytest.raises(DtypeError, match="sentence_embedding"):
            st.CachedMultipleNegativesRankingLoss(model)
    with pytest.raises(DtypeError, match="got 'bert-base-uncased'"):
        st.MultipleNegativesRankingLoss("bert-base-uncased")
    loss = st.MultipleNegativesRankingLoss(None)
    with pytest.raises(DtypeError, match="compute_loss_from_embeddings"):
        loss(sentences(2))
    columns = [normal(N, D), normal(N, D)]
    want = st.MultipleNegativesRankingLoss(Bag()).compute_loss_from_embeddings(columns)
    assert torch.equal(loss.compute_loss_from_embeddings(columns), want)
