"""The Jensen-Shannon divergence in Triton's interpreter: the same with any memory for stored scores."""

import pytest
import torch
from tests.compare import assert_close
from tests.kernels.dense import dense_stats
from tests.kernels.interpreted import INTERPRETED
from tests.kernels.pair_cases import make_case
from tests.kernels.quick_interpreter import make_quick

from tilewise.kernels.triton_impl.launch.call import Call, row_width
from tilewise.kernels.triton_impl.two_pass import guide
from tilewise.options import TileOptions

pytestmark = INTERPRETED


@pytest.mark.parametrize("tiles", [0, 1, 100], ids=["no memory", "blocks of rows", "all rows"])
def test_any_memory_gives_the_same_divergence(tiles, monkeypatch):
    """``tiles`` of rows, whose scores the memory holds."""
    make_quick(monkeypatch)
    monkeypatch.setattr(guide, "FEWEST_STORED", 1)
    pair, spec = make_case("guide_jsd_without_norms", torch.float32, size=2)
    call = Call(pair, spec, TileOptions())
    memory = 8 * tiles * call.guided_sizes.rows * row_width(pair.b.shape[0], torch.float32)
    launches, plain = [], guide._statistics

    def watched(call, i, divergences, **stored):
        launches.append((i.stop - i.start, bool(stored)))
        return plain(call, i, divergences, **stored)

    monkeypatch.setattr(guide, "_statistics", watched)
    found = guide.guided_forward(call, memory)
    rows = pair.a.shape[0]
    if tiles == 0:
        assert launches == [(rows, False), (rows, False)], "all products are computed twice"
    else:
        assert all(stored for _, stored in launches)
        assert sum(count for count, _ in launches) == rows, "every product is computed once"
        assert (len(launches) > 1) == (tiles == 1)
    want = dense_stats(pair, spec)
    for name in ("row_lse", "guide_lse", "row_jsd", "row_mix_kl", "row_hot_lse", "row_pos"):
        assert_close(getattr(found, name), getattr(want, name), 5e-6, name)
