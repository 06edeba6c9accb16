"""Divergences in Triton's interpreter: the same with any memory for scores that are stored or saved."""

import dataclasses

import pytest
import torch
from tests.compare import assert_close
from tests.gpu.checks import Place, check_good_student
from tests.kernels.dense import dense_stats
from tests.kernels.interpreted import IN_THE_INTERPRETER, run_steps
from tests.kernels.pair_cases import make_case
from tests.kernels.pair_checks import incoming_gradients

from tilewise.kernels.spec import Needs, Pair, PairSpec, wanted_names
from tilewise.kernels.triton_impl import program, sizes
from tilewise.kernels.triton_impl.backend import TritonBackend
from tilewise.kernels.triton_impl.scores import Scores, row_width
from tilewise.kernels.triton_impl.two_pass import backward as gradients
from tilewise.kernels.triton_impl.two_pass import guide
from tilewise.kernels.triton_impl.two_pass import saved as saving
from tilewise.kernels.triton_impl.two_pass.macro_tile import macro_tile
from tilewise.kernels.triton_impl.two_pass.saved import SavedColumns
from tilewise.options import TileOptions

pytestmark = IN_THE_INTERPRETER
BACKEND = TritonBackend()


@pytest.mark.parametrize("tiles", [0, 1, 100], ids=["no memory", "blocks of rows", "all rows"])
def test_any_memory_gives_the_same_divergence(tiles, monkeypatch):
    """``tiles`` of rows, whose scores the memory holds."""
    monkeypatch.setattr(guide, "FEWEST_STORED", 1)
    pair, spec = make_case("guide_jsd_without_norms", torch.float32, size=2)
    memory = 8 * tiles * sizes.INTERPRETED.rows * row_width(pair.b.shape[0], torch.float32)
    launches, plain = [], guide._statistics

    def watched(scores, i, divergences, total, saved=None, stored=None):
        launches.append((i.stop - i.start, stored is not None))
        return plain(scores, i, divergences, total, saved, stored)

    monkeypatch.setattr(guide, "_statistics", watched)
    names = "row_lse", "guide_lse", "row_jsd", "row_mix_kl", "row_hot_lse", "row_pos"

    def build(scores, more):
        stats, _ = guide.guided_forward(scores, memory)
        return [stats[name] for name in names]

    found = run_steps(build, pair, spec, TileOptions())
    rows = pair.a.shape[0]
    if tiles == 0:
        assert launches == [(rows, False), (rows, False)], "all products are computed twice"
    else:
        assert all(stored for _, stored in launches)
        assert sum(count for count, _ in launches) == rows, "every product is computed once"
        assert (len(launches) > 1) == (tiles == 1)
    want = dense_stats(pair, spec)
    for name, value in zip(names, found, strict=True):
        assert_close(value, getattr(want, name), 5e-6, name)


@pytest.mark.parametrize(
    "kind, room",
    [
        *(("guide_kl", room) for room in (0, 96, 10_000)),
        ("guide_reverse_kl", 96),
        ("guide_of_the_same_scores", 96),
        ("guide_of_scores_1000", 96),
    ],
)
def test_saved_scores_give_the_same_gradients(kind, room, monkeypatch):
    """Scores in the memory of dB, and in a buffer with room for that many columns."""
    monkeypatch.setattr(saving, "DTYPES", (torch.float32,))  # the interpreter does not support bfloat16
    for name, value in {"WORTH_IT": 0, "COLS": 32, "CHUNK_ENTRIES": 0, "FULL_TILES": 32, "NARROWEST": 8}.items():
        monkeypatch.setattr(saving, name, value)
    monkeypatch.setattr(guide, "FULL_TILES", 32)
    for module in (gradients, guide):
        monkeypatch.setattr(module, "macro_tile", lambda shape, *rest: (-(-shape.rows // 64) * 64, 96))
    pair, spec = wide_case(kind)
    n, (m, d) = pair.a.shape[0], pair.b.shape
    bytes_left = 8 * n * room
    options = TileOptions(backend="triton", precision="highest", workspace_mib=256)
    monkeypatch.setattr(TileOptions, "workspace_bytes", property(lambda _: n * (4 * d + 4 * 96) + bytes_left))
    monkeypatch.setattr(guide, "_widest", lambda *_: 64)
    plain = BACKEND.forward(pair, spec, options)
    stats, held = BACKEND.forward_saving(pair, spec, options)
    assert held.scores
    assert held.inside > 0
    assert held.behind == min(room // 32 * 32, m - held.inside)
    for name in wanted_names(spec):
        assert_close(getattr(stats, name), getattr(plain, name), 1e-6, name)
    grad, needs = incoming_gradients(plain), Needs(a=True, b=True, scale=True, bias=pair.bias is not None)
    want = BACKEND.backward(pair, plain, grad, needs, spec, options)
    memory, launched = held.memory, []
    tiles = Scores.tiles

    def watched(self, kernel, i, j, sizes, **values):
        launched.append((j.stop - j.start) * (values.get("x") is not None))
        tiles(self, kernel, i, j, sizes, **values)

    monkeypatch.setattr(Scores, "tiles", watched)
    monkeypatch.setattr(program, "LEAST_TURNS", 1000)
    got = BACKEND.backward(pair, stats, grad, needs, spec, options, saved=held)
    assert sum(launched) == held.end, "these columns are read, not computed"
    assert got.b.data_ptr() == memory.data_ptr(), "the memory is the gradient"
    for name in ("a", "b", "scale", *(["bias"] if needs.bias else [])):
        assert_close(getattr(got, name), getattr(want, name), 1e-4 if kind.endswith("1000") else 1e-6, name)


def wide_case(kind):
    """A case with so many columns that the memory of dB holds the scores of some."""
    pair, spec = make_case(kind, torch.float32, size=2)
    times = -(-600 // pair.b.shape[0])

    def repeated(value):
        return None if value is None else torch.cat([value * (1 + k / 10) for k in range(times)])

    names = ("b", "bias", "guide_b", "guide_bias")
    pair = dataclasses.replace(pair, **{name: repeated(getattr(pair, name)) for name in names})
    return pair, spec


@pytest.mark.parametrize(
    "n, d, m, inside", [(8192, 4096, 128256, 14848), (8192, 2048, 128256, 7424), (8192, 4096, 32000, 2816)]
)
def test_heads_of_common_sizes_save_scores(n, d, m, inside):
    """The memory of dB holds few columns of some heads; a larger workspace holds more."""
    a, b = (torch.empty(size, d, dtype=torch.bfloat16, device="meta") for size in (n, m))
    found = SavedColumns.of(Pair(a=a, b=b, scale=torch.ones(())), PairSpec(row_lse=True, guide="kl"))
    assert found is not None
    assert found.inside == inside


@pytest.mark.parametrize("n", [512, 3000, 5000, 6000, 16000])
@pytest.mark.parametrize("mib", [64, 256, 1024, 8192])
def test_macro_tiles_are_whole_tiles(n, mib):
    """Otherwise the columns of the next macro-tile would not start at a 16-byte address."""
    pair = Pair(a=torch.empty(n, 4096, device="meta"), b=torch.empty(128256, 4096, device="meta"), scale=torch.ones(()))
    spec, tile = PairSpec(row_lse=True, guide="kl"), sizes.TABLE["sm_90", 2].guided
    rows, cols = macro_tile(pair.shape, spec, tile, TileOptions(workspace_mib=mib))
    assert cols % max(tile.rows, tile.cols) == 0
    assert 0 < cols <= 65536
    assert rows % tile.rows == 0


@pytest.mark.parametrize("beta", [0.0, 0.03, 1.0])
def test_a_good_student(beta):
    check_good_student(Place("cpu", "triton"), beta, n=24)
