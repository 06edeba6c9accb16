"""Ranks and nearest items on a CUDA device: ties, both directions, and scores that depend on nothing but features."""

import pytest
import torch
from tests.gpu.checks import CHUNK
from tests.test_nearest import assert_same, dense

from tilewise.kernels.registry import choose_scorer
from tilewise.kernels.torch_impl.ranks import ScoreTile
from tilewise.kernels.triton_impl.ranks import FusedScorer
from tilewise.options import TileOptions
from tilewise.retrieval import gallery as blocks
from tilewise.retrieval import nearest, retrieval_ranks, retrieval_ranks_both

pytestmark = [pytest.mark.gpu, pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")]
FUSED, TILES = TileOptions(backend="triton", precision="highest"), TileOptions(backend="torch", precision="highest")
DTYPES = pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32], ids=["bf16", "fp16", "fp32"])


def features(seed, rows, d, dtype):
    generator = torch.Generator("cuda").manual_seed(seed)
    return torch.randn(rows, d, generator=generator, device="cuda").to(dtype)


def whole_numbers(seed, rows, d, dtype):
    return features(seed, rows, d, torch.float32).round().to(dtype)


def test_it_is_taken_by_itself():
    assert isinstance(choose_scorer(torch.device("cuda", 0), 8, torch.bfloat16, TileOptions()), FusedScorer)
    assert isinstance(choose_scorer(torch.device("cuda", 0), 8, torch.float64, TileOptions()), ScoreTile)


@DTYPES
@pytest.mark.parametrize("d", [8, 72, 512, 1030])
def test_equal_rows_tie_wherever_they_stand(d, dtype):
    """A second copy of the gallery: its answers have their first copies before them, and each better item twice."""
    queries, gallery = features(1, 1500, d, dtype), features(2, 2100, d, dtype)
    place = torch.randperm(4200, generator=torch.Generator("cuda").manual_seed(3), device="cuda")
    twice = torch.empty_like(torch.cat([gallery, gallery]))
    twice[place] = torch.cat([gallery, gallery])
    answer = torch.randint(2100, (1500,), generator=torch.Generator("cuda").manual_seed(4), device="cuda")
    once = retrieval_ranks(queries, gallery, answer, options=FUSED)
    copies = torch.stack([place[answer], place[answer + 2100]], 1).sort(1).values
    got = retrieval_ranks(queries, twice, copies, options=FUSED)
    assert torch.equal(got[:, 0], 2 * once)
    assert torch.equal(got[:, 1], 2 * once + 1)


@DTYPES
@pytest.mark.parametrize(
    "n, m, d, answers, exclusions", [(1000, 1700, 24, 1, 0), (777, 3000, 40, 6, 2), (130, 129, 9, 4, 1)]
)
def test_whole_numbers_are_counted_as_by_tiles(n, m, d, answers, exclusions, dtype):
    """Every sum is exact, and most scores tie."""
    queries, gallery = whole_numbers(1, n, d, dtype), whole_numbers(2, m, d, dtype)
    generator = torch.Generator("cuda").manual_seed(5)
    index = torch.randint(-1, m, (n, answers), generator=generator, device="cuda")
    exclude = torch.randint(-1, m, (n, exclusions), generator=generator, device="cuda")
    exclude[(exclude[:, :, None] == index[:, None, :]).any(2)] = -1
    more = {"exclude": exclude} if exclusions else {}
    got = retrieval_ranks_both(queries, gallery, index, options=FUSED, **more)
    want = retrieval_ranks_both(queries, gallery, index, options=TILES, **more)
    assert torch.equal(got.query_to_gallery, want.query_to_gallery)
    assert torch.equal(got.gallery_to_query, want.gallery_to_query)


@DTYPES
@pytest.mark.parametrize("classes", [3, 500, 10**6])
def test_whole_numbers_by_id(classes, dtype):
    queries, gallery = whole_numbers(1, 900, 20, dtype), whole_numbers(2, 1300, 20, dtype)
    generator = torch.Generator("cuda").manual_seed(6)
    ids = [torch.randint(0, classes, (rows,), generator=generator, device="cuda") for rows in (900, 1300)]
    exclude = torch.randint(-1, 1300, (900, 2), generator=generator, device="cuda")
    more = {"query_ids": ids[0], "gallery_ids": ids[1], "exclude": exclude}
    got = retrieval_ranks_both(queries, gallery, options=FUSED, **more)
    want = retrieval_ranks_both(queries, gallery, options=TILES, **more)
    assert torch.equal(got.query_to_gallery, want.query_to_gallery)
    assert torch.equal(got.gallery_to_query, want.gallery_to_query)


@DTYPES
@pytest.mark.parametrize("d", [24, 600])
def test_ids_of_pairs_are_pairs(d, dtype):
    """Real numbers: the best answer's score is that with which its rivals are compared."""
    queries, gallery = features(1, 3000, d, dtype), features(2, 3000, d, dtype)
    ids = torch.randperm(3000, generator=torch.Generator("cuda").manual_seed(7), device="cuda")
    want = retrieval_ranks_both(queries, gallery, options=FUSED)
    got = retrieval_ranks_both(queries, gallery, query_ids=ids, gallery_ids=ids, options=FUSED)
    assert torch.equal(got.query_to_gallery, want.query_to_gallery)
    assert torch.equal(got.gallery_to_query, want.gallery_to_query)


@DTYPES
def test_ranks_are_those_of_float64_up_to_rounding(dtype):
    queries, gallery = features(1, 1003, 200, dtype), features(2, 3001, 200, dtype)
    scores = queries.double() @ gallery.double().T
    own = scores.diagonal()[:, None]
    slack = 1e-5 * queries.double().norm(dim=1, keepdim=True) * gallery.double().norm(dim=1).max()
    got = retrieval_ranks_both(queries, gallery, options=FUSED)
    assert (got.query_to_gallery >= (scores > own + slack).sum(1)).all()
    assert (got.query_to_gallery <= (scores > own - slack).sum(1)).all()
    back, theirs = scores.T[:1003], scores.diagonal()[:, None]
    assert (got.gallery_to_query[:1003] >= (back > theirs + slack).sum(1)).all()
    assert (got.gallery_to_query[:1003] <= (back > theirs - slack).sum(1)).all()
    assert (got.gallery_to_query[1003:] == -1).all()


def test_a_rank_depends_on_no_other_query_and_on_no_size():
    queries, gallery = features(1, 5000, 96, torch.bfloat16), features(2, 9000, 96, torch.bfloat16)
    whole = retrieval_ranks(queries, gallery, options=FUSED)
    few = retrieval_ranks(queries[1234:1300], gallery, torch.arange(1234, 1300, device="cuda"), options=FUSED)
    assert torch.equal(few, whole[1234:1300])
    small = TileOptions(backend="triton", workspace_mib=1, precision="highest")
    assert torch.equal(retrieval_ranks(queries, gallery, options=small), whole)
    wide = torch.full((5000, 99), torch.nan, device="cuda", dtype=torch.bfloat16)
    wide[:, 1:97] = queries  # rows that no descriptor can read
    assert torch.equal(retrieval_ranks(wide[:, 1:97], gallery, options=FUSED), whole)


def test_memory_does_not_grow_with_the_pairs():
    queries, gallery = features(1, CHUNK, 64, torch.bfloat16), features(2, CHUNK, 64, torch.bfloat16)
    retrieval_ranks(queries[:256], gallery[:256], options=FUSED)
    torch.cuda.synchronize()
    torch.cuda.reset_peak_memory_stats()
    before = torch.cuda.memory_allocated()
    retrieval_ranks(queries, gallery, options=FUSED)
    assert (
        torch.cuda.max_memory_allocated() - before < 2**25
    )  # the right answers, gathered, are 8 MiB; scores would be 16 GiB


@DTYPES
@pytest.mark.parametrize("backend", ["triton", "torch"])
def test_a_gallery_on_the_host_gives_the_bits_of_one_on_the_device(backend, dtype, monkeypatch):
    """Copied in blocks of 1 MiB, from plain and from pinned memory, with the device's memory bounded."""
    options = TileOptions(backend=backend, precision="highest", workspace_mib=32)
    queries, gallery = whole_numbers(1, 600, 72, dtype), features(2, 10**6, 72, dtype)
    ids = [torch.arange(rows, device="cuda") % 999 for rows in (600, 10**6)]
    positives = torch.randint(10**6, (600,), generator=torch.Generator("cuda").manual_seed(3), device="cuda")
    want = nearest(queries, gallery, 50, query_ids=ids[0], gallery_ids=ids[1], options=options)
    ranks = retrieval_ranks_both(queries, gallery, positives, options=options)
    host = gallery.cpu()
    del gallery
    monkeypatch.setattr(blocks, "BLOCK_BYTES", 2**20)
    for there in (host, host.pin_memory()):
        torch.cuda.synchronize()
        torch.cuda.reset_peak_memory_stats()
        before = torch.cuda.memory_allocated()
        got = nearest(queries, there, 50, query_ids=ids[0], gallery_ids=ids[1].cpu(), options=options)
        assert torch.cuda.max_memory_allocated() - before < 2**26  # the gallery has at least 137 MiB
        assert torch.equal(got.indices, want.indices)
        assert torch.equal(got.scores, want.scores)
        found = retrieval_ranks_both(queries, there, positives, options=options)
        assert torch.equal(found.query_to_gallery, ranks.query_to_gallery)
        assert torch.equal(found.gallery_to_query, ranks.gallery_to_query)


@DTYPES
@pytest.mark.parametrize("n, m, d, k", [(1, 1, 3, 2), (300, 20000, 8, 100), (130, 5000, 72, 10), (70, 9000, 5, 1024)])
def test_the_nearest_are_those_of_a_stable_sort(n, m, d, k, dtype):
    """Nearly every choice is a tie."""
    queries, gallery = whole_numbers(1, n, d, dtype), whole_numbers(2, m, d, dtype)
    assert_same(nearest(queries, gallery, k, options=FUSED), dense(queries, gallery, k))


@DTYPES
@pytest.mark.parametrize("names", [["exclude"], ["below"], ["query_ids", "gallery_ids"], []])
def test_what_is_not_wanted_is_not_found(names, dtype):
    queries, gallery = whole_numbers(1, 500, 9, dtype), whole_numbers(2, 7000, 9, dtype)
    generator = torch.Generator("cuda").manual_seed(3)
    ids = [torch.randint(0, 9, (rows,), generator=generator, device="cuda") * 2**40 for rows in (500, 7000)]
    exclude = torch.randint(-1, 7000, (500, 3), generator=generator, device="cuda")
    more = {"query_ids": ids[0], "gallery_ids": ids[1], "exclude": exclude}
    more["below"] = torch.arange(500, device="cuda") % 7 - 3.0
    some = {name: more[name] for name in names or more}
    assert_same(nearest(queries, gallery, 30, **some, options=FUSED), dense(queries, gallery, 30, **some))


@pytest.mark.parametrize("order", ["rising", "falling", "all equal", "all negative"])
def test_buffers_that_overflow(order):
    """In a gallery in rising order every item enters. In one of negative scores columns past the end would, too."""
    gallery = torch.arange(-3000.0, 3000.0, device="cuda")[:, None]
    gallery = {
        "rising": gallery, "falling": gallery.flip(0), "all equal": gallery * 0, "all negative": gallery[:2999]
    }[order]  # fmt: skip
    queries = torch.ones(200, 1, device="cuda")
    assert_same(nearest(queries, gallery, 40, options=FUSED), dense(queries, gallery, 40))


@DTYPES
def test_a_found_score_has_the_bits_of_a_rank(dtype):
    """In bfloat16, n and m are those of several launches of many tiles, with rows in two parts of the workspace."""
    queries, gallery = features(1, 3000, 200, dtype), features(2, 30000, 200, dtype)
    found = nearest(queries, gallery, 100, options=TileOptions(backend="triton", precision="highest", workspace_mib=8))
    places = retrieval_ranks(queries, gallery, found.indices, options=FUSED)
    assert torch.equal(places, torch.arange(100, device="cuda").expand(3000, -1))
