"""The baselines and the loss of a run agree with one another, on one rank."""

import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F
from tests.compare import relative_error

from tilewise.train.baselines import gather
from tilewise.train.config import LossConfig
from tilewise.train.objective import pair_loss


def leaves(n=13, d=8):
    generator = torch.Generator().manual_seed(0)
    image, text = (F.normalize(torch.randn(n, d, generator=generator), dim=1) for _ in range(2))
    scale, bias = torch.tensor(7.0), torch.tensor(-3.0)
    return [t.requires_grad_() for t in (image, text, scale, bias)]


def loss_and_gradients(name, kind, ids):
    given = leaves()
    loss = pair_loss(LossConfig(name=name, kind=kind))(*given, ids)
    used = given if kind == "siglip" else given[:3]
    return loss.detach(), torch.autograd.grad(loss, used)


@pytest.mark.parametrize("name", ["dense", "local"])
@pytest.mark.parametrize("kind, masked", [("clip", False), ("clip", True), ("siglip", False)])
def test_baselines_equal_tilewise(name, kind, masked):
    ids = torch.tensor([0, 1, 2, 0, 1, 5, 6, 7, 0, 9, 10, 11, 11]) if masked else None
    want, want_grads = loss_and_gradients("tilewise", kind, ids)
    got, grads = loss_and_gradients(name, kind, ids)
    assert relative_error(got, want) < 1e-5
    for a, b in zip(grads, want_grads, strict=True):
        assert relative_error(a, b) < 1e-4


def test_the_mask_changes_the_loss_by_exactly_the_masked_pairs():
    image, text, scale, _ = leaves(4)
    ids = torch.tensor([3, 3, 5, 6])
    scores = scale * image @ text.T
    scores[0, 1] = scores[1, 0] = -torch.inf
    target = torch.arange(4)
    want = (F.cross_entropy(scores, target) + F.cross_entropy(scores.T, target)) / 2
    for name in ("tilewise", "dense", "local"):
        assert relative_error(pair_loss(LossConfig(name=name))(image, text, scale, None, ids), want) < 1e-5


def test_gathered_rows_have_first_derivatives_only(monkeypatch):
    """Torch does not see the sum over ranks in their backward, so a second backward would be wrong."""
    monkeypatch.setattr(dist, "get_rank", lambda group: 0)
    monkeypatch.setattr(dist, "all_gather", lambda parts, rows, group: [part.copy_(rows) for part in parts])
    monkeypatch.setattr(dist, "all_reduce", lambda total, group: total.mul_(2))
    rows = torch.randn(3, 4, requires_grad=True)
    (grad,) = torch.autograd.grad(gather(rows, [3, 3], "a group").square().sum(), rows, create_graph=True)
    assert relative_error(grad, 4 * rows) < 1e-6
    with pytest.raises(RuntimeError, match="differentiate twice"):
        grad.sum().backward()
