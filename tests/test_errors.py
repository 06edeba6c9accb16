"""Every bad input has its error, whose words say what was wanted, what came, and what to do. Nothing else changes.

What the message says is then done: the result must be that of an oracle in float64.
"""

import ast
import re
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import NamedTuple

import pytest
import torch
from tests import bad_cache, bad_distillation, bad_drop_ins, bad_inputs, bad_retrieval
from tests.bad_inputs import OPTIONS, A, B, Y, cross_entropy
from tests.compare import assert_close
from torch import Tensor

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


class Bad(NamedTuple):
    """A call that is refused, and the call that its message advises."""

    call: Callable[[], object]
    error: type[TilewiseError]
    words: tuple[str, str, str]  # what was wanted, what came, what to do: patterns in the message
    advice: Callable[[], tuple[Tensor, Tensor]] | None = None  # the result of the advised call, and that of an oracle


SOURCE = Path(tw.__file__).parent
TABLES = (bad_inputs.BAD, bad_distillation.BAD, bad_retrieval.BAD, bad_cache.BAD, bad_drop_ins.BAD)
BAD = {name: Bad(*entry) for table in TABLES for name, entry in table.items()}
# The end of a message that advises no change of the code.
NO_CHANGE = (
    r"\?",  # a question
    "Check how it was computed",
    "Check for a step with a very large gradient",
    "It divides the logits",
    "It divides the scores",
    "It is the share of the uniform labels",
    "It is a fraction, not a percentage",
    "It is a share of the score",
    "0 is exact",
    "0.5 is the Jensen-Shannon divergence",
    "the student needs all other classes",
    "A negative value has no minimum",
    "there is nothing to explain",
    "Call the loss only on its members",
    "It is how many items to find for each query",
    r"at least 1, got .*\. Pass one",
    "Skip empty batches",
    "use the loss of pytorch-metric-learning",
)
# Advice that cannot be executed in one process on a CPU.
ELSEWHERE = {
    "Move one of them": "needs a second device",
    r"Pass \.cpu\(\) of all tensors; .*": "needs an Apple GPU",
    r"For all ranks, pass torch\.distributed\.group\.WORLD": "needs a group: tests/ring/test_ring_losses.py",
    "Call torch.distributed.init_process_group before the loss, .*": "tests/integrations/test_drop_ins_group.py",
}


def test_no_table_hides_an_entry_of_another():
    assert len(BAD) == sum(map(len, TABLES))


# Functions whose errors need ranks, a GPU or another package, and the tests that raise them.
RAISED_ELSEWHERE = {
    "_check.py:group_name": "tests/ring/test_ring_faults.py",
    "_check.py:check_tensor": "tests/test_sharded_arguments.py",
    "cache/encoders.py:check": "tests/cache/test_cached_encoders.py",
    "cache/encode.py:_check_reduced": "tests/cache/test_cache_groups.py",
    "cache/offload.py:target_device": "tests/cache/test_cache_memory.py",
    "cache/sync.py:_check_static_graph": "tests/cache/test_cache_groups.py",
    "integrations/_groups.py:world_group": "tests/integrations/test_drop_ins_group.py",
    "integrations/grad_cache.py:push_gradient": "tests/integrations/test_grad_cache.py",
    "integrations/lightly.py:__init__": "tests/integrations/test_drop_ins.py",
    "integrations/sentence_transformers/": "tests/integrations/test_gist.py, test_ranking_losses.py",
    "integrations/transformers/": "tests/integrations/test_transformers_*.py",
    "integrations/trl.py": "tests/integrations/test_trl*.py",
    "kernels/triton_impl/launch.py:compiled_launch": "tests/kernels/test_launch.py",
    "kernels/registry.py:choose_backend": "tests/losses/test_batch_invariant.py",
    "losses/entry.py:other": "tests/test_sharded_arguments.py",
    "losses/sharded": "tests/test_sharded_arguments.py",
    "losses/nt_xent.py:_over_shards": "tests/test_sharded_arguments.py",
    "ops/distributed/dtensors.py": "tests/test_sharded_arguments.py",
    "ops/distributed/sharded.py": "tests/ops/test_sharded_plan.py",
    "ops/strategies.py:stats_jvp": "tests/ring/test_ring_losses.py",
    "ring/": "tests/ring",
    "tools/": "tests/tools",
}


def raised_in(path: Path) -> Iterator[tuple[str, range]]:
    """The function and the lines of each raise of an error of tilewise in a file."""
    tree = ast.parse(path.read_text())
    functions = [node for node in ast.walk(tree) if isinstance(node, ast.FunctionDef)]
    for node in ast.walk(tree):
        if not isinstance(node, ast.Raise) or node.exc is None:
            continue
        names = {part.id for part in ast.walk(node.exc) if isinstance(part, ast.Name)}
        if any(isinstance(getattr(errors, name, None), type) for name in names):
            around = [f for f in functions if f.lineno <= node.lineno <= (f.end_lineno or 0)]
            inside = max(around, key=lambda f: f.lineno).name
            yield f"{path.relative_to(SOURCE)}:{inside}", range(node.lineno, (node.end_lineno or 0) + 1)


def test_every_error_of_the_library_is_in_a_table():
    """Except for those of the trainer. A new error needs an entry, and one whose message advises needs its call."""
    reached = set()
    for bad in BAD.values():
        with pytest.raises(bad.error) as caught:
            bad.call()
        last = caught.traceback[-1]
        reached.add((Path(last.path), last.lineno + 1))
    missing = {
        f"{where} line {lines[0]}"
        for path in SOURCE.rglob("*.py")
        if path.relative_to(SOURCE).parts[0] != "train"
        for where, lines in raised_in(path)
        if not any((path, line) in reached for line in lines) and not where.startswith(tuple(RAISED_ELSEWHERE))
    }
    assert missing == set()


def message_of(bad):
    with pytest.raises(TilewiseError) as caught:
        bad.call()
    return str(caught.value)


@pytest.mark.parametrize("name", BAD)
def test_bad_input(name):
    call, error, words, _ = BAD[name]
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


@pytest.mark.parametrize("name", [name for name, bad in BAD.items() if bad.advice is not None])
def test_the_advice_gives_the_dense_result(name):
    got, want = BAD[name].advice()
    assert_close(got, want, 1e-5)


@pytest.mark.parametrize("name", [name for name, bad in BAD.items() if bad.advice is None])
def test_without_advice_the_message_asks_for_no_change(name):
    ends = "|".join((*NO_CHANGE, *ELSEWHERE))
    assert re.search(f"({ends})$", message_of(BAD[name]))


def test_every_error_of_the_engine_is_in_the_table():
    raised = {bad.error for bad in BAD.values()}
    elsewhere = {errors.DataError, errors.CheckpointError, TilewiseError}
    known = {thing for thing in vars(errors).values() if isinstance(thing, type)}
    assert raised | elsewhere == known


@pytest.mark.parametrize(
    "builtin, error", [(ValueError, ShapeError), (TypeError, DtypeError), (ValueError, RangeError)]
)
def test_python_users_catch_what_they_expect(builtin, error):
    call = next(bad.call for bad in BAD.values() if bad.error is error)
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


def test_a_failure_inside_leaves_no_gradient_behind(monkeypatch, set_limits):
    set_limits(small_cpu=0)
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
