"""Programs in Triton's interpreter: a later call of a kind writes none, and its result is that of a first call."""

import dataclasses

import pytest
import torch
from tests.kernels.interpreted import IN_THE_INTERPRETER
from tests.kernels.one_pass_pairs import ONE_PASS, SOFTMAX, take_several_blocks
from tests.kernels.pair_cases import make_case
from tests.kernels.pair_checks import all_needs, incoming_gradients

import tilewise as tw
from tilewise.kernels.spec import Needs, Pair, PairSpec, RowWeights
from tilewise.kernels.triton_impl import program as programming
from tilewise.kernels.triton_impl import scores, sizes
from tilewise.kernels.triton_impl.backend import TritonBackend
from tilewise.kernels.triton_impl.one_pass.strategy import loss_and_gradients
from tilewise.kernels.triton_impl.program import Loop, Program
from tilewise.kernels.triton_impl.sizes import Sizes
from tilewise.kernels.triton_impl.two_pass.backward import Backward
from tilewise.kernels.triton_impl.two_pass.forward import Forward
from tilewise.kernels.triton_impl.two_pass.strategy import forward
from tilewise.options import TileOptions

pytestmark = IN_THE_INTERPRETER
BACKEND, OPTIONS = TritonBackend(), TileOptions(backend="triton", precision="highest")
CLIP = PairSpec(row_lse=True, col_lse=True, positive="one")
CLASSES = PairSpec(row_lse=True, positive="one")
VIEWS = PairSpec(row_lse=True, positive="one", mask_self=True, symmetric=True)
LABELS = PairSpec(row_lse=True, positive="many", mask_self=True, symmetric=True)
PICKS = PairSpec(row_lse=True, row_picked=True, positive="one")  # and a factor of each row
IDS = PairSpec(row_lse=True, col_lse=True, positive="one")  # and pairs that never meet
SIGMOID = PairSpec(softplus=True, positive="one")  # and a bias that all columns share
NEEDS = Needs(a=True, b=True, scale=True)
STATISTICS = "row_lse", "col_lse", "row_pos", "row_softplus", "row_picked"


@pytest.fixture
def written(monkeypatch):
    """The programs that were written, in order."""
    seen, plain = [], Program.done
    monkeypatch.setattr(Program, "done", lambda self: seen.append(self) or plain(self))
    return seen


def pair_of(spec: PairSpec, seed: int, n: int = 70, d: int = 24) -> Pair:
    generator = torch.Generator().manual_seed(seed)
    a, b = (torch.randn(n, d, generator=generator) for _ in range(2))
    key = torch.randint(0, n, (n,), generator=generator) if spec is CLASSES else None
    if spec is PICKS:
        pick = torch.randint(0, n, (n, 3), generator=generator)
        more = {"row_key": pick[:, 1].clone(), "pick": pick, "row_scale": torch.rand(n, generator=generator) + 0.5}
        return Pair(a=a, b=b, scale=torch.tensor(0.1 + seed), **more)
    if spec is SIGMOID:
        return Pair(a=a, b=b, scale=torch.tensor(0.1 + seed), bias=torch.tensor(-0.5 * seed).expand(n))
    if spec is VIEWS:
        key = (torch.arange(n) + n // 2) % n
    if spec is LABELS or spec is IDS:
        ids = torch.randint(0, n // 5, (n,), generator=generator)
        names = ("row_key", "col_key") if spec is LABELS else ("row_skip", "col_skip")
        features = {"a": a, "b": a.detach() if spec is LABELS else b, "scale": torch.tensor(0.1 + seed)}
        return Pair(**features, **dict.fromkeys(names, ids))
    return Pair(a=a, b=a.detach() if spec.symmetric else b, scale=torch.tensor(0.1 + seed), row_key=key)


def everything(pair: Pair, spec: PairSpec, needs: Needs | None = None):
    """Statistics and gradients."""
    stats = BACKEND.forward(pair, spec, OPTIONS)
    grad = incoming_gradients(stats)
    grads = BACKEND.backward(pair, stats, grad, needs or all_needs(pair)._replace(bias=False), spec, OPTIONS)
    values = [getattr(stats, name) for name in STATISTICS] + [grads.a, grads.b, grads.scale]
    return [value for value in values if value is not None]


def equal(values, others):
    return all(torch.equal(one, other) for one, other in zip(values, others, strict=True))


def check_later_calls(call, written):
    """Calls 1 and 2 use the programs of call 0. Call 1 has the bits of a first call; call 2 does not change them."""
    call(0)
    before = len(written)
    assert before
    got = call(1)
    copies = [value.clone() for value in got]
    assert not equal(got, call(2))
    assert len(written) == before
    assert equal(got, copies)
    scores.forget_programs()
    assert equal(got, call(1))
    assert len(written) > before


@pytest.mark.parametrize(
    "spec",
    [CLIP, CLASSES, VIEWS, LABELS, IDS, PICKS, SIGMOID],
    ids=["clip", "classes", "views", "labels", "ids", "picks", "sigmoid"],
)
def test_a_later_call_writes_no_program(spec, written):
    check_later_calls(lambda seed: everything(pair_of(spec, seed), spec), written)


def test_a_later_call_with_a_guide_writes_no_program(written):
    def call(seed):
        pair, spec = make_case("guide_kl", torch.float32)
        stats, _ = forward(dataclasses.replace(pair, scale=pair.scale * (1 + seed)), spec, OPTIONS)
        return [value for value in vars(stats).values() if value is not None]

    check_later_calls(call, written)


def in_one_pass(seed: int, spec: PairSpec, needs: Needs, dtype: torch.dtype = torch.float32, bias: bool = False):
    """Loss and gradients. The weights and their common factor differ from seed to seed."""
    pair = pair_of(CLASSES if spec is SOFTMAX else SIGMOID, seed, n=132)
    pair = dataclasses.replace(pair, a=(0.1 * pair.a).to(dtype), b=pair.b.to(dtype))  # float16 holds the exponentials
    if bias:
        pair = dataclasses.replace(pair, bias=0.1 * torch.arange(132.0) * seed)
    each = None if seed == 2 else (torch.arange(132) % 3 + seed).float()
    square = torch.full((132,), 0.01 * seed) if spec is SOFTMAX else None
    loss, grads = loss_and_gradients(
        pair, RowWeights(share=0.5 / (seed + 1), each=each, square=square), needs, spec, ONE_PASS
    )
    return [loss, *(value for value in vars(grads).values() if value is not None)]


@pytest.mark.parametrize("blocks", ["one block", "several blocks"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float16], ids=["fp32", "fp16"])  # fp16: positives are corrected
@pytest.mark.parametrize("spec", [SOFTMAX, SIGMOID], ids=["softmax", "sigmoid"])
def test_a_later_call_of_one_pass_writes_no_program(spec, dtype, blocks, written, monkeypatch):
    if blocks == "several blocks":
        take_several_blocks(monkeypatch)
    one_side = (Needs(a=False), Needs(b=False)) if dtype == torch.float32 and blocks == "several blocks" else ()
    for needs in (Needs(scale=True, bias=spec is SIGMOID), *one_side):
        check_later_calls(lambda seed, needs=needs: in_one_pass(seed, spec, needs, dtype), written)


@pytest.mark.parametrize("needs", [Needs(bias=True), Needs(b=False, bias=True), Needs(False, False, False, True)])
@pytest.mark.parametrize("spec", [SOFTMAX, SIGMOID], ids=["softmax", "sigmoid"])
def test_a_later_call_with_a_bias_of_each_column_writes_no_program(spec, needs, written):
    """Torch adds up the gradient of the bias, between launches and after them."""
    check_later_calls(lambda seed: in_one_pass(seed, spec, needs, bias=True), written)


@pytest.mark.parametrize("loss", [tw.siglip_loss, tw.info_nce])
def test_two_forwards_and_their_backwards_in_the_other_order(loss):
    """Each has what it saved, although both run one program; a second backward computes it anew."""

    def forward(seed):
        pair = pair_of(CLIP, seed)
        leaves = pair.a.requires_grad_(), pair.b.requires_grad_(), pair.scale.requires_grad_()
        if loss is tw.siglip_loss:
            return loss(*leaves, -1.0, options=ONE_PASS), leaves
        return loss(leaves[0], leaves[1] * leaves[2], options=ONE_PASS), leaves

    def alone(seed):
        value, leaves = forward(seed)
        return torch.autograd.grad(3.0 * value, leaves)

    want = [alone(seed) for seed in (0, 1)]
    made = [forward(seed) for seed in (0, 1)]
    for seed in (1, 0):
        value, leaves = made[seed]
        for again in (True, False):
            got = torch.autograd.grad(3.0 * value, leaves, retain_graph=again)
            assert all(torch.equal(one, other) for one, other in zip(got, want[seed], strict=True))


def test_what_a_program_depends_on(written):
    """Another shape, need, option or tensor is another program."""
    pair = pair_of(CLIP, 0)
    calls = [
        lambda: everything(pair, CLIP),
        lambda: everything(pair_of(CLIP, 0, n=71), CLIP),
        lambda: everything(pair, CLIP, Needs(a=True, b=False)),
        lambda: everything(dataclasses.replace(pair, row_key=torch.arange(70)), CLIP),
        lambda: BACKEND.forward(pair, CLIP, dataclasses.replace(OPTIONS, precision="high")),
        lambda: BACKEND.forward(pair, dataclasses.replace(CLIP, softcap=3.0), OPTIONS),
    ]
    for call in calls:
        before = len(written)
        call()
        assert len(written) > before
        before = len(written)
        call()
        assert len(written) == before


@pytest.mark.parametrize("change", [{"row_start": 70}, {"col_start": 35}, {"row_start": 2, "col_start": 5}], ids=str)
@pytest.mark.parametrize("name", ["clip", "views"])
def test_the_place_of_a_block_is_a_number(name, change, written):
    """A ring meets blocks before, on and behind the diagonal with one program."""
    spec = {"clip": CLIP, "views": dataclasses.replace(VIEWS, symmetric=False)}[name]
    pair = dataclasses.replace(pair_of(CLIP, 0), row_key=None if name == "clip" else torch.arange(70).roll(35))
    everything(pair, spec)
    before, moved = len(written), dataclasses.replace(pair, **change)
    got = everything(moved, spec)
    assert len(written) == before
    scores.forget_programs()
    assert equal(got, everything(moved, spec))
    assert not equal(got, everything(pair, spec))


@pytest.mark.parametrize("name", ["softcap", "beta"])
def test_numbers_of_the_loss_are_no_part_of_a_program(name, written):
    case = {"softcap": "cross_entropy_smoothed_and_capped", "beta": "guide_jsd_without_norms"}[name]
    pair, spec = make_case(case, torch.float32)
    assert getattr(spec, name)
    found = []
    for number in (getattr(spec, name), 0.7 * getattr(spec, name)):
        found.append(forward(pair, dataclasses.replace(spec, **{name: number}), OPTIONS)[0].row_lse)
        before = len(written)
    assert len(written) == before == 1
    scores.forget_programs()
    again, _ = forward(pair, dataclasses.replace(spec, **{name: number}), OPTIONS)
    assert torch.equal(again.row_lse, found[1])
    assert torch.equal(found[0], found[1]) == (name == "beta")


@pytest.mark.parametrize("how", ["unaligned", "strided", "the same features twice", "overlapping"])
def test_features_of_any_layout(how, written):
    """They run the program of ordinary features: addresses, and what shares memory, are no part of it."""
    pair = pair_of(CLIP, 0)
    if how == "unaligned":
        pair = dataclasses.replace(pair, a=torch.cat([torch.zeros(1), pair.a.flatten()])[1:].view(70, 24))
    if how == "strided":
        pair = dataclasses.replace(pair, a=pair.a.T.contiguous().T)
    if how == "the same features twice":
        pair = dataclasses.replace(pair, b=pair.a)
    if how == "overlapping":
        whole = torch.randn(72, 24)
        pair = dataclasses.replace(pair, a=whole[:70], b=whole[2:])
    apart = {name: getattr(pair, name).clone(memory_format=torch.contiguous_format) for name in "ab"}
    want = everything(dataclasses.replace(pair, **apart), CLIP, NEEDS)
    assert equal(everything(pair, CLIP, NEEDS), want)
    assert len(written) == 2


def test_only_so_many_programs_are_kept(monkeypatch):
    monkeypatch.setattr(scores, "MOST_PROGRAMS", 4)
    for n in range(64, 71):
        BACKEND.forward(pair_of(CLIP, 0, n=n), CLIP, OPTIONS)
        assert 1 <= len(scores._programs) <= 4


def test_a_program_that_another_thread_drops_still_runs(monkeypatch):
    """One thread looks for its program while another makes room."""

    class Shared(dict):
        def get(self, kind):
            found = super().get(kind)
            self.clear()
            return found

    pair = pair_of(CLIP, 0)
    want = everything(pair, CLIP)
    monkeypatch.setattr(scores, "_programs", Shared(scores._programs))
    assert equal(everything(pair, CLIP), want)


@pytest.mark.parametrize("spec", [CLIP, VIEWS], ids=["clip", "views"])
def test_loops_have_the_bits_of_their_steps_written_out(spec, written, monkeypatch):
    """Macro-tiles of one small tile, so that rows and columns are loops, and for symmetric scores a triangle."""
    monkeypatch.setattr(sizes, "INTERPRETED", Sizes(16, 16, 32, 1, 1, 1, 2))
    for work in (Forward, Backward):
        monkeypatch.setattr(work, "_macro", lambda self: (16, 16))
    pair = pair_of(spec, 1, n=108 if spec is VIEWS else 62)
    pair = dataclasses.replace(pair, a=pair.a.half(), b=pair.b.half())
    needs, found = NEEDS._replace(b=not spec.symmetric), []
    for least in (2, 1000):
        scores.forget_programs()
        monkeypatch.setattr(programming, "LEAST_TURNS", least)
        found.append(everything(pair, spec, needs))
    assert equal(*found)
    loops = [sum(isinstance(step, Loop) for step in program.steps) for program in written]
    assert min(loops[:2]) >= 2
    assert loops[2:] == [0, 0]
