"""The study of a filter for contrastive losses, on batches whose answer is known."""

import json

import pytest
import torch
import torch.nn.functional as F
from tests.compare import relative_error

from reproductions import contrastive_skipping as study


def clusters(count=8, size=16, width=12, seed=0):
    """Unit features in tight clusters, in random order, and the cluster of each."""
    generator = torch.Generator().manual_seed(seed)
    label = torch.arange(count).repeat_interleave(size)[torch.randperm(count * size, generator=generator)]
    centre = F.normalize(torch.randn(count, width, generator=generator), dim=1)
    noise = 0.01 * torch.randn(count * size, width, generator=generator)
    return F.normalize(centre[label] + noise, dim=1), label


@pytest.mark.parametrize("name", study.ORDERS)
def test_an_order_is_a_permutation(name):
    x, _ = clusters()
    order = study.ORDERS[name](x[:101])
    assert order.sort().values.equal(torch.arange(101))


@pytest.mark.parametrize("name, most", [("bisection", 20), ("chain", 8)])
def test_orders_put_what_is_alike_together(name, most):
    x, label = clusters()
    changes = (label[study.ORDERS[name](x)].diff() != 0).sum()
    assert changes <= most < 100 < (label.diff() != 0).sum()


def test_rows_drop_at_most_the_tolerance_and_never_their_positive():
    p = torch.rand(50, 96).pow(8)
    p /= p.sum(1, keepdim=True)
    mass, positive = study.tile_sums(p, 32), torch.arange(50) % 3
    for tolerance in (0.0, 0.1, 0.5, 0.9):
        keep = study.needed_tiles(mass, tolerance, positive)
        dropped = mass.masked_fill(keep, 0.0).sum(1)
        assert (dropped <= tolerance).all()
        assert keep[torch.arange(50), positive].all()
        lightest = mass.masked_fill(~keep, torch.inf).scatter(1, positive[:, None], torch.inf).min(1).values
        assert (dropped + lightest > tolerance).all()  # no further tile could be dropped
    assert not study.needed_tiles(mass, 0.9, positive).all()


def test_flat_rows_need_nearly_all_scores():
    p = torch.full((4, 1000), 1e-3)
    assert study.needed_scores(p, 1e-2).tolist() == pytest.approx([990] * 4, abs=1)
    columns = study.needed_of_columns(torch.full((1000, 3), 1e-3), 1e-2)
    assert columns.sum(0).tolist() == pytest.approx([990] * 3, abs=1)


def test_errors_are_those_of_the_gradients():
    x, _ = clusters(width=6)
    a, b, own = x.double(), x.flip(0).double(), torch.arange(len(x))
    p = (4 * a @ b.T).softmax(1)
    keep = torch.rand(len(x), 8) < 0.5
    g = p.clone()
    g[own, own] -= 1
    tile = torch.arange(len(x)) // 16
    wrong = g - p.masked_fill(keep[:, tile], 0.0)
    errors = study.gradient_errors(p, keep, 16, a, b, own)
    assert errors["error_dA"] == pytest.approx(relative_error(wrong @ b, g @ b))
    assert errors["error_dB"] == pytest.approx(relative_error(wrong.T @ a, g.T @ a))
    sums = (p.masked_fill(keep[:, tile], 0.0) @ F.one_hot(tile).double() / 16)[:, tile]
    mended = wrong + sums.masked_fill(keep[:, tile], 0.0)
    assert mended.sum(1).abs().max() < 1e-12
    assert errors["error_dA_compensated"] == pytest.approx(relative_error(mended @ b, g @ b))


def test_a_batch_of_clusters_can_skip_once_it_is_ordered(monkeypatch):
    x, _ = clusters(size=32)
    monkeypatch.setattr(study, "WIDTHS", (32,))
    found = study.study(x, x, 50.0, torch.arange(len(x)))
    needed = {(r["order"], r["tolerance"]): r["needed"] for r in found["results"]}
    assert needed["random", 1e-2] > 0.9
    assert needed["chain", 1e-2] < 0.5
    best = {r["needed_best_order"] for r in found["results"] if r["tolerance"] == 1e-2}
    assert all(share <= needed["chain", 1e-2] for share in best)
    assert all(r["needed_symmetric"] >= r["needed"] for r in found["results"])
    assert all(r["largest_dropped"] <= r["tolerance"] for r in found["results"])


def test_the_command_writes_what_it_found(tmp_path, monkeypatch):
    x, label = clusters(size=8)
    monkeypatch.setattr(study, "features_of", lambda folder, rows: (x, x, 20.0, label, {"step": 3}))
    path = study.main(["somewhere", "--rows", "64", "--out", str(tmp_path / "x.json")])
    report = json.loads(path.read_text())
    assert [batch["scale"] for batch in report["batches"]] == [20.0, 100.0]
    assert len(report["batches"][0]["results"]) == len(study.ORDERS) * len(study.WIDTHS) * len(study.TOLERANCES)
