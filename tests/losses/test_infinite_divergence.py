"""Divergences where models exclude classes with a bias of -inf: as dense, wherever tiles, blocks and ranks end."""

import itertools

import pytest
import torch
from tests.compare import assert_close
from tests.kernels.marks import INTERPRETED
from tests.oracles import distillation_dense
from tests.ring.virtual import run_virtual

import tilewise as tw

pytestmark = pytest.mark.usefixtures("small_tiles")
N, D, E, V = 6, 8, 5, 200  # tiles of 80 columns, or of 64 in Triton's interpreter
BETAS = (0.0, 1e-12, 1e-3, 0.3, 1.0 - 1e-12, 1.0)
COLUMNS = {
    "a tile of 80": slice(80),
    "a tile of 64": slice(64),
    "tiles of 64": slice(64, 192),
    "the last columns": slice(150, V),
    "inside a tile": slice(3, 50),
    "across tiles": slice(50, 140),
    "one": slice(7, 8),
    "every third": slice(0, V, 3),
    "all": slice(V),
}
SIDES = {"student": (True, False), "teacher": (False, True), "both": (True, True)}
TOLERANCES = {torch.float64: 1e-12, torch.float32: 2e-6, torch.float16: 2e-6}
MARKS = [mark for mark in INTERPRETED if mark.name != "usefixtures"]
GRADIENT_TOLERANCES = {torch.float64: 1e-11, torch.float32: 2e-5, torch.float16: 2e-3}
PLACES = [
    pytest.param(("torch", torch.float64), id="torch-float64"),
    pytest.param(("torch", torch.float32), id="torch-float32"),
    pytest.param(("triton", torch.float32), id="triton-float32", marks=MARKS),
    pytest.param(("triton", torch.float16), id="triton-float16", marks=MARKS),
]


@pytest.fixture(params=PLACES)
def place(request):
    """Options with a backend, and a type."""
    backend, dtype = request.param
    if backend == "triton":
        for name in ("quick", "nan_filled_empty"):
            request.getfixturevalue(name)
    return tw.TileOptions(backend=backend, precision="highest"), dtype


def models(dtype):
    random = torch.Generator().manual_seed(0)
    sizes = (N, D), (V, D), (N, E), (V, E)
    hidden, head, *teacher = (torch.randn(*size, generator=random, dtype=torch.float64).to(dtype) for size in sizes)
    return [hidden.requires_grad_(), head.requires_grad_()], teacher


def biases(columns, sides, dtype, low=-torch.inf):
    """Biases of student and teacher, ``low`` in ``columns`` where the side is excluded."""
    return [torch.zeros(V, dtype=dtype).index_fill(0, torch.arange(V)[columns], low if side else 0.0) for side in sides]


def dense(student, teacher, student_bias, teacher_bias, beta):
    """The divergences of all tokens in float64, and leaves for their gradients."""
    leaves = [part.detach().double().requires_grad_() for part in student]
    logits = leaves[0] @ leaves[1].T + student_bias, teacher[0].double() @ teacher[1].double().T + teacher_bias
    return distillation_dense(*logits, beta), leaves


def check(found, want, tolerance):
    """Infinite and NaN in the same places; an error of a number is relative to it or, if it is small, to 1."""
    assert torch.equal(found.isposinf(), want.isposinf())
    assert torch.equal(found.isnan(), want.isnan())
    assert not want.isneginf().any()
    finite = want.isfinite()
    assert ((found - want)[finite].abs() <= tolerance * want[finite].abs().clamp(min=1.0)).all()


def call(student, teacher, student_bias, teacher_bias, beta, **how):
    kind = student[0].dtype if student[0].dtype == torch.float64 else torch.float32
    given = {"linear_bias": student_bias.to(kind), "teacher_bias": teacher_bias.to(kind)}
    return tw.linear_distillation_stats(*student, *teacher, entropy=False, beta=beta, **given, **how).divergence


@pytest.mark.parametrize("side", SIDES)
@pytest.mark.parametrize("columns", COLUMNS)
def test_excluded_classes(columns, side, place):
    options, dtype = place
    student, teacher = models(dtype)
    pair = biases(COLUMNS[columns], SIDES[side], torch.float64)
    seen = set()
    for beta in BETAS:
        want, leaves = dense(student, teacher, *pair, beta)
        found = call(student, teacher, *pair, beta, options=options)
        check(found, want, TOLERANCES[dtype])
        seen |= set(zip(want.isposinf().tolist(), want.isnan().tolist(), strict=True))
        grads, exact = torch.autograd.grad(found.sum(), student), torch.autograd.grad(want.sum(), leaves)
        if all(grad.isfinite().all() for grad in exact):
            for grad, right in zip(grads, exact, strict=True):
                assert (grad - right).norm() <= GRADIENT_TOLERANCES[dtype] * right.norm().clamp(min=1.0)
    infinite, nan = side != "both" and columns != "all", columns == "all"
    assert seen == ({(False, True)} if nan else {(False, False), (True, False)} if infinite else {(False, False)})


@pytest.mark.parametrize("beta", [0.0, 1.0])
@pytest.mark.parametrize("columns", ["a tile of 80", "tiles of 64", "inside a tile", "one"])
def test_an_excluded_class_whose_probability_underflows(columns, beta, place):
    """The other model gives it a logit that is 300 lower: its probability is not 0."""
    options, dtype = place
    student, teacher = models(dtype)
    excluded = biases(COLUMNS[columns], (True, True), torch.float64)[0]
    low = biases(COLUMNS[columns], (True, True), torch.float64, low=-300.0)[0]
    pair = (excluded, low) if beta == 0.0 else (low, excluded)
    assert dense(student, teacher, *pair, beta)[0].isposinf().all()
    assert call(student, teacher, *pair, beta, options=options).isposinf().all()


@pytest.mark.parametrize("place", PLACES[:3], indirect=True)
@pytest.mark.parametrize("beta", [0.0, 0.3, 1.0])
@pytest.mark.parametrize("columns", ["a tile of 80", "tiles of 64", "every third"])
def test_other_rows_keep_their_divergence_and_gradient(columns, beta, place):
    """Some rows of the student overflow to -inf in some columns; one has NaN."""
    options, dtype = place
    student, teacher = models(dtype)
    with torch.no_grad():
        # Products of these features overflow in the columns of the first, and are 0 in the others.
        student[1][:, 0] = biases(COLUMNS[columns], (True, True), dtype, low=torch.finfo(dtype).max)[0]
        student[0][:, 0] = torch.tensor([-1e3, 0.0, 0.0, -1e3, 0.0, 0.0])
        student[0][4, 3] = torch.nan
    none = torch.zeros(V, dtype=torch.float64)
    logits = student[0].detach() @ student[1].detach().T
    assert logits.isneginf().any(1).tolist() == [True, False, False, True, False, False]
    leaves = [part.detach().clone().requires_grad_() for part in student]
    want = distillation_dense(leaves[0] @ leaves[1].T, teacher[0] @ teacher[1].T, beta)
    found = call(student, teacher, none, none, beta, options=options)
    check(found.double(), want.double(), 1e-5 if dtype == torch.float32 else 1e-10)
    grad, right = torch.autograd.grad(found.sum(), student[0])[0], torch.autograd.grad(want.sum(), leaves[0])[0]
    apart = [1, 2, 5]
    assert right[apart].isfinite().all()
    scale = right[apart].abs().amax(0)  # of the first feature it is huge
    assert_close(grad[apart] / scale, right[apart] / scale, 1e-4 if dtype == torch.float32 else 1e-10)
    assert right[apart, 1:].abs().min() > 0


@pytest.mark.parametrize("edges", [(0, 80, 80, V), (0, 7, 8, V)], ids=str)
@pytest.mark.parametrize("side", SIDES)
@pytest.mark.parametrize("columns", ["a tile of 80", "across tiles", "one", "all"])
def test_excluded_classes_over_a_vocabulary_group(columns, side, edges):
    student, teacher = models(torch.float64)
    pair = biases(COLUMNS[columns], SIDES[side], torch.float64)
    shards = [slice(*part) for part in itertools.pairwise(edges)]

    def work(group):
        own = shards[group.rank()]
        hidden, head = student[0].detach().requires_grad_(), student[1].detach()[own].requires_grad_()
        own_biases = [bias[own] for bias in pair]
        found = []
        for beta in BETAS:
            value = call([hidden, head], [teacher[0], teacher[1][own]], *own_biases, beta, group=group)
            found.append((value.detach(), torch.autograd.grad(value.sum(), hidden)[0]))
        return found

    for part in run_virtual(len(shards), work):
        for beta, (value, grad) in zip(BETAS, part, strict=True):
            want, leaves = dense(student, teacher, *pair, beta)
            check(value, want, 1e-12)
            right = torch.autograd.grad(want.sum(), leaves[0])[0]
            if right.isfinite().all():
                assert (grad - right).norm() <= 1e-11 * right.norm().clamp(min=1.0)
