"""The kernels that form gradients in forward, in Triton's interpreter, on the CPU."""

import dataclasses
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from tests.compare import assert_close, assert_no_worse, relative_error
from tests.kernels.quick_interpreter import make_quick
from tests.losses.loss_cases import converted, problem, solve

pytest.importorskip("triton", reason="triton is not installed on this platform")

import triton.language as tl
from triton.runtime import interpreter

import tilewise as tw
from tilewise.errors import GradientError
from tilewise.kernels import direct as kernels
from tilewise.kernels.spec import Needs, Pair, PairSpec
from tilewise.kernels.triton_impl import direct, gradients, launch, sizes, tape
from tilewise.kernels.triton_impl.sizes import Sizes

pytestmark = [
    pytest.mark.skipif(torch.cuda.is_available(), reason="here the kernels are compiled: make test-gpu"),
    pytest.mark.filterwarnings("ignore::RuntimeWarning:triton.*"),  # NumPy speaks where a GPU is silent: log2(0)
    pytest.mark.filterwarnings("ignore:Conversion of an array:DeprecationWarning"),  # the interpreter's own
    pytest.mark.usefixtures("nan_filled_empty", "quick"),
]
EARLY, LATE = (
    tw.TileOptions(backend="triton", precision="highest", gradients=when) for when in ("forward", "backward")
)
SERVED = [
    *("siglip", "info_nce", "info_nce_ids_one_way", "cross_entropy", "cross_entropy_bias", "cross_entropy_weighted"),
    *("cross_entropy_softcap", "cross_entropy_z_loss"),
]
SOFTMAX, ALL = PairSpec(row_lse=True, positive="one"), Needs(a=True, b=True, scale=True, bias=False)


@pytest.fixture
def quick(monkeypatch):
    make_quick(monkeypatch)
    monkeypatch.setattr(tape, "_tapes", {})


@pytest.fixture
def to_nearest(monkeypatch):
    """The interpreter cuts a float32 to a bfloat16; a GPU rounds it."""
    real = interpreter._convert_float

    def convert(values, source, target, mode):
        if (source, target) != (tl.float32, tl.bfloat16):
            return real(values, source, target, mode)
        return torch.tensor(values).bfloat16().view(torch.int16).numpy().view(np.uint16)

    monkeypatch.setattr(interpreter, "_convert_float", convert)


@pytest.fixture
def several_blocks(monkeypatch):
    """So little memory that a hundred rows need several blocks, and their gradients several pieces."""
    monkeypatch.setattr(direct.Softmax, "_blocks", lambda self: 128)
    monkeypatch.setattr(tw.TileOptions, "workspace_bytes", 2**14)
    monkeypatch.setattr(gradients, "ONE_MACRO", 50)


def check(name, **size):
    made = problem(name, torch.float32, **size)
    loss, grads = solve(made.ours, made.leaves, options=EARLY)
    want, want_grads = solve(made.dense, converted(made.leaves, torch.float64))
    assert_close(loss, want, 1e-6)
    for leaf in want_grads:
        assert_close(grads[leaf], want_grads[leaf], 2e-6, leaf)


@pytest.mark.parametrize("name", SERVED)
def test_equals_the_oracle(name, monkeypatch):
    monkeypatch.setattr(kernels, "two_passes", None)
    check(name)


@pytest.mark.usefixtures("several_blocks")
@pytest.mark.parametrize("name", ["siglip", "info_nce_ids_one_way", "cross_entropy_bias"])
def test_several_blocks(name):
    check(name, n=200)


def test_float16_sigmoid():
    made = problem("siglip", torch.float16)
    loss, grads = solve(made.ours, made.leaves, options=EARLY)
    want, want_grads = solve(made.dense, converted(made.leaves, torch.float64))
    assert_close(loss, want, 1e-6)
    for leaf in want_grads:
        assert_close(grads[leaf], want_grads[leaf], 5e-4, leaf)


def test_float16_softmax_is_left_to_two_passes():
    made = problem("cross_entropy", torch.float16)
    _, grads = solve(made.ours, made.leaves, options=EARLY)
    _, want = solve(made.ours, made.leaves, options=LATE)
    for leaf in want:
        assert_close(grads[leaf], want[leaf], 1e-3, leaf)


@pytest.fixture
def waiting(monkeypatch):
    """Exponentials wait, however small a call is; how many were made, and how many gradients of them."""
    counts = {"exponentials": 0, "gradients": 0, "direct": 0}

    def counted(name, real):
        def call(*arguments, only_if=None):
            counts[name] += only_if is None or bool(only_if)  # not what was launched in vain
            return real(*arguments) if only_if is None else real(*arguments, only_if=only_if)

        return call

    for name in counts:
        monkeypatch.setattr(kernels, name, counted(name, getattr(kernels, name)))
    monkeypatch.setattr(kernels, "waits", lambda pair, needs, spec, options: needs.b and spec.row_lse)
    return counts


WAITING = ["info_nce_ids_one_way", "cross_entropy_bias", "cross_entropy_weighted", "cross_entropy_softcap"]


@pytest.mark.parametrize("k", [1.0, 3.0, -1e-12])
@pytest.mark.parametrize("name", [*WAITING, "cross_entropy_z_loss"])
def test_exponentials_that_wait(name, k, waiting):
    """Every gradient is made in backward, with what comes in; ignored rows are left out of both passes."""
    made = problem(name, torch.float32)
    loss, grads = solve(lambda p: k * made.ours(p, options=EARLY), made.leaves)
    want, want_grads = solve(lambda p: k * made.dense(p), converted(made.leaves, torch.float64))
    assert waiting == {"exponentials": 1, "gradients": 1, "direct": 0}
    assert_close(loss, want, 1e-6)
    for leaf in want_grads:
        assert_close(grads[leaf], want_grads[leaf], 2e-6, leaf)


@pytest.mark.parametrize("name", ["cross_entropy_z_loss", "cross_entropy_bias"])
def test_exponentials_that_wait_leave_a_tape(name, monkeypatch):
    """Other numbers, the same launches: nothing is set up again, and the result is that of a first call."""
    monkeypatch.setattr(kernels, "waits", lambda pair, needs, spec, options: needs.b and spec.row_lse)
    first, second = (problem(name, torch.float32, n=70, seed=seed) for seed in (0, 1))
    fresh = solve(second.ours, second.leaves, options=EARLY)
    tape._tapes.clear()
    solve(first.ours, first.leaves, options=EARLY)
    tapes = [made is not None for kind, made in tape._tapes.items() if kind[0] == "exponentials"]
    assert tapes == [True, True], "of all rows, in vain, and of those that count"
    monkeypatch.setattr(direct.Softmax, "__init__", None)
    again = solve(second.ours, second.leaves, options=EARLY)
    assert torch.equal(again[0], fresh[0])
    assert all(torch.equal(again[1][leaf], value) for leaf, value in fresh[1].items())


def test_nothing_is_computed_in_vain():
    """What is launched before it is known whether all rows count touches no score where they do not."""
    made = problem("cross_entropy_bias", torch.float32)
    leaves = {name: value.detach() for name, value in made.leaves.items()}
    pair = Pair(
        a=leaves["hidden"],
        b=leaves["classifier"],
        scale=torch.ones(()),
        row_key=torch.arange(len(leaves["hidden"])) % len(leaves["classifier"]),
    )
    weights = kernels.RowWeights(each=torch.ones(len(pair.a)))
    held = {}
    for go in (0, 1):
        only_if = torch.tensor(go, dtype=torch.int32)
        _, held[go] = kernels.exponentials(pair, weights, SOFTMAX, EARLY, len(pair.a), only_if=only_if)
    columns = torch.arange(len(pair.b)) != pair.row_key[:, None]
    assert held[0].e[:, : len(pair.b)][columns].isnan().all(), "memory as it was"
    want = (pair.a @ pair.b.T - (pair.a * pair.b[pair.row_key]).sum(1, keepdim=True)).exp()
    assert_close(held[1].e[:, : len(pair.b)][columns], want[columns], 1e-5)


def test_exponentials_are_given_away(waiting):
    made = problem("cross_entropy_bias", torch.float32)
    leaves = list(made.leaves.values())
    loss = 3.0 * made.ours(SimpleNamespace(**made.leaves), options=EARLY)
    node = loss.grad_fn.next_functions[0][0].next_functions[0][0]
    assert node.held is not None
    first = torch.autograd.grad(loss, leaves, retain_graph=True)
    assert node.held is None
    second = torch.autograd.grad(loss, leaves)
    assert waiting == {"exponentials": 2, "gradients": 2, "direct": 0}
    assert all(torch.equal(one, other) for one, other in zip(first, second, strict=True))


def test_a_frozen_classifier_keeps_no_exponentials(waiting):
    made = problem("cross_entropy_bias", torch.float32)
    _, want = solve(made.ours, made.leaves, options=LATE)
    frozen = {leaf: value.detach().requires_grad_(leaf != "classifier") for leaf, value in made.leaves.items()}
    _, grads = solve(made.ours, frozen, options=EARLY)
    assert waiting == {"exponentials": 0, "gradients": 0, "direct": 1}
    assert_close(grads["hidden"], want["hidden"], 2e-6)


def test_a_second_derivative_of_what_waited_is_refused(waiting):
    made = problem("cross_entropy", torch.float32, n=8, d=4)
    loss = made.ours(SimpleNamespace(**made.leaves), options=EARLY)
    grads = torch.autograd.grad(loss, list(made.leaves.values()), create_graph=True)
    with pytest.raises(GradientError, match="first derivatives only"):
        sum(grad.square().sum() for grad in grads).backward()


@pytest.mark.parametrize("name", ["info_nce", "cross_entropy_bias"])
def test_exponentials_wait_in_a_compiled_graph(name, waiting):
    """The operator announces memory for all rows, also where fewer count."""
    torch._dynamo.reset()
    made = problem(name, torch.float32)

    def whole(p):
        return torch.compile(lambda: 3.0 * made.ours(p, options=EARLY), fullgraph=True, backend="aot_eager")()

    loss, grads = solve(whole, made.leaves)
    assert waiting == {"exponentials": 1, "gradients": 1, "direct": 0}
    want, want_grads = solve(lambda p: 3.0 * made.ours(p, options=EARLY), made.leaves)
    assert_close(loss, want, 1e-6)
    for leaf in want_grads:
        assert_close(grads[leaf], want_grads[leaf], 1e-6, leaf)


def exponentials_of(pair, dtype, each):
    """Features in ``dtype``, and what waits for backward. Made here: the interpreter gets bfloat16 products wrong."""
    half = Pair(**(vars(pair) | {"a": pair.a.to(dtype), "b": pair.b.to(dtype)}))
    x = pair.scale * half.a.float() @ half.b.float().T
    counts, column = each != 0, pair.row_key.clamp(min=0)
    e = (x - x.gather(1, column[:, None])).exp()
    total = e.sum(1)
    entry = torch.where(counts, 1.0 - total, 0.0)
    e[~counts] = 0.0
    e.scatter_(1, column[:, None], entry[:, None])
    column = torch.where(counts, column, -1).int()
    memory = torch.full((len(e), kernels.row_width(e.shape[1], dtype)), torch.nan, dtype=dtype)
    memory[:, : e.shape[1]] = e
    return half, kernels.Exponentials(e=memory, factor=each / total, entry=entry, column=column)


def dense_gradients(pair, each, k):
    """Of a and b, in their type."""
    leaves = [pair.a.detach().requires_grad_(), pair.b.detach().requires_grad_()]
    logits = pair.scale.item() * leaves[0] @ leaves[1].T
    logits = logits.float() if pair.a.dtype != torch.float64 else logits
    nats = torch.nn.functional.cross_entropy(logits, pair.row_key, reduction="none", ignore_index=-1)
    return torch.autograd.grad(k * (each.to(nats.dtype) * nats).sum(), leaves)


def as_float64(pair):
    return Pair(**(vars(pair) | {"a": pair.a.double(), "b": pair.b.double()}))


@pytest.mark.usefixtures("to_nearest")
def test_gradients_of_bfloat16_exponentials_are_rounded_once():
    """Their error is the same whatever comes in, and by our rule no worse than that of a dense loss."""
    pair, _ = softmax_pair(200, 300, 48, 3.0)
    each = torch.full((200,), 1 / 200)
    half, held = exponentials_of(pair, torch.bfloat16, each)
    errors = {}
    for k in (1.0, 3.0, 1.0 / 3.0, 1.0 + 2.0**-9):
        grads = kernels.gradients(held, half, torch.tensor(k), Needs(scale=True, bias=True), EARLY)
        exact = dense_gradients(as_float64(half), each, k)
        for got, theirs, want in zip((grads.a, grads.b), dense_gradients(half, each, k), exact, strict=True):
            assert got.dtype == torch.bfloat16
            assert_no_worse(got, theirs, want)
        errors[k] = relative_error(grads.a, exact[0]), relative_error(grads.b, exact[1])
        assert max(errors[k][0] / errors[1.0][0], errors[k][1] / errors[1.0][1]) < 1.05  # two roundings: 1.13 to 1.21
        assert_close(grads.scale, (exact[0] * half.a.double()).sum() / 3.0, 2e-3)


# The positives' share ----------------------------------------------------------------------------------------------


def flat(n=256, m=40_000, d=64):
    """Scores near 0: each row's gradient is its positive, and the rest drowns in rounding."""
    return softmax_pair(n, m, d, 1.0)[0], torch.full((n,), 1 / n)


def calibrated():
    """Rows that are nearly alike, and classes as frequent as predicted: the negatives' share cancels the positives'."""
    pair, _ = softmax_pair(512, 300, 64, 1.0)
    middle = torch.randn(1, 64, generator=torch.Generator().manual_seed(1))
    share = torch.log_softmax(-torch.arange(1, 301).float().log(), 0)
    pair.a.mul_(1.6).add_(middle)
    pair.b.mul_(0.1).add_(share[:, None] * middle / middle.square().sum())
    key = torch.multinomial(share.exp(), 512, replacement=True, generator=torch.Generator().manual_seed(2))
    return Pair(**(vars(pair) | {"row_key": key})), torch.full((512,), 1 / 512)


def repeated():
    """Few classes, one of them in most rows: more than a block of them."""
    pair, each = flat(n=200, m=3000)
    key = torch.where(torch.arange(200) % 5 < 3, 7, pair.row_key % 30)
    return Pair(**(vars(pair) | {"row_key": key})), each


def ignored():
    """Rows without a positive, and classes of different weight."""
    pair, each = flat(m=3000)
    key, each = pair.row_key.clone(), each * torch.linspace(0.5, 2.0, 256)
    key[::3], each[::3] = -1, 0.0
    return Pair(**(vars(pair) | {"row_key": key})), each


@pytest.mark.usefixtures("to_nearest")
@pytest.mark.parametrize("k", [1.0, 3.0])
@pytest.mark.parametrize("make", [flat, calibrated, repeated, ignored])
def test_the_positives_share_is_as_exact_as_that_of_a_dense_loss(make, k):
    pair, each = make()
    half, held = exponentials_of(pair, torch.bfloat16, each)
    wanted = Needs(scale=True, bias=len(pair.b) < 10_000)  # slow in the interpreter
    grads = kernels.gradients(held, half, torch.tensor(k), wanted, EARLY)
    exact, dense = dense_gradients(as_float64(half), each, k), dense_gradients(half, each, k)
    assert_no_worse(grads.a, dense[0], exact[0], "rows")
    assert_no_worse(grads.b, dense[1], exact[1], "columns")
    dots = (exact[0] * half.a.double()).sum(1) / pair.scale
    assert abs(grads.scale - dots.sum()) <= 1e-4 * dots.abs().sum()
    if wanted.bias:
        g = torch.softmax(pair.scale.double() * half.a.double() @ half.b.double().T, 1)
        g.scatter_add_(1, pair.row_key.clamp(min=0)[:, None], torch.full((len(g), 1), -1.0).double())
        assert_close(grads.bias, (k * each[:, None] * g).sum(0), 5e-4)


@pytest.mark.usefixtures("to_nearest")
def test_without_the_correction_it_is_not(monkeypatch):
    pair, each = flat()
    half, held = exponentials_of(pair, torch.bfloat16, each)
    exact, dense = dense_gradients(as_float64(half), each, 1.0), dense_gradients(half, each, 1.0)
    monkeypatch.setattr(kernels.Exponentials, "rounded", False)
    grads = kernels.gradients(held, half, torch.ones(()), Needs(), EARLY)
    assert relative_error(grads.b, exact[1]) > 2.5 * relative_error(dense[1], exact[1])
    assert relative_error(grads.a, exact[0]) > 1.3 * relative_error(dense[0], exact[0])


def test_a_gradient_that_waits_in_float32_has_the_whole_share(monkeypatch, several_blocks):
    """All kernels, in float16: what is left is the rounding of E among the negatives."""
    monkeypatch.setattr(direct, "why_not", lambda *_: None)
    made = flat(n=200, m=400, d=24)[0]
    pair = Pair(**(vars(made) | {"a": made.a.half(), "b": made.b.half()}))
    pair.row_key[:50] = 3
    _, grads = kernels.direct(pair, kernels.RowWeights(each=torch.ones(200)), ALL, SOFTMAX, EARLY)
    exact = dense_gradients(as_float64(pair), torch.ones(200), 1.0)
    monkeypatch.setattr(kernels.Exponentials, "rounded", False)
    _, plain = kernels.direct(pair, kernels.RowWeights(each=torch.ones(200)), ALL, SOFTMAX, EARLY)
    for got, before, want in zip((grads.a, grads.b), (plain.a, plain.b), exact, strict=True):
        assert got.dtype == torch.float32
        assert relative_error(got, want) < 3e-5 < 1e-4 < relative_error(before, want)
    assert_close(grads.scale, (exact[0] * pair.a.double()).sum() / pair.scale, 1e-4)


@pytest.mark.parametrize("most", [1, 63, 64, 65, 127, 200, 300])
def test_a_column_may_have_any_number_of_rows(most):
    """Those of a long run are added up in several parts; a row without a positive has none."""
    generator = torch.Generator().manual_seed(most)
    n, d, columns = 330, 40, 50
    a, scaled = torch.randn(n, d, generator=generator), torch.randn(n, d, generator=generator).half()
    entry, factor = torch.randn(n, generator=generator), torch.rand(n, generator=generator)
    column = torch.randint(0, columns, (n,), generator=generator, dtype=torch.int32)
    column[torch.randperm(n, generator=generator)[:most]] = 7
    column[::30] = -1
    held = kernels.Exponentials(e=a[:, :1], factor=factor, entry=entry, column=column)
    work = object.__new__(direct.Products)
    pair = Pair(a=a.half(), b=a.half(), scale=torch.tensor(1.5))
    work.call, work.d = launch.Call.of(pair, SOFTMAX, EARLY), d
    grad = torch.zeros(columns, d)
    work._positives(held, pair.a, scaled, grad)
    exact = 1.5 * (factor * entry).double()[:, None] * pair.a.double()
    each = exact - entry.half().double()[:, None] * scaled.double()
    want = torch.zeros(columns, d).double().index_add_(0, column.clamp(min=0), each * (column >= 0)[:, None])
    assert_close(grad, want, 1e-6)


@pytest.mark.usefixtures("to_nearest")
@pytest.mark.parametrize("negatives", [0.0, 1e-4, 1e-3, 4e-3, 1e-2, 1.0])
def test_two_roundings_leave_little_more_than_one(negatives):
    """Whatever the negatives' share is: of the rounding that comes before, what can be told from it is taken out."""
    generator = torch.Generator().manual_seed(0)
    a, other = (torch.randn(128, 200, generator=generator) for _ in range(2))
    a, entry = a.bfloat16(), -torch.rand(128, generator=generator) - 1.0
    factor, k = 1.0 / -entry, torch.tensor(3.0)
    scaled = (k * factor[:, None] * a).bfloat16()
    share = negatives * other
    grad = (share + entry.bfloat16()[:, None].float() * scaled.float()).bfloat16()
    column = torch.arange(128, dtype=torch.int32)
    held = kernels.Exponentials(e=a[:, :1], factor=k * factor, entry=entry, column=column)
    work = object.__new__(direct.Products)
    work.call, work.d = launch.Call.of(Pair(a=a, b=a, scale=torch.ones(())), SOFTMAX, EARLY), 200
    work._positives(held, a, scaled, grad)
    want = share.double() - 3.0 * a.double()
    assert relative_error(grad, want) <= 1.45 * relative_error(want.bfloat16(), want)


def test_nan_in_one_row_reaches_its_column_only_through_it():
    """A class that has no positive is not touched, and a NaN is not lost in what is estimated."""
    pair, each = flat(n=20, m=60)
    pair.a[3] = torch.nan
    half, held = exponentials_of(pair, torch.bfloat16, each)
    grads = kernels.gradients(held, half, torch.ones(()), Needs(), EARLY)
    assert grads.a[3].isnan().all()
    assert grads.b[pair.row_key[3]].isnan().all()
    assert not grads.a[4:].isnan().any()


def softmax_pair(n, m, d, scale, seed=0):
    generator = torch.Generator().manual_seed(seed)
    a, b = (torch.randn(rows, d, generator=generator) / d**0.5 for rows in (n, m))
    key = torch.randint(0, m, (n,), generator=generator)
    return Pair(a=a, b=b, scale=torch.tensor(scale), row_key=key), SOFTMAX


def both(pair, spec, weights, needs):
    """From the kernels, and in float64."""
    got = kernels.direct(pair, weights, needs, spec, EARLY)
    wide = {
        name: value.double()
        for name, value in vars(pair).items()
        if torch.is_tensor(value) and value.is_floating_point()
    }
    exact = Pair(**(vars(pair) | wide))
    square = None if weights.square is None else weights.square.double()
    want = kernels.direct(
        exact, kernels.RowWeights(each=weights.each.double(), square=square), needs, spec, tw.TileOptions()
    )
    return got, want


@pytest.mark.usefixtures("several_blocks")
@pytest.mark.parametrize("scale", [400.0, 4000.0])
def test_rows_whose_positive_is_far_below_the_rest(scale, monkeypatch):
    """Losses of hundreds of nats: the exponentials overflow, cast doubt, and are done again with each row's maximum."""
    pair, spec = softmax_pair(150, 90, 16, scale)
    pair.a[70:] *= 1e-3  # rows of the second block are harmless: doubt does not last
    doubts = []

    class Spied(direct.Softmax):
        def _exponentials(self, e, row_part, i, scaled):
            assert self.doubt.item() == 0
            result = super()._exponentials(e, row_part, i, scaled)
            doubts.append(self.call.by_row["shift"][i].clone())
            return result

    monkeypatch.setattr(direct, "Softmax", Spied)
    weights = kernels.RowWeights(each=torch.full((150,), 1 / 150))
    (loss, grads), (want, want_grads) = both(pair, spec, weights, ALL)
    assert want.item() > 60.0
    assert len(doubts) == 2
    scores = (pair.scale * pair.a @ pair.b.T) * 1.4426950408889634
    assert_close(doubts[0], scores[:128].amax(1), 1e-5)
    assert_close(doubts[1], scores[128:].gather(1, pair.row_key[128:, None]).squeeze(1), 1e-5)
    assert_close(loss, want, 1e-5)
    for field in ("a", "b", "scale"):
        assert_close(getattr(grads, field), getattr(want_grads, field), 2e-4, field)  # scores of 1000 have 4 digits


def test_rows_that_do_not_count():
    """Weight 0 and no positive: no share in anything, whatever their scores are."""
    pair, spec = softmax_pair(100, 90, 16, 4.0)
    pair.a[::3] *= 1e4
    key = pair.row_key.clone()
    key[::3] = -1
    each = torch.full((100,), 0.02)
    each[::3] = 0.0
    each[1] = 0.0  # of class weight 0
    pair = Pair(**(vars(pair) | {"row_key": key}))
    (loss, grads), (want, want_grads) = both(pair, spec, kernels.RowWeights(each=each), ALL)
    assert_close(loss, want, 1e-6)
    assert not grads.a[::3].any()
    assert not grads.a[1].any()
    for field in ("a", "b", "scale"):
        assert_close(getattr(grads, field), getattr(want_grads, field), 2e-6, field)


@pytest.mark.parametrize("softcap", [0.0, 5.0])
def test_a_class_that_is_ruled_out(softcap):
    """A bias of -inf: no share in any row; as a target, an infinite loss, as in the dense path. A cap makes it -5."""
    pair, spec = softmax_pair(70, 90, 8, 3.0)
    spec = dataclasses.replace(spec, softcap=softcap)
    bias = torch.zeros(90)
    bias[pair.row_key[0]] = -torch.inf
    for target in (pair.row_key, (pair.row_key + 1) % 90):
        masked = Pair(**(vars(pair) | {"bias": bias, "row_key": target}))
        (loss, grads), (want, want_grads) = both(
            masked, spec, kernels.RowWeights(each=torch.ones(70)), Needs(bias=True)
        )
        assert loss.isinf() == want.isinf()
        assert not (softcap and loss.isinf())
        assert loss.isinf() or abs(loss - want) < 1e-4
        for field in ("a", "b", "bias"):
            assert_close(getattr(grads, field), getattr(want_grads, field), 2e-6, field)


def test_a_target_that_no_column_has_is_not_a_number():
    pair, spec = softmax_pair(20, 30, 8, 1.0)
    pair.row_key[3] = 30
    loss, grads = kernels.direct(pair, kernels.RowWeights(each=torch.ones(20)), ALL, spec, EARLY)
    assert loss.isnan()
    assert grads.b.isnan().any()


def test_a_z_loss_that_cancels_the_weight_of_a_row():
    pair, spec = softmax_pair(20, 30, 8, 1.0)
    lse = torch.logsumexp(pair.a @ pair.b.T, 1)
    each = torch.ones(20)
    weights = kernels.RowWeights(each=each, square=-0.5 / lse)  # w + 2 z lse is 0 but for rounding
    (loss, grads), (want, want_grads) = both(pair, spec, weights, ALL)
    assert_close(loss, want, 1e-5)
    for field in ("a", "b", "scale"):
        assert_close(getattr(grads, field), getattr(want_grads, field), 1e-5, field)
    alone = kernels.RowWeights(each=torch.zeros(20), square=torch.full((20,), 0.1))
    (loss, grads), (want, want_grads) = both(pair, spec, alone, ALL)
    assert_close(loss, want, 1e-5)
    assert_close(grads.a, want_grads.a, 1e-5)


@pytest.mark.parametrize("field", ["a", "b", "scale", "bias"])
@pytest.mark.parametrize("softplus", [False, True])
def test_only_what_is_needed(field, softplus):
    pair, spec = softmax_pair(70, 70, 8, 3.0)
    pair = Pair(**(vars(pair) | {"bias": torch.linspace(-1, 1, 70)}))
    if softplus:
        spec = PairSpec(softplus=True, positive="one")
    needs = Needs(**(dict.fromkeys(("a", "b", "scale", "bias"), False) | {field: True}))
    (_, grads), (_, want) = both(pair, spec, kernels.RowWeights(each=torch.full((70,), 0.1)), needs)
    assert [name for name in ("a", "b", "scale", "bias") if getattr(grads, name) is not None] == [field]
    assert_close(getattr(grads, field), getattr(want, field), 2e-6)


@pytest.mark.parametrize("columns", [64, 128, 256])
@pytest.mark.parametrize("scale", [0.0, 1.0, 300.0])
def test_sigmoid_of_small_and_large_scores(scale, columns, monkeypatch):
    """Scores near 0 make products of 2**columns; above 69 nats they cast doubt, and the loss is taken anew."""
    monkeypatch.setattr(sizes, "INTERPRETED", Sizes(64, columns, 64, 1, 1, 1, 2))
    ran = []

    class Spied(direct.Sigmoid):
        def loss_and_grads(self):
            result = super().loss_and_grads()
            ran.append(self.doubt.item())
            return result

    monkeypatch.setattr(direct, "Sigmoid", Spied)
    pair, _ = softmax_pair(80, 300, 8, scale)
    pair = Pair(a=pair.a, b=pair.b, scale=pair.scale, bias=torch.linspace(-0.2, 0.2, 300))
    spec, needs = PairSpec(softplus=True, positive="one"), Needs(a=True, b=True, scale=True, bias=True)
    weights = kernels.RowWeights(each=torch.full((80,), 1 / 80))
    (loss, grads), (want, want_grads) = both(pair, spec, weights, needs)
    assert ran == [int(scale == 300.0)]
    assert_close(loss, want, 1e-6)
    for field in ("a", "b", "scale", "bias"):
        if scale or field == "scale":
            assert_close(getattr(grads, field), getattr(want_grads, field), 5e-6, field)


def test_the_positive_is_subtracted_before_rounding():
    """Of a row that is sure of its answer the gradient is what float32 makes of 1 - p, not a rounding of 1."""
    pair, spec = softmax_pair(64, 64, 32, 1.0)
    pair = Pair(a=pair.a, b=pair.a.clone(), scale=torch.tensor(40.0))
    (loss, grads), (want, want_grads) = both(pair, spec, kernels.RowWeights(each=torch.ones(64)), ALL)
    assert want.item() < 1e-2
    assert_close(loss, want, 1e-3)
    assert relative_error(grads.a, want_grads.a) < 1e-3


@pytest.mark.parametrize("k", [1.0, 0.37])
def test_multiply_in_place(k):
    values, other = torch.randn(70, 90), torch.empty(70, 90, dtype=torch.float16)
    want = values * k
    direct.multiply(values, torch.tensor(k), other)
    assert torch.equal(other, want.half())
    direct.multiply(values, torch.tensor(k), values)
    assert torch.equal(values, want)


@pytest.mark.parametrize("mib", [1, 64, 256, 2100])
@pytest.mark.parametrize(
    "n, m, d", [(8192, 128_256, 4096), (65_536, 65_536, 512), (100, 1_000_000, 64), (5000, 5000, 8192)]
)
def test_a_call_allocates_what_it_says(n, m, d, mib):
    work = object.__new__(direct.Softmax)
    options = tw.TileOptions(workspace_mib=mib)
    pair = Pair(
        a=torch.empty(n, d, dtype=torch.bfloat16, device="meta"), b=torch.empty(m, d, device="meta"), scale=None
    )
    for size in (sizes.TABLE[9, 2][1], sizes.WIDE_TABLE[9, 2][1]):
        work.__dict__ |= {
            "call": type("Call", (), {"options": options}),
            "pair": pair,
            "sizes": size,
            "n": n,
            "m": m,
            "d": d,
        }
        rows = work._blocks()
        scratch = rows * (m * 2 + 4 * -(-m // size.cols) + 2 * d)
        assert scratch <= mib * 2**20 or rows == size.rows
        assert rows < n + size.rows
    if mib == 2100 and n == 8192:
        assert rows >= n  # one block: no float32 accumulator


@pytest.mark.parametrize("where", ["row", "column", "bias"])
def test_an_infinite_score_is_seen_in_the_loss(where):
    """A shift of +inf stands for a row that does not count; a score of +inf must not be taken for that."""
    pair, spec = softmax_pair(20, 128, 8, 1.0)
    pair = Pair(**(vars(pair) | {"bias": torch.zeros(128)}))
    {"row": pair.a[3], "column": pair.b[7], "bias": pair.bias}[where][0] = torch.inf
    weights = kernels.RowWeights(each=torch.full((20,), 0.05))
    loss, _ = kernels.direct(pair, weights, ALL, spec, EARLY)
    assert not loss.isfinite()


def test_sigmoid_of_scores_whose_product_is_out_of_range():
    """(1 + t) (1 + t') is infinite, times 0 it is no number, and the loss is still a finite one."""
    a, b = torch.ones(2, 1, requires_grad=True), torch.tensor([[-0.84], [0.30]], requires_grad=True)
    loss = tw.siglip_loss(a, b, 100.0, 0.0, options=EARLY)
    want = tw.siglip_loss(a.double(), b.double(), 100.0, 0.0, options=tw.TileOptions(backend="torch"))
    assert_close(loss, want, 1e-6)
    got, exact = (torch.autograd.grad(value, (a, b)) for value in (loss, want))
    for one, other in zip(got, exact, strict=True):
        assert_close(one, other, 1e-6)
