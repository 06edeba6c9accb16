"""Forward that starts for all rows before the host knows whether some are dropped."""

import pytest
import torch
from tests.kernels.interpreted import INTERPRETED

import tilewise as tw
from tilewise.kernels.registry import load_backend
from tilewise.kernels.triton_impl.filtered import forward as filter_forward
from tilewise.ops import rows as drop_rows
from tilewise.ops.rows import PendingRows
from tilewise.options import TileOptions

pytestmark = INTERPRETED


@pytest.mark.parametrize("backend, tolerance", [("torch", 0.0), ("triton", 0.0), ("triton", 1e-2)])
def test_a_guess_that_no_row_is_dropped_changes_no_number(backend, tolerance, monkeypatch):
    """As on a GPU: forward starts for all rows before the host knows the number of ignored ones."""
    options = TileOptions(backend=backend, gradients="backward", filter_tolerance=tolerance)
    chosen, seen = load_backend(backend), []
    monkeypatch.setattr("tilewise._check.can_read", lambda values: False)  # as the host of a GPU
    monkeypatch.setattr(drop_rows, "_all_stayed", {})
    monkeypatch.setattr(drop_rows, "WHOLE_TILES", 1)

    monkeypatch.setattr(filter_forward, "WORTH_PROBING", 0)
    owner = chosen.filtered if tolerance else chosen
    plain = owner.forward_saving

    def spy(pair, *rest):
        used = None if pair.only_if is None else pair.only_if.tolist()
        seen.append((pair.a.shape[0], used))
        found = plain(pair, *rest)
        if backend == "triton":  # memory that no kernel has written is NaN
            assert found[0].row_lse.isnan().all() == (used == [0])
        return found

    monkeypatch.setattr(owner, "forward_saving", spy)

    def solve(target):
        torch.manual_seed(0)
        hidden, classifier = torch.randn(48, 32, requires_grad=True), torch.randn(160, 32, requires_grad=True)
        loss = tw.linear_cross_entropy(hidden, classifier, target, options=options)
        return [loss.detach(), *torch.autograd.grad(loss, (hidden, classifier))]

    whole = torch.arange(48)
    padded = torch.where(whole % 4 == 0, -100, whole)
    want = [solve(whole), solve(padded)]
    assert seen == [(48, None), (36, None)]
    seen.clear()
    monkeypatch.setattr(type(chosen), "can_skip", lambda self, spec: True)
    monkeypatch.setattr(PendingRows, "likely_all", property(lambda self: drop_rows._all_stayed.get(self.kind, False)))
    found = [solve(target) for target in (padded, whole, whole, padded, padded)]
    assert seen == [(36, None), (48, None), (48, [1]), (48, [0]), (36, None), (36, None)]
    for some, index in zip(found, (1, 0, 0, 1, 1), strict=True):
        assert all(torch.equal(one, other) for one, other in zip(some, want[index], strict=True))


@pytest.mark.parametrize("rows", [1, 3, 4, 5, 8, 9])
def test_the_device_and_the_host_find_the_same(rows, monkeypatch):
    """Also where all rows are ignored and still stay, because they are no more than one step."""
    monkeypatch.setattr(drop_rows, "_all_stayed", {})
    for ignored in range(rows + 1):
        pending = PendingRows(torch.arange(rows) - ignored, step=4)
        assert pending.all_stay().tolist() == [int(pending.wait() is None)], ignored
