"""The nearest items against a stable sort of all scores in float64. Features are whole numbers, with many ties."""

from __future__ import annotations

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from hypothesis import given, settings
from hypothesis import strategies as st
from tests.processes import peak_bytes
from tests.ring.test_ring_retrieval import SEARCHES, search_over_ranks
from tests.ring.virtual import run_virtual
from tests.test_retrieval import DEVICES, DTYPES, mask_of, whole_numbers, with_side

import tilewise as tw
from tilewise.errors import BackendError, GroupError, RangeError
from tilewise.retrieval import Nearest
from tilewise.retrieval import gallery as blocks


def dense(queries, gallery, k, *, query_ids=None, gallery_ids=None, exclude=None, below=None):
    scores = queries.double() @ gallery.double().T
    if query_ids is not None:
        scores = scores.masked_fill(query_ids[:, None] == gallery_ids[None, :], -torch.inf)
    if exclude is not None:
        index = exclude if exclude.dim() == 2 else exclude[:, None]
        scores = scores.masked_fill(mask_of(index.cpu(), len(gallery)).to(scores.device), -torch.inf)
    if below is not None:
        limit = torch.as_tensor(below, dtype=torch.float64, device=scores.device).reshape(-1, 1)
        scores = scores.masked_fill(scores >= limit, -torch.inf)
    scores = F.pad(scores, (0, k), value=-torch.inf)  # at least k columns
    order = scores.argsort(dim=1, descending=True, stable=True)[:, :k]
    values = scores.gather(1, order)
    return Nearest(values, torch.where(values > -torch.inf, order, -1))


def assert_same(got, want):
    assert torch.equal(got.indices, want.indices)
    assert torch.equal(got.scores.double(), want.scores)


@st.composite
def problems(draw):
    generator = torch.Generator().manual_seed(draw(st.integers(0, 2**32)))
    n, m, d = draw(st.integers(0, 50)), draw(st.integers(0, 90)), draw(st.integers(1, 9))
    dtype = draw(st.sampled_from(DTYPES))
    largest = draw(st.sampled_from([0, 1, 3]))  # 0: all scores equal
    queries, gallery = (whole_numbers(generator, rows, d, dtype, largest) for rows in (n, m))
    more = {}
    if draw(st.booleans()):
        more["query_ids"], more["gallery_ids"] = (torch.randint(0, 4, (rows,), generator=generator) for rows in (n, m))
    if draw(st.booleans()):
        more["exclude"] = torch.randint(-1, max(m, 1), (n, 3), generator=generator) if m else torch.full((n, 3), -1)
    if draw(st.booleans()):
        more["below"] = draw(st.sampled_from([2.0, torch.randint(-3, 4, (n,), generator=generator).float()]))
    return queries, gallery, draw(st.sampled_from([1, 2, 7, 40, 100])), more, draw(st.sampled_from([16, 32, 64]))


@settings(max_examples=150, deadline=None)
@given(problems())
def test_equals_a_stable_sort(problem):
    queries, gallery, k, more, side = problem
    assert_same(with_side(side, lambda: tw.nearest(queries, gallery, k, **more)), dense(queries, gallery, k, **more))


@pytest.mark.parametrize("seed", range(6))
def test_whole_numbers_tie_everywhere(seed, monkeypatch):
    """Sizes at random, of several tiles, strips and blocks. Scores take few values, so nearly every choice is a tie."""
    random = np.random.default_rng(seed)
    n, m, d = int(random.integers(1, 800)), int(random.integers(1, 6000)), int(random.integers(1, 6))
    generator = torch.Generator().manual_seed(seed)
    queries, gallery = (whole_numbers(generator, rows, d, largest=1 + seed % 2) for rows in (n, m))
    monkeypatch.setattr(blocks, "BLOCK_BYTES", 4 * d * int(random.integers(m // 3 + 1, 2 * m + 1)))
    k = int(random.integers(1, 150))
    assert_same(tw.nearest(queries, gallery, k), dense(queries, gallery, k))


@pytest.mark.parametrize("share", [0.0, 0.1, 0.9, 1.0])
def test_a_mask_excludes_its_true_entries(share):
    generator = torch.Generator().manual_seed(4)
    queries, gallery = (whole_numbers(generator, rows, 5, torch.float32) for rows in (30, 50))
    mask = torch.rand(30, 50, generator=generator) < share
    want = dense(queries, gallery, 7, exclude=torch.where(mask, torch.arange(50), -1))
    assert_same(tw.nearest(queries, gallery, 7, exclude=mask), want)


def test_a_mask_has_columns_for_the_items_of_all_ranks():
    generator = torch.Generator().manual_seed(5)
    queries, gallery = (whole_numbers(generator, rows, 5, torch.float32) for rows in (6, 15))
    mask = torch.rand(6, 15, generator=generator) < 0.5
    want = dense(queries, gallery, 4, exclude=torch.where(mask, torch.arange(15), -1))

    def part(group):
        own = slice(2 * group.rank(), 2 * group.rank() + 2), slice(5 * group.rank(), 5 * group.rank() + 5)
        return tw.nearest(queries[own[0]], gallery[own[1]], 4, exclude=mask[own[0]], group=group)

    found = run_virtual(3, part)
    assert_same(Nearest(*(torch.cat(parts) for parts in zip(*found, strict=True))), want)


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("dtype", DTYPES)
def test_several_tiles_on_a_device(device, dtype):
    generator = torch.Generator().manual_seed(1)
    queries, gallery = (whole_numbers(generator, rows, 6, dtype).to(device) for rows in (700, 5000))
    ids = [torch.randint(0, 50, (rows,), generator=generator).to(device) for rows in (700, 5000)]
    more = {"query_ids": ids[0], "gallery_ids": ids[1], "exclude": torch.arange(700, device=device)}
    assert_same(tw.nearest(queries, gallery, 20, **more), dense(queries, gallery, 20, **more))


@pytest.mark.parametrize("order", ["rising", "falling", "one row rises"])
def test_a_sorted_gallery_and_many_items(order):
    """Every item enters, none after the first do, or all of one row do; and more items than a tile has."""
    generator = torch.Generator().manual_seed(3)
    queries, gallery = torch.ones(20, 1), torch.randint(0, 900, (1500, 1), generator=generator).float().sort(0).values
    if order == "falling":
        gallery = gallery.flip(0)
    if order == "one row rises":
        queries[1:] = 0
    for k in (1, 1024):
        assert_same(with_side(64, lambda k=k: tw.nearest(queries, gallery, k)), dense(queries, gallery, k))


def test_a_score_has_the_bits_of_a_rank():
    """The rank of the item that was found in place k is k, also where the workspace holds one tile at a time."""
    queries, gallery = (F.normalize(torch.randn(rows, 96), dim=1) for rows in (150, 3000))
    found = tw.nearest(queries, gallery, 30)
    assert torch.equal(tw.retrieval_ranks(queries, gallery, found.indices), torch.arange(30).expand(150, -1))
    small = tw.nearest(queries, gallery, 30, options=tw.TileOptions(workspace_mib=6))
    assert torch.equal(found.scores, small.scores)


def test_scores_of_real_features():
    queries, gallery = (F.normalize(torch.randn(rows, 64), dim=1) for rows in (300, 2000))
    got, want = tw.nearest(queries, gallery, 10), (queries @ gallery.T).topk(10)
    torch.testing.assert_close(got.scores, want.values)
    torch.testing.assert_close((queries[:, None] * gallery[got.indices]).sum(2), want.values)
    assert got.scores.dtype == torch.float32
    assert not tw.nearest(queries.requires_grad_(), gallery, 10).scores.requires_grad


def test_hard_negatives_for_training():
    """Right answers and what is nearly as close are left out, and the rest trains `info_nce`."""
    document = torch.randint(0, 40, (64,))  # of each query
    gallery = F.normalize(torch.randn(40, 16), dim=1)
    query = F.normalize(gallery[document] + 0.1 * torch.randn(64, 16), dim=1).requires_grad_()
    positive = (query * gallery[document]).sum(1)
    found = tw.nearest(query, gallery, 39, query_ids=document, gallery_ids=torch.arange(40), below=0.3 * positive)
    scores = query @ gallery.T
    wanted = (scores < 0.3 * positive[:, None]) & (document[:, None] != torch.arange(40))
    real = found.indices >= 0
    assert torch.equal(real.sum(1), wanted.sum(1))
    assert not real.all()
    loss = tw.info_nce(query, gallery[document], gallery[found.indices], negative_mask=real, in_batch=False)
    logits = scores.masked_fill(~wanted & ~F.one_hot(document, 40).bool(), -torch.inf) / 0.07
    torch.testing.assert_close(loss, F.cross_entropy(logits, document))


@pytest.mark.parametrize("rows, cols", SEARCHES)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_over_ranks_equals_one_process(rows, cols, dtype):
    work, (whole, more) = search_over_ranks(rows, cols, dtype)
    parts = run_virtual(len(rows), work)
    assert_same(Nearest(*(torch.cat(part) for part in zip(*parts, strict=True))), dense(*whole, **more))


def test_ranks_that_differ_all_raise():
    x = torch.eye(4)

    def outcome(group, **odd):
        try:
            tw.nearest(x, x, **({"k": 2} | (odd if group.rank() == 1 else {})), group=group)
        except (GroupError, RangeError) as error:
            return type(error).__name__, str(error)
        return "finished", ""

    found = run_virtual(3, lambda group: outcome(group, k=3))
    assert all(kind == "GroupError" and "on k: 2 on ranks 0, 2 but 3 on rank 1" in text for kind, text in found)
    found = run_virtual(3, lambda group: outcome(group, k=0))
    assert [kind for kind, _ in found] == ["GroupError", "RangeError", "GroupError"]
    found = run_virtual(3, lambda group: outcome(group, exclude=torch.full((4,), 99)))
    assert [kind for kind, _ in found] == ["GroupError", "RangeError", "GroupError"]


def search_step(rows):
    features = torch.randn(rows, 16, generator=torch.Generator().manual_seed(0))

    return lambda: tw.nearest(features[:64], features[:64], 10), lambda: tw.nearest(features, features, 10)


def test_memory_is_linear():
    small, large = (peak_bytes("tests.test_nearest:search_step", {"rows": rows}) for rows in (4096, 16384))
    print(f"{small / 2**20:.1f} and {large / 2**20:.1f} MiB")
    # Per query 120 bytes are found and merged; the scores of 16,384 would be 1 GiB.
    assert large < 20 * 2**20
    assert large - small < 6 * 2**20


def test_progress_reaches_the_end():
    features, seen = torch.eye(1100), []
    found = tw.nearest(features, features, 1, progress=lambda *a: seen.append(a))
    assert torch.equal(found.indices.squeeze(1), torch.arange(1100))
    assert seen == sorted(seen)
    assert seen[-1] == (1100 * 1100, 1100 * 1100)


X = torch.eye(6)


def test_a_number_of_numpy_is_a_number():
    assert tw.nearest(X, X, np.int64(2)).indices.shape == (6, 2)


def test_a_backend_without_a_search_is_named(monkeypatch):
    from tilewise.kernels.torch_impl.backend import TorchBackend

    monkeypatch.setattr(TorchBackend, "offers_search", False)
    with pytest.raises(BackendError, match="no search for the nearest items"):
        tw.nearest(X, X, 2, options=tw.TileOptions(backend="torch"))
