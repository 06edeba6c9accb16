"""The GIST losses equal their definition with all similarities, for small models. Their package is not needed."""

from __future__ import annotations

import inspect

import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F
from tests.compare import assert_close, assert_no_worse
from tests.integrations.matryoshka import shortened
from tests.kernels.marks import INTERPRETED
from torch import nn

import tilewise as tw
from tilewise.errors import ConfigError, DtypeError, RangeError, ShapeError
from tilewise.integrations import sentence_transformers as st
from tilewise.integrations.sentence_transformers import gist

N, T, WORDS, D, E = 23, 5, 40, 8, 11  # N texts of T words
CONTRASTS = [(True, True), (True, False), (False, True), (False, False)]
MARGINS = [("absolute", 0.0), ("absolute", 0.2), ("absolute", -3.0), ("relative", 0.3)]


class Tokenizer:
    """Words "w0" to "w39", with ids that start at ``first``. Id 0 is padding."""

    def __init__(self, first: int = 1) -> None:
        self.first = first

    def get_vocab(self):
        return {f"w{i}": i + self.first for i in range(WORDS)}

    def batch_decode(self, rows, skip_special_tokens):
        assert skip_special_tokens
        rows = rows.tolist() if isinstance(rows, torch.Tensor) else rows
        return [" ".join(f"w{i - self.first}" for i in row if i >= self.first) for row in rows]


class Model(nn.Module):
    """A mean of word embeddings. Like the modules of sentence-transformers, it writes its outputs into the features."""

    def __init__(self, width: int, seed: int, first: int = 1, max_seq_length: int | None = T, dropout: float = 0.0):
        super().__init__()
        torch.manual_seed(seed)
        self.words = nn.Embedding(WORDS + first, width, dtype=torch.float64)
        self.drop = nn.Dropout(dropout)
        self.tokenizer, self.max_seq_length, self.device = Tokenizer(first), max_seq_length, torch.device("cpu")

    def preprocess(self, texts):
        ids = [[int(word[1:]) + self.tokenizer.first for word in text.split()][: self.max_seq_length] for text in texts]
        longest = max(map(len, ids))
        return {"input_ids": torch.tensor([row + [0] * (longest - len(row)) for row in ids])}

    def forward(self, features):
        ids = features["input_ids"]
        real = (ids >= self.tokenizer.first)[..., None]
        total = torch.where(real, self.words(ids), 0.0).sum(1)
        features["sentence_embedding"] = self.drop(total / real.sum(1))
        return features


def texts(columns: int, seed: int = 0):
    draw = torch.Generator().manual_seed(seed)
    lengths = torch.randint(2, T + 1, (columns, N), generator=draw).tolist()
    return [
        [" ".join(f"w{i}" for i in torch.randint(0, WORDS, (n,), generator=draw).tolist()) for n in column]
        for column in lengths
    ]


def cosine(a, b):
    return F.normalize(a, dim=1) @ F.normalize(b, dim=1).T


def gist_dense(columns, guides, temperature, margin_strategy, margin, anchors, positives, rank=None):
    """Oracle, with all similarities of both models. ``rank``: of each row; anchors are compared within a rank only."""
    own = cosine(guides[0], guides[1]).diagonal()[:, None]
    limit = own - (margin * own.abs() if margin_strategy == "relative" else margin)
    pairs = [(0, j) for j in range(1, len(columns))] + [(0, 0)] * anchors + [(1, 1)] * positives
    scores = []
    for i, j in pairs:
        left_out = cosine(guides[i], guides[j]) > limit
        if (i, j) == (0, 1):
            left_out = left_out & ~torch.eye(len(own), dtype=torch.bool, device=own.device)
        if (i, j) == (0, 0) and rank is not None:
            left_out = left_out | (rank[:, None] != rank)
        scores.append((cosine(columns[i], columns[j]) / temperature).masked_fill(left_out, -torch.inf))
    return F.cross_entropy(torch.cat(scores, 1), torch.arange(len(own), device=own.device))


def embedded(model, columns):
    return [model(model.preprocess(column))["sentence_embedding"] for column in columns]


def step(loss, model, columns):
    """The loss of a batch and the gradients of the model."""
    model.zero_grad()
    value = loss([model.preprocess(column) for column in columns], None)
    (3 * value).backward()
    return value.detach(), model.words.weight.grad.clone()


def wanted(model, guide, columns, *settings):
    model.zero_grad()
    with torch.no_grad():
        guides = embedded(guide, columns)
    value = gist_dense(embedded(model, columns), guides, *settings)
    (3 * value).backward()
    return value.detach(), model.words.weight.grad.clone()


@pytest.mark.parametrize("cached", [False, True])
@pytest.mark.parametrize("columns", [2, 3, 4])
@pytest.mark.parametrize("strategy, margin", MARGINS)
@pytest.mark.parametrize("contrasts", CONTRASTS)
def test_equals_the_definition(contrasts, strategy, margin, columns, cached):
    model, guide, batch = Model(D, 0), Model(E, 1), texts(columns)
    settings = {"margin_strategy": strategy, "margin": margin}
    settings |= {"contrast_anchors": contrasts[0], "contrast_positives": contrasts[1]}
    kind = st.CachedGISTEmbedLoss if cached else st.GISTEmbedLoss
    more = {"mini_batch_size": 7} if cached else {}
    loss = kind(model, guide, 0.1, **settings, **more)
    assert not loss.must_retokenize
    got = step(loss, model, batch)
    want = wanted(model, guide, batch, 0.1, strategy, margin, *contrasts)
    assert want[1].norm() > 0
    assert_close(got[0], want[0], 1e-12, "loss")
    assert_close(got[1], want[1], 1e-11, "gradients")
    assert guide.words.weight.grad is None


def test_the_guide_leaves_pairs_out():
    """Otherwise the tests above would compare the loss without a guide."""
    model, batch = Model(D, 0), texts(3)
    values = {step(st.GISTEmbedLoss(model, Model(E, seed), 0.1), model, batch)[0].item() for seed in (1, 2)}
    assert len(values) == 2
    rows, guides = embedded(model, batch), embedded(Model(E, 1), batch)
    everything = gist_dense(rows, guides, 0.1, "absolute", -3.0, True, True)
    assert gist_dense(rows, guides, 0.1, "absolute", 0.0, True, True) < everything


def test_rows_whose_candidates_are_all_left_out():
    model, guide, batch = Model(D, 0), Model(E, 1), texts(3)
    loss = st.GISTEmbedLoss(model, guide, margin=3.0)
    value, grad = step(loss, model, batch)
    assert value == 0
    assert torch.equal(grad, torch.zeros_like(grad))


@pytest.mark.parametrize("cached", [False, True])
@pytest.mark.parametrize(
    "guide", [Model(E, 1, first=3), Model(E, 1, max_seq_length=T - 2)], ids=["vocabulary", "length"]
)
def test_texts_are_tokenized_again_for_another_guide(guide, cached):
    model, batch = Model(D, 0), texts(3)
    loss = st.CachedGISTEmbedLoss(model, guide, 0.1, 7) if cached else st.GISTEmbedLoss(model, guide, 0.1)
    assert loss.must_retokenize
    got, want = step(loss, model, batch), wanted(model, guide, batch, 0.1, "absolute", 0.0, True, True)
    assert_close(got[0], want[0], 1e-12, "loss")
    assert_close(got[1], want[1], 1e-11, "gradients")


def test_a_longer_guide_takes_the_same_tokens():
    for longer in (None, T + 1):
        assert not st.GISTEmbedLoss(Model(D, 0), Model(E, 1, max_seq_length=longer)).must_retokenize
    assert st.GISTEmbedLoss(Model(D, 0, max_seq_length=None), Model(E, 1)).must_retokenize


def test_texts_in_one_row_are_split_before_they_are_tokenized_again():
    loss, batch = st.GISTEmbedLoss(Model(D, 0), Model(E, 1, first=3)), texts(1)[0]
    rows = [[int(word[1:]) + 1 for word in text.split()] for text in batch]
    ends = torch.tensor([0, *map(len, rows)]).cumsum(0)
    flat = {"input_ids": torch.tensor([[word for row in rows for word in row]]), "cu_seq_lens_q": ends}
    (got,) = loss.guide_inputs([flat])
    assert torch.equal(got["input_ids"], loss.guide.preprocess(batch)["input_ids"])


def test_the_guide_does_not_change_the_features():
    """`MatryoshkaLoss` reads what the model wrote into them."""
    model, guide = Model(D, 0), Model(E, 1)
    features = [model.preprocess(column) for column in texts(2)]
    st.GISTEmbedLoss(model, guide)(features)
    assert all(column["sentence_embedding"].shape == (N, D) for column in features)


def test_the_cache_repeats_dropout():
    """With one chunk, the cached loss draws the same dropout masks as the plain one, and backward repeats them."""
    model, guide, batch = Model(D, 0, dropout=0.4), Model(E, 1), texts(3)
    found = []
    for loss in (st.GISTEmbedLoss(model, guide, 0.1), st.CachedGISTEmbedLoss(model, guide, 0.1, N)):
        torch.manual_seed(5)
        found.append(step(loss, model, batch))
    assert_close(found[1][0], found[0][0], 1e-12, "loss")
    assert_close(found[1][1], found[0][1], 1e-11, "gradients")


def test_settings_of_the_cached_losses_can_be_assigned():
    model, guide, batch = Model(D, 0), Model(E, 1), texts(3)
    ranking = st.CachedMultipleNegativesRankingLoss(model, mini_batch_size=7)
    ranking.scale, ranking.similarity_fct = 5.0, "dot_score"
    gist = st.CachedGISTEmbedLoss(model, guide, mini_batch_size=7)
    gist.temperature, gist.margin, gist.contrast_anchors = 0.1, 0.2, False
    assert (ranking.scale, gist.margin) == (5.0, 0.2)
    plain = st.MultipleNegativesRankingLoss(model, 5.0, "dot_score")
    guided = st.GISTEmbedLoss(model, guide, 0.1, margin=0.2, contrast_anchors=False)
    for cached, want in ((ranking, plain), (gist, guided)):
        for got, expected in zip(step(cached, model, batch), step(want, model, batch), strict=True):
            assert_close(got, expected, 1e-11, type(cached).__name__)


@pytest.mark.parametrize("cached", [False, True])
@pytest.mark.parametrize("columns", [2, 3, 4])
@pytest.mark.parametrize("strategy, margin", MARGINS)
@pytest.mark.parametrize("contrasts", CONTRASTS)
def test_a_cross_entropy_of_the_user_gets_all_scores(contrasts, strategy, margin, columns, cached):
    """They are those that the tiles have: their cross-entropy is the same loss."""
    model, guide, batch = Model(D, 0), Model(E, 1), texts(columns)
    settings = {"margin_strategy": strategy, "margin": margin}
    settings |= {"contrast_anchors": contrasts[0], "contrast_positives": contrasts[1]}
    loss = (
        st.CachedGISTEmbedLoss(model, guide, 0.1, 7, **settings)
        if cached
        else st.GISTEmbedLoss(model, guide, 0.1, **settings)
    )
    want, seen = step(loss, model, batch), []

    def cross_entropy(scores, labels):
        seen.append((scores.detach(), labels))
        return F.cross_entropy(scores, labels)

    del loss.cross_entropy_loss
    loss.cross_entropy_loss = cross_entropy
    got = step(loss, model, batch)
    assert_close(got[0], want[0], 1e-12, "loss")
    assert_close(got[1], want[1], 1e-11, "gradients")
    ((scores, labels),) = seen
    assert scores.shape == (N, N * (columns - 1 + sum(contrasts)))
    assert torch.equal(labels, torch.arange(N))
    assert scores[labels, labels].isfinite().all()
    assert scores.isinf().any() == (margin > -3.0)  # with that margin nothing is left out


def test_settings_of_a_cross_entropy_are_used():
    model, guide, batch = Model(D, 0), Model(E, 1), texts(3)
    loss = st.GISTEmbedLoss(model, guide, 0.1)
    mean = step(loss, model, batch)
    loss.cross_entropy_loss = nn.CrossEntropyLoss(reduction="sum")
    total = step(loss, model, batch)
    for got, want in zip(total, mean, strict=True):
        assert_close(got, N * want, 1e-11)


def test_a_loss_without_models_from_its_settings():
    """The tests of sentence-transformers make their losses like this, to pass embeddings."""
    model, guide, batch = Model(D, 0), Model(E, 1), texts(3)
    rows, guides = embedded(model, batch), embedded(guide, batch)
    settings = {"temperature": 0.1, "margin_strategy": "absolute", "margin": 0.2, "contrast_anchors": True}
    settings |= {"contrast_positives": False, "gather_across_devices": True}
    parts = {"similarity_fct": nn.CosineSimilarity(dim=-1), "cross_entropy_loss": nn.CrossEntropyLoss()}
    loss = st.CachedGISTEmbedLoss.__new__(st.CachedGISTEmbedLoss)
    nn.Module.__init__(loss)
    for name, value in (settings | parts).items():
        setattr(loss, name, value)
    got = loss.calculate_loss([[column[:9], column[9:]] for column in rows], [[column] for column in guides])
    assert_close(got, gist_dense(rows, guides, 0.1, "absolute", 0.2, True, False), 1e-12)


@pytest.mark.parametrize("kind", [st.CachedGISTEmbedLoss, st.CachedMultipleNegativesRankingLoss])
def test_both_passes_call_embed_minibatch(kind):
    """It may be replaced, as in sentence-transformers. The second pass has the same dropout and a graph."""
    model, batch = Model(D, 0, dropout=0.4), texts(2)
    more, values = ((Model(E, 1),), 3) if "GIST" in kind.__name__ else ((), 2)
    loss, seen = kind(model, *more, mini_batch_size=9), []
    original = loss.embed_minibatch

    def embed(**keywords):
        found = original(**keywords)
        assert len(found) == values
        assert found[0].requires_grad == keywords["with_grad"] == (len(seen) >= 6)
        seen.append(found[0].detach())
        return found

    loss.embed_minibatch = embed
    step(loss, model, batch)
    assert [len(rows) for rows in seen] == [9, 9, 5] * 4  # two columns, twice
    assert all(torch.equal(*pair) for pair in zip(seen[:6], seen[6:], strict=True))
    part = loss.embed_minibatch(sentence_feature=model.preprocess(batch[0]), begin=3, end=8, with_grad=True)[0]
    assert part.shape == (5, D)


def test_two_batches_before_one_backward():
    model, guide = Model(D, 0), Model(E, 1)
    loss = st.CachedGISTEmbedLoss(model, guide, 0.1, 7)
    first, second = (step(loss, model, texts(2, seed))[1] for seed in (0, 1))
    model.zero_grad()
    both = [loss([model.preprocess(column) for column in texts(2, seed)]) for seed in (0, 1)]
    (3 * sum(both)).backward()
    assert_close(model.words.weight.grad, first + second, 1e-12)
    with torch.no_grad():
        assert_close(loss([model.preprocess(column) for column in texts(2)]), both[0].detach(), 1e-12)


def check_precision(dtype, device="cpu", rows=N, width=64, backend="auto"):
    """At the default temperature, where scores are up to 100. The guide has another type than the model."""
    draw = torch.Generator().manual_seed(0)
    columns = [torch.randn(rows, width, dtype=torch.float64, generator=draw).to(dtype) for _ in range(3)]
    topics = torch.randint(0, 4, (3, rows), generator=draw)
    topics[1] = topics[0]
    guides = F.one_hot(topics, 5).double()  # similarities are 0 or 1, so that rounding does not change the mask
    guides = list(guides.to(device))
    options = tw.TileOptions(backend=backend, precision="highest")
    loss = st.GISTEmbedLoss(Model(D, 0), Model(E, 1), margin=0.5, options=options)
    settings = (0.01, "absolute", 0.5, True, True)
    runs = []
    for kind, compute in (
        (torch.float64, lambda c: gist_dense(c, guides, *settings)),
        (dtype, lambda c: gist_dense(c, guides, *settings)),
        (dtype, lambda c: loss.compute_loss_from_embeddings(c, guides)),
    ):
        leaves = [column.to(device, kind).requires_grad_() for column in columns]
        value = compute(leaves)
        runs.append((value, *torch.autograd.grad(value, leaves)))
    assert runs[2][0].dtype == torch.float32
    for exact, dense, ours in zip(*runs, strict=True):
        assert_no_worse(ours, dense, exact)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.filterwarnings("ignore:mkldnn_matmul")  # a CPU without bfloat16 products falls back
def test_lower_precision_is_no_worse_than_dense(dtype):
    check_precision(dtype)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16])
def test_kernels(dtype):
    check_precision(dtype, backend="triton")


for mark in INTERPRETED:
    test_kernels = mark(test_kernels)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_equal_texts_stay(dtype):
    """The guide scores them like the positive, so they are not above the limit, however the products are rounded."""
    draw = torch.Generator().manual_seed(0)
    guide = torch.randn(N, 768, dtype=dtype, generator=draw)
    columns = [torch.randn(N, D, dtype=dtype, generator=draw) for _ in range(2)]
    got = st.GISTEmbedLoss(Model(D, 0), Model(E, 1), 0.1).compute_loss_from_embeddings(columns, [guide, guide])
    own = torch.eye(N, dtype=dtype)  # the guide's similarities, and everything that is smaller
    want = gist_dense(columns, [own, own], 0.1, "absolute", 0.0, True, True)
    assert_close(got, want, 1e-6)


def test_under_autocast():
    model, guide, batch = Model(D, 0).float(), Model(E, 1).float(), texts(3)
    loss = st.GISTEmbedLoss(model, guide, 1.0)
    want = step(loss, model, batch)
    model.zero_grad()
    with torch.autocast("cpu", dtype=torch.bfloat16):
        value = loss([model.preprocess(column) for column in batch])
    assert value.dtype == torch.float32
    assert_close(value, want[0], 2e-2)


def test_matryoshka_around_the_cached_loss():
    model, guide, columns, sizes = Model(D, 0), Model(E, 1), texts(3), (D, D // 2)
    plain, loss = st.GISTEmbedLoss(model, guide, 0.1), st.CachedGISTEmbedLoss(model, guide, 0.1, mini_batch_size=4)
    with torch.no_grad():
        guides = embedded(guide, columns)
    whole = embedded(model, columns)
    want = sum(plain.compute_loss_from_embeddings([c[:, :size] for c in whole], guides) for size in sizes) / 2
    (want_grad,) = torch.autograd.grad(3 * want, model.words.weight)
    loss.calculate_loss = shortened(loss.calculate_loss, sizes)
    got, grad = step(loss, model, columns)
    assert_close(got, want, 1e-12, "loss")
    assert_close(grad, want_grad, 1e-11, "gradients")


def test_no_matrix_is_built():
    from tests.integrations.test_open_clip_more import Largest

    torch.manual_seed(0)
    columns = [torch.randn(1500, D, requires_grad=True) for _ in range(3)]
    loss = st.GISTEmbedLoss(Model(D, 0), Model(E, 1), options=tw.TileOptions(workspace_mib=1))
    with Largest() as largest:
        loss.compute_loss_from_embeddings(columns, [torch.randn(1500, E) for _ in range(3)]).backward()
    assert largest.numbers * 4 <= 2**20 < 1500**2


def parameters(thing):
    return {
        p.name: p.default for p in inspect.signature(thing).parameters.values() if p.kind is p.POSITIONAL_OR_KEYWORD
    }


def test_signatures_are_theirs():
    empty = inspect.Parameter.empty
    models = {"model": empty, "guide": empty, "temperature": 0.01}
    cache = {"mini_batch_size": 32, "mini_batch_num_tokens": None, "show_progress_bar": False}
    rest = {"margin_strategy": "absolute", "margin": 0.0, "contrast_anchors": True, "contrast_positives": True}
    rest["gather_across_devices"] = False
    for thing, want in ((st.GISTEmbedLoss, models | rest), (st.CachedGISTEmbedLoss, models | cache | rest)):
        assert list(parameters(thing).items()) == list(want.items())
    model, guide = Model(D, 0), Model(E, 1)
    config = st.CachedGISTEmbedLoss(model, guide, margin=0.1).get_config_dict()
    assert config == {
        "guide": guide,
        "temperature": 0.01,
        "mini_batch_size": 32,
        "mini_batch_num_tokens": None,
    } | rest | {"margin": 0.1}


class StaticEmbedding(nn.Module):
    pass


def test_refusals():
    model, guide = Model(D, 0), Model(E, 1)
    with pytest.raises(ConfigError, match="no margin_strategy 'both'"):
        st.GISTEmbedLoss(model, guide, margin_strategy="both")
    with pytest.raises(RangeError, match=r"relative margin is in \[0, 1\]"):
        st.GISTEmbedLoss(model, guide, margin_strategy="relative", margin=2.0)
    with pytest.raises(DtypeError, match="model is a module"):
        st.GISTEmbedLoss(model, None)
    with pytest.raises(ConfigError, match="guide needs a tokenizer of transformers"):
        st.GISTEmbedLoss(model, nn.Linear(2, 2))
    with pytest.raises(RangeError, match="mini_batch_num_tokens must be a positive integer or None, got 0"):
        st.CachedGISTEmbedLoss(model, guide, mini_batch_num_tokens=0)
    rows = torch.randn(4, 3)
    with pytest.raises(ShapeError, match=r"each column, 2 of them, got 3"):
        st.GISTEmbedLoss(model, guide).compute_loss_from_embeddings([rows] * 2, [rows] * 3)
    other = st.GISTEmbedLoss(model, guide)
    other.similarity_fct = nn.PairwiseDistance()
    with pytest.raises(ConfigError, match=r"GIST loss is nn.CosineSimilarity, got PairwiseDistance"):
        other.compute_loss_from_embeddings([rows] * 2, [rows] * 2)
    with pytest.raises(RangeError, match="temperature"):
        st.GISTEmbedLoss(model, guide, 0.0).compute_loss_from_embeddings([rows] * 2, [rows] * 2)
    model.inside = StaticEmbedding()
    st.GISTEmbedLoss(model, guide)
    with pytest.raises(ConfigError, match=r"a gradient cache is not compatible with .* StaticEmbedding"):
        st.CachedGISTEmbedLoss(model, guide)
    with pytest.raises(ConfigError, match="a guide with another tokenizer is not compatible with"):
        st.GISTEmbedLoss(model, Model(E, 1, first=3))


def test_gathered_rows_have_first_derivatives_only(monkeypatch):
    """Torch does not see the sum over ranks in their backward, so a second backward would be wrong."""
    monkeypatch.setattr(dist, "get_world_size", lambda group: 2)
    monkeypatch.setattr(dist, "get_rank", lambda group: 0)
    monkeypatch.setattr(dist, "all_gather", lambda parts, rows, group: [part.copy_(rows) for part in parts])
    monkeypatch.setattr(dist, "all_reduce", lambda total, group: total.mul_(2))
    rows = torch.randn(3, 4, requires_grad=True)
    (grad,) = torch.autograd.grad(gist._Gathered.apply(rows, None).square().sum(), rows, create_graph=True)
    assert_close(grad, 4 * rows, 1e-6)
    with pytest.raises(RuntimeError, match="differentiate twice"):
        grad.sum().backward()
