"""Ranking losses of sentence-transformers equal its formulas, written here with all logits, and refuse other uses."""

from __future__ import annotations

import sys
import types
from functools import partial

import pytest
import torch
from tests.compare import assert_close
from tests.integrations.drop_ins import EXACT, D, N, assert_same, cosines, normal, scalar, seed  # noqa: F401 - a fixture
from tests.integrations.matryoshka import shortened
from torch import nn

from tilewise.errors import ConfigError, DtypeError, RangeError, ShapeError
from tilewise.integrations import sentence_transformers as st

FOUR = ("query_to_doc", "query_to_query", "doc_to_query", "doc_to_doc")


def ranking_dense(
    columns, scale, directions, partition_mode, similarity=cosines, ids=None, hardness_mode=None, hardness_strength=0.0
):
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
    own_hard = torch.cat([torch.zeros_like(own), *[own] * (len(docs) - 1)], 1)
    others = ~own.repeat(1, len(docs))
    raised = {"hard_negatives": own_hard, "in_batch_negatives": others, "all_negatives": own_hard | others}
    if hardness_mode is not None:
        close = hardness_strength * similarity(query, torch.cat(docs)).detach()
        terms["query_to_doc"] = terms["query_to_doc"] + close.masked_fill(~raised[hardness_mode], 0.0)
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


@pytest.mark.parametrize("mode", ["in_batch_negatives", "hard_negatives", "all_negatives"])
@pytest.mark.parametrize("count, directions, partition_mode", RANKING)
def test_ranking_with_hardness(count, directions, partition_mode, mode):
    model, batch, scale = Bag(), sentences(count), nn.Parameter(scalar(7.0).detach())
    ids = torch.randint(-3, 9, (N,))
    settings = {"directions": directions, "partition_mode": partition_mode}
    hard = {"hardness_mode": mode, "hardness_strength": 4.0}

    def dense(**more):
        columns = [model(dict(features))["sentence_embedding"] for features in batch]
        return ranking_dense(columns, scale, directions, partition_mode, **more)

    for labels in (None, ids):
        loss = st.MultipleNegativesRankingLoss(model, scale, **settings, **hard, labels_as_ids=labels is not None)
        assert_same(loss(batch, labels), dense(ids=labels, **hard), [model.table.weight, scale])
    if count > 2 or mode != "hard_negatives":
        assert (dense(**hard) - dense()).abs() > 1e-3, "the hardness must matter here"
    cached = st.CachedMultipleNegativesRankingLoss(model, scale, mini_batch_size=7, **settings, **hard)
    got = cached(batch, None)
    got.backward()
    want, leaves = dense(**hard), (model.table.weight, scale)
    assert_close(got, want, EXACT)
    for leaf, grad in zip(leaves, torch.autograd.grad(want, leaves), strict=True):
        assert_close(leaf.grad, grad, EXACT)
    assert cached.hardness_mode == cached.get_config_dict()["hardness_mode"] == mode
    assert cached.temperature == 1 / scale
    cached.hardness_strength = 0.0
    assert_close(cached(batch, None), dense(), EXACT)


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

    assert st.MultipleNegativesRankingLoss(None, similarity_fct=partial(dot_score)).get_config_dict()[
        "similarity_fct"
    ] == ("dot_score")

    loss = st.MultipleNegativesRankingLoss(Bag(), 0.3, similarity_fct=dot_score)
    want = ranking_dense(columns, 0.3, ("query_to_doc",), "joint", dot_score)
    assert_same(loss.compute_loss_from_embeddings(columns), want, columns)
    assert loss.get_config_dict()["similarity_fct"] == "dot_score"
    loss.similarity_fct = nn.CosineSimilarity()  # refused when it is used
    assert loss.get_config_dict()["similarity_fct"] == "CosineSimilarity"


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
    with pytest.raises(RangeError, match="Scale must be a positive value, got 0"):
        st.MultipleNegativesRankingLoss(model, scale=0.0)
    with pytest.raises(ConfigError, match="has the target"):
        st.MultipleNegativesRankingLoss(model, directions=("doc_to_query",))
    with pytest.raises(ConfigError, match="no direction"):
        st.MultipleNegativesRankingLoss(model, directions=("query_to_doc", "sideways"))
    with pytest.raises(ConfigError, match=r"tuple of names, got 'query_to_doc'. Write .*\('query_to_doc',\)"):
        st.MultipleNegativesRankingLoss(model, directions="query_to_doc")
    with pytest.raises(ConfigError, match="joint"):
        st.MultipleNegativesRankingLoss(model, directions=FOUR, partition_mode="per_direction")
    with pytest.raises(ConfigError, match="Add 'doc_to_query'"):
        st.MultipleNegativesRankingLoss(model, directions=("query_to_doc", "doc_to_doc"))
    with pytest.raises(ConfigError, match="no hardness_mode 'hard'; choose one of"):
        st.MultipleNegativesRankingLoss(model, hardness_mode="hard", hardness_strength=5.0)
    with pytest.raises(RangeError, match="hardness must not be negative, got -1"):
        st.MultipleNegativesRankingLoss(model, hardness_mode="all_negatives", hardness_strength=-1.0)
    with pytest.raises(ConfigError, match="cos_sim or dot_score"):
        st.MultipleNegativesRankingLoss(model, similarity_fct=torch.cdist)
    static = Bag()
    static.inside = type("StaticEmbedding", (nn.Module,), {})()
    st.MultipleNegativesRankingLoss(static)
    with pytest.raises(ConfigError, match=r"a gradient cache is not compatible with .* StaticEmbedding"):
        st.CachedMultipleNegativesRankingLoss(static)
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
