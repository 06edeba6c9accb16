"""Which columns forward saves for backward and where they lie, in Triton's interpreter."""

import dataclasses
import weakref
from itertools import pairwise
from types import SimpleNamespace

import pytest
import torch
from tests.compare import assert_close
from tests.kernels.interpreted import INTERPRETED
from tests.kernels.pair_checks import incoming_gradients
from tests.kernels.saved_columns import BACKEND, NEEDS, OPTIONS, SPEC, g_of, pair_of, small  # noqa: F401 - a fixture

import tilewise as tw
from tilewise.kernels.triton_impl import scores, sizes
from tilewise.kernels.triton_impl.two_pass import forward as statistics
from tilewise.kernels.triton_impl.two_pass import saved as saving
from tilewise.kernels.triton_impl.two_pass.saved import SavedColumns, column_pieces
from tilewise.options import TileOptions

pytestmark = INTERPRETED


@pytest.mark.parametrize("g_cols", [0, 40, 96, 1000])
@pytest.mark.parametrize("n, m, d", [(48, 400, 32), (24, 500, 64), (70, 333, 128), (64, 1000, 8), (50, 403, 16)])
def test_saved_columns_lie_behind_the_gradient_written_so_far(n, m, d, g_cols):
    found = SavedColumns.of(pair_of(n, m, d), SPEC)
    assert found.memory.shape == (m, d)
    found.allocate(g_cols, lambda name, *shape, dtype: found.memory.new_empty(shape, dtype=dtype))
    columns = column_pieces(m, 128, found)
    assert [j.start for j in columns[1:]] == [j.stop for j in columns[:-1]]
    assert (columns[0].start, columns[-1].stop) == (0, m)
    held = [(j, found.chunk(j)) for j in columns]
    assert all((chunk is not None) == (j.stop <= found.inside + g_cols) for j, chunk in held)
    assert all(chunk.shape == (n, j.stop - j.start) for j, chunk in held if chunk is not None)
    assert max(j.stop - j.start for j in columns if j.stop <= found.end) == 64

    def bytes_of(chunk):
        return chunk.data_ptr(), chunk.data_ptr() + 4 * ((n - 1) * chunk.stride(0) + chunk.shape[1])

    start, end = found.memory.data_ptr(), found.memory.data_ptr() + found.memory.nbytes
    first = [(j, *bytes_of(chunk)) for j, chunk in held if j.stop <= found.inside]
    for k, (j, _, _) in enumerate(first):
        assert all(start + 4 * j.stop * d <= low < high <= end for _, low, high in first[k:]), (
            "dB would be written over it"
        )
    last = [bytes_of(chunk) for j, chunk in held if found.inside <= j.start < found.end]
    if last:
        start, end = found.buffer.data_ptr(), found.buffer.data_ptr() + found.buffer.nbytes
        assert all(start <= low < high <= end for low, high in last)
    every = sorted([(low, high) for _, low, high in first] + last)
    assert all(one[1] <= other[0] for one, other in pairwise(every)), "chunks lie apart"
    room = (m - 64) * d // max(n, d)
    assert room - 32 < found.inside <= room


@pytest.mark.parametrize("n, m, width", [(48, 1000, 64), (30, 1000, 96), (10, 1000, 224), (10, 300, 64)])
def test_few_rows_have_wide_chunks(n, m, width, monkeypatch):
    check_wide_chunks(n, m, width, 48 * 64, monkeypatch)


def test_chunks_are_no_wider_than_the_memory_has_room_for(monkeypatch):
    """Many rows: the memory holds few columns. One chunk of all of them would leave no room for dB."""
    check_wide_chunks(300, 1000, 64, 300 * 250, monkeypatch)


def check_wide_chunks(n, m, width, scores, monkeypatch):
    monkeypatch.setattr(saving, "CHUNK_ENTRIES", scores)
    pair = pair_of(n, m, 64)
    stats, held = BACKEND.forward_saving(pair, SPEC, OPTIONS)
    assert held.cols == width
    grad = incoming_gradients(stats)
    got = BACKEND.backward(pair, stats, grad, NEEDS, SPEC, OPTIONS, saved=held)
    want = BACKEND.backward(pair, stats, grad, NEEDS, SPEC, OPTIONS)
    for name in ("a", "b"):
        assert_close(getattr(got, name), getattr(want, name), 5e-6, name)


def test_nothing_is_saved_for_few_columns():
    assert SavedColumns.of(pair_of(200, 333, 32), SPEC) is None


@pytest.mark.parametrize("mib", [16, 256, 1024, 4096])
@pytest.mark.parametrize("spec", [SPEC, dataclasses.replace(SPEC, row_entropy=True)], ids=["plain", "entropy"])
def test_a_larger_workspace_saves_more_columns(spec, mib, monkeypatch):
    """Saved columns and what else either pass takes fit the workspace, and most of it is used."""
    monkeypatch.undo()
    n, m, d = 8192, 256_000, 2304
    options, held = TileOptions(workspace_mib=mib), SimpleNamespace(relative=spec.token_stats)
    held.memory = torch.empty((), dtype=torch.bfloat16)
    work = object.__new__(statistics.Forward)
    work.__dict__ |= {"scores": SimpleNamespace(options=options, d=d), "spec": spec}
    work.__dict__ |= {"sizes": sizes.TABLE["sm_90", 2].forward_wide, "saved": object(), "n": n, "m": m}
    work.row_step, work.col_step = work._macro()
    tiles = m // work.sizes.cols * spec.token_stats
    used = 2 * n * work._room(held) + 4 * n * (d + tiles)
    if work._room(held):
        assert 0 <= options.workspace_bytes - used < 2 * n * 256
    else:
        assert options.workspace_bytes < 4 * n * (d + tiles) + 2 * n * 256


def test_nothing_is_saved_with_a_scale_of_each_row():
    assert SavedColumns.of(dataclasses.replace(pair_of(), row_scale=torch.ones(48)), SPEC) is None


def test_a_workspace_too_small_for_all_rows_saves_nothing(monkeypatch):
    """Backward could not use saved columns there."""
    monkeypatch.setattr(statistics, "macro_tile", lambda *args: (32, 64))
    assert BACKEND.forward_saving(pair_of(), SPEC, OPTIONS)[1] is None


@pytest.mark.parametrize("mib", [1, 3, 16, 256])
@pytest.mark.parametrize("n, m, d", [(8192, 256_000, 2304), (16_384, 400_000, 1024), (1000, 50_257, 4096)])
def test_saved_columns_leave_the_parts_a_quarter_of_the_workspace(n, m, d, mib):
    """G is allocated in forward already and takes at most three quarters."""
    options = TileOptions(workspace_mib=mib)
    work = object.__new__(statistics.Forward)
    work.__dict__ |= {"scores": SimpleNamespace(options=options), "spec": SPEC, "n": n, "m": m}
    work.__dict__ |= {"sizes": sizes.TABLE["sm_90", 2].forward_wide, "saved": object()}
    rows, cols = (min(*both) for both in zip(work._macro(), (n, m), strict=True))
    assert 4 * rows * -(-cols // work.sizes.cols) <= 1.2 * options.workspace_bytes / 4


@pytest.mark.parametrize(
    "change",
    [{"col_lse": True}, {"softcap": 3.0}, {"row_sum": True}, {"mask_self": True}, {"positive": "none"}],
    ids=str,
)
def test_other_losses_save_nothing(change):
    assert SavedColumns.of(pair_of(), dataclasses.replace(SPEC, **change)) is None


def test_a_workspace_too_small_for_a_chunk_saves_nothing(monkeypatch):
    """The partial sums of a macro-tile fit the workspace. A wider macro-tile would be written past its end."""
    monkeypatch.setattr(saving, "COLS", 128)
    pair = pair_of()
    widest, plain = [], statistics.Forward._tiles

    def watched(self, i, j, mirrored):
        widest.append(j.stop - j.start)
        if widest[-1] <= self.col_step:
            plain(self, i, j, mirrored)

    monkeypatch.setattr(statistics.Forward, "_tiles", watched)
    assert BACKEND.forward_saving(pair, SPEC, OPTIONS)[1] is not None
    widest.clear()
    monkeypatch.setattr(statistics.Forward, "_macro", lambda self: (64, 64))
    scores.forget_programs()
    stats, held = BACKEND.forward_saving(pair, SPEC, OPTIONS)
    assert max(widest) <= 64
    assert held is None
    assert_close(stats.row_lse, BACKEND.forward(pair, SPEC, OPTIONS).row_lse, 1e-6, "lse")


@pytest.mark.parametrize("how", ["no grad", "frozen classifier", "a second derivative"])
def test_nothing_is_saved_for_a_backward_that_cannot_use_it(how, monkeypatch):
    """Evaluation takes no memory for gradients, although its classifier is a parameter."""
    monkeypatch.setattr("tilewise.losses.cross_entropy.target_scores", lambda *args: None)
    hidden, classifier = torch.randn(40, 32, requires_grad=True), torch.nn.Parameter(torch.randn(300, 32))
    classifier.requires_grad_(how != "frozen classifier")
    memory, holds, plain = [], [], SavedColumns.of

    def watched(*args):
        found = plain(*args)
        memory.append(weakref.ref(found.memory))
        holds.append(weakref.ref(found))
        return found

    monkeypatch.setattr(SavedColumns, "of", staticmethod(watched))
    with torch.set_grad_enabled(how != "no grad"):
        loss = tw.linear_cross_entropy(hidden, classifier, torch.arange(40), options=OPTIONS)
    if how == "a second derivative":
        torch.autograd.grad(loss, (hidden, classifier), create_graph=True)
        assert len(memory) == 1
    assert all(one() is None for one in memory + holds)
    assert how == "a second derivative" or not memory
