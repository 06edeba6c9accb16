"""The one-pass kernels in Triton's interpreter, on the CPU."""

import dataclasses
from types import SimpleNamespace

import pytest
import torch
from tests.compare import assert_close, relative_error
from tests.losses.loss_cases import converted, problem, solve

pytest.importorskip("triton", reason="triton is not installed on this platform")

from tests.kernels.interpreted import IN_THE_INTERPRETER
from tests.kernels.one_pass_pairs import ALL, ONE_PASS, TWO_PASS, softmax_pair, take_several_blocks

import tilewise as tw
from tilewise.kernels.scalar_loss import gradients_of
from tilewise.kernels.spec import Grads, Needs, Pair, PairSpec, RowWeights
from tilewise.kernels.torch_impl.one_pass import TorchOnePass
from tilewise.kernels.triton_impl import sizes
from tilewise.kernels.triton_impl.backend import TritonBackend
from tilewise.kernels.triton_impl.one_pass import strategy
from tilewise.kernels.triton_impl.one_pass.softmax import Softmax
from tilewise.kernels.triton_impl.one_pass.strategy import loss_and_gradients, times
from tilewise.kernels.triton_impl.sizes import Sizes

pytestmark = IN_THE_INTERPRETER
SERVED = [
    *("siglip", "info_nce", "info_nce_ids_one_way", "cross_entropy", "cross_entropy_bias", "cross_entropy_weighted"),
    *("cross_entropy_softcap", "cross_entropy_z_loss"),
]


@pytest.fixture
def several_blocks(monkeypatch):
    """So little memory that a hundred rows need several blocks, and their gradients several pieces."""
    take_several_blocks(monkeypatch)


def check(name, **size):
    made = problem(name, torch.float32, **size)
    loss, grads = solve(made.ours, made.leaves, options=ONE_PASS)
    want, want_grads = solve(made.dense, converted(made.leaves, torch.float64))
    assert_close(loss, want, 1e-6)
    for leaf in want_grads:
        assert_close(grads[leaf], want_grads[leaf], 2e-6, leaf)


@pytest.mark.parametrize("name", SERVED)
def test_equals_the_oracle(name, monkeypatch):
    monkeypatch.setattr(TritonBackend, "backward", None)
    check(name)


@pytest.mark.usefixtures("several_blocks")
@pytest.mark.parametrize("name", ["siglip", "info_nce_ids_one_way", "cross_entropy_bias"])
def test_several_blocks(name):
    check(name, n=200)


def test_float16_sigmoid():
    made = problem("siglip", torch.float16)
    loss, grads = solve(made.ours, made.leaves, options=ONE_PASS)
    want, want_grads = solve(made.dense, converted(made.leaves, torch.float64))
    assert_close(loss, want, 1e-6)
    for leaf in want_grads:
        assert_close(grads[leaf], want_grads[leaf], 5e-4, leaf)


def test_float16_sigmoid_of_many_rows_that_are_nearly_learned():
    """The entries of G times 1 / 65,536 and the scale are below the smallest numbers of float16."""
    a = torch.nn.functional.normalize(torch.randn(80, 128, generator=torch.Generator().manual_seed(0)), dim=1)
    pair = Pair(a=a.half(), b=a.half(), scale=torch.tensor(20.0), bias=torch.tensor(-10.0).expand(80))
    spec, needs = PairSpec(softplus=True, positive="one"), Needs(a=True, b=True, scale=True, bias=True)
    for _ in range(2):  # the second one writes no program
        (loss, grads), (want, want_grads) = both(pair, spec, RowWeights(each=torch.full((80,), 2.0**-16)), needs)
        assert_close(loss, want, 1e-5)
        for field in ("a", "b", "scale"):
            assert_close(getattr(grads, field), getattr(want_grads, field), 5e-4, field)
        assert_close(grads.bias.sum(), want_grads.bias.sum(), 1e-5)


def test_float16_softmax_is_left_to_two_passes():
    made = problem("cross_entropy", torch.float16)
    _, grads = solve(made.ours, made.leaves, options=ONE_PASS)
    _, want = solve(made.ours, made.leaves, options=TWO_PASS)
    for leaf in want:
        assert_close(grads[leaf], want[leaf], 1e-3, leaf)


def both(pair, spec, weights, needs):
    """From the kernels, and in float64."""
    got = loss_and_gradients(pair, weights, needs, spec, ONE_PASS)
    wide = {
        name: value.double()
        for name, value in vars(pair).items()
        if torch.is_tensor(value) and value.is_floating_point()
    }
    exact = Pair(**(vars(pair) | wide))
    square = None if weights.square is None else weights.square.double()
    wide_weights, rows = RowWeights(each=weights.each.double(), square=square), pair.a.shape[0]
    loss, saved = TorchOnePass().forward(exact, wide_weights, needs, spec, tw.TileOptions(), rows)
    return got, (loss, gradients_of(saved, needs, rows))


@pytest.mark.usefixtures("several_blocks")
@pytest.mark.parametrize("scale", [400.0, 4000.0])
def test_rows_whose_positive_is_far_below_the_rest(scale, monkeypatch):
    """Losses of hundreds of nats: the exponentials overflow and are computed again with the maximum of each row."""
    pair, spec = softmax_pair(150, 90, 16, scale)
    pair.a[70:] *= 1e-3  # the second block needs no repair
    flags, shifts = [], []

    class Spied(Softmax):
        def _exponentials(self, e, i):
            self.scores.program.call(lambda flag: flags.append(flag.item()), self.needs_repair)
            result = super()._exponentials(e, i)
            self.scores.program.call(lambda shift: shifts.append(shift.clone()), self.scores.by_row["shift"][i])
            return result

    monkeypatch.setattr(strategy, "Softmax", Spied)
    weights = RowWeights(each=torch.full((150,), 1 / 150))
    (loss, grads), (want, want_grads) = both(pair, spec, weights, ALL)
    assert want.item() > 60.0
    assert flags == [0, 0], "the flag is cleared before each block"
    assert len(shifts) == 2
    scores = (pair.scale * pair.a @ pair.b.T) * 1.4426950408889634
    assert_close(shifts[0], scores[:128].amax(1), 1e-5)
    assert_close(shifts[1], scores[128:].gather(1, pair.row_key[128:, None]).squeeze(1), 1e-5)
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
    (loss, grads), (want, want_grads) = both(pair, spec, RowWeights(each=each), ALL)
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
        (loss, grads), (want, want_grads) = both(masked, spec, RowWeights(each=torch.ones(70)), Needs(bias=True))
        assert loss.isinf() == want.isinf()
        assert not (softcap and loss.isinf())
        assert loss.isinf() or abs(loss - want) < 1e-4
        for field in ("a", "b", "bias"):
            assert_close(getattr(grads, field), getattr(want_grads, field), 2e-6, field)


def test_a_target_that_no_column_has_is_not_a_number():
    pair, spec = softmax_pair(20, 30, 8, 1.0)
    pair.row_key[3] = 30
    loss, grads = loss_and_gradients(pair, RowWeights(each=torch.ones(20)), ALL, spec, ONE_PASS)
    assert loss.isnan()
    assert grads.b.isnan().any()


@pytest.mark.parametrize("options", [ONE_PASS, TWO_PASS], ids=["one_pass", "two_pass"])
def test_a_wrong_target_where_the_host_may_not_look(options, monkeypatch):
    """NaN as loss, and as gradient of the row and of all classes, in both strategies."""
    monkeypatch.setattr("tilewise._check.can_read", lambda values: False)
    hidden, classes = torch.randn(9, 8, requires_grad=True), torch.randn(40, 8, requires_grad=True)
    for wrong in (43, -5):
        target = torch.arange(9)
        target[2] = wrong
        loss = tw.linear_cross_entropy(hidden, classes, target, options=options)
        of_hidden, of_classes = torch.autograd.grad(loss, (hidden, classes))
        assert loss.isnan()
        assert of_hidden.isnan().any(1).tolist() == [row == 2 for row in range(9)]
        assert of_classes.isnan().all()


@pytest.mark.parametrize("options", [ONE_PASS, TWO_PASS], ids=["one_pass", "two_pass"])
@pytest.mark.parametrize(("score", "at"), [(torch.inf, 0), (torch.inf, 30), (-torch.inf, slice(None))])
def test_a_score_that_makes_the_dense_loss_nan(options, score, at):
    """Then so are its gradients, and ours."""
    hidden, classes = torch.randn(9, 8, requires_grad=True), torch.randn(40, 8, requires_grad=True)
    bias = torch.zeros(40)
    bias[at] = score
    leaves = hidden, classes, bias.requires_grad_()
    loss = tw.linear_cross_entropy(hidden, classes, torch.arange(9), linear_bias=bias, options=options)
    assert loss.isnan()
    assert all(grad.isnan().all() for grad in torch.autograd.grad(loss, leaves))


def test_a_z_loss_that_cancels_the_weight_of_a_row():
    pair, spec = softmax_pair(20, 30, 8, 1.0)
    lse = torch.logsumexp(pair.a @ pair.b.T, 1)
    each = torch.ones(20)
    weights = RowWeights(each=each, square=-0.5 / lse)  # w + 2 z lse is 0 but for rounding
    (loss, grads), (want, want_grads) = both(pair, spec, weights, ALL)
    assert_close(loss, want, 1e-5)
    for field in ("a", "b", "scale"):
        assert_close(getattr(grads, field), getattr(want_grads, field), 1e-5, field)
    alone = RowWeights(each=torch.zeros(20), square=torch.full((20,), 0.1))
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
    (_, grads), (_, want) = both(pair, spec, RowWeights(each=torch.full((70,), 0.1)), needs)
    assert [name for name in ("a", "b", "scale", "bias") if getattr(grads, name) is not None] == [field]
    assert_close(getattr(grads, field), getattr(want, field), 2e-6)


@pytest.mark.parametrize("columns", [64, 128, 256])
@pytest.mark.parametrize("scale", [0.0, 1.0, 300.0])
def test_sigmoid_of_small_and_large_scores(scale, columns, monkeypatch):
    """Scores near 0 make products of 2**columns. Above 69 nats the loss is computed again."""
    monkeypatch.setattr(sizes, "INTERPRETED", Sizes(64, columns, 64, 1, 1, 1, 2))
    ran = []

    class Spied(strategy.Sigmoid):
        def losses_and_grads(self):
            result = super().losses_and_grads()
            self.scores.program.call(lambda flag: ran.append(flag.item()), self.needs_repair)
            return result

    monkeypatch.setattr(strategy, "Sigmoid", Spied)
    pair, _ = softmax_pair(80, 300, 8, scale)
    pair = Pair(a=pair.a, b=pair.b, scale=pair.scale, bias=torch.linspace(-0.2, 0.2, 300))
    spec, needs = PairSpec(softplus=True, positive="one"), Needs(a=True, b=True, scale=True, bias=True)
    weights = RowWeights(each=torch.full((80,), 1 / 80))
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
    (loss, grads), (want, want_grads) = both(pair, spec, RowWeights(each=torch.ones(64)), ALL)
    assert want.item() < 1e-2
    assert_close(loss, want, 1e-3)
    assert relative_error(grads.a, want_grads.a) < 1e-3


@pytest.mark.parametrize("k", [1.0, 0.37])
def test_gradients_times_grad_output(k):
    grads, by = Grads(a=torch.randn(70, 90), b=torch.randn(50, 90), scale=torch.tensor(2.0)), torch.tensor(k)
    want = [grads.a * k, grads.b * k, grads.scale * k]
    for _ in range(2):  # the second one writes no program
        half = times(grads, by, torch.float16, True)
        assert torch.equal(half.a, want[0].half())
        assert torch.equal(half.b, want[1].half())
        grads = dataclasses.replace(grads, scale=torch.tensor(2.0))
        plain = times(grads, by, torch.float32, False)
        assert all(torch.equal(got, one) for got, one in zip((plain.a, plain.b, plain.scale), want, strict=True))
    for _ in range(2):
        copy = Grads(a=grads.a.clone(), b=grads.b.clone(), scale=grads.scale.clone())
        got = times(copy, by, torch.float32, True)
        assert got.a is copy.a
        assert got.b is copy.b
        assert all(torch.equal(got, one) for got, one in zip((copy.a, copy.b, copy.scale), want, strict=True))


@pytest.mark.parametrize("mib", [1, 64, 256, 2100])
@pytest.mark.parametrize(
    "n, m, d", [(8192, 128_256, 4096), (65_536, 65_536, 512), (100, 1_000_000, 64), (5000, 5000, 8192)]
)
def test_a_call_allocates_what_it_says(n, m, d, mib):
    work = object.__new__(Softmax)
    options = tw.TileOptions(workspace_mib=mib)
    pair = Pair(
        a=torch.empty(n, d, dtype=torch.bfloat16, device="meta"), b=torch.empty(m, d, device="meta"), scale=None
    )
    row = sizes.TABLE["sm_90", 2]
    for size in (row.gradient, row.gradient_wide):
        work.__dict__ |= {
            "scores": SimpleNamespace(options=options, shape=pair.shape),
            "sizes": size,
            "n": n,
        }
        rows = work._block_rows()
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
    weights = RowWeights(each=torch.full((20,), 0.05))
    loss, _ = loss_and_gradients(pair, weights, ALL, spec, ONE_PASS)
    assert not loss.isfinite()


def test_sigmoid_of_scores_whose_product_is_out_of_range():
    """(1 + t) (1 + t') is infinite, times 0 it is no number, and the loss is still a finite one."""
    a, b = torch.ones(2, 1, requires_grad=True), torch.tensor([[-0.84], [0.30]], requires_grad=True)
    loss = tw.siglip_loss(a, b, 100.0, 0.0, options=ONE_PASS)
    want = tw.siglip_loss(a.double(), b.double(), 100.0, 0.0, options=tw.TileOptions(backend="torch"))
    assert_close(loss, want, 1e-6)
    got, exact = (torch.autograd.grad(value, (a, b)) for value in (loss, want))
    for one, other in zip(got, exact, strict=True):
        assert_close(one, other, 1e-6)
