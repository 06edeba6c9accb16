"""The statistics in public: each against dense scores, what one call refuses is in tests/bad_inputs.py."""

import pytest
import torch
from tests.compare import assert_close
from tests.losses.loss_cases import Maker

import tilewise as tw

MAKE = Maker(torch.float64, n=50, d=6)
A, B, LABELS = MAKE.random(50, 6), MAKE.random(50, 6), MAKE.integers(4, 50)
SHIFT, TARGET = torch.linspace(-2, 3, 50, dtype=torch.float64), MAKE.integers(50, 50)
SAME = torch.eye(50, dtype=torch.bool)


def dense(a=A, b=B, excluded=None, shift=None):
    x = a @ b.T if shift is None else a @ b.T - shift[:, None]
    return x if excluded is None else x.masked_fill(excluded, -torch.inf)


@pytest.mark.usefixtures("small_tiles")
def test_the_largest_score_and_its_column():
    stats = tw.pair_stats(A, B, want="max", shift=SHIFT)
    want = dense(shift=SHIFT).max(1)
    assert_close(stats.max, want.values, 1e-14)
    assert torch.equal(stats.argmax, want.indices)
    assert (stats.entropy, stats.positive_sum, stats.picked) == (None, None, None)


@pytest.mark.usefixtures("small_tiles")
@pytest.mark.parametrize("softcap", [None, 3.0])
def test_both_directions_with_one_target(softcap):
    stats = tw.pair_stats(A, B, want=["col_logsumexp"], target=TARGET, shift=SHIFT, softcap=softcap)
    x = dense() if softcap is None else softcap * torch.tanh(dense() / softcap)
    assert_close(stats.col_logsumexp, x.logsumexp(0), 1e-14)
    assert_close(stats.logsumexp, x.logsumexp(1) - SHIFT, 1e-13)
    assert_close(stats.positive_sum, x.gather(1, TARGET[:, None])[:, 0] - SHIFT, 1e-13)
    assert (stats.num_positives == 1).all()


@pytest.mark.usefixtures("small_tiles")
def test_without_columns_the_rows_are_the_columns():
    """Once with half of the tiles, once with all of them."""
    mine = A.clone().requires_grad_()
    x = dense(mine, mine, SAME)
    positive = (LABELS[:, None] == LABELS) & ~SAME
    (want,) = torch.autograd.grad((x.logsumexp(1) * SHIFT).sum() + x[positive].sum(), mine)
    for names in ((), ("max",)):
        stats = tw.pair_stats(mine, row_labels=LABELS, exclude_self=True, want=names)
        assert_close(stats.positive_sum, x.masked_fill(~positive, 0.0).sum(1), 1e-13)
        assert torch.equal(stats.num_positives.long(), positive.sum(1))
        (got,) = torch.autograd.grad((stats.logsumexp * SHIFT).sum() + stats.positive_sum.sum(), mine)
        assert_close(got, want, 1e-12)


def test_ids_exclude_pairs_that_are_not_positive():
    stats = tw.pair_stats(A, B, target=TARGET, row_ids=LABELS, col_ids=LABELS)
    excluded = (LABELS[:, None] == LABELS).scatter(1, TARGET[:, None], False)
    assert_close(stats.logsumexp, dense(excluded=excluded).logsumexp(1), 1e-13)


def test_no_picked_column_and_no_column_at_all():
    stats = tw.pair_stats(A, B, pick=torch.tensor([[-1, 3]]).expand(50, 2), exclude_picked=True)
    assert (stats.picked[:, 0] == 0).all()
    assert_close(stats.picked[:, 1], dense()[:, 3], 1e-14)
    assert_close(stats.logsumexp, dense().index_fill(1, torch.tensor([3]), -torch.inf).logsumexp(1), 1e-13)
    assert (tw.pair_stats(A, B[:0]).logsumexp == -torch.inf).all()
