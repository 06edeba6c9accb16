"""The kernels that find the nearest items, in Triton's interpreter: whole numbers, with many ties."""

import pytest
import torch
import torch.nn.functional as F
from tests.kernels.interpreted import IN_THE_INTERPRETER
from tests.test_nearest import assert_same, dense

import tilewise as tw
from tilewise.kernels import ranks, registry
from tilewise.kernels.triton_impl import nearest as fused
from tilewise.options import TileOptions
from tilewise.retrieval import Nearest

pytestmark = IN_THE_INTERPRETER
FUSED = TileOptions(backend="triton")


@pytest.fixture
def smallest_buffer(monkeypatch):
    """Sets how many keys of a row are kept at least, so that a small gallery fills it."""
    return lambda keys: monkeypatch.setattr(fused, "SMALLEST_BUFFER", keys)


def numbers(n, m, d, dtype=torch.float32, largest=2):
    generator = torch.Generator().manual_seed(n + m)
    return [torch.randint(-largest, largest + 1, (rows, d), generator=generator).to(dtype) for rows in (n, m)]


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16], ids=["float32", "float16"])
@pytest.mark.parametrize("n, m, d, k", [(1, 1, 1, 1), (5, 130, 7, 5), (3, 90, 16, 120)])
def test_equals_a_stable_sort(n, m, d, k, dtype, smallest_buffer):
    smallest_buffer(16)
    queries, gallery = numbers(n, m, d, dtype)
    assert_same(tw.nearest(queries, gallery, k, options=FUSED), dense(queries, gallery, k))


def test_unwanted_items_are_left_out(smallest_buffer):
    smallest_buffer(16)
    queries, gallery = numbers(7, 80, 5)
    generator = torch.Generator().manual_seed(1)
    ids = [torch.randint(0, 9, (rows,), generator=generator) * 2**40 for rows in (7, 80)]
    exclude = torch.randint(-1, 80, (7, 3), generator=generator)
    more = {"query_ids": ids[0], "gallery_ids": ids[1], "exclude": exclude, "below": torch.arange(7) - 3.0}
    for names in (["exclude"], ["below"], ["query_ids", "gallery_ids"], list(more)):
        some = {name: more[name] for name in names}
        assert_same(tw.nearest(queries, gallery, 6, **some, options=FUSED), dense(queries, gallery, 6, **some))


@pytest.mark.parametrize("rising", [True, False])
def test_a_buffer_that_overflows(rising, smallest_buffer, monkeypatch):
    """In a gallery in rising order every item enters, so that launches are repeated with fewer columns."""
    smallest_buffer(8)
    launched, launch = [], fused.FusedSearcher._launch
    monkeypatch.setattr(fused.FusedSearcher, "_launch", lambda *a: (launched.append(a[4]["m"]), launch(*a)))
    gallery = torch.arange(70.0).sort(descending=not rising).values[:, None]
    queries = torch.ones(2, 1)
    assert_same(tw.nearest(queries, gallery, 2, options=FUSED), dense(queries, gallery, 2))
    assert (launched != sorted(launched)) == rising


def test_rows_in_parts_and_shards_of_a_ring(smallest_buffer):
    """The blocks of a ring come in falling order, so an equal score of a later block may enter."""
    smallest_buffer(32)
    queries, gallery = numbers(70, 90, 3, largest=1)
    searcher = registry.choose_searcher(queries.device, 3, queries.dtype, FUSED)
    searcher.workspace = 1
    found = ranks.no_nearest(70, 4, searcher)
    for start in (60, 30, 0):
        block = ranks.Block(queries, gallery[start : start + 30], col_offset=start)
        searcher.find_nearest(block, ranks.Unwanted(), found)
    assert_same(Nearest(found.score, found.index), dense(queries, gallery, 4))


def test_a_score_has_the_bits_of_a_rank():
    queries, gallery = (F.normalize(torch.randn(rows, 20), dim=1) for rows in (4, 200))
    found = tw.nearest(queries, gallery, 10, options=FUSED)
    places = tw.retrieval_ranks(queries, gallery, found.indices, options=FUSED)
    assert torch.equal(places, torch.arange(10).expand(4, -1))
