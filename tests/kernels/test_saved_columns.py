"""Gradients from exponentials that forward has saved, in Triton's interpreter."""

import dataclasses

import pytest
import torch
from tests.compare import assert_close, assert_no_worse
from tests.kernels.interpreted import INTERPRETED
from tests.kernels.pair_checks import incoming_gradients
from tests.kernels.saved_columns import BACKEND, NEEDS, OPTIONS, SPEC, g_of, pair_of, small  # noqa: F401 - a fixture

import tilewise as tw
from tilewise.kernels.spec import GradStats, Needs
from tilewise.kernels.triton_impl import program, scores, sizes
from tilewise.kernels.triton_impl.sizes import Sizes
from tilewise.kernels.triton_impl.two_pass import backward as gradients
from tilewise.kernels.triton_impl.two_pass import forward as statistics
from tilewise.kernels.triton_impl.two_pass import saved as saving
from tilewise.kernels.triton_impl.two_pass.saved import SavedColumns

pytestmark = INTERPRETED


@pytest.mark.parametrize("spread", [1.0, 3.0, 1000.0], ids=["plain", "peaked", "needs repair"])
@pytest.mark.parametrize("n, m, d, g_cols", [(48, 400, 32, 96), (24, 501, 64, 500), (130, 700, 40, 64)])
def test_gradients_with_and_without_are_the_same(n, m, d, g_cols, spread, monkeypatch):
    g_of(monkeypatch, g_cols)
    pair = pair_of(n, m, d, spread)
    stats, held = BACKEND.forward_saving(pair, SPEC, OPTIONS)
    assert held is not None
    assert bool(held.needs_repair > 0) == (spread > 500.0), "a shift that is too far off sets the flag"
    plain = BACKEND.forward(pair, SPEC, OPTIONS)
    assert_close(stats.row_lse, plain.row_lse, 1e-6, "lse")
    grad = incoming_gradients(plain)
    want = BACKEND.backward(pair, plain, grad, NEEDS, SPEC, OPTIONS)
    memory = held.memory
    assert (held.end == m) == (g_cols == 500), "the other columns are saved too if they fit"
    got = BACKEND.backward(pair, stats, grad, NEEDS, SPEC, OPTIONS, saved=held)
    assert got.b.data_ptr() == memory.data_ptr(), "the memory is the gradient"
    for name in ("a", "b"):  # exponents of about 90 have steps of 8e-6 in float32
        assert_close(getattr(got, name), getattr(want, name), 2e-5 if spread > 500.0 else 5e-6, name)
    terms = pair.a.norm() * want.a.norm() / pair.scale  # the scale's gradient is a sum of these, and may cancel
    assert abs(got.scale - want.scale) <= 2e-5 * terms


@pytest.mark.parametrize("away", [-1, 1], ids=["far below the shift", "far above it"])
def test_one_row_far_from_the_shift_sets_the_repair_flag(away):
    """The shift is estimated from positives. Far below it, the exponentials of a row underflow. Far above it, in a
    column that is no row's positive, they overflow, and forward repairs the sum. Both times nothing saved is used."""
    pair = pair_of(m=400, d=32)
    pair = dataclasses.replace(pair, bias=None)
    if away > 0:
        pair.a[3] = 80.0 * pair.b[7] / (pair.scale * pair.b[7].square().sum())
        pair.row_key[pair.row_key == 7] = 8
    else:
        pair.a[3] = 0.0
        pair.a[4] = 150.0 * pair.b[9] / (pair.scale * pair.b[9].square().sum())
        pair.row_key[4] = 9
    stats, held = BACKEND.forward_saving(pair, SPEC, OPTIONS)
    assert bool(held.needs_repair > 0)
    x = pair.scale.double() * pair.a.double() @ pair.b.double().T
    assert_close(stats.row_lse, x.logsumexp(1), 1e-6, "lse")
    grad = incoming_gradients(stats)
    g = grad.row_lse.double()[:, None] * x.softmax(1)
    valid = pair.row_key >= 0
    g[valid, pair.row_key[valid]] += grad.row_pos.double()[valid]
    got = BACKEND.backward(pair, stats, grad, NEEDS, SPEC, OPTIONS, saved=held)
    assert_close(got.a, pair.scale.double() * g @ pair.b.double(), 2e-5, "a")
    assert_close(got.b, pair.scale.double() * g.T @ pair.a.double(), 2e-5, "b")


def test_exponentials_of_a_shard_serve_the_sums_over_all_shards():
    """Over a vocabulary group: the log-sum-exp of backward is that of all ranks, whose columns may be far larger."""
    pair = pair_of(48, 700, 32)
    shards = []
    for first, last in ((0, 400), (400, 700)):
        part = dataclasses.replace(pair, b=pair.b[first:last], bias=pair.bias[first:last] + first / 80, col_start=first)
        shards.append((part, *BACKEND.forward_saving(part, SPEC, OPTIONS)))
    merged = shards[0][1].merge(shards[1][1])
    whole = dataclasses.replace(pair, bias=torch.cat([part.bias for part, *_ in shards]))
    stats = BACKEND.forward(whole, SPEC, OPTIONS)
    assert_close(merged.row_lse, stats.row_lse, 1e-6, "lse")
    grad = incoming_gradients(stats)
    want = BACKEND.backward(whole, stats, grad, NEEDS, SPEC, OPTIONS)
    job = grad, NEEDS, SPEC, OPTIONS
    parts = []
    for part, _, held in shards:
        assert held is not None
        assert held.end > 0
        memory = held.memory
        parts.append(BACKEND.backward(part, merged, *job, grad_dtype=torch.float32, saved=held))
        assert parts[-1].b.data_ptr() == memory.data_ptr(), "the saved exponentials were used"
    assert_close(parts[0].a + parts[1].a, want.a, 1e-5, "a")
    assert_close(torch.cat([parts[0].b, parts[1].b]), want.b, 1e-5, "b")


COMING = {
    "tiny": lambda lse, pos: (lse * 1e-25, pos * 1e-25),
    "huge": lambda lse, pos: (lse * 1e20, pos * 1e20),
    "some rows ignored": lambda lse, pos: (lse * KEEP[: len(lse)], pos * KEEP[: len(lse)]),
    "no log-sum-exp": lambda lse, pos: (lse * 0.0, pos),
    "hardly any": lambda lse, pos: (pos * torch.logspace(-1, -12, len(pos)), -pos),
    "no positive": lambda lse, pos: (lse, None),
    "positive and negative": lambda lse, pos: (lse * SIGN[: len(lse)], -lse * SIGN[: len(lse)]),
}
KEEP, SIGN = (torch.arange(100) % 3 > 0).float(), (-1.0) ** torch.arange(100)


@pytest.mark.parametrize("kind, scale", [*((kind, 0.3) for kind in COMING), ("no positive", -0.5), ("hardly any", 0.0)])
def test_every_kind_of_incoming_gradient(kind, scale):
    """The factor of a row may be 0, tiny or negative. The entry of its positive is divided by it."""
    pair = dataclasses.replace(pair_of(), scale=torch.tensor(scale))
    stats, held = BACKEND.forward_saving(pair, SPEC, OPTIONS)
    assert bool(held.needs_repair == 0)
    plain = incoming_gradients(stats)
    row_lse, row_pos = COMING[kind](plain.row_lse, plain.row_pos)
    grad = dataclasses.replace(plain, row_lse=row_lse, row_pos=row_pos)
    want = BACKEND.backward(pair, stats, grad, NEEDS, SPEC, OPTIONS)
    got = BACKEND.backward(pair, stats, grad, NEEDS, SPEC, OPTIONS, saved=held)
    for name in ("a", "b"):
        assert_close(getattr(got, name), getattr(want, name), 5e-6, name)
    terms = pair.a.double().norm() * want.a.double().norm() / abs(scale or 1e-30)
    assert abs(got.scale - want.scale) <= 2e-5 * terms


def test_positives_are_rounded_once(monkeypatch):
    """Where scores are flat, a column's gradient is that of its positives. Many rows share one of them."""
    monkeypatch.setattr(saving, "DTYPES", (torch.float16,))
    n, m = 100, 400
    pair = pair_of(n, m)
    key = torch.randint(0, m, (n,), generator=torch.Generator().manual_seed(2))
    key[10:90] = 11  # more than one program adds up
    pair = dataclasses.replace(pair, a=pair.a.half(), b=pair.b.half(), bias=None, row_key=key)
    pair = dataclasses.replace(pair, scale=torch.tensor(2.0**-6))
    stats, held = BACKEND.forward_saving(pair, SPEC, OPTIONS)
    assert held is not None
    saved = slice(0, held.end)
    grad = GradStats(row_lse=torch.ones(n), row_pos=-torch.ones(n))
    plain = BACKEND.backward(pair, stats, grad, NEEDS, SPEC, OPTIONS)
    got = BACKEND.backward(pair, stats, grad, NEEDS, SPEC, OPTIONS, saved=held)
    x = pair.scale.double() * pair.a.double() @ pair.b.double().T
    g = x.softmax(1) - torch.nn.functional.one_hot(key, m)
    exact = pair.scale.double() * g.T @ pair.a.double()
    assert_no_worse(got.b[saved], plain.b[saved], exact[saved], "saved columns", factor=1.1)
    assert_no_worse(got.b[11], plain.b[11], exact[11], "the column of many rows", factor=1.1)


PICKED = dataclasses.replace(SPEC, row_picked=True)
PICKS_COMING = {  # gradients of the log-sum-exp, the positive and the picked columns
    "all": lambda lse, pos, picked: (lse, pos, picked),
    "picked alone": lambda lse, pos, picked: (lse * 0.0, None, picked),
    "hardly any": lambda lse, pos, picked: (lse * 1e-12, pos * 1e-12, picked),
    "a teacher": lambda lse, pos, picked: (-picked.sum(1), None, picked),
}


@pytest.mark.parametrize("spread", [1.0, 1000.0], ids=["plain", "needs repair"])
@pytest.mark.parametrize("kind", PICKS_COMING)
@pytest.mark.parametrize("skip", [False, True], ids=["", "left out"])
def test_picked_columns(kind, spread, skip):
    """Some of them are saved columns and some are not, some are picked twice, and some are the positive."""
    pair, spec = pair_of(spread=spread), dataclasses.replace(PICKED, skip_picked=skip)
    pick = torch.randint(0, 400, (48, 7), generator=torch.Generator().manual_seed(4))
    pick[::2, 3], pick[:, 5], pick[1::3, 6] = pick[::2, 0], pair.row_key, -1
    pair = dataclasses.replace(pair, pick=pick.sort(dim=1).values if skip else pick)
    stats, held = BACKEND.forward_saving(pair, spec, OPTIONS)
    assert held is not None
    assert bool(held.needs_repair > 0) == (spread > 500.0)
    plain = incoming_gradients(stats)
    row_lse, row_pos, picked = PICKS_COMING[kind](plain.row_lse, plain.row_pos, plain.row_picked)
    grad = dataclasses.replace(plain, row_lse=row_lse, row_pos=row_pos, row_picked=picked)
    want = BACKEND.backward(pair, stats, grad, NEEDS, spec, OPTIONS)
    got = BACKEND.backward(pair, stats, grad, NEEDS, spec, OPTIONS, saved=held)
    for name in ("a", "b"):
        assert_close(getattr(got, name), getattr(want, name), 2e-5 if spread > 500.0 else 5e-6, name)


def test_rows_whose_every_column_is_picked():
    """Their log-sum-exp is -inf. Only the gradients of the picked columns are left."""
    pair = pair_of()
    pick = torch.tensor([[3, 40, 300]]).expand(48, 3).contiguous()
    bias = torch.full((pair.b.shape[0],), -torch.inf).index_fill_(0, pick[0], 0.5)
    pair = dataclasses.replace(pair, pick=pick, bias=bias, row_key=pick[:, 1].contiguous())
    spec = dataclasses.replace(PICKED, skip_picked=True)
    stats, held = BACKEND.forward_saving(pair, spec, OPTIONS)
    assert held is not None
    assert (stats.row_lse == -torch.inf).all()
    grad = GradStats(row_lse=torch.zeros(48), row_picked=torch.randn(48, 3, generator=torch.Generator().manual_seed(1)))
    got = BACKEND.backward(pair, stats, grad, NEEDS, spec, OPTIONS, saved=held)
    assert_close(got.a, pair.scale * grad.row_picked @ pair.b[pick[0]], 5e-6)
    assert_close(got.b[pick[0]], pair.scale * grad.row_picked.T @ pair.a, 5e-6)


TOKENS = [("row_entropy",), ("row_sum_sq",), ("row_top",), ("row_entropy", "row_sum_sq", "row_top", "row_picked")]


@pytest.mark.parametrize("spread", [1.0, 1000.0], ids=["plain", "peaked"])
@pytest.mark.parametrize("names", TOKENS, ids="+".join)
def test_statistics_of_tokens(names, spread):
    """Each row of a tile has its own reference, so no scores are too far apart, and nothing is repaired."""
    spec = dataclasses.replace(SPEC, **dict.fromkeys(names, True))
    pair = pair_of(spread=spread)
    pair.bias[::7] = float("-inf")
    pair.row_key[pair.row_key % 7 == 0] = -1
    if spec.row_picked:
        pick = torch.randint(0, 57, (48, 5), generator=torch.Generator().manual_seed(4)) * 7 + 1
        pair = dataclasses.replace(pair, pick=pick)
    stats, held = BACKEND.forward_saving(pair, spec, OPTIONS)
    assert held.relative
    assert held.needs_repair is None
    assert 0 < held.end < 400
    plain = BACKEND.forward(pair, spec, OPTIONS)
    for name in ("row_lse", *names):
        assert_close(getattr(stats, name), getattr(plain, name), 2e-5, name)
    grad = incoming_gradients(stats)
    want = BACKEND.backward(pair, stats, grad, NEEDS, spec, OPTIONS)
    got = BACKEND.backward(pair, stats, grad, NEEDS, spec, OPTIONS, saved=held)
    for name in ("a", "b", "scale"):
        assert_close(getattr(got, name), getattr(want, name), 2e-5, name)


@pytest.mark.parametrize("names", [(), ("row_entropy", "row_top"), ("row_entropy", "row_sum_sq")], ids=str)
def test_many_saved_chunks_are_a_loop(names, monkeypatch):
    """Chunks in the memory of dB, chunks in the buffer, and columns that are not saved: a loop or written out each."""
    monkeypatch.setattr(sizes, "INTERPRETED", Sizes(32, 32, 64, 1, 1, 1, 2))
    monkeypatch.setattr(saving, "COLS", 32)
    g_of(monkeypatch, 64)
    monkeypatch.setattr(statistics.Forward, "_room", lambda self, saved: 192)
    pair = dataclasses.replace(pair_of(n=24, m=600, d=16), bias=None)
    spec = dataclasses.replace(SPEC, **dict.fromkeys(names, True))
    stats, held = BACKEND.forward_saving(pair, spec, OPTIONS)
    assert held.inside >= 7 * 32
    grad = incoming_gradients(stats)
    got = BACKEND.backward(pair, stats, grad, NEEDS, spec, OPTIONS, saved=held)
    loops = [step for made in scores._programs.values() for step in made.steps if isinstance(step, program.Loop)]
    assert len(loops) >= 2, "one in each pass"
    want = BACKEND.backward(pair, BACKEND.forward(pair, spec, OPTIONS), grad, NEEDS, spec, OPTIONS)
    for name in ("a", "b"):
        assert_close(getattr(got, name), getattr(want, name), 5e-6, name)


def test_forgotten_columns_are_computed_again():
    """A filter's call that turns out to be exact after all: nothing was saved, and the memory holds anything."""
    for names in [(), ("row_entropy",)]:
        spec = dataclasses.replace(SPEC, **dict.fromkeys(names, True))
        pair = pair_of()
        stats, held = BACKEND.forward_saving(pair, spec, OPTIONS)
        grad = incoming_gradients(stats)
        held.memory.fill_(float("nan"))
        held.buffer.fill_(float("nan"))
        held.forget()
        want = BACKEND.backward(pair, stats, grad, NEEDS, spec, OPTIONS)
        got = BACKEND.backward(pair, stats, grad, NEEDS, spec, OPTIONS, saved=held)
        for name in ("a", "b"):
            assert_close(getattr(got, name), getattr(want, name), 1e-6, name)


@pytest.mark.parametrize("needs", [Needs(a=False, b=True, scale=True), Needs(a=False, b=True), Needs(a=True, b=True)])
def test_fewer_gradients(needs):
    pair = pair_of()
    stats, held = BACKEND.forward_saving(pair, SPEC, OPTIONS)
    grad = incoming_gradients(stats)
    want = BACKEND.backward(pair, stats, grad, needs, SPEC, OPTIONS)
    got = BACKEND.backward(pair, stats, grad, needs, SPEC, OPTIONS, saved=held)
    for name in ("a", "b", "scale"):
        one, other = getattr(got, name), getattr(want, name)
        assert (one is None) == (other is None) == (not getattr(needs, name))
        if one is not None:
            assert_close(one, other, 1e-3 if name == "scale" else 5e-6, name)  # the scale's is a sum that cancels


@pytest.mark.parametrize("spread", [1.0, 3.0, 1000.0], ids=["plain", "peaked", "needs repair"])
def test_half_type_holds_scaled_rows_where_row_gradients_go(spread, monkeypatch):
    """float16 instead of bfloat16. Both gradients are as close to float64 as without saved columns."""
    monkeypatch.setattr(saving, "DTYPES", (torch.float16,))
    pair = pair_of(spread=spread)
    pair = dataclasses.replace(pair, a=pair.a.half(), b=pair.b.half(), row_key=pair.row_key.clamp(min=0))
    stats, held = BACKEND.forward_saving(pair, SPEC, OPTIONS)
    assert bool(held.needs_repair > 0) == (spread > 500.0)
    grad = GradStats(row_lse=torch.full((48,), 1 / 48), row_pos=torch.full((48,), -1 / 48))
    same, plain = [], SavedColumns.factors

    def watched(self, scores, factor, place):
        found = plain(self, scores, factor, place)
        assert found.scaled.name == "dA"
        scores.program.call(lambda each: same.append((each == 1.0).all().item()), found.each)
        return found

    monkeypatch.setattr(SavedColumns, "factors", watched)
    got = BACKEND.backward(pair, stats, grad, NEEDS, SPEC, OPTIONS, saved=held)
    assert same == [spread > 500.0]
    ordinary = BACKEND.backward(pair, stats, grad, NEEDS, SPEC, OPTIONS)
    leaves = [x.double().requires_grad_() for x in (pair.a, pair.b)]
    loss = torch.nn.functional.cross_entropy(0.3 * leaves[0] @ leaves[1].T + pair.bias, pair.row_key)
    exact = torch.autograd.grad(loss, leaves)
    for index, name in enumerate(("a", "b")):
        assert_no_worse(getattr(got, name), getattr(ordinary, name), exact[index], name)


def test_the_entry_of_the_positive_is_not_rounded_twice(monkeypatch):
    """Flat scores: the gradient of a row is its positive's column. A rounded entry would change its length."""
    monkeypatch.setattr(saving, "DTYPES", (torch.float16,))
    pair = pair_of()
    pair = dataclasses.replace(pair, a=(pair.a * 0.1).half(), b=pair.b.half(), bias=None, row_key=torch.arange(48) * 4)
    stats, held = BACKEND.forward_saving(pair, SPEC, OPTIONS)
    assert held.end > 48 * 4
    grad = GradStats(row_lse=torch.full((48,), 1 / 48), row_pos=torch.full((48,), -1 / 48))
    got = BACKEND.backward(pair, stats, grad, NEEDS, SPEC, OPTIONS, saved=held)
    a, b = pair.a.double(), pair.b.double()
    p = (0.3 * a @ b.T).softmax(1)
    p[torch.arange(48), pair.row_key] -= 1.0
    want = 0.3 * p @ b / 48
    stretch = (got.a.double() * want).sum(1) / want.square().sum(1)
    assert (stretch - 1.0).abs().max() < 2e-4, "one rounding of float16 is up to 5e-4"


@pytest.mark.parametrize("peak, trusted", [(40.0, True), (80.0, False), (100.0, False), (130.0, False)])
def test_one_row_far_above_the_others(peak, trusted):
    """The shift is the largest sampled score. The exponentials of a row far below it underflow."""
    pair = pair_of()
    a, key = pair.a * 0.1, pair.row_key.clamp(min=0)
    own = pair.b[key[3]]
    a[3] = own * (peak / own.square().sum())
    pair = dataclasses.replace(pair, a=a, row_key=key, scale=torch.tensor(1.0), bias=None)
    stats, held = BACKEND.forward_saving(pair, SPEC, OPTIONS)
    assert bool(held.needs_repair == 0) == trusted
    grad = incoming_gradients(stats)
    want = BACKEND.backward(pair, stats, grad, NEEDS, SPEC, OPTIONS)
    got = BACKEND.backward(pair, stats, grad, NEEDS, SPEC, OPTIONS, saved=held)
    for name in ("a", "b"):
        assert_close(getattr(got, name), getattr(want, name), 2e-6, name)


def test_saved_columns_need_no_product(monkeypatch):
    """The gradient kernel computes only the other columns."""
    pair = pair_of()
    stats, held = BACKEND.forward_saving(pair, SPEC, OPTIONS)
    seen, plain = [], gradients.Backward._gradient

    def watched(self, g, desc, i, j):
        seen.append(self.saved is not None and self.saved.chunk(j) is not None)
        plain(self, g, desc, i, j)

    monkeypatch.setattr(program, "LEAST_TURNS", 1000)
    monkeypatch.setattr(gradients.Backward, "_gradient", watched)
    BACKEND.backward(pair, stats, incoming_gradients(stats), NEEDS, SPEC, OPTIONS, saved=held)
    assert seen.count(True) == len(held.columns()) >= 3
    assert seen.count(False) == -(-(400 - held.end) // 96) >= 1


def test_g_takes_the_memory_of_saved_exponentials(monkeypatch):
    """The peak memory is that of backward and does not rise. The memory is freed when backward ends."""
    pair = pair_of()
    stats, held = BACKEND.forward_saving(pair, SPEC, OPTIONS)
    assert held.buffer.numel() == 48 * 96
    seen, plain = set(), gradients.Backward._gradient

    def watched(self, g, desc, i, j):
        seen.add((j.start < held.end, (g.name, g.offset)))
        plain(self, g, desc, i, j)

    monkeypatch.setattr(gradients.Backward, "_gradient", watched)
    BACKEND.backward(pair, stats, incoming_gradients(stats), NEEDS, SPEC, OPTIONS, saved=held)
    assert {where for saved, where in seen if not saved} == {("saved_buffer", 0)}
    assert (True, ("saved_buffer", 0)) in seen
    assert held.buffer is None


@pytest.mark.parametrize("spread", [1.0, 1000.0], ids=["plain", "needs repair"])
def test_later_steps_run_the_same_two_programs(spread, monkeypatch):
    """Other values, same programs: none is written, and the result equals that of a first call."""

    def step(seed):
        pair = pair_of(spread=spread, seed=seed)
        stats, held = BACKEND.forward_saving(pair, SPEC, OPTIONS)
        grads = BACKEND.backward(pair, stats, incoming_gradients(stats), NEEDS, SPEC, OPTIONS, saved=held)
        assert grads.b.data_ptr() == held.memory.data_ptr()
        assert held.buffer is None
        return stats.row_lse, stats.row_pos, grads.a, grads.b, grads.scale

    fresh = step(1)
    scores.forget_programs()
    step(0)
    assert len(scores._programs) == 2
    monkeypatch.setattr(program.Program, "__init__", None)
    for one, other in zip(step(1), fresh, strict=True):
        assert torch.equal(one, other)


def test_needs_that_cannot_use_saved_columns(monkeypatch):
    """A frozen classifier or a trainable bias: backward ignores the saved columns."""
    pair = pair_of()
    stats, held = BACKEND.forward_saving(pair, SPEC, OPTIONS)
    grad = incoming_gradients(stats)
    for needs in (Needs(a=True, b=False), Needs(a=True, b=True, bias=True)):
        got = BACKEND.backward(pair, stats, grad, needs, SPEC, OPTIONS, saved=held)
        want = BACKEND.backward(pair, stats, grad, needs, SPEC, OPTIONS)
        assert_close(got.a, want.a, 1e-6, "a")


@pytest.mark.parametrize("ignored", [0, 7])
def test_the_loss_twice_through_one_graph(ignored, monkeypatch):
    """The public function: the first backward uses the saved columns, the second recomputes."""
    monkeypatch.setattr("tilewise.losses.cross_entropy.target_scores", lambda *args: None)
    generator = torch.Generator().manual_seed(1)
    hidden = torch.randn(40, 32, generator=generator, requires_grad=True)
    classifier = torch.randn(300, 32, generator=generator, requires_grad=True)
    target = torch.randint(0, 300, (40,), generator=generator)
    target[:ignored] = -100
    seen, plain = [], SavedColumns.of
    monkeypatch.setattr(SavedColumns, "of", staticmethod(lambda *args: seen.append(plain(*args)) or seen[-1]))
    loss = tw.linear_cross_entropy(hidden, classifier, target, options=OPTIONS)
    assert len(seen) == 1
    assert seen[0] is not None
    first = torch.autograd.grad(loss, (hidden, classifier), retain_graph=True)
    second = torch.autograd.grad(loss, (hidden, classifier))
    dense = torch.nn.functional.cross_entropy(hidden.double() @ classifier.double().T, target)
    want = torch.autograd.grad(dense, (hidden, classifier))
    for one, other, exact in zip(first, second, want, strict=True):
        assert_close(one, exact, 5e-6, "first")
        assert_close(other, exact, 5e-6, "second")
