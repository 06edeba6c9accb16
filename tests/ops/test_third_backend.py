"""A backend that is registered by a test and offers only `two_pass` runs every loss and retrieval."""

from types import SimpleNamespace

import pytest
import torch
from tests.compare import assert_close
from tests.kernels.oracle_backend import OracleBackend
from tests.losses.loss_cases import CASES, problem, solve

import tilewise as tw
from tilewise.errors import ConfigError
from tilewise.kernels.registry import choose_backend, register_backend, unregister_backend
from tilewise.kernels.spec import Pair, PairSpec
from tilewise.options import BACKEND_NAMES


@pytest.fixture(autouse=True)
def calls():
    """The backend is known inside of a test; what was asked of it."""
    seen = []

    class Counted(OracleBackend):
        def forward(self, *args):
            seen.append("forward")
            return super().forward(*args)

        def backward(self, *args, **more):
            seen.append("backward")
            return super().backward(*args, **more)

    register_backend(Counted())
    yield seen
    unregister_backend("oracle")


@pytest.mark.parametrize("reduction", ["mean", "none"])
@pytest.mark.parametrize("name", CASES)
def test_every_loss(name, reduction, calls):
    made = problem(name)
    options = tw.TileOptions(backend="oracle")

    def loss(p):
        return made.ours(p, reduction=reduction, options=options).sum()

    got, grads = solve(loss, made.leaves)
    want, want_grads = solve(lambda p: made.dense(p, reduction=reduction).sum(), made.leaves)
    assert calls == ["forward", "backward"] * (len(calls) // 2) or set(calls) == {"forward", "backward"}
    assert_close(got, want, 1e-12)
    for leaf in want_grads:
        assert_close(grads[leaf], want_grads[leaf], 1e-10, leaf)


@pytest.mark.parametrize("gradients", ["forward", "backward"])
@pytest.mark.parametrize("tolerance", [0.0, 0.1])
@pytest.mark.usefixtures("filter_on_cpu")
def test_what_it_lacks_is_two_pass_of_its_own(gradients, tolerance, calls, monkeypatch):
    """Neither the one-pass strategy nor the filter of another backend is used."""
    monkeypatch.setattr("tilewise.kernels.torch_impl.backend.TorchBackend.one_pass", None)
    made = problem("cross_entropy_bias")
    options = tw.TileOptions(backend="oracle", gradients=gradients, filter_tolerance=tolerance)
    _, grads = solve(made.ours, made.leaves, options=options)
    _, want = solve(made.dense, made.leaves)
    assert calls == ["forward", "backward"]
    for leaf in want:
        assert_close(grads[leaf], want[leaf], 1e-10, leaf)
    hidden, classes = torch.randn(9, 4, requires_grad=True), torch.randn(40, 4)
    way = tw.explain(tw.linear_cross_entropy, hidden, classes, torch.arange(9), options=options).calls[0]
    assert (way.backend, way.strategy) == ("oracle", "two_pass")


@pytest.mark.parametrize("by_ids", [False, True])
def test_retrieval(by_ids, calls):
    generator = torch.Generator().manual_seed(0)
    queries = torch.randn(13, 6, generator=generator, dtype=torch.float64)
    gallery = queries[torch.randperm(13, generator=generator)].repeat(2, 1)  # every item twice: ties
    settings = {"exclude": torch.arange(13)[:, None] % 5}
    if by_ids:
        settings |= {"query_ids": torch.arange(13) // 2, "gallery_ids": torch.arange(26) % 7}
    else:
        settings["positives"] = torch.arange(13) + 6
    got = tw.retrieval_ranks_both(queries, gallery, **settings, options=tw.TileOptions(backend="oracle"))
    want = tw.retrieval_ranks_both(queries, gallery, **settings)
    assert calls
    assert torch.equal(got.query_to_gallery, want.query_to_gallery)
    assert torch.equal(got.gallery_to_query, want.gallery_to_query)


def test_search(calls):
    queries, gallery = torch.randn(13, 6, dtype=torch.float64), torch.randn(26, 6, dtype=torch.float64)
    got = tw.nearest(queries, gallery, 4, options=tw.TileOptions(backend="oracle"))
    assert calls
    assert torch.equal(got.indices, tw.nearest(queries, gallery, 4).indices)


def test_auto_does_not_choose_it(calls):
    x = torch.randn(5, 3, requires_grad=True)
    tw.clip_loss(x, x.detach(), 2.0).backward()
    assert not calls


def test_a_name_that_is_not_registered_is_refused():
    with pytest.raises(ConfigError, match=r"no backend 'nothing'.*oracle"):
        tw.TileOptions(backend="nothing")


def test_a_backend_that_takes_the_name_of_another_serves_the_next_call(calls):
    """Also a call that was routed before."""
    made, options = problem("clip"), tw.TileOptions(backend="oracle")
    made.ours(SimpleNamespace(**made.leaves), options=options)
    before, used = len(calls), []

    class Later(OracleBackend):
        def forward(self, *args):
            used.append("forward")
            return super().forward(*args)

    register_backend(Later())
    made.ours(SimpleNamespace(**made.leaves), options=options)
    assert used == ["forward"]
    assert len(calls) == before


def test_a_replaced_backend_comes_back():
    class InPlaceOfTorch(OracleBackend):
        name = "torch"

    options, x = tw.TileOptions(backend="torch"), torch.randn(6, 4)

    def chosen():
        return type(choose_backend(Pair(a=x, b=x, scale=x[0, 0]).shape, PairSpec(row_lse=True), options))

    first = chosen()
    register_backend(InPlaceOfTorch())
    assert chosen() is InPlaceOfTorch
    unregister_backend("torch")
    assert chosen() is first
    assert "torch" in BACKEND_NAMES
