"""The operators: registration, saved tensors, settings, dropped rows."""

import copy
import dataclasses
import logging
import shutil
import threading
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from tests.compare import assert_close
from tests.kernels.dense import dense_stats
from tests.kernels.pair_cases import CASES, make_case
from tests.kernels.pair_checks import dense_grads, incoming_gradients, leaves_of, stats_asked
from tests.losses import loss_cases
from tests.ops.one_pass_cases import TWO_PASS
from torch.utils._python_dispatch import TorchDispatchMode

import tilewise as tw
from tilewise.errors import BackendError
from tilewise.kernels import registry as select
from tilewise.kernels.spec import STATISTICS, Needs, Pair, PairSpec, RowWeights, Stats, saved_names, wanted_stats
from tilewise.kernels.torch_impl.backend import TorchBackend
from tilewise.ops import rows as drop_rows
from tilewise.ops.autograd import pair_loss, pair_stats
from tilewise.ops.call import KEYS, LEAVES, PairKeys, Settings, decode, encode, revision_of
from tilewise.ops.paired_scores import own_scores, positive_shift
from tilewise.ops.rows import KeptRows, PendingRows
from tilewise.options import TileOptions

OPTIONS = TileOptions()
HERE = [name for name in CASES if "foreign" not in name and "slice" not in name and "position" not in name]
# One case for each kind of statistic; blocks with offsets belong to the ring.
TYPICAL = ("clip", "nt_xent", "supcon", "siglip", "cross_entropy_smoothed_and_capped", "ids_excluded", "tokens")


def call(pair, spec):
    keys = PairKeys(**{name: getattr(pair, name) for name in KEYS})
    b = None if spec.symmetric else pair.b
    return pair_stats(pair.a, b, pair.scale, pair.bias, keys=keys, spec=spec, options=OPTIONS)


def plain_inputs(pair, spec):
    b = None if spec.symmetric else pair.b
    settings = Settings(spec, OPTIONS, needs=Needs(True, True, True, True))
    keys = (getattr(pair, name) for name in KEYS)
    return (pair.a, b, pair.scale, pair.bias, *keys, None, None, encode(settings))


@pytest.mark.usefixtures("small_tiles", "nan_filled_empty")
@pytest.mark.parametrize("name", [name for name in HERE if not make_case(name, torch.float64)[0].row_start])
def test_op_and_its_gradients(name):
    pair, spec = make_case(name, torch.float64)
    pair = leaves_of(dataclasses.replace(pair, row_start=0, col_start=0))
    stats, want = call(pair, spec), dense_stats(pair, spec)
    assert stats_asked(stats).keys() == stats_asked(want).keys()
    grad = incoming_gradients(want)
    named = {"a": pair.a, "scale": pair.scale}
    named |= {} if spec.symmetric else {"b": pair.b}
    named |= {} if pair.bias is None else {"bias": pair.bias}
    asked = [key for key in vars(grad) if getattr(grad, key) is not None]
    got = torch.autograd.grad(
        [getattr(stats, key) for key in asked], list(named.values()), [getattr(grad, key) for key in asked]
    )
    right = dense_grads(pair, spec, grad)
    for key, value in zip(named, got, strict=True):
        assert_close(value, getattr(right, key), 1e-10 if key == "scale" else 1e-12, key)


@pytest.mark.parametrize("name", TYPICAL)
def test_registered_operators_pass_opcheck(name):
    """Schema, fake tensors, autograd registration, and tracing, as torch.library checks them."""
    pair, spec = make_case(name, torch.float32)
    pair = leaves_of(pair)
    inputs = plain_inputs(pair, spec)
    torch.library.opcheck(torch.ops.tilewise.pair_stats.default, inputs)


@pytest.mark.parametrize("backend", ["torch", "transposed"])
@pytest.mark.parametrize("batch_invariant", [False, True])
def test_results_have_the_strides_of_the_fakes(backend, batch_invariant):
    """Whatever the strides of the features are, and those of a backend's results. Compiled code relies on it."""

    class Transposed(TorchBackend):
        name = "transposed"

        def backward(self, *args, **more):
            grads = super().backward(*args, **more)
            turned = {name: g.T.contiguous().T for name, g in vars(grads).items() if g is not None and g.dim() == 2}
            return dataclasses.replace(grads, **turned)

    if backend == "transposed":
        select.register_backend(Transposed())
    pair, spec = make_case("cross_entropy_smoothed_and_capped", torch.float32)
    pair = dataclasses.replace(pair, a=pair.a.T.contiguous().T, b=pair.b.T.contiguous().T)
    options = TileOptions(backend=backend, batch_invariant=batch_invariant)
    settings = encode(Settings(spec, options, needs=Needs(True, True, True, True)))
    inputs = *plain_inputs(pair, spec)[:-1], settings
    try:
        found = torch.ops.tilewise.pair_stats(*inputs)
        grads, coming = [torch.ones_like(value) for value in found], [True] * len(found)
        torch.library.opcheck(torch.ops.tilewise.pair_stats.default, inputs, test_utils="test_faketensor")
        inputs = *inputs[:-1], found, grads, coming, [True] * 4, settings
        torch.library.opcheck(torch.ops.tilewise.pair_stats_backward.default, inputs, test_utils="test_faketensor")
    finally:
        if backend == "transposed":
            select.unregister_backend("transposed")


def test_eager_and_registered_operator_agree():
    for name in TYPICAL:
        pair, spec = make_case(name, torch.float64)
        pair = leaves_of(pair)
        eager = stats_asked(call(pair, spec))
        registered = torch.ops.tilewise.pair_stats(*plain_inputs(pair, spec))
        shown = dict(zip([stat.name for stat in wanted_stats(spec)], registered, strict=True))
        for key, value in eager.items():
            assert torch.equal(value, shown[key]), (name, key)


@pytest.mark.parametrize("name", loss_cases.CASES)
def test_nothing_of_the_size_of_the_scores_is_saved(name):
    """Saved for backward: the arguments (shared with the caller) and vectors. Never a tile."""
    n, d = 300, 4
    made = loss_cases.problem(name, torch.float32, n=n, d=d)
    given_storage = {leaf.untyped_storage().data_ptr() for leaf in made.leaves.values()}
    saved: dict[int, int] = {}

    def pack(tensor):
        storage = tensor.untyped_storage()
        if storage.data_ptr() not in given_storage:
            saved[storage.data_ptr()] = storage.nbytes()
        return tensor

    with torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor):
        made.ours(SimpleNamespace(**made.leaves))
    own_negatives = 8 * n * 4  # (n, k) of them, and only those
    teacher = 4 * 40 * (2 * n + 41)  # arguments that are no leaves
    assert sum(saved.values()) <= 30 * 8 * n + 2 * own_negatives + 8 * n * d + teacher
    assert max(saved.values(), default=0) < n * n


@pytest.mark.parametrize("name", ["clip", "siglip"])
def test_a_weight_that_all_rows_share_needs_no_vectors(name):
    """One number and a vector of it give the same loss and gradients. Beside that vector, only statistics are saved."""
    pair, spec = make_case(name, torch.float64)
    n, share, found = pair.a.shape[0], 0.3, []
    for weights in (RowWeights(share=share), RowWeights(each=torch.full((n,), share, dtype=torch.float64))):
        leaves = leaves_of(dataclasses.replace(pair))
        kept = []
        with torch.autograd.graph.saved_tensors_hooks(lambda x, kept=kept: kept.append(x) or x, lambda x: x):
            loss = pair_loss(
                leaves.a, leaves.b, leaves.scale, leaves.bias, weights=weights, spec=spec, options=TWO_PASS
            )
        (1.7 * loss).backward()
        found.append((loss, leaves.a.grad, leaves.b.grad, leaves.scale.grad, len(kept)))
    for one, other in zip(found[0][:-1], found[1][:-1], strict=True):
        assert_close(one, other, 1e-13)
    assert found[1][-1] == found[0][-1] + 1
    assert found[0][-1] == len([x for x in (pair.a, pair.b, pair.scale, pair.bias) if x is not None]) + len(
        saved_names(spec)
    )


SPECS = st.builds(
    PairSpec,
    **{field.name: st.booleans() for field in dataclasses.fields(PairSpec) if field.type == "bool"},
    positive=st.sampled_from(["none", "one", "many"]),
    ignored=st.integers(-(2**62), 2**62),
    guide=st.sampled_from(["none", "mask", "kl", "reverse_kl", "jsd"]),
    **{field.name: st.floats(0.0, 1e6) for field in dataclasses.fields(PairSpec) if field.type == "float"},
)
HOW = st.builds(
    TileOptions,
    backend=st.sampled_from(["auto", "triton", "torch"]),
    workspace_mib=st.integers(1, 2**20),
    precision=st.sampled_from(["torch", "highest", "high"]),
    filter_tolerance=st.floats(0.0, 0.99),
    ring_gradients=st.sampled_from(["float32", "features"]),
    gradients=st.sampled_from(["auto", "forward", "backward"]),
    batch_invariant=st.just(False),  # True contradicts some of these
)
INVARIANT = st.just(TileOptions(batch_invariant=True))


NEEDS = st.builds(Needs, st.booleans(), st.booleans(), st.booleans(), st.booleans())


@given(SPECS, HOW | INVARIANT, st.sampled_from(["", "0", "7;odd,name"]), NEEDS, st.floats(0.0, 1.0))
def test_the_string_of_an_operator_has_every_setting(spec, options, group, needs, share):
    settings = Settings(spec, options, group, needs, share)
    assert decode(encode(settings)) == settings


def test_a_changed_file_changes_the_string_of_an_operator(tmp_path):
    """A compiled graph that torch has cached on disk holds the number of tensors that the operator returned."""
    package = Path(tw.__file__).parent
    assert encode(Settings(PairSpec(row_lse=True), OPTIONS)).startswith(f"{revision_of(package)};")
    for folder in ("ops", "kernels"):
        shutil.copytree(package / folder, tmp_path / folder)
    assert revision_of(tmp_path) == revision_of(package)
    found = {revision_of(package)}
    for name in ("ops/operators.py", "kernels/scalar_loss.py", "kernels/torch_impl/one_pass.py"):
        with (tmp_path / name).open("a") as file:
            file.write("# more\n")
        found.add(revision_of(tmp_path))
    assert len(found) == 4


def test_the_table_of_statistics_has_every_field():
    names = {stat.name for stat in STATISTICS}
    assert {field.name for field in dataclasses.fields(Stats)} == names | {"row_shift"}


def test_a_pair_begins_with_the_tensors_of_a_call():
    """`Call.pair` passes them by position."""
    names = tuple(field.name for field in dataclasses.fields(Pair))
    assert names[: len(LEAVES) + len(KEYS)] == (*LEAVES, *KEYS)


def test_the_plan_test_knows_every_setting():
    built = set(SPECS.wrapped_strategy.kwargs) | set(HOW.wrapped_strategy.kwargs)
    known = {field.name for kind in (PairSpec, TileOptions) for field in dataclasses.fields(kind)}
    assert built == known


def test_rows_with_a_negative_key_are_dropped_before_any_product(monkeypatch):
    seen = []
    plain = TorchBackend.forward

    def spy(self, pair, spec, options):
        seen.append(pair.a.shape[0])
        return plain(self, pair, spec, options)

    monkeypatch.setattr(TorchBackend, "forward", spy)
    hidden, classifier = torch.randn(10, 4, requires_grad=True), torch.randn(7, 4)
    target = torch.tensor([1, -100, 2, -100, -100, 3, 4, -100, 5, 6])
    tw.linear_cross_entropy(hidden, classifier, target, options=TileOptions(gradients="backward"))
    assert seen == [6]


def test_kept_rows():
    pair, spec = make_case("cross_entropy", torch.float64)
    assert KeptRows.find(pair, dataclasses.replace(spec, drop_rows=True)) is None
    key = pair.row_key.clone()
    key[[0, 5]] = -1
    pair = dataclasses.replace(pair, row_key=key)
    assert KeptRows.find(pair, spec) is None
    kept = KeptRows.find(pair, dataclasses.replace(spec, drop_rows=True))
    stats = kept.scatter_back(TorchBackend().forward(kept.of_pair(pair), spec, OPTIONS))
    whole = dense_stats(pair, spec)
    assert stats.row_lse[[0, 5]].tolist() == [0.0, 0.0]
    assert_close(stats.row_lse[6:], whole.row_lse[6:], 1e-12)
    assert torch.equal(kept.pick(stats).row_lse, stats.row_lse[key >= 0])


@pytest.mark.parametrize("n, m, same_rows, looks", [
    (8192, 256_000, False, True),
    (8192, 10_000, False, False),
    (8192, 256_000, True, False),  # over a group all ranks decide alike, whatever their slices
    (65_536, 10, True, True),
])  # fmt: skip
def test_the_host_waits_for_the_number_of_rows_only_where_it_pays(n, m, same_rows, looks):
    """Elsewhere than on the CPU, which a test can see without any device."""
    pair = Pair(a=torch.empty(n, 256, device="meta"), b=torch.empty(m, 256, device="meta"), scale=None)
    assert drop_rows.may_read(pair, PairSpec(drop_rows=True, same_rows=same_rows)) == looks


@pytest.mark.parametrize("ignored", [0, 1, 5, 9, 10])
def test_rows_that_stay_fill_whole_tiles(ignored):
    """As on a GPU: those that count, in order, then some that do not."""
    key = torch.arange(10)
    key[torch.randperm(10)[:ignored]] = -1
    exact, filled = (key >= 0).nonzero().squeeze(1), PendingRows(key, 4).wait()
    alone = PendingRows(key, 1).wait()
    assert PendingRows(key, 4).all_stay().tolist() == [filled is None]
    assert (alone is None) == (ignored == 0), "all of them"
    assert alone is None or torch.equal(alone.index, exact)
    if -(-len(exact) // 4) * 4 >= 10:
        assert filled is None
        return
    assert torch.equal(filled.index[: len(exact)], exact)
    assert len(filled.index) == max(4, -(-len(exact) // 4) * 4)
    assert len(filled.index.unique()) == len(filled.index)


def test_filled_tiles_change_no_loss(monkeypatch):
    made = loss_cases.problem("cross_entropy_everything")
    want, want_grads = loss_cases.solve(made.ours, made.leaves)
    start = PendingRows.__init__
    monkeypatch.setattr(PendingRows, "__init__", lambda self, key, step, kind: start(self, key, 16, kind))
    loss, grads = loss_cases.solve(made.ours, made.leaves)
    assert_close(loss, want, 1e-14)
    for leaf, value in want_grads.items():
        assert_close(grads[leaf], value, 1e-12, leaf)


def test_backward_takes_the_rows_that_forward_found(monkeypatch):
    found, wait = [], PendingRows.wait
    monkeypatch.setattr(PendingRows, "wait", lambda self: found.append(1) or wait(self))
    hidden = torch.randn(4, 3, requires_grad=True)
    target = torch.tensor([1, -100, 2, 0])
    options = TileOptions(gradients="backward")
    tw.linear_cross_entropy(hidden, torch.randn(7, 3), target, options=options).backward()
    assert len(found) == 1
    assert not hidden.grad[1].any()
    assert hidden.grad[[0, 2, 3]].any(1).all()


def test_a_statistic_that_nobody_asks_about_has_no_gradient(monkeypatch):
    """Not zeros: None, so that backward leaves its terms out."""
    seen = []
    plain = TorchBackend.backward

    def spy(self, pair, stats, grad, *rest, **more):
        seen.append({name for name, value in vars(grad).items() if value is not None})
        return plain(self, pair, stats, grad, *rest, **more)

    monkeypatch.setattr(TorchBackend, "backward", spy)
    pair, spec = make_case("clip", torch.float64)
    stats = call(leaves_of(pair), spec)
    stats.row_lse.sum().backward(retain_graph=True)
    (stats.col_lse.sum() + stats.row_pos.sum()).backward()
    assert seen == [{"row_lse"}, {"col_lse", "row_pos"}]


def test_losses_run_in_several_threads_at_once():
    made = loss_cases.problem("clip", torch.float32)
    want, want_grads = loss_cases.solve(made.ours, made.leaves)
    results = {}

    def work(index):
        options = TileOptions(workspace_mib=1 + index)
        leaves = {name: leaf.detach().clone().requires_grad_() for name, leaf in made.leaves.items()}
        results[index] = loss_cases.solve(made.ours, leaves, options=options)

    threads = [threading.Thread(target=work, args=(index,)) for index in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    for loss, grads in results.values():
        assert_close(loss, want, 1e-6)
        assert_close(grads["image"], want_grads["image"], 1e-6)
    assert len(results) == 4


def test_works_inside_of_activation_checkpointing():
    made = loss_cases.problem("clip")
    _, want = loss_cases.solve(made.ours, made.leaves)

    def checkpointed(p):
        return torch.utils.checkpoint.checkpoint(
            lambda a, b, s: tw.clip_loss(a, b, s), p.image, p.text, p.scale, use_reentrant=False
        )

    _, got = loss_cases.solve(checkpointed, made.leaves)
    assert all(torch.equal(got[leaf], want[leaf]) for leaf in want)


def test_a_loss_can_be_exported():
    image, text = torch.randn(6, 4), torch.randn(6, 4)
    program = torch.export.export(tw.ClipLoss(), (image, text, torch.tensor(3.0)))
    assert "tilewise.pair_loss" in str(program.graph)
    assert_close(program.module()(image, text, torch.tensor(3.0)), tw.clip_loss(image, text, 3.0), 1e-6)


def test_modules_and_options_can_be_copied_and_pickled(tmp_path):
    module = tw.InfoNCELoss(temperature=torch.nn.Parameter(torch.tensor(0.1)), options=TileOptions(workspace_mib=3))
    twin = copy.deepcopy(module)
    assert twin.settings == module.settings
    assert twin.temperature is not module.temperature
    torch.save(module, tmp_path / "loss.pt")
    again = torch.load(tmp_path / "loss.pt", weights_only=False)
    x = torch.randn(4, 3)
    assert torch.equal(again(x, x), module(x, x))


# Scores of given pairs ------------------------------------------------------------------------------------------


@pytest.mark.usefixtures("nan_filled_empty")
def test_positive_shift_are_near():
    a, b = torch.randn(50, 8), torch.randn(60, 8)
    scale = torch.tensor(3.0)
    index = torch.arange(50).flip(0)
    assert_close(positive_shift(a, b[:50], scale), 3.0 * (a * b[:50]).sum(1), 1e-6)
    assert_close(positive_shift(a, b, scale, index), 3.0 * (a * b[index]).sum(1), 1e-6)
    assert not positive_shift(a.requires_grad_(), b[:50], scale).requires_grad


@pytest.mark.usefixtures("nan_filled_empty")
@pytest.mark.parametrize("masked", [False, True])
def test_own_scores(masked, monkeypatch):
    monkeypatch.setattr("tilewise.ops.paired_scores.CHUNK_ELEMENTS", 100)
    a = torch.randn(30, 8, dtype=torch.float64, requires_grad=True)
    own = torch.randn(30, 5, 8, dtype=torch.float64, requires_grad=True)
    keep = torch.rand(30, 5) > 0.5 if masked else None
    assert torch.autograd.gradcheck(lambda a, own: own_scores(a, own, keep, "highest"), (a, own))
    want = torch.einsum("nd,nkd->nk", a, own)
    assert_close(own_scores(a, own, keep, "highest"), want if keep is None else want * keep, 1e-12)
    torch.library.opcheck(torch.ops.tilewise.own_scores.default, (a, own, keep, "highest"))


# Which backend --------------------------------------------------------------------------------------------------


def test_auto_says_what_it_chose_and_why_not_the_others(caplog):
    pair, spec = make_case("clip", torch.float32)
    with caplog.at_level(logging.DEBUG, logger="tilewise"):
        assert select.choose_backend(pair.shape, spec, OPTIONS).name == "torch"
    assert "triton not chosen: it needs a CUDA device" in caplog.text
    assert "torch chosen" in caplog.text


def test_an_explicit_choice_never_falls_back(monkeypatch):
    monkeypatch.delenv("TRITON_INTERPRET", raising=False)
    pair, spec = make_case("clip", torch.float32)
    with pytest.raises(BackendError, match=r"triton.*needs a CUDA device.*auto"):
        select.choose_backend(pair.shape, spec, TileOptions(backend="triton"))
    assert select.choose_backend(pair.shape, spec, TileOptions(backend="torch")).name == "torch"


def test_the_torch_backend_never_refuses():
    for name in CASES:
        for dtype in (torch.float64, torch.bfloat16):
            pair, spec = make_case(name, dtype)
            assert TorchBackend().why_not(pair.shape, spec, OPTIONS) is None


@pytest.mark.parametrize("traced", [False, True])
def test_a_compiler_of_backward_sees_the_operator(traced, monkeypatch):
    """Compiled autograd traces the backward of an eager forward: it must not look into kernels."""

    class Seen(TorchDispatchMode):
        def __init__(self):
            super().__init__()
            self.names = []

        def __torch_dispatch__(self, func, types, args=(), kwargs=None):
            self.names.append(str(func))
            return func(*args, **(kwargs or {}))

    a, b = (torch.randn(9, 4, dtype=torch.float64, requires_grad=True) for _ in range(2))
    want = torch.autograd.grad(tw.clip_loss(a, b, 2.0), (a, b))
    loss = tw.clip_loss(a, b, 2.0)
    with monkeypatch.context() as patch, Seen() as seen:
        if traced:
            patch.setattr(torch.compiler, "is_compiling", lambda: True)
        got = torch.autograd.grad(loss, (a, b))
    assert ("tilewise.pair_loss_backward.default" in seen.names) == traced
    for one, other in zip(got, want, strict=True):
        assert_close(one, other, 1e-12, "gradient")
