"""The kernels that count ranks, in Triton's interpreter: whole numbers, of which every sum is exact."""

import itertools

import pytest
import torch
from tests.kernels.interpreted import IN_THE_INTERPRETER

from tilewise.errors import BackendError
from tilewise.kernels import ranks, registry
from tilewise.kernels.torch_impl.ranks import ScoreTile
from tilewise.kernels.triton_impl import ranks as fused
from tilewise.kernels.triton_impl.sizes import Sizes
from tilewise.options import TileOptions
from tilewise.retrieval import retrieval_ranks, retrieval_ranks_both

pytestmark = IN_THE_INTERPRETER
FUSED, TILES = TileOptions(backend="triton"), TileOptions(backend="torch")


def numbers(seed, n, m, d, dtype=torch.float32, largest=1):
    generator = torch.Generator().manual_seed(seed)
    made = [torch.randint(-largest, largest + 1, (rows, d), generator=generator).to(dtype) for rows in (n, m)]
    return *made, generator


def scorer_of(features, options):
    return registry.choose_scorer(features.device, features.shape[1], features.dtype, options)


def both(queries, gallery, *answers, **more):
    got = retrieval_ranks_both(queries, gallery, *answers, options=FUSED, **more)
    want = retrieval_ranks_both(queries, gallery, *answers, options=TILES, **more)
    assert torch.equal(got.query_to_gallery, want.query_to_gallery)
    assert torch.equal(got.gallery_to_query, want.gallery_to_query)
    assert torch.equal(retrieval_ranks(queries, gallery, *answers, options=FUSED, **more), want.query_to_gallery)
    return want


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16], ids=["float32", "float16"])
@pytest.mark.parametrize("n, m, d", [(1, 1, 1), (64, 64, 64), (65, 130, 7), (100, 100, 70), (3, 200, 16)])
def test_item_i_answers_query_i(n, m, d, dtype):
    queries, gallery, _ = numbers(n + d, n, m, d, dtype)
    both(queries, gallery)


@pytest.mark.parametrize("rows, cols", [(16, 64), (32, 64), (64, 16)])
@pytest.mark.parametrize("n, m", [(1, 1), (70, 90), (130, 40)])
def test_tiles_may_be_wider_than_tall(n, m, rows, cols, monkeypatch):
    """`tilewise tune` may choose tiles of 128 x 256: the scores of right answers lie in several tiles of a strip."""
    monkeypatch.setattr(fused, "forward_sizes", lambda *args, **more: Sizes(rows, cols, 16, 1, 1, 1, 2))
    queries, gallery, generator = numbers(n, n, m, 20)
    answers = torch.randint(0, m, (n,), generator=generator)
    both(queries, gallery, answers)
    score = torch.zeros(n)
    scorer_of(queries, FUSED).pair_scores(ranks.Block(queries, gallery), answers, score)
    assert torch.equal(score, (queries * gallery[answers]).sum(1))


@pytest.mark.parametrize("answers", [1, 3, 4, 6])
def test_several_answers_some_of_them_missing(answers):
    queries, gallery, generator = numbers(answers, 70, 90, 5)
    both(queries, gallery, torch.randint(-1, 90, (70, answers), generator=generator))


@pytest.mark.parametrize("largest", [0, 1])
@pytest.mark.parametrize("exclusions", [1, 3])
def test_excluded_pairs_go_before_nothing(exclusions, largest):
    """With all features 0 every score is 0, and places decide."""
    queries, gallery, generator = numbers(exclusions, 70, 140, 5, largest=largest)
    exclude = torch.randint(-1, 140, (70, exclusions), generator=generator)
    exclude[exclude == torch.arange(70)[:, None]] = -1
    want = both(queries, gallery, exclude=exclude)
    plain = retrieval_ranks(queries, gallery, options=FUSED)
    assert (want.query_to_gallery != plain).any()


@pytest.mark.parametrize("classes", [1, 9, 4000])
@pytest.mark.parametrize("leave_out", [False, True])
def test_the_best_answer_of_equal_id(leave_out, classes):
    """Few ids: most pairs are right; many: most tiles have no right pair, and some queries none at all."""
    queries, gallery, generator = numbers(classes, 150, 140, 3)
    ids = [torch.randint(0, classes, (rows,), generator=generator) * 2**40 for rows in (150, 140)]
    exclude = torch.randint(-1, 140, (150, 2), generator=generator) if leave_out else None
    want = both(queries, gallery, query_ids=ids[0], gallery_ids=ids[1], exclude=exclude)
    if classes == 4000:
        assert (want.query_to_gallery == -1).any()


def test_keys_order_scores_and_places():
    """Of equal scores, 0.0 and -0.0 among them, the lower index."""
    scores = torch.tensor([-torch.inf, -3.0, -1e-40, -0.0, 0.0, 1e-40, 2.0, 3e38])
    queries = torch.ones(1, 1)
    found = ranks.no_best(1, scorer_of(queries, FUSED))
    for item in range(1, 8):
        block = ranks.Block(queries, scores[item : item + 1, None], col_offset=item)
        scorer_of(queries, FUSED).find_best(block, torch.zeros(1).long(), torch.zeros(1).long(), found)
        assert found.score.item() == scores[item]
        assert found.index.item() == (item if item != 4 else 3)


def test_parts_of_the_gallery_and_of_the_queries_add_up(monkeypatch):
    monkeypatch.setattr(fused, "PAIRS_AT_ONCE", 70 * 64)
    monkeypatch.setattr(fused, "GATHERED_BYTES", 1)
    queries, gallery, _ = numbers(0, 70, 300, 9)
    seen = []
    both(queries, gallery, progress=lambda done, all_: seen.append((done, all_)))
    both(queries, gallery, query_ids=torch.arange(70) % 7, gallery_ids=torch.arange(300) % 11)
    assert seen[-1] == (70 * 300, 70 * 300)
    assert (70 * 64, 70 * 300) in seen  # the first part of the fused pass


def test_rows_that_no_descriptor_can_read():
    queries, gallery, _ = numbers(4, 70, 90, 7)
    both(queries.T.contiguous().T, torch.cat([gallery, gallery], 1)[:, 7:])


def test_blocks_with_offsets_are_what_a_ring_adds_up():
    queries, gallery, _ = numbers(5, 80, 150, 6)
    want = retrieval_ranks_both(queries, gallery, options=TILES)
    scorer = scorer_of(queries, FUSED)
    assert isinstance(scorer, fused.FusedScorer)
    index, score = torch.arange(80), torch.zeros(80)
    cuts = [slice(*ends) for ends in itertools.pairwise([0, 1, 70, 70, 150])]
    for cut in cuts:
        scorer.pair_scores(ranks.Block(queries, gallery[cut], col_offset=cut.start), index, score)
    assert torch.equal(score, (queries * gallery[:80]).sum(1))
    answers = ranks.answers_of(index, score, scorer.side)
    assert answers.spans == []
    total, back = torch.zeros(80, dtype=torch.int64), []
    for cut in cuts:
        mine = torch.arange(cut.start, cut.stop)
        mine[mine >= 80] = -1
        cols = ranks.answers_of(mine, score[mine.clamp(min=0)], scorer.side)
        rows_part, cols_part = scorer.count_better(
            ranks.Block(queries, gallery[cut], col_offset=cut.start), [answers], cols
        )
        total += rows_part[0]
        back.append(torch.where(mine < 0, -1, cols_part))
    assert torch.equal(total, want.query_to_gallery)
    assert torch.equal(torch.cat(back), want.gallery_to_query)


def test_rows_of_another_rank_have_an_offset():
    queries, gallery, _ = numbers(6, 130, 90, 3)
    whole = retrieval_ranks_both(gallery, queries[:100], torch.arange(90), options=TILES)  # 90 right pairs
    scorer = scorer_of(queries, FUSED)
    score = (gallery * queries[:90]).sum(1)
    cols = ranks.answers_of(torch.arange(90), score, scorer.side)
    total = torch.zeros(90, dtype=torch.int64)
    for cut in (slice(0, 30), slice(30, 100)):
        part = queries[cut]
        none = ranks.answers_of(torch.full((len(part),), -1), torch.zeros(len(part)), scorer.side)
        rows_part, cols_part = scorer.count_better(ranks.Block(part, gallery, row_offset=cut.start), [none], cols)
        assert not rows_part.any()  # no answer: nothing is better
        total += cols_part
    assert torch.equal(total, whole.query_to_gallery)


@pytest.mark.parametrize("empty", ["queries", "gallery"])
def test_nothing_to_count(empty):
    queries, gallery, _ = numbers(7, 0 if empty == "queries" else 5, 0 if empty == "gallery" else 5, 4)
    both(queries, gallery, torch.full((len(queries),), -1))


def test_whom_it_does_not_serve(monkeypatch):
    x = torch.ones(3, 4)
    for call, said in {
        "float64": (lambda: retrieval_ranks(x.double(), x.double(), options=FUSED), "not torch.float64"),
        "bfloat16": (
            lambda: retrieval_ranks(x.bfloat16(), x.bfloat16(), options=FUSED),
            "gets bfloat16 products wrong",
        ),
        "wide": (lambda: retrieval_ranks(torch.ones(1, 9000), torch.ones(1, 9000), options=FUSED), "8192 features"),
    }.values():
        with pytest.raises(BackendError, match=said):
            call()
    assert isinstance(scorer_of(x, TileOptions()), ScoreTile)  # on the CPU, by itself
    monkeypatch.delenv("TRITON_INTERPRET")
    with pytest.raises(BackendError, match=r'needs a CUDA device.*Use backend="auto"'):
        retrieval_ranks(x, x, options=FUSED)
    monkeypatch.setattr(registry, "installed", lambda name: False)
    monkeypatch.setenv("TRITON_INTERPRET", "1")
    with pytest.raises(BackendError, match="triton is not installed"):
        retrieval_ranks(x, x, options=FUSED)
