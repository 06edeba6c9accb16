"""Every bad input has its error, whose words say what was wanted, what came, and what to do. Nothing else changes."""

import pytest
import torch
from tests import bad_distillation, bad_inputs
from tests.bad_inputs import OPTIONS, A, B, Y, cross_entropy

import tilewise as tw
from tilewise import errors
from tilewise.errors import ConfigError, DtypeError, RangeError, ShapeError, TilewiseError


def state():
    return (
        torch.get_float32_matmul_precision(),
        torch.is_grad_enabled(),
        torch.get_default_dtype(),
        torch.is_autocast_enabled("cpu"),
        torch.get_num_threads(),
    )


BAD = bad_inputs.BAD | bad_distillation.BAD


@pytest.mark.parametrize("call, error, words", BAD.values(), ids=BAD)
def test_bad_input(call, error, words):
    before, features, rng = state(), (A.clone(), B.clone(), Y.clone()), torch.get_rng_state()
    good = tw.clip_loss(A, B, 14.0)
    with pytest.raises(error) as caught:
        call()
    assert type(caught.value) is error
    wanted, came, remedy = words
    for part in (wanted, came, remedy):
        assert caught.match(part)
    assert state() == before
    assert torch.equal(torch.get_rng_state(), rng)
    assert all(torch.equal(one, other) for one, other in zip(features, (A, B, Y), strict=True))
    assert torch.equal(tw.clip_loss(A, B, 14.0), good)


def test_every_error_of_the_engine_is_in_the_table():
    raised = {error for _, error, _ in BAD.values()}
    elsewhere = {errors.GroupError, errors.DataError, errors.CheckpointError, TilewiseError}
    known = {thing for thing in vars(errors).values() if isinstance(thing, type)}
    assert raised | elsewhere == known


@pytest.mark.parametrize(
    "builtin, error", [(ValueError, ShapeError), (TypeError, DtypeError), (ValueError, RangeError)]
)
def test_python_users_catch_what_they_expect(builtin, error):
    call = next(call for call, kind, _ in BAD.values() if kind is error)
    with pytest.raises(builtin):
        call()
    with pytest.raises(TilewiseError):
        call()


def test_modules_refuse_what_their_functions_refuse():
    with pytest.raises(ConfigError):
        tw.ClipLoss(reduction="avg")(A, B, 1.0)
    with pytest.raises(RangeError):
        tw.NTXentLoss(temperature=0.0)(A)


def test_options_cannot_be_changed_or_given_by_position():
    with pytest.raises(AttributeError):
        OPTIONS().backend = "torch"
    with pytest.raises(TypeError):
        OPTIONS("torch")


def test_a_target_out_of_range_gives_nan_where_nobody_may_read():
    """Compiled, values are not read: the loss is NaN, never a plausible number."""
    torch._dynamo.reset()
    whole = torch.compile(cross_entropy, fullgraph=True, backend="aot_eager")
    assert whole().isfinite()
    target = Y.clone()
    target[3] = 6
    assert whole(target=target).isnan()


def test_a_failure_inside_leaves_no_gradient_behind(monkeypatch):
    from tilewise.kernels.torch_impl.backend import TorchBackend

    a, b = A.clone().requires_grad_(), B.clone().requires_grad_()
    loss = tw.clip_loss(a, b, 14.0, options=OPTIONS(precision="high"))
    with monkeypatch.context() as patch:
        patch.setattr(TorchBackend, "backward", lambda *args, **more: 1 / 0)
        with pytest.raises(ZeroDivisionError):
            loss.backward(retain_graph=True)
    assert a.grad is None
    assert b.grad is None
    loss.backward()
    assert a.grad.isfinite().all()
