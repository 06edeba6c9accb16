"""What PyTorch's own machinery may do with every loss: the meta device, checkpointing, torch.func, copies, state."""

from __future__ import annotations

import copy
import io
import pickle
from types import SimpleNamespace

import pytest
import torch
from tests.compare import assert_close
from tests.losses import loss_cases
from torch.autograd import forward_ad
from torch.utils.checkpoint import checkpoint

import tilewise as tw
from tilewise.errors import DeviceError

# The meta device: shapes and types, without numbers.


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("how", [{}, {"gradients": "forward"}, {"gradients": "backward"}, {"filter_tolerance": 0.01}])
@pytest.mark.parametrize("name", loss_cases.CASES)
def test_meta_tensors_give_shapes_and_types(name, how, dtype):
    options = tw.TileOptions(**how)
    real = loss_cases.problem(name, dtype, n=10, d=4)
    there = loss_cases.problem(name, dtype, n=10, d=4, device="meta")
    want, want_grads = loss_cases.solve(real.ours, real.leaves, options=options)
    got, grads = loss_cases.solve(there.ours, there.leaves, options=options)
    assert got.is_meta
    assert (got.shape, got.dtype) == (want.shape, want.dtype)
    for leaf, grad in grads.items():
        assert grad.is_meta
        assert (grad.shape, grad.dtype) == (want_grads[leaf].shape, want_grads[leaf].dtype), leaf


def test_meta_tensors_have_shapes_for_every_token_and_no_ranks():
    x, y = torch.empty(2, 5, 4, device="meta"), torch.zeros(2, 5, dtype=torch.int64, device="meta")
    w = torch.empty(7, 4, device="meta")
    assert tw.linear_cross_entropy(x, w, y, shift=1, reduction="none").shape == (2, 4)
    stats = tw.linear_token_stats(x, w, y)
    assert stats.entropy.shape == stats.argmax.shape == (2, 5)
    assert stats.argmax.dtype == torch.int64
    assert tw.linear_logsumexp(x.flatten(0, 1), w).shape == (10,)
    with pytest.raises(DeviceError, match="meta device"):
        tw.retrieval_ranks(w, w)


# Transformations and copies.


@pytest.mark.parametrize("reentrant", [False, True])
@pytest.mark.parametrize("name", loss_cases.CASES)
def test_checkpointing_changes_nothing(name, reentrant):
    made = loss_cases.problem(name, torch.float32, n=12, d=4)
    want, want_grads = loss_cases.solve(made.ours, made.leaves)

    def again(p, **how):
        names = list(vars(p))
        return checkpoint(
            lambda *values: made.ours(SimpleNamespace(**dict(zip(names, values, strict=True))), **how),
            *vars(p).values(),
            use_reentrant=reentrant,
        )

    leaves = {key: leaf.detach().clone().requires_grad_() for key, leaf in made.leaves.items()}
    loss = again(SimpleNamespace(**leaves))
    loss.backward()
    assert_close(loss.detach(), want, 1e-6)  # without gradients the first pass may take another path
    for key, leaf in leaves.items():
        assert_close(leaf.grad, want_grads[key], 1e-6, key)


def features_of(leaves: dict[str, torch.Tensor]) -> list[str]:
    names = [name for name, leaf in leaves.items() if leaf.dim() > 1]
    assert names
    return names


@pytest.mark.parametrize("transform", [torch.func.grad, torch.func.jacrev, torch.func.jacfwd, torch.func.hessian])
@pytest.mark.parametrize("name", loss_cases.CASES)
def test_torch_func_is_refused_and_never_wrong(name, transform):
    made = loss_cases.problem(name, torch.float32, n=6, d=4)
    plain = {key: leaf.detach() for key, leaf in made.leaves.items()}
    for leaf in features_of(plain):
        with pytest.raises(RuntimeError, match=r"setup_context|no forward-mode derivatives"):
            transform(lambda value, leaf=leaf: made.ours(SimpleNamespace(**plain | {leaf: value})))(plain[leaf])


@pytest.mark.parametrize("name", loss_cases.CASES)
def test_forward_mode_is_refused_and_never_wrong(name):
    made = loss_cases.problem(name, torch.float32, n=6, d=4)
    plain = {key: leaf.detach() for key, leaf in made.leaves.items()}
    for leaf in features_of(plain):
        with forward_ad.dual_level():
            dual = forward_ad.make_dual(plain[leaf], torch.ones_like(plain[leaf]))
            with pytest.raises(RuntimeError, match="jvp"):
                made.ours(SimpleNamespace(**plain | {leaf: dual}))


X, Y = torch.nn.functional.normalize(torch.arange(24.0).reshape(6, 4).sin(), dim=1), torch.tensor([0, 0, 1, 1, 2, 2])
MODULES = {
    "InfoNCELoss": ("temperature", lambda s: tw.InfoNCELoss(temperature=s), lambda m: m(X, X.roll(1, 0))),
    "NTXentLoss": ("temperature", lambda s: tw.NTXentLoss(temperature=s), lambda m: m(X)),
    "SupConLoss": ("temperature", lambda s: tw.SupConLoss(temperature=s), lambda m: m(X, Y)),
    "SoftInfoNCELoss": ("temperature", lambda s: tw.SoftInfoNCELoss(temperature=s), lambda m: m(X, X.roll(1, 0))),
    "LinearCrossEntropyLoss": (
        "logit_scale",
        lambda s: tw.LinearCrossEntropyLoss(logit_scale=s, weight=torch.arange(1.0, 7.0)),
        lambda m: m(X, X, Y),
    ),
    "LinearDistillationLoss": (
        "logit_scale",
        lambda s: tw.LinearDistillationLoss(logit_scale=s, temperature=2.0),
        lambda m: m(X, X, X.roll(1, 1), X),
    ),
    "LinearSparseDistillationLoss": (
        "logit_scale",
        lambda s: tw.LinearSparseDistillationLoss(logit_scale=s, tail="bucket"),
        lambda m: m(X, X, torch.stack([Y, Y + 3], 1), torch.full((6, 2), -1.5)),
    ),
}


@pytest.mark.parametrize("name", MODULES)
def test_a_learnable_number_is_in_the_state_and_in_copies(name):
    setting, make, call = MODULES[name]
    module = make(torch.nn.Parameter(torch.tensor(0.5)))
    assert setting in module.state_dict()
    assert [key for key, _ in module.named_parameters()] == [setting]
    stream = io.BytesIO()
    torch.save(module.state_dict(), stream)
    stream.seek(0)
    fresh = make(torch.nn.Parameter(torch.tensor(0.1)))
    assert not torch.equal(call(fresh), call(module))
    fresh.load_state_dict(torch.load(stream, weights_only=True))
    for twin in (fresh, copy.deepcopy(module), pickle.loads(pickle.dumps(module))):
        assert torch.equal(call(twin), call(module))
        call(twin).backward()
        assert getattr(twin, setting).grad.abs() > 0
    assert getattr(module, setting).grad is None


@pytest.mark.parametrize("name", MODULES)
def test_a_fixed_number_is_not_in_the_state(name):
    setting, make, _ = MODULES[name]
    assert setting not in make(0.5).state_dict()
