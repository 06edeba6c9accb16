"""``workspace_mib="auto"``: a share of the free memory, the same for equal steps, and a fixed number elsewhere."""

import pytest
import torch
from tests.compare import assert_close
from tests.ring.virtual import run_virtual
from tests.ring.wrapped import wrapped

import tilewise as tw
from tilewise.errors import ConfigError
from tilewise.ops import budget
from tilewise.ops.budget import budget_mib, with_budget

AUTO = tw.TileOptions(workspace_mib="auto")
CPU = torch.device("cpu")


@pytest.mark.parametrize(
    "free_gib, mib", [(0.01, 64), (1.0, 256), (1.99, 384), (2.0, 512), (30.0, 6144), (500.0, 8192)]
)
def test_a_quarter_rounded_down(free_gib, mib, monkeypatch):
    monkeypatch.setattr(budget, "free_bytes", lambda device: int(free_gib * 2**30))
    assert with_budget(AUTO, CPU, "") == tw.TileOptions(workspace_mib=mib)


def test_it_never_exceeds_the_share():
    for free in range(2**28, 2**36, 2**28 - 12345):
        mib = budget_mib(free)
        assert free / 8 / 2**20 < mib <= free / 4 / 2**20 or mib == 8192


def test_elsewhere_it_is_the_default(monkeypatch):
    monkeypatch.setattr(budget, "free_bytes", lambda device: 2**36)
    assert with_budget(AUTO, CPU, "a group") is AUTO
    assert AUTO.workspace_bytes == tw.TileOptions().workspace_bytes
    monkeypatch.setattr(budget, "free_bytes", lambda device: None)
    assert with_budget(AUTO, CPU, "") is AUTO


def test_a_number_is_kept():
    options = tw.TileOptions(workspace_mib=100)
    assert with_budget(options, CPU, "") is options


def test_the_route_sees_the_number(monkeypatch):
    x, w, y = torch.randn(128, 16, requires_grad=True), torch.randn(400_000, 16), torch.arange(128)
    for free, strategy in ((2**28, "two_pass"), (2**34, "one_pass")):
        monkeypatch.setattr(budget, "free_bytes", lambda device, free=free: free)
        (call,) = tw.explain(tw.linear_cross_entropy, x, w, y, options=AUTO).calls
        assert call.strategy == strategy
        assert call.workspace_bytes <= budget_mib(free) * 2**20


def test_results_with_any_budget(monkeypatch):
    x, w, y = torch.randn(70, 16, requires_grad=True), torch.randn(300, 16, requires_grad=True), torch.arange(70)
    want = torch.autograd.grad(tw.linear_cross_entropy(x, w, y), (x, w))
    for loss in (tw.linear_cross_entropy, torch.compile(tw.linear_cross_entropy, backend="aot_eager", fullgraph=True)):
        got = torch.autograd.grad(loss(x, w, y, options=AUTO), (x, w))
        for one, other in zip(got, want, strict=True):
            assert_close(one, other, 1e-6)


def test_over_a_group(monkeypatch):
    """The free memory of ranks differs, and their options must not."""
    monkeypatch.setattr(budget, "free_bytes", None)  # would fail if called

    def work(group):
        generator = torch.Generator().manual_seed(0)
        a, b = (torch.randn(8, 4, generator=generator) for _ in range(2))
        with wrapped(group) as (name, _):
            return tw.clip_loss(a, b, 10.0, group=name, options=AUTO)

    one, other = run_virtual(2, work)
    assert torch.equal(one, other)


def test_a_wrong_word_is_refused():
    with pytest.raises(ConfigError, match='"auto"'):
        tw.TileOptions(workspace_mib="all")
