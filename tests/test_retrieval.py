"""Ranks against a full stable sort in float64. Features are small whole numbers where ranks must be equal:
their scores are exact in every type and full of ties."""

from __future__ import annotations

import itertools

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from tests.processes import peak_bytes
from torch.utils._python_dispatch import TorchDispatchMode

from tilewise.kernels import ranks as kernel
from tilewise.kernels.torch_impl import ranks as tiled
from tilewise.options import TileOptions
from tilewise.retrieval import recall_at_k, retrieval_ranks, retrieval_ranks_both

DTYPES = [torch.float64, torch.float32, torch.bfloat16, torch.float16]
DEVICES = ["cpu", pytest.param("cuda", marks=pytest.mark.gpu)]


def oracle(queries, gallery, right, excluded=None):
    """Place of the best right answer of each row in a full stable descending sort; -1 without one.

    `right` and `excluded` are (n, m) masks."""
    scores = queries.double() @ gallery.double().T
    if excluded is not None:
        scores = scores.masked_fill(excluded, -torch.inf)
        right = right & ~excluded
    order = scores.argsort(dim=1, descending=True, stable=True)
    place = torch.arange(scores.shape[1]).expand_as(order)
    first = torch.where(right.gather(1, order), place, scores.shape[1])
    if scores.shape[1] == 0:
        return torch.full((scores.shape[0],), -1)
    return torch.where(right.any(1), first.amin(1), -1)


def mask_of(index, items):
    """(n, p) indices padded with -1 -> (n, m) mask."""
    mask = torch.zeros(index.shape[0], items + 1, dtype=torch.bool)
    mask.scatter_(1, torch.where(index < 0, items, index), True)
    return mask[:, :items]


def whole_numbers(generator, rows, width, dtype=torch.float32, largest=2):
    return torch.randint(-largest, largest + 1, (rows, width), generator=generator).to(dtype)


@st.composite
def problems(draw):
    generator = torch.Generator().manual_seed(draw(st.integers(0, 2**32)))
    n, extra, d = draw(st.integers(0, 50)), draw(st.integers(0, 50)), draw(st.integers(1, 9))
    m = draw(st.sampled_from([n + extra, max(1, n - extra)]))
    dtype = draw(st.sampled_from(DTYPES))
    largest = draw(st.sampled_from([0, 1, 3]))  # 0: all scores equal
    queries, gallery = (whole_numbers(generator, rows, d, dtype, largest) for rows in (n, m))
    if draw(st.booleans()):  # strides
        queries, gallery = queries.T.contiguous().T, torch.cat([gallery, gallery], 1)[:, d:]
    return queries, gallery, generator, draw(st.sampled_from([16, 32, 64]))


def with_side(side, work):
    before = tiled.LARGEST_SIDE
    tiled.LARGEST_SIDE = {"cpu": side}
    try:
        return work()
    finally:
        tiled.LARGEST_SIDE = before


@settings(max_examples=60, deadline=None)
@given(problems(), st.integers(1, 3), st.integers(0, 2))
def test_ranks_of_several_answers_equal_the_sort(problem, answers, exclusions):
    queries, gallery, generator, side = problem
    n, m = len(queries), len(gallery)
    positives = torch.randint(-1, m, (n, answers), generator=generator)
    exclude = torch.randint(-1, m, (n, exclusions), generator=generator)
    exclude[(exclude[:, :, None] == positives[:, None, :]).any(2)] = -1
    ranks = with_side(side, lambda: retrieval_ranks_both(queries, gallery, positives, exclude=exclude))
    excluded = mask_of(exclude, m)
    for column in range(answers):
        want = oracle(queries, gallery, mask_of(positives[:, column : column + 1], m), excluded)
        assert torch.equal(ranks.query_to_gallery[:, column], want)
    back = oracle(gallery, queries, mask_of(positives, m).T, excluded.T)
    assert torch.equal(ranks.gallery_to_query, back)
    only = with_side(side, lambda: retrieval_ranks(queries, gallery, positives, exclude=exclude))
    assert torch.equal(only, ranks.query_to_gallery)


@settings(max_examples=60, deadline=None)
@given(problems(), st.integers(1, 12), st.booleans())
def test_ranks_by_id_equal_the_sort(problem, classes, leave_out):
    queries, gallery, generator, side = problem
    n, m = len(queries), len(gallery)
    query_ids, gallery_ids = (torch.randint(0, classes, (rows,), generator=generator) for rows in (n, m))
    exclude = torch.randint(-1, m, (n,), generator=generator) if leave_out else None
    ranks = with_side(
        side,
        lambda: retrieval_ranks_both(queries, gallery, query_ids=query_ids, gallery_ids=gallery_ids, exclude=exclude),
    )
    right = query_ids[:, None] == gallery_ids[None, :]
    excluded = None if exclude is None else mask_of(exclude[:, None], m)
    back = None if excluded is None else excluded.T
    assert torch.equal(ranks.query_to_gallery, oracle(queries, gallery, right, excluded))
    assert torch.equal(ranks.gallery_to_query, oracle(gallery, queries, right.T, back))


@settings(max_examples=30, deadline=None)
@given(problems())
def test_without_positives_item_i_answers_query_i(problem):
    queries, gallery, _, side = problem
    if len(gallery) < len(queries):
        queries = queries[: len(gallery)]
    ranks = with_side(side, lambda: retrieval_ranks_both(queries, gallery))
    right = torch.eye(len(queries), len(gallery), dtype=torch.bool)
    assert torch.equal(ranks.query_to_gallery, oracle(queries, gallery, right))
    assert torch.equal(ranks.gallery_to_query, oracle(gallery, queries, right.T))


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("dtype", DTYPES)
def test_equal_gallery_rows_tie_wherever_they_stand(dtype, device):
    """Real numbers, of which a product of another shape would round the score differently."""
    generator = torch.Generator().manual_seed(0)
    queries = torch.randn(333, 513, generator=generator).to(device, dtype)
    distinct = torch.randn(37, 513, generator=generator).to(device, dtype)
    copies = torch.randint(0, 37, (2999,), generator=generator).to(device)
    positives = torch.randint(0, 2999, (333,), generator=generator).to(device)
    ranks = retrieval_ranks(queries, distinct[copies], positives)
    # The rank of the answer among distinct rows tells which rows are better; each counts as often as it is
    # there.
    by_row = retrieval_ranks(queries, distinct, torch.arange(37, device=device).expand(333, 37))
    better = by_row < by_row.gather(1, copies[positives][:, None])
    want = (better * torch.bincount(copies, minlength=37)).sum(1)
    earlier = torch.tensor([int((copies[:p] == copies[p]).sum()) for p in positives.tolist()], device=device)
    assert torch.equal(ranks, want + earlier)


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("dtype", DTYPES)
def test_ranks_are_exact_up_to_rounding_of_the_scores(dtype, device):
    generator = torch.Generator().manual_seed(1)
    queries, gallery = (torch.randn(rows, 96, generator=generator).to(dtype) for rows in (700, 1100))
    scores = queries.double() @ gallery.double().T
    own = scores.diagonal()[:, None]
    # TF32 products keep 10 bits; float32 accumulation of 96 products is far inside.
    slack = {torch.float64: 1e-12}.get(dtype, 1e-4) * queries.double().norm(dim=1, keepdim=True) * 12
    ranks = retrieval_ranks(queries.to(device), gallery.to(device), options=TileOptions(precision="highest")).cpu()
    assert (ranks >= (scores > own + slack).sum(1)).all()
    assert (ranks <= (scores > own - slack).sum(1)).all()
    assert ranks.float().std() > 100  # ranks spread over the gallery, so that the bounds mean something


def test_sizes_and_blocks_do_not_change_a_rank():
    """A block is a shard of the gallery: what a ring will add up."""
    generator = torch.Generator().manual_seed(2)
    queries, gallery = (torch.randn(rows, 257, generator=generator) for rows in (600, 1300))
    want = retrieval_ranks_both(queries, gallery)
    for workspace in (7, 32):
        options = TileOptions(workspace_mib=workspace)
        assert torch.equal(retrieval_ranks(queries, gallery, options=options), want.query_to_gallery)
    tile = tiled.ScoreTile(torch.device("cpu"), 257, torch.float32, 2**28)
    cuts = [0, 1, 130, 641, 1300]
    index, score = torch.arange(600), torch.zeros(600)
    blocks = [(first, gallery[first:last]) for first, last in itertools.pairwise(cuts)]
    for first, block in reversed(blocks):
        tile.pair_scores(kernel.Block(queries, block, col_offset=first), index, score)
    answers = kernel.answers_of(index, score, tile.side)
    parts, back = [], []
    for first, block in blocks:
        mine = torch.arange(first, first + len(block))
        mine[mine >= 600] = -1
        own = torch.where(mine >= 0, score[mine.clamp(min=0)], torch.inf)
        cols = kernel.answers_of(mine, own, tile.side)
        rows_part, cols_part = tile.count_better(kernel.Block(queries, block, col_offset=first), [answers], cols)
        parts.append(rows_part[0])
        back.append(torch.where(mine < 0, -1, cols_part))
    assert torch.equal(sum(parts), want.query_to_gallery)
    assert torch.equal(torch.cat(back), want.gallery_to_query)


def test_best_of_blocks_does_not_depend_on_their_order():
    generator = torch.Generator().manual_seed(3)
    queries, gallery = (whole_numbers(generator, rows, 3, largest=1) for rows in (40, 90))
    ids = torch.arange(40) % 4, torch.arange(90) % 4
    tile = tiled.ScoreTile(torch.device("cpu"), 3, torch.float32, 2**24)
    found = []
    for order in (slice(None), slice(None, None, -1)):
        best = kernel.no_best(40, tile)
        for first in [0, 30, 60][order]:
            part = slice(first, first + 30)
            tile.find_best(kernel.Block(queries, gallery[part], col_offset=first), ids[0], ids[1][part], best)
        found.append(best.index)
    assert torch.equal(*found)
    right = ids[0][:, None] == ids[1][None, :]
    scores = (queries @ gallery.T).masked_fill(~right, -torch.inf)
    assert torch.equal(found[0], scores.max(1).indices)


@pytest.mark.parametrize("dtype", DTYPES)
def test_a_constant_model_ranks_at_chance(dtype):
    """Counting only strictly better items would give it a perfect recall."""
    features = torch.full((200, 7), 0.3, dtype=dtype)
    ranks = retrieval_ranks_both(features, features)
    assert torch.equal(ranks.query_to_gallery, torch.arange(200))
    assert torch.equal(ranks.gallery_to_query, torch.arange(200))
    assert recall_at_k(ranks.query_to_gallery, ks=(1, 10)) == {1: 1 / 200, 10: 10 / 200}


def test_five_captions_per_image():
    generator = torch.Generator().manual_seed(4)
    images = whole_numbers(generator, 30, 8)
    captions = images.repeat_interleave(5, 0) + whole_numbers(generator, 150, 8, largest=1)
    positives = torch.arange(150) // 5
    ranks = retrieval_ranks_both(captions, images, positives)
    right = positives[:, None] == torch.arange(30)[None, :]
    assert torch.equal(ranks.query_to_gallery, oracle(captions, images, right))
    assert torch.equal(ranks.gallery_to_query, oracle(images, captions, right.T))
    by_caption = retrieval_ranks(images, captions, torch.arange(150).view(30, 5))
    assert torch.equal(by_caption.amin(1), ranks.gallery_to_query)
    assert recall_at_k(by_caption) == recall_at_k(ranks.gallery_to_query)


def test_a_query_does_not_find_itself():
    features = torch.tensor([[1.0, 0.0], [0.75, 0.25], [0.0, 1.0], [0.5, 0.5]])
    labels = torch.tensor([0, 0, 1, 1])
    found = retrieval_ranks(features, features, query_ids=labels, gallery_ids=labels)
    assert found.tolist() == [0, 0, 0, 2]
    left_out = retrieval_ranks(features, features, query_ids=labels, gallery_ids=labels, exclude=torch.arange(4))
    right = (labels[:, None] == labels) & ~torch.eye(4, dtype=torch.bool)
    assert torch.equal(left_out, oracle(features, features, right, torch.eye(4, dtype=torch.bool)))


def test_empty_sides():
    assert retrieval_ranks(torch.zeros(0, 4), torch.zeros(5, 4)).shape == (0,)
    both = retrieval_ranks_both(torch.zeros(0, 4), torch.zeros(0, 4))
    assert both.query_to_gallery.shape == both.gallery_to_query.shape == (0,)
    ids = torch.zeros(3, dtype=torch.int64)
    alone = retrieval_ranks(torch.zeros(3, 4), torch.zeros(0, 4), query_ids=ids, gallery_ids=ids[:0])
    assert alone.tolist() == [-1, -1, -1]
    assert retrieval_ranks(torch.zeros(3, 4), torch.zeros(5, 4), ids[:, None][:, :0]).shape == (3, 0)
    assert retrieval_ranks(torch.zeros(3, 4), torch.zeros(0, 4), ids - 1).tolist() == [-1, -1, -1]
    assert retrieval_ranks(torch.zeros(3, 0), torch.zeros(5, 0)).tolist() == [0, 1, 2]


def test_neither_autocast_nor_gradients_nor_global_precision_matter():
    generator = torch.Generator().manual_seed(5)
    queries, gallery = (torch.randn(90, 64, generator=generator) for _ in range(2))
    want = retrieval_ranks(queries, gallery)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        assert torch.equal(retrieval_ranks(queries.requires_grad_(), gallery), want)
    before = torch.get_float32_matmul_precision()
    retrieval_ranks(queries, gallery, options=TileOptions(precision="high"))
    assert torch.get_float32_matmul_precision() == before


class LargestTensor(TorchDispatchMode):
    """Bytes of the largest tensor that any operation returned."""

    def __init__(self):
        super().__init__()
        self.bytes = 0

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        out = func(*args, **(kwargs or {}))
        for tensor in out if isinstance(out, tuple | list) else [out]:
            if isinstance(tensor, torch.Tensor):
                self.bytes = max(self.bytes, tensor.untyped_storage().nbytes())
        return out


@pytest.mark.parametrize("by_id", [False, True])
def test_no_tensor_grows_with_the_product(by_id):
    def largest(rows):
        features = torch.ones(rows, 2)
        ids = torch.arange(rows)
        answers = {"query_ids": ids, "gallery_ids": ids} if by_id else {}
        with LargestTensor() as watch:
            with_side(32, lambda: retrieval_ranks_both(features, features, exclude=(ids + 1) % rows, **answers))
        return watch.bytes

    # The tile, or a few vectors of int64. A (rows, rows) mask of single bytes would be 1 MB.
    assert largest(1000) <= max(4 * 32 * 32 * 4, 2 * 1024 * 8)


@pytest.mark.parametrize("width", [1, 64, 512, 768, 4096, 16384])
@pytest.mark.parametrize("device", ["cpu", "cuda"])
def test_scratch_for_any_gallery_stays_within_the_workspace(device, width):
    """200,000 x 200,000 scores are 160 GB; the tile does not even know the sizes."""
    for dtype in DTYPES:
        for workspace in (8, 64, 256):
            side = tiled.tile_side(torch.device(device), width, dtype, workspace * 2**20)
            types = tiled.product_types(torch.device(device), dtype)
            need = tiled.scratch_bytes(side, width, types[0].itemsize, types[1].itemsize)
            assert need <= workspace * 2**20
            assert need < 200_000 * 200_000 * 4 / 500


def test_peak_memory_is_the_tile_and_a_few_vectors():
    def peak(rows):
        case = {"loss": "retrieval", "rows": rows, "cols": rows, "width": 16, "dtype": "float32"}
        arguments = {"case": {**case, "methods": ["tilewise"]}, "method": "tilewise"}
        return peak_bytes("benchmarks.cases:memory_target", arguments)

    # 5 MiB of tile, and per query some 100 bytes; the scores of 16,384 would be 1 GiB, a mask of them 256 MiB.
    assert peak(16384) < 12 * 2**20


def test_scratch_is_what_the_tile_holds():
    tile = tiled.ScoreTile(torch.device("cpu"), 100, torch.float64, 2**24)
    held = sum(t.untyped_storage().nbytes() for t in (tile.queries, tile.gallery, tile.scores))
    assert held <= tiled.scratch_bytes(tile.side, 100, 8, 8) <= 1.5 * held


def test_progress_reaches_the_end():
    features = torch.eye(1100)
    seen = []
    want = retrieval_ranks(features, features)
    assert torch.equal(retrieval_ranks(features, features, progress=lambda *a: seen.append(a)), want)
    assert seen[-1] == (1100 * 1100, 1100 * 1100)
    assert len(seen) == 3
    assert seen == sorted(seen)
    ids = torch.arange(1100)
    seen.clear()
    retrieval_ranks(features, features, query_ids=ids, gallery_ids=ids, progress=lambda *a: seen.append(a))
    assert seen[-1] == (2 * 1100 * 1100, 2 * 1100 * 1100)
    assert torch.equal(retrieval_ranks(features, features, progress=True), want)


@pytest.mark.parametrize("rows, items", [(40, 60), (7, 3), (5, 0), (0, 5)])
def test_a_mask_is_the_list_of_its_true_entries(rows, items):
    generator = torch.Generator().manual_seed(3)
    queries, gallery = (whole_numbers(generator, size, 5) for size in (rows, items))
    draw = torch.rand(rows, items, generator=generator)
    right, excluded = draw < 0.1, draw > 0.8
    got = retrieval_ranks(queries, gallery, right, exclude=excluded)
    assert got.shape == (rows, int(right.sum(1).max()) if rows else 0)
    for query, ranks in enumerate(got.tolist()):
        one = [queries[query : query + 1], gallery]
        for item, rank in zip(right[query].nonzero().flatten().tolist(), ranks, strict=False):
            alone = torch.zeros(1, items, dtype=torch.bool)
            alone[0, item] = True
            assert rank == oracle(*one, alone, excluded[query : query + 1])
        assert set(ranks[int(right[query].sum()) :]) <= {-1}
    listed = torch.where(excluded, torch.arange(items), -1)
    both = [retrieval_ranks_both(queries, gallery, right, exclude=what) for what in (excluded, listed)]
    assert all(torch.equal(one, other) for one, other in zip(*both, strict=True))
    assert torch.equal(both[0].query_to_gallery, got)


def test_recall_counts_the_best_answer_and_leaves_out_queries_without_one():
    ranks = torch.tensor([[4, 0], [7, -1], [-1, -1], [9, 5]])
    assert recall_at_k(ranks, ks=(1, 5, 6, 8)) == {1: 1 / 3, 5: 1 / 3, 6: 2 / 3, 8: 1.0}
    assert recall_at_k(ranks[:, 0], ks=(5, 8)) == {5: 1 / 3, 8: 2 / 3}
    assert recall_at_k(ranks.int(), ks=(1,)) == {1: 1 / 3}
