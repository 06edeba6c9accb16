"""Recorded launches and their replay with other tensors, in Triton's interpreter."""

import dataclasses
import gc
import threading
import weakref
from concurrent.futures import ThreadPoolExecutor
from types import SimpleNamespace

import pytest
import torch
from tests.kernels.interpreted import INTERPRETED
from tests.kernels.one_pass_pairs import ONE_PASS, SOFTMAX, take_several_blocks
from tests.kernels.pair_checks import all_needs, incoming_gradients
from tests.kernels.quick_interpreter import make_quick

import tilewise as tw
from tilewise.kernels.spec import Needs, Pair, PairSpec, RowWeights
from tilewise.kernels.triton_impl.backend import TritonBackend
from tilewise.kernels.triton_impl.launch import call as launch
from tilewise.kernels.triton_impl.launch import driver, replay
from tilewise.kernels.triton_impl.one_pass.strategy import loss_and_gradients
from tilewise.kernels.triton_impl.two_pass import backward as gradients
from tilewise.kernels.triton_impl.two_pass.strategy import STATISTICS
from tilewise.options import TileOptions

pytestmark = INTERPRETED
BACKEND, OPTIONS = TritonBackend(), TileOptions(backend="triton", precision="highest")
CLIP = PairSpec(row_lse=True, col_lse=True, positive="one")
CLASSES = PairSpec(row_lse=True, positive="one")
VIEWS = PairSpec(row_lse=True, positive="one", mask_self=True, symmetric=True)
LABELS = PairSpec(row_lse=True, positive="many", mask_self=True, symmetric=True)
PICKS = PairSpec(row_lse=True, row_picked=True, positive="one")  # and a factor of each row
IDS = PairSpec(row_lse=True, col_lse=True, positive="one")  # and pairs that never meet
SIGMOID = PairSpec(softplus=True, positive="one")  # and a bias that all columns share


@pytest.fixture(autouse=True)
def recordings(monkeypatch):
    make_quick(monkeypatch)
    fresh = {}
    monkeypatch.setattr(replay, "_recordings", fresh)
    return fresh


@pytest.fixture
def made(monkeypatch):
    """How many calls were set up from the beginning."""
    seen, plain = [], launch.Call.__init__

    def counted(self, *args):
        seen.append(args)
        plain(self, *args)

    monkeypatch.setattr(launch.Call, "__init__", counted)
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
    stats = BACKEND.forward(pair, spec, OPTIONS)
    grad = incoming_gradients(stats)
    grads = BACKEND.backward(pair, stats, grad, needs or all_needs(pair)._replace(bias=False), spec, OPTIONS)
    values = [getattr(stats, name) for name in STATISTICS] + [grads.a, grads.b, grads.scale]
    return [value for value in values if value is not None]


@pytest.mark.parametrize(
    "spec",
    [CLIP, CLASSES, VIEWS, LABELS, IDS, PICKS, SIGMOID],
    ids=["clip", "classes", "views", "labels", "ids", "picks", "sigmoid"],
)
def test_a_replay_is_the_call(spec, recordings, made):
    everything(pair_of(spec, 0), spec)
    assert len(made) == 2
    assert all(kept is not None for kept in recordings.values())
    got = [everything(pair_of(spec, seed), spec) for seed in (1, 2)]
    assert len(made) == 2, "the second and third call replay"
    recordings.clear()
    for seed, values in zip((1, 2), got, strict=True):
        want = everything(pair_of(spec, seed), spec)
        assert len(values) == len(want)
        assert all(torch.equal(one, other) for one, other in zip(values, want, strict=True))
        recordings.clear()


def in_one_pass(seed: int, spec: PairSpec, needs: Needs, dtype: torch.dtype = torch.float32):
    """Loss and gradients. The weights and their common factor differ from seed to seed."""
    pair = pair_of(CLASSES if spec is SOFTMAX else SIGMOID, seed, n=150)
    pair = dataclasses.replace(pair, a=(0.1 * pair.a).to(dtype), b=pair.b.to(dtype))  # float16 holds the exponentials
    each = None if seed == 2 else (torch.arange(150) % 3 + seed).float()
    square = torch.full((150,), 0.01 * seed) if spec is SOFTMAX else None
    loss, grads = loss_and_gradients(
        pair, RowWeights(share=0.5 / (seed + 1), each=each, square=square), needs, spec, ONE_PASS
    )
    return [loss, *(value for value in vars(grads).values() if value is not None)]


@pytest.mark.parametrize("blocks", ["one block", "several blocks"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float16], ids=["fp32", "fp16"])  # fp16: positives are corrected
@pytest.mark.parametrize("spec", [SOFTMAX, SIGMOID], ids=["softmax", "sigmoid"])
def test_a_replay_of_one_pass_is_the_call(spec, dtype, blocks, recordings, made, monkeypatch):
    if blocks == "several blocks":
        take_several_blocks(monkeypatch)
    one_side = (Needs(a=False), Needs(b=False)) if dtype == torch.float32 else ()
    for needs in (Needs(scale=True, bias=spec is SIGMOID), *one_side):
        in_one_pass(0, spec, needs, dtype)
        before = len(made)
        got = [in_one_pass(seed, spec, needs, dtype) for seed in (1, 2)]
        copies = [[value.clone() for value in values] for values in got]
        in_one_pass(3, spec, needs, dtype)
        assert len(made) == before, "every call but the first replays"
        recordings.clear()
        for seed, values, copied in zip((1, 2), got, copies, strict=True):
            want = in_one_pass(seed, spec, needs, dtype)
            assert all(torch.equal(one, other) for one, other in zip(values, copied, strict=True)), "and is apart"
            assert all(torch.equal(one, other) for one, other in zip(values, want, strict=True))
            recordings.clear()


@pytest.mark.parametrize("needs", [Needs(bias=True), Needs(b=False, bias=True), Needs(False, False, False, True)])
def test_one_pass_with_a_bias_of_each_column_is_not_recorded(needs, recordings):
    """Torch adds up the gradient of the bias, between launches and after them."""
    pair = dataclasses.replace(pair_of(CLASSES, 0), bias=torch.zeros(70))
    weights = RowWeights(each=torch.ones(70))
    calls = [loss_and_gradients(pair, weights, needs, SOFTMAX, ONE_PASS)[1] for _ in range(2)]
    assert list(recordings.values()) == [None]
    assert torch.equal(calls[0].bias, calls[1].bias)


@pytest.mark.parametrize("loss", [tw.siglip_loss, tw.info_nce])
def test_two_forwards_and_their_backwards_in_the_other_order(loss):
    """Each has what it saved, although both replay one recording; a second backward computes it anew."""

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


def test_scratch_that_is_used_at_the_same_time_is_apart(recordings, monkeypatch):
    """The memory of a block of rows is used again by the next one."""
    take_several_blocks(monkeypatch)
    in_one_pass(0, SOFTMAX, Needs(), torch.float16)
    (recording,) = recordings.values()
    pooled, shared = [slot for _, slot in recording.pooled], 0
    for number, one in enumerate(pooled):
        assert one.pool_at % replay.ALIGNED == 0
        assert one.pool_at + one.bytes <= recording.pool_bytes
        for other in pooled[:number]:
            together = one.first <= other.last and other.first <= one.last
            apart = one.pool_at + one.bytes <= other.pool_at or other.pool_at + other.bytes <= one.pool_at
            assert apart or not together
            shared += not apart
    assert shared


def test_results_of_two_replays_are_apart():
    everything(pair_of(CLIP, 0), CLIP)
    first = everything(pair_of(CLIP, 1), CLIP)
    copies = [value.clone() for value in first]
    everything(pair_of(CLIP, 2), CLIP)
    assert all(torch.equal(one, other) for one, other in zip(first, copies, strict=True))


def test_what_a_recording_depends_on(recordings, made):
    """Another shape, need, option or a shift of the rows is another recording; the same again is not."""
    pair = pair_of(CLIP, 0)
    calls = [
        lambda: everything(pair, CLIP),
        lambda: everything(pair_of(CLIP, 0, n=71), CLIP),
        lambda: everything(pair, CLIP, Needs(a=True, b=False)),
        lambda: everything(dataclasses.replace(pair, row_start=70), CLIP),
        lambda: everything(dataclasses.replace(pair, row_key=torch.arange(70)), CLIP),
    ]
    for call in calls:
        before = len(made)
        call()
        assert len(made) > before
        before = len(made)
        call()
        assert len(made) == before


@pytest.mark.parametrize("how", ["unaligned", "strided", "the same features twice", "overlapping"])
def test_what_cannot_be_replayed_leaves_no_recording(how, recordings):
    pair = pair_of(CLIP, 0)
    if how == "unaligned":
        pair = dataclasses.replace(pair, a=torch.cat([pair.a.flatten(), torch.zeros(1)])[1:].view(70, 24))
    if how == "strided":
        pair = dataclasses.replace(pair, a=pair.a.T.contiguous().T)
    if how == "the same features twice":
        pair = dataclasses.replace(pair, b=pair.a)
    if how == "overlapping":
        whole = torch.randn(72, 24)
        pair = dataclasses.replace(pair, a=whole[:70], b=whole[2:])
    first = everything(pair, CLIP)
    assert all(kept is None for kept in recordings.values())
    assert all(torch.equal(one, other) for one, other in zip(everything(pair, CLIP), first, strict=True))


@pytest.mark.parametrize("overlap", [0, 2])
def test_features_that_share_memory_do_not_spoil_their_kind(overlap, made):
    """Addresses are no part of a key: later inputs without shared memory are recorded, and all replay that."""
    whole, pair = torch.randn(70 + overlap, 24), pair_of(CLIP, 0)
    shared = dataclasses.replace(pair, a=whole[:70], b=whole[overlap:])
    want = everything(shared, CLIP)
    everything(pair, CLIP)
    before = len(made)
    everything(pair_of(CLIP, 1), CLIP)
    got = everything(shared, CLIP)
    assert len(made) == before
    assert all(torch.equal(one, other) for one, other in zip(got, want, strict=True))


def test_memory_is_given_back_after_its_last_use(recordings):
    everything(pair_of(CLIP, 0), CLIP)
    backward = recordings[next(kind for kind in recordings if kind[0] == "backward")]
    kept = {where.slot for where in backward.outputs if where is not None}
    slots = enumerate(backward.slots[backward.inputs :], start=backward.inputs)
    used = [index for index, slot in slots if slot.last >= 0 and slot.pool_at < 0]
    assert set(used) - kept, "something that can be given back"
    for index in used:
        assert any(index == other for _, made, _, _ in backward.turns for other, _ in made)
        assert any(index in done for _, _, _, done in backward.turns) == (index not in kept)


def test_what_is_multiplied_is_a_tensor_of_its_own(recordings):
    everything(pair_of(CLIP, 0), CLIP)
    backward = recordings[next(kind for kind in recordings if kind[0] == "backward")]
    products = [step for step in backward.steps if isinstance(step, replay.TorchStep)]
    assert len(products) == 2
    assert all(backward.slots[w.slot].pool_at < 0 for step in products for w in step.wheres)


def test_only_so_many_recordings_are_kept(recordings, monkeypatch):
    monkeypatch.setattr(replay, "MOST_RECORDINGS", 4)
    for n in range(64, 71):
        everything(pair_of(CLIP, 0, n=n), CLIP)
        assert len(recordings) <= 4


def test_memory_that_torch_uses_again_is_no_slot():
    """A sum by torch may take the memory of scratch that was given back: what it holds cannot be repeated."""
    given = torch.zeros(8)
    fresh = replay.Recording(given.device, [given])
    scratch = replay.allocate(fresh, given, (64,), torch.float32)
    assert fresh.find(scratch[3:]) == replay.Where(1, 12, (61,), (1,))
    del scratch
    summed = torch.zeros(64)
    fresh.slots[1].address = summed.data_ptr()  # as an allocator does that gives it out again
    assert fresh.find(summed) is replay.NOWHERE
    assert fresh.finish([given]) is None


def test_memory_that_was_freed_is_not_searched():
    """A call in many blocks of rows allocates hundreds of times, and every argument of every launch is looked for."""
    given = torch.zeros(8)
    fresh = replay.Recording(given.device, [given])
    held = [replay.allocate(fresh, given, (64,), torch.float32) for _ in range(100)]
    last = held.pop()
    held.clear()
    assert fresh.find(given).slot == 0
    assert fresh.find(last).slot == 100
    assert fresh.alive == [0, 100]


def test_what_has_no_slot_is_not_kept_alive(monkeypatch):
    """With a bias, each macro-tile has sums of its own, made by torch: they go as they come, also while recording."""
    monkeypatch.setattr(gradients.Backward, "_macro", lambda self: (64, 64))
    pair = dataclasses.replace(pair_of(CLASSES, 0, n=200), bias=torch.zeros(200))
    alive, plain = [], gradients.Bias.part

    def part(self, i, j):
        alive.append(weakref.ref(plain(self, i, j)))
        assert sum(one() is not None for one in alive) <= 3
        return self.held

    monkeypatch.setattr(gradients.Bias, "part", part)
    everything(pair, CLASSES, Needs(a=True, b=True, bias=True))
    assert len(alive) == 16


def test_the_operand_of_the_products_is_freed_before_the_end(monkeypatch):
    alive, plain = [], gradients.Backward._without_factor

    def allocated(self, made, zero):
        alive.append((tuple(made.shape), replay.StorageWeakRef(made.untyped_storage())))

    def take_out(self, dots):
        gc.collect()  # the interpreter's own cycles hold the arguments of a launch
        assert all(memory.expired() for shape, memory in alive if shape == (70, 72))
        return plain(self, dots)

    monkeypatch.setattr(replay.Recording, "allocated", allocated)
    monkeypatch.setattr(gradients.Backward, "_without_factor", take_out)
    everything(pair_of(CLIP, 0), CLIP)
    assert sum(shape == (70, 72) for shape, _ in alive) == 1


def test_threads_share_recordings(monkeypatch):
    """One thread looks for its recording while another makes room."""

    class Shared(dict):
        def __contains__(self, kind):
            found = super().__contains__(kind)
            self.clear()
            return found

    pair = pair_of(CLIP, 0)
    want = everything(pair, CLIP)
    monkeypatch.setattr(replay, "_recordings", Shared(replay._recordings))
    assert all(torch.equal(one, other) for one, other in zip(everything(pair, CLIP), want, strict=True))


class Launcher:
    """In place of the driver: notes the arguments of each thread's launches, and the stream is that of the thread."""

    def __init__(self, monkeypatch):
        self.here = threading.local()
        monkeypatch.setattr(driver, "is_known_version", lambda: True)
        monkeypatch.setattr(torch._C, "_cuda_getCurrentRawStream", lambda index: self.here.stream, raising=False)
        run = SimpleNamespace(launch=self, launch_cooperative_grid=0, launch_pdl=0)
        run.global_scratch_size = run.profile_scratch_size = 0
        compiled = SimpleNamespace(run=run, function="function", packed_metadata=None)
        given = torch.zeros(8)
        recording = replay.Recording(given.device, [given])
        scratch, out = (replay.allocate(recording, given, (size,), torch.float32) for size in (4, 8))
        recording.launched(print, [given[2:], scratch, 5], compiled, 3)
        recording.launched(print, [scratch, out[1:], given], compiled, 3)
        recording.finish([out])
        recording.driven = True
        self.recording = recording

    def __call__(self, *args):
        self.here.launched.append(args)

    def check(self, given, stream):
        """Replay with this input on this stream. Returns the output."""
        self.here.stream, self.here.launched = stream, []
        (out,) = self.recording.replay([given])
        first, second = self.here.launched
        for launched in (first, second):
            assert launched[:5] == (3, 1, 1, stream, "function")
        scratch = first[-2]
        assert first[-3:] == (given.data_ptr() + 8, scratch, 5)
        assert second[-3:] == (scratch, out.data_ptr() + 4, given.data_ptr())
        assert scratch not in (out.data_ptr(), given.data_ptr(), 0)
        return out


def test_launches_get_the_addresses_and_the_stream_of_their_replay(monkeypatch):
    launcher, held = Launcher(monkeypatch), []
    x, y = torch.zeros(8), torch.zeros(8)
    for given, stream in [(x, 1), (x, 1), (y, 1), (y, 2), (y, 2), (x, 1)]:
        out = launcher.check(given, stream)
        before = launcher.recording.filled
        del out
        held.append(launcher.check(given, stream))  # which may have the addresses of the one before
        if before.at == launcher.recording.filled.at:
            assert launcher.recording.filled is before


def test_threads_replay_one_recording_side_by_side(monkeypatch):
    launcher = Launcher(monkeypatch)

    def work(stream):
        given = torch.zeros(8)
        for _ in range(500):
            launcher.check(given, stream)

    with ThreadPoolExecutor(4) as pool:
        list(pool.map(work, range(1, 5)))
