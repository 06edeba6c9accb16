"""How a loss would be computed: backend, strategy, reason and memory, without computing anything."""

from __future__ import annotations

import contextlib
import textwrap
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.utils._pytree import tree_map_only

from tilewise.errors import ConfigError
from tilewise.kernels.registry import refusals
from tilewise.kernels.spec import HALF_TYPES, Needs, PairShape, may_save, stat_dtype
from tilewise.ops.budget import column_chunk, limit_and_reason, ring_team
from tilewise.ops.call import Call
from tilewise.ops.route import Route, Strategy
from tilewise.ops.rows import copied_bytes
from tilewise.options import DEFAULT_SMALL_MIB, TileOptions
from tilewise.ring.exchange import find_exchange

MIB = 2**20


@dataclass(frozen=True)
class Decision:
    """How one operator call is computed. Bytes are upper bounds, above the inputs.

    Args:
        operator: "pair_stats" (vectors) or "pair_loss" (a scalar).
        backend: its name.
        refused: (backend, reason) of each backend that "auto" prefers and could not choose.
        strategy: "small", "two_pass", "one_pass" or "filtered".
        reason: why this strategy.
        rows, cols, width, dtype, device: of the scores and their features.
        gradient_bytes: the gradients that are returned.
        accumulator_bytes: float32 sums or saved float32 gradients of half types; over a group also the blocks that
            travel and the sums over them, for shards of equal size.
        workspace_bytes: what a call of these sizes uses of the workspace.
        copy_bytes: if some tokens are ignored, a copy of the others, and their gradient before it is put back.
        workspace_limit: the most workspace that the call may use, and why: ``TileOptions.workspace_mib`` or a default.
        program: on the Triton backend, the steps of forward and backward, their buffers, and the exact peak of their
            memory; "" for the filter, over a group, and on other backends.
        ring: how blocks of columns move between the ranks of a group, for shards of equal size; "" for none.
    """

    operator: str
    backend: str
    strategy: Strategy
    reason: str
    rows: int
    cols: int
    width: int
    dtype: torch.dtype
    device: torch.device
    gradient_bytes: int
    accumulator_bytes: int
    workspace_bytes: int
    refused: tuple[tuple[str, str], ...] = ()
    copy_bytes: int = 0
    workspace_limit: str = ""
    program: str = ""
    ring: str = ""

    @property
    def peak_bytes(self) -> int:
        """The most memory that forward and backward take together, above the inputs."""
        return self.gradient_bytes + self.accumulator_bytes + self.copy_bytes + self.workspace_bytes

    def __str__(self) -> str:
        kind = str(self.dtype).removeprefix("torch.")
        parts = {
            "gradients": self.gradient_bytes,
            "accumulators": self.accumulator_bytes,
            "copies": self.copy_bytes,
            "workspace": self.workspace_bytes,
        }
        memory = ", ".join(f"{name} {-(-size // MIB):,}" for name, size in parts.items() if size)
        program = f"\n  program\n{textwrap.indent(self.program, '    ')}" if self.program else ""
        ring = f"\n  ring      {self.ring}" if self.ring else ""
        refused = "".join(f"; {name} not chosen: {reason}" for name, reason in self.refused)
        return (
            f"{self.operator}: {self.rows:,} x {self.cols:,} scores of width {self.width:,}, {kind} on {self.device}\n"
            f"  backend   {self.backend}{refused}\n"
            f"  strategy  {self.strategy}: {self.reason}\n"
            f"  memory    at most {-(-self.peak_bytes // MIB):,} MiB above the inputs ({memory})\n"
            f"  workspace {self.workspace_limit}{ring}{program}"
        )


@dataclass(frozen=True)
class Explanation:
    """The decisions behind one loss, one for each operator call. Print it to read them.

    ``plans``: for each loss that got sharded tensors, what each dimension of the mesh is and what is sent over it. The
    sizes of its operator calls are those of this rank.
    """

    calls: tuple[Decision, ...]
    plans: tuple[str, ...] = ()

    def __str__(self) -> str:
        return "\n".join([*self.plans, *(str(call) for call in self.calls)])

    __repr__ = __str__


listeners: list[list[Decision | str]] = []


def is_explaining() -> bool:
    """Whether `explain` is running, so that decisions are recorded."""
    return bool(listeners)


def note(operator: str, call: Call, way: Route) -> None:
    """Add the decision of one operator call to every explanation that is being recorded."""
    shape, settings = call.shape, call.settings
    needs = settings.needs
    gradient_bytes = _gradient_bytes(shape, needs, call.leaves[1] is None)
    program, accumulator_bytes, workspace_bytes = _work(call, way, gradient_bytes)
    decision = Decision(
        operator=operator,
        backend=way.backend.name,
        strategy=way.strategy,
        reason=way.reason,
        rows=shape.rows,
        cols=shape.cols,
        width=shape.width,
        dtype=shape.dtype,
        device=shape.device,
        gradient_bytes=gradient_bytes,
        accumulator_bytes=accumulator_bytes + _ring_bytes(call),
        workspace_bytes=workspace_bytes,
        refused=tuple(refusals(shape, settings.spec, settings.options).items()),
        workspace_limit=_workspace_limit(call, way),
        copy_bytes=copied_bytes(shape, settings.spec, needs.a),
        program=program,
        ring=_ring(call),
    )
    for found in listeners:
        found.append(decision)


def note_plan(describe: Callable[[], str]) -> None:
    """Add the plan of a loss over sharded tensors to every explanation that is being recorded."""
    for found in listeners:
        found.append(describe())


def _gradient_bytes(shape: PairShape, needs: Needs, symmetric: bool) -> int:
    rows = shape.rows * needs.a + shape.cols * (needs.b and not symmetric)
    return rows * shape.width * shape.dtype.itemsize + 4 * shape.cols * needs.bias


def _accumulator_bytes(call: Call, way: Route) -> int:
    spec, options, needs = call.settings.spec, call.options, call.settings.needs
    if not way.forms_gradients:
        return way.backend.accumulator_bytes(call.shape, needs, spec, options)
    if call.shape.dtype not in HALF_TYPES:
        return 0  # saved gradients become the returned ones
    saved = way.saved_like(call.shape, needs, spec, options)
    wide = [(size, dtype) for size, dtype in saved if len(size) == 2 and dtype == torch.float32]
    return sum(size[0] * size[1] * dtype.itemsize for size, dtype in wide)


def _work(call: Call, way: Route, gradient_bytes: int) -> tuple[str, int, int]:
    """`Decision.program`, bytes of accumulators without those of a group, and `Decision.workspace_bytes`."""
    spec, _, group_name, needs = call.settings[:4]
    accumulators = _accumulator_bytes(call, way) if any(needs) else 0
    if way.strategy == "small":
        assert way.backend.small is not None
        program, workspace = way.backend.small.describe(call.small_key(call.shape, scalar=way.forms_gradients))
        return program, accumulators, workspace
    if not group_name:
        job = call.pair(), call.weights(), needs, spec, call.options
        found = way.backend.describe(*job, strategy=way.strategy, save=may_save(needs, spec))
        if found is not None:
            return found[0], 0, max(0, found[1] - gradient_bytes)
    return "", accumulators, _workspace_bytes(call, way)


def _workspace_bytes(call: Call, way: Route) -> int:
    team, options = _team(call)
    shape = call.shape._replace(cols=team * call.shape.cols)
    used = way.backend.workspace_bytes(shape, call.settings.spec, options, way.strategy)
    if shape.dtype in HALF_TYPES:
        return used
    # Before that, `positive_shift` multiplies each row by its own column.
    return max(used, min(options.workspace_bytes // 2, 2 * shape.rows * shape.width * shape.dtype.itemsize))


def _workspace_limit(call: Call, way: Route) -> str:
    """`Decision.workspace_limit`. Over a group, for shards of equal size."""
    spec, options, _, needs = call.settings[:4]
    if way.strategy == "small" and options.workspace_mib is None:
        mib, reason = DEFAULT_SMALL_MIB, "the default of a small batch"
    else:
        mib, reason = limit_and_reason(options, call.shape, spec, needs)
    return f"at most {mib:,} MiB: {reason}"


def _team(call: Call) -> tuple[int, TileOptions]:
    """How many ranks of a ring gather their blocks, for shards of equal size, and the options for the work on them."""
    world = find_exchange(call.settings.group_name).world
    if world == 1 or call.settings.spec.same_rows:
        return 1, call.options
    return ring_team(call.options, call.shape, call.shape.cols, world)


def _ring(call: Call) -> str:
    """`Decision.ring`."""
    world, team = find_exchange(call.settings.group_name).world, _team(call)[0]
    if world == 1 or call.settings.spec.same_rows:
        return ""
    blocks = "each block of columns is" if team == 1 else f"the blocks of {team} ranks are gathered and"
    return f"{world} ranks: {blocks} computed at once, {world // team} launches in each direction"


def _ring_bytes(call: Call) -> int:
    """Buffers of `rotate_blocks` and float32 sums of gradients, for shards of equal size; 0 without a group."""
    spec, options, group_name, needs = call.settings[:4]
    if find_exchange(group_name).world == 1:
        return 0
    team, rest = _team(call)
    shape, stat = call.shape, stat_dtype(call.shape.dtype).itemsize
    rows, cols = shape.rows * shape.width, shape.cols * shape.width
    if spec.same_rows:  # the ranks exchange only vectors
        return stat * rows * needs.a
    if team > 1:
        return 2 * stat * rows * needs.a + call.options.workspace_bytes - rest.workspace_bytes
    travelling = stat if options.ring_gradients == "float32" else shape.dtype.itemsize
    columns, chunk = needs.a if spec.symmetric else needs.b, None
    if columns and not spec.symmetric:
        chunk, _ = column_chunk(call.options, shape.width * stat, shape.cols)
    of_block = cols if chunk is None else chunk * shape.width
    sums = 2 * rows * needs.a + of_block * columns  # of all blocks, and those of one block
    return 2 * cols * (shape.dtype.itemsize + travelling * columns) + stat * sums


@contextlib.contextmanager
def _listening() -> Iterator[list[Decision | str]]:
    found: list[Decision | str] = []
    listeners.append(found)
    try:
        yield found
    finally:
        listeners[:] = [other for other in listeners if other is not found]


def explain(loss: Callable[..., Any], *args: Any, **kwargs: Any) -> Explanation:
    """How ``loss(*args, **kwargs)`` would be computed. Nothing is computed, and nothing is allocated.

    Args:
        loss: a loss function or Module of tilewise, such as `clip_loss`.
        args, kwargs: its arguments. Tensors are replaced by fake ones of the same sizes and devices; meta tensors
            would be taken for tensors on the meta device, so pass real ones, for instance ``torch.empty(...)``.

    >>> import tilewise as tw
    >>> x = torch.empty(8192, 64, requires_grad=True)
    >>> found = tw.explain(tw.clip_loss, x, torch.empty(8192, 64), 20.0)
    >>> found.calls[0].backend, found.calls[0].strategy
    ('torch', 'two_pass')
    """
    from torch._subclasses.fake_tensor import DataDependentOutputException, FakeTensorMode

    name = getattr(loss, "__name__", type(loss).__name__)
    with _listening() as found, FakeTensorMode(allow_non_fake_inputs=True) as mode:
        fake_args, fake_kwargs = tree_map_only(Tensor, mode.from_tensor, (args, kwargs))
        try:
            loss(*fake_args, **fake_kwargs)
        except DataDependentOutputException as error:
            raise ConfigError(
                f"explain is for losses of tilewise, whose strategy depends on no value, and {name} reads values "
                "of its tensors. Retrieval has only one strategy, so there is nothing to explain"
            ) from error
    if not found:
        raise ConfigError(
            f"explain is for losses of tilewise, and {name} called none of its operators. Pass one of them, such as "
            "tilewise.clip_loss"
        )
    plans = tuple(note for note in found if isinstance(note, str))
    return Explanation(tuple(note for note in found if isinstance(note, Decision)), plans)
