"""How losses behave as parts of a training step: frozen sides, autocast, compile, upstream gradients, modules."""

import inspect
from types import SimpleNamespace

import pytest
import torch
from tests.compare import assert_close, relative_error
from tests.losses.loss_cases import CASES, converted, problem, solve, upstream_like
from torch import nn

import tilewise as tw
from tilewise.kernels.torch_impl.backend import TorchBackend

pytestmark = pytest.mark.usefixtures("small_tiles")

ONE_OF_EACH = (
    "clip",
    "siglip",
    "info_nce_ids_of_negatives",
    "nt_xent",
    "supcon",
    "cross_entropy_everything",
    "logsumexp",
)


@pytest.mark.parametrize("name", CASES)
def test_k_times_the_loss_has_k_times_the_gradient(name):
    made = problem(name)
    _, once = solve(made.ours, made.leaves)
    for k in (3.0, -0.25, 65536.0, 1e-12):
        _, scaled = solve(lambda p, k=k: k * made.ours(p), made.leaves)
        for leaf in once:
            assert_close(scaled[leaf], k * once[leaf], 1e-12, leaf)


@pytest.mark.parametrize("name", ONE_OF_EACH)
def test_an_incoming_gradient_of_zero_gives_zero(name):
    made = problem(name)
    _, grads = solve(made.ours, made.leaves, torch.tensor(0.0))
    assert all(torch.equal(grad, torch.zeros_like(grad)) for grad in grads.values())


@pytest.mark.parametrize("bad", [torch.inf, torch.nan])
@pytest.mark.parametrize("name", ONE_OF_EACH)
def test_a_loss_scale_that_overflowed_shows_in_the_gradient(name, bad):
    """What torch.amp.GradScaler looks for. A finite gradient here would be a silent wrong number."""
    made = problem(name, torch.float16)
    _, grads = solve(made.ours, made.leaves, torch.tensor(bad))
    assert not any(grad.isfinite().all() for name, grad in grads.items())


@pytest.mark.parametrize("name", ONE_OF_EACH)
def test_gradients_of_a_tiny_loss_survive_float16(name):
    """A mean over a million rows sends 1e-6 to each: the tile of G must not hold that number in float16."""
    made = problem(name, torch.float16)
    _, once = solve(made.ours, converted(made.leaves, torch.float32))
    tiny, _ = solve(lambda p: made.ours(p) * 1e-6, made.leaves)
    _, grads = solve(lambda p: made.ours(p) * 1e-6 * 1e6, made.leaves)
    assert tiny > 0
    for leaf in grads:
        assert relative_error(grads[leaf], once[leaf]) < 5e-3, leaf


@pytest.mark.parametrize("name", CASES)
def test_each_leaf_alone_gets_the_gradient_it_gets_in_company(name):
    made = problem(name)
    _, together = solve(made.ours, made.leaves)
    for leaf in made.leaves:
        alone = {other: value.detach() for other, value in made.leaves.items()}
        alone[leaf].requires_grad_()
        _, grads = solve(made.ours, alone)
        assert grads.keys() == {leaf}
        assert_close(grads[leaf], together[leaf], 1e-12, leaf)


def test_only_the_gradients_that_are_needed_are_asked_for(monkeypatch, set_limits):
    set_limits(small_cpu=0)
    asked = []
    plain = TorchBackend.backward

    def spy(self, pair, stats, grad, needs, *rest, **more):
        asked.append((needs.a, needs.b, needs.scale, needs.bias))
        return plain(self, pair, stats, grad, needs, *rest, **more)

    monkeypatch.setattr(TorchBackend, "backward", spy)
    made = problem("clip")
    for frozen, needs in (
        ((), (True, True, True, False)),
        (("image",), (False, True, True, False)),
        (("text", "scale"), (True, False, False, False)),
        (("image", "text"), (False, False, True, False)),
    ):
        leaves = {name: leaf.detach().requires_grad_(name not in frozen) for name, leaf in made.leaves.items()}
        made.ours(SimpleNamespace(**leaves)).backward()
        assert asked.pop() == needs
        assert not asked


@pytest.mark.parametrize("name", CASES)
def test_no_grad(name, monkeypatch):
    monkeypatch.setattr(TorchBackend, "backward", None)
    made = problem(name)
    arguments = SimpleNamespace(**made.leaves)
    with torch.no_grad():
        loss = made.ours(arguments)
    assert not loss.requires_grad
    assert loss.grad_fn is None
    assert_close(loss, made.ours(arguments), 1e-15)  # rows may be added up in another order where gradients are formed
    with torch.inference_mode():
        assert torch.equal(made.ours(arguments), loss)


def test_backward_twice_through_one_forward():
    made = problem("clip")
    loss = made.ours(SimpleNamespace(**made.leaves))
    first = torch.autograd.grad(loss, list(made.leaves.values()), retain_graph=True)
    second = torch.autograd.grad(loss, list(made.leaves.values()))
    assert all(torch.equal(one, other) for one, other in zip(first, second, strict=True))


@pytest.mark.parametrize("threads", [1, 2])
@pytest.mark.parametrize("name", CASES)
def test_the_same_call_twice_is_bitwise_the_same(name, threads):
    made = problem(name, torch.float32)
    before = torch.get_num_threads()
    torch.set_num_threads(threads)
    try:
        (loss, grads), (again, grads_again) = (solve(made.ours, made.leaves) for _ in range(2))
    finally:
        torch.set_num_threads(before)
    assert torch.equal(loss, again)
    assert all(torch.equal(grads[leaf], grads_again[leaf]) for leaf in grads)


@pytest.mark.parametrize("name", CASES)
def test_inputs_are_left_as_they_were(name):
    made = problem(name, torch.float32)
    before = {leaf: value.detach().clone() for leaf, value in made.leaves.items()}
    solve(made.ours, made.leaves)
    assert all(torch.equal(made.leaves[leaf], before[leaf]) for leaf in before)


@pytest.mark.parametrize("name", CASES)
def test_autocast_rounds_features_and_nothing_else(name):
    """Under autocast the loss is that of features in bfloat16: float32 loss, float32 gradients for float32 leaves."""
    made = problem(name, torch.float32)
    with torch.autocast("cpu", torch.bfloat16):
        loss, grads = solve(made.ours, made.leaves)
    rounded = {
        leaf: value.detach().bfloat16().requires_grad_() if value.dim() else value
        for leaf, value in made.leaves.items()
    }
    want, want_grads = solve(made.ours, rounded)
    assert loss.dtype == torch.float32
    assert torch.equal(loss, want)
    for leaf in grads:
        assert grads[leaf].dtype == torch.float32
        if name == "pair_statistics":  # gradients of two calls, added in float32 here and in bfloat16 there
            assert_close(grads[leaf], want_grads[leaf].float(), 2**-7, leaf)
        else:
            assert torch.equal(grads[leaf], want_grads[leaf].float()), leaf


def test_autocast_leaves_float64_alone():
    made = problem("clip")
    with torch.autocast("cpu", torch.bfloat16):
        loss, _ = solve(made.ours, made.leaves)
    assert loss.dtype == torch.float64


def test_backward_runs_outside_of_autocast_as_inside():
    made = problem("clip", torch.float32)
    with torch.autocast("cpu", torch.bfloat16):
        loss = made.ours(SimpleNamespace(**made.leaves))
        inside = torch.autograd.grad(loss, list(made.leaves.values()), retain_graph=True)
    outside = torch.autograd.grad(loss, list(made.leaves.values()))
    assert all(torch.equal(one, other) for one, other in zip(inside, outside, strict=True))


def compiled(loss, backend):
    """The loss as one graph. Arguments are read inside of it, from a namespace that exists before."""

    def call(arguments):
        return torch.compile(lambda: loss(arguments), fullgraph=True, backend=backend)()

    return call


@pytest.mark.parametrize("name", CASES)
def test_compile_in_one_graph(name):
    torch._dynamo.reset()
    made = problem(name, torch.float32)
    loss, grads = solve(compiled(made.ours, "aot_eager"), made.leaves)
    want, want_grads = solve(made.ours, made.leaves)
    assert_close(loss, want, 1e-6)
    for leaf in want_grads:
        assert_close(grads[leaf], want_grads[leaf], 1e-6, leaf)


def test_compile_sees_new_sizes():
    torch._dynamo.reset()
    whole = torch.compile(tw.clip_loss, fullgraph=True, backend="aot_eager")
    for n in (12, 30, 77):
        made = problem("clip", n=n)
        loss, grads = solve(lambda p: whole(p.image, p.text, p.scale), made.leaves)
        want, want_grads = solve(made.ours, made.leaves)
        assert_close(loss, want, 1e-12)
        assert_close(grads["image"], want_grads["image"], 1e-12)


@pytest.mark.slow
@pytest.mark.usefixtures("cpp_compiler")
def test_compile_with_inductor():
    torch._dynamo.reset()
    made = problem("clip", torch.float32)
    loss, grads = solve(compiled(made.ours, "inductor"), made.leaves)
    want, want_grads = solve(made.ours, made.leaves)
    assert_close(loss, want, 1e-6)
    for leaf in want_grads:
        assert_close(grads[leaf], want_grads[leaf], 1e-6, leaf)


MODULES = {
    tw.ClipLoss: tw.clip_loss,
    tw.SigLipLoss: tw.siglip_loss,
    tw.InfoNCELoss: tw.info_nce,
    tw.NTXentLoss: tw.nt_xent,
    tw.SupConLoss: tw.supcon_loss,
    tw.SoftInfoNCELoss: tw.soft_info_nce,
    tw.LinearCrossEntropyLoss: tw.linear_cross_entropy,
    tw.LinearDistillationLoss: tw.linear_distillation_loss,
    tw.ClipDistillationLoss: tw.clip_distillation_loss,
    tw.LinearSparseDistillationLoss: tw.linear_sparse_distillation_loss,
}


@pytest.mark.parametrize("module, function", MODULES.items(), ids=lambda thing: thing.__name__)
def test_module_takes_every_argument_of_its_function(module, function):
    def parameters(thing):
        return {p.name: (p.default, p.kind, p.annotation) for p in inspect.signature(thing).parameters.values()}

    settings, arguments, wanted = parameters(module), parameters(module.forward), parameters(function)
    arguments.pop("self")
    assert not settings.keys() & arguments.keys()
    assert settings | arguments == wanted
    tensors = [p.name for p in inspect.signature(function).parameters.values() if p.kind is p.POSITIONAL_OR_KEYWORD]
    assert [name for name in arguments if name in tensors] == tensors


def test_modules_compute_what_their_functions_compute():
    made = problem("clip")
    image, text, scale = made.leaves.values()
    labels, weight = torch.arange(len(image)) % 7, torch.rand(len(text), dtype=torch.float64)
    options = tw.TileOptions(workspace_mib=1)
    cases = {
        tw.ClipLoss: ({"reduction": "sum", "options": options}, (image, text, scale), {}),
        tw.SigLipLoss: ({"reduction": "none"}, (image, text, scale, -3.0), {}),
        tw.InfoNCELoss: ({"temperature": 0.3, "symmetric": True}, (image, text, text), {"query_ids": labels}),
        tw.NTXentLoss: ({"temperature": 0.3}, (image,), {}),
        tw.SupConLoss: ({"temperature": 0.3}, (image, labels), {}),
        tw.SoftInfoNCELoss: ({"temperature": 0.3, "exclude_self": True}, (image, text, labels[:, None]), {}),
        tw.LinearCrossEntropyLoss: (
            {"weight": weight, "label_smoothing": 0.1, "softcap": 4.0, "logit_scale": 3.0, "z_loss": 0.1},
            (image, text, labels),
            {"linear_bias": weight},
        ),
        tw.LinearDistillationLoss: (
            {"beta": 0.4, "temperature": 2.0, "target_weight": 0.5, "softcap": 4.0, "logit_scale": 3.0},
            (image, text, text, image, labels),
            {"linear_bias": weight, "mask": labels > 0},
        ),
        tw.ClipDistillationLoss: ({"teacher_entropy": True}, (image, text, scale, text, image, 3.0), {}),
        tw.LinearSparseDistillationLoss: (
            {"divergence": "reverse", "tail": "bucket", "softcap": 4.0, "logit_scale": 3.0, "temperature": 2.0},
            (image, text, labels[:, None] + torch.tensor([0, 9]), torch.full((len(image), 2), -2.0)),
            {"linear_bias": weight, "mask": labels > 2},
        ),
    }
    assert cases.keys() == MODULES.keys()
    for module, (settings, tensors, more) in cases.items():
        assert torch.equal(module(**settings)(*tensors, **more), MODULES[module](*tensors, **settings, **more))


def test_a_temperature_given_as_parameter_is_learned():
    made = problem("nt_xent")
    module = tw.NTXentLoss(temperature=nn.Parameter(torch.tensor(0.2, dtype=torch.float64)))
    assert [name for name, _ in module.named_parameters()] == ["temperature"]
    module(made.leaves["z"]).backward()
    _, grads = solve(made.ours, made.leaves)
    assert_close(module.temperature.grad, grads["temperature"], 1e-12)


def test_class_weights_move_and_save_with_their_module():
    module = tw.LinearCrossEntropyLoss(weight=torch.ones(4))
    assert module.double().weight.dtype == torch.float64
    assert "weight" in module.state_dict()


@pytest.mark.parametrize("name", ["clip", "nt_xent", "info_nce", "cross_entropy"])
def test_numbers_and_tensors_mean_the_same(name):
    """A scale is a float, a 0-d tensor or a tensor of one element."""
    made = problem(name)
    scalar = next(leaf for leaf in made.leaves if leaf in ("scale", "temperature"))
    want = made.ours(SimpleNamespace(**made.leaves))
    value = made.leaves[scalar].detach()
    for other in (value.item(), value, value.reshape(1), value.reshape(1, 1)):
        assert_close(made.ours(SimpleNamespace(**made.leaves | {scalar: other})), want, 1e-14)
    assert made.ours(SimpleNamespace(**made.leaves | {scalar: 1})).isfinite()


@pytest.mark.parametrize("name", CASES)
def test_upstream_gradients_differ_by_row(name):
    """One row asks: only its own loss is differentiated (wrong `none` gradients have been seen elsewhere)."""
    made = problem(name)
    full = made.dense(SimpleNamespace(**made.leaves), reduction="none")
    row = (full.flatten() != 0).nonzero()[1].item()
    upstream = torch.zeros_like(full).flatten().index_fill(0, torch.tensor([row]), 2.0).view_as(full)
    _, grads = solve(made.ours, made.leaves, upstream, reduction="none")
    _, want = solve(made.dense, made.leaves, upstream, reduction="none")
    for leaf in want:
        assert_close(grads[leaf], want[leaf], 1e-12, leaf)
    assert upstream_like(full).shape == full.shape
