"""The training loop: the schedule of steps, evaluations and checkpoints, and the end of a run."""

from __future__ import annotations

import time
from collections.abc import Iterator
from contextlib import AbstractContextManager, ExitStack, contextmanager, nullcontext, suppress
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch

from tilewise.errors import ConfigError, GroupError, TilewiseError
from tilewise.train.checkpoint import Checkpoint, check_room, latest_checkpoint
from tilewise.train.config import RunConfig, check_same_run, settled
from tilewise.train.data import Batch, BatchStream, SkipLog, open_eval_pairs, open_source
from tilewise.train.distributed import World, is_lost_rank, join_world
from tilewise.train.held_out import HeldOut
from tilewise.train.memory import tensor_bytes
from tilewise.train.messages import Messages
from tilewise.train.models import describe_model
from tilewise.train.objective import Objective
from tilewise.train.optim import AveragedWeights, build_optimizer
from tilewise.train.plan import change_length, new_plan, planned_steps
from tilewise.train.prepare import build_model, fit_batch, total_steps
from tilewise.train.progress import RunProgress, counted
from tilewise.train.run_folder import MetricsLog, RunFolder
from tilewise.train.run_state import RunState
from tilewise.train.settings import build
from tilewise.train.sharding import shard_towers
from tilewise.train.signals import StopRequest
from tilewise.train.status import status_kept
from tilewise.train.step_memory import memory_now
from tilewise.train.trackers import check_trackers, open_trackers
from tilewise.train.update import Update

if TYPE_CHECKING:
    from rich.console import Console


@dataclass(frozen=True)
class RunResult:
    """How a run ended.

    Args:
        folder: folder of the run.
        step: number of steps done.
        finished: whether all steps are done.
        signal_number: the signal that stopped the run, or 0.
        metrics: metrics of the last evaluation.
    """

    folder: Path
    step: int
    finished: bool
    signal_number: int
    metrics: dict[str, float]


class Trainer:
    """A run from its configuration to its last checkpoint.

    Args:
        config: settings of the run.
        world: the ranks.
        console: prints messages and the progress bar; None prints nothing.
    """

    def __init__(self, config: RunConfig, world: World, console: Console | None = None) -> None:
        config = settled(config)
        check_trackers(config)
        self.world, self.console = world, console if world.is_first else None
        self.messages = Messages(self.console)
        self.signal_number = 0
        self.saved_step = 0  # the step of the last checkpoint that was written or loaded
        self.seconds = self.waited = 0.0  # time of all steps, and the part spent waiting for data
        self.folder = RunFolder(config.output.folder)
        torch.manual_seed(config.loop.seed)
        self.sharded = config.loop.shard and world.group is not None
        self.model = build_model(self.folder, config, torch.device("cpu") if self.sharded else world.device)
        self.skips = SkipLog()
        with counted(self.console if config.data.source == "shards" else None, "counting pairs in shards") as watch:
            source = open_source(config.data, self.model.pixels.size, self.skips, watch)
        self.messages.notices("training pairs", self.skips)
        self.config = config = fit_batch(config, len(source), world.size, self.messages)
        self.stream = BatchStream(
            source, self.model.tokenizer, seed=config.loop.seed, batch_size=config.loop.batch_size,
            rank=world.rank, world=world.size, skips=self.skips, prefetch=config.data.prefetch,
        )  # fmt: skip
        pairs, skips = None, SkipLog()
        if world.is_first:
            with counted(self.console, "reading held-out images") as watch:
                pairs = open_eval_pairs(config.data, self.model.pixels.size, skips, watch=watch)
        self.messages.skipped("held-out pairs", skips)
        self.steps = total_steps(config.loop, self.stream.steps_per_epoch)
        if self.sharded:
            shard_towers(self.model, world)
        average = AveragedWeights(self.model, config.optim.ema_decay) if config.optim.ema_decay else None
        objective = Objective(config, self.model, world)
        self.state = RunState(self.model, build_optimizer(self.model, config.optim), average, objective.scaler)
        self.state.plan, self.state.pairs = new_plan(self.steps), len(source)
        self.update = Update(self.state, objective, config, world, self.folder.checkpoints)
        build = partial(self.folder.build_model, config, for_training=False) if self.sharded else None
        self.held_out = HeldOut(pairs, self.state, config, world.device, self.steps, build)

    @property
    def step(self) -> int:
        """Number of steps done."""
        return self.state.step

    # -- a whole run ---------------------------------------------------------------------------------------

    def run(self) -> RunResult:
        """Train until the last step, a signal or an error. An error does not affect the last good checkpoint."""
        with ExitStack() as held:
            self._take_folder(held)
            pairs = self.held_out.pairs
            held_out = None if pairs is None else len(pairs.images)
            self.messages.sizes(
                self.model, self.world, self.state.pairs, held_out, self.steps, self.stream.steps_per_epoch
            )
            self.messages.warnings(self.model, self.config)
            self._continue()
            if self.world.is_first:
                self._write_down()
            with self._log() as log, self._status(), StopRequest() as stop, self._bar() as bar:
                self._train(log, stop, bar)
            if pairs is not None:
                pairs.images.give_up_when(None)
            here = "" if self.world.size == 1 else f" of rank 0, one of {self.world.size}"
            self.messages.skipped(f"training pairs{here}", self.skips)
            self.messages.slow_data(self.seconds, self.waited, self.config.data)
            self.world.wait()
            return RunResult(
                self.folder.path, self.step, self.step >= self.steps, self.signal_number, dict(self.state.metrics)
            )

    def _take_folder(self, held: ExitStack) -> None:
        """Lock the folder on the first rank and check that it can be written. If it cannot, every rank stops."""
        problem: TilewiseError | None = None
        if self.world.is_first:
            copies = 1 + (2 if self.config.optim.name == "adamw" else 1) + (self.state.average is not None)
            room = copies * tensor_bytes(self.model.parameters()) + 2**20
            try:
                held.enter_context(self.folder.locked())
                check_room(self.folder.path, room, self._most_checkpoints())
            except TilewiseError as error:
                problem = error
        if self.world.total(float(problem is not None))[0]:
            raise problem or GroupError(f"rank {self.world.rank} stops: the first rank cannot use output.folder")

    def _most_checkpoints(self) -> int:
        """Return how many checkpoints can be on the disk at once: the last few, the best one and a new one."""
        output = self.config.output
        written = 2 + self.steps // output.checkpoint_every  # plus the one of the last step and one of a signal
        if output.evaluate_every:
            written += self.steps // output.evaluate_every
        return min(output.keep_last + 2, written, self.steps)

    def _write_down(self) -> None:
        """Write the settings, and a description from which the model can be built without its initial weights."""
        self.folder.save_config(self.config)
        self.messages.say(f"all settings, defaults too: {self.folder.config_file}")
        if not (self.step and self.folder.model.is_dir()):
            describe_model(self.model, self.folder.model)

    def _status(self) -> AbstractContextManager[None]:
        if not self.world.is_first:
            return nullcontext()
        return status_kept(self.folder.path, lambda: (self.step, self.steps), lambda: self.signal_number)

    def _train(self, log: MetricsLog | None, stop: StopRequest, bar: RunProgress) -> None:
        before = time.perf_counter()
        stopping = False
        # One process can stop between two steps. Several ranks must agree in a step; torchrun ends those that block.
        give_up = stop.overdue if self.world.size == 1 else None
        if self.held_out.pairs is not None:
            self.held_out.pairs.images.give_up_when(stop.overdue)
        self._evaluate_again(log, bar)
        for batch in self.stream.batches(self.state.position, self.step, self.steps, give_up):
            waited = time.perf_counter() - before
            line, stopping = self._step(batch, stop)
            seconds = time.perf_counter() - before
            self.seconds, self.waited = self.seconds + seconds, self.waited + waited
            speed = {
                "seconds": seconds,
                "data_seconds": waited,
                "pairs_per_second": line["rows"] / seconds,
                "memory_bytes": float(memory_now(self.world.device)),
            }
            if log is not None and (self.step % self.config.output.log_every == 0 or self.step == self.steps):
                log.write(self.step, "train", {**line, **speed})
            self._after_step(log, bar, stopping)
            bar.step(self.step, line, speed)
            if stopping:  # all ranks stop, whichever of them received the signal
                self.signal_number = int(self.world.largest(stop.signal_number))
                break
            before = time.perf_counter()  # evaluations and checkpoints are not part of the next step
        if not stopping and self.step < self.steps:
            self._give_up_reading(stop)

    def _give_up_reading(self, stop: StopRequest) -> None:
        """End a run that got a stop signal while a read of the data blocks. Save the state of the last whole step."""
        self.signal_number = stop.signal_number
        self.messages.say(
            f"the data of step {self.step + 1} cannot be read: a read has not returned. The run stops before it"
        )
        if self.step and self.saved_step != self.step:
            self.state.collect(self.world)
            self._save()

    def _save(self) -> None:
        self.state.save(self.folder.checkpoints, self.config)
        self.saved_step = self.step

    def _after_step(self, log: MetricsLog | None, bar: RunProgress, stopping: bool) -> None:
        """Evaluate and save if they are due."""
        output, last = self.config.output, self.step == self.steps
        due = last or stopping or self.step % output.checkpoint_every == 0
        if due or self.held_out.due:
            self.state.collect(self.world)
        if self.held_out.due:
            try:
                self._evaluate(log, bar)
            except Exception:  # keep the steps; `_evaluate_again` evaluates them when the run continues
                if self.world.is_first:
                    self._save()
                raise
        best = self.state.best.get("step") == self.step  # only the first rank evaluates and knows it
        if self.world.is_first and (due or best):
            self._save()
        if not last:
            self.state.tensors = {}
        if due:
            self.world.wait()

    def _evaluate_again(self, log: MetricsLog | None, bar: RunProgress) -> None:
        """Evaluate the loaded checkpoint if its own evaluation is due and failed before."""
        if not self.step or not self.held_out.due:
            return
        self.state.collect(self.world)
        if log is not None and not log.evaluated and self.held_out.pairs is not None:
            self.held_out.measure(log, bar)
            self._save()  # with the metrics
        self.world.wait()

    def _evaluate(self, log: MetricsLog | None, bar: RunProgress) -> None:
        """Evaluate on the first rank while the others wait."""
        if self.held_out.pairs is not None:
            assert log is not None
            self.held_out.measure(log, bar)
        self.world.wait()

    def _step(self, batch: Batch, stop: StopRequest) -> tuple[dict[str, Any], bool]:
        return self.update.run(batch, stop)

    # -- continuing ----------------------------------------------------------------------------------------

    def _continue(self) -> None:
        """Load the newest whole checkpoint on every rank."""
        checkpoint, problems = latest_checkpoint(self.folder.checkpoints)
        for problem in problems:
            self.messages.say(f"ignored a damaged checkpoint: {problem}")
        if checkpoint is not None and checkpoint.state["format"] == 1:
            self.messages.say(
                f"{checkpoint.path} was written by an earlier version, without a checksum of its state.json. "
                "Damage in that file may go unnoticed. New checkpoints have one"
            )
        found = float(checkpoint.step) if checkpoint is not None else 0.0
        if self.world.total(found)[0] != found * self.world.size:
            raise GroupError(
                f"ranks found different checkpoints (rank {self.world.rank}: step {found:.0f}). "
                "output.folder must be a folder that all ranks share"
            )
        if checkpoint is None:
            return
        self._check_same_run(checkpoint)
        self.state.load(checkpoint)
        self.saved_step = self.step
        if self.world.is_first:
            self.skips.restore(self.state.skips)
        before = planned_steps(self.state.plan)
        self.state.plan = change_length(self.state.plan, self.step, self.steps, self.config.optim)
        changed = f" ({before} before; learning rate: {self.config.optim.extend})" if before != self.steps else ""
        self.messages.say(f"continuing after step {self.step} of {self.steps}{changed}")

    def _check_same_run(self, checkpoint: Checkpoint) -> None:
        saved = checkpoint.state
        check_same_run(saved["config"], self.config)
        pairs = saved.get("pairs", self.state.pairs)
        if pairs != self.state.pairs:
            raise ConfigError(
                f"the run in {self.folder.path} was started on {pairs} training pairs, and {self.config.data.path!r} "
                f"has {self.state.pairs}, so the position in the data is not valid. Give the same data, which may be "
                "in another place, or choose another output.folder"
            )
        if "plan" not in saved:  # written by an earlier version
            self.state.plan = new_plan(total_steps(build(RunConfig, saved["config"]).loop, self.stream.steps_per_epoch))

    # -- small helpers -------------------------------------------------------------------------------------

    @contextmanager
    def _log(self) -> Iterator[MetricsLog | None]:
        if not self.world.is_first:
            yield None
            return
        trackers = open_trackers(self.config, self.folder.path, self.step)
        log = MetricsLog(self.folder, self.step, trackers)
        if log.damaged:
            self.messages.say(
                f"{self.folder.metrics_file}: {len(log.damaged)} damaged lines were removed, the first was line "
                f"{log.damaged[0]}. Weights and checkpoints are not affected"
            )
        try:
            yield log
        except BaseException:
            with suppress(TilewiseError):  # a full disk, for example; the error of the run is more important
                log.close()
            raise
        log.close()

    @contextmanager
    def _bar(self) -> Iterator[RunProgress]:
        bar = RunProgress(self.console, self.steps, self.step)
        try:
            yield bar
        finally:
            bar.close()


def train(config: RunConfig, console: Console | None = None) -> RunResult:
    """Train a run in one process, or as one of the ranks that ``torchrun`` started. Write the report at the end."""
    if config.loop.threads:
        torch.set_num_threads(config.loop.threads)
    world = join_world(config.loop.device)
    try:
        return _train(config, world, console)
    except RuntimeError as error:
        first = error.__cause__ if isinstance(error, GroupError) else error  # the ring raises one of its own
        if world.group is None or isinstance(first, TilewiseError) or not is_lost_rank(first):
            raise
        raise GroupError(
            f"rank {world.rank} stops, because another rank has ended or cannot be reached. The message of the rank "
            "that ended first says why. The same command continues from the last checkpoint"
        ) from error
    finally:
        world.close()


def _train(config: RunConfig, world: World, console: Console | None) -> RunResult:
    """Train and write the report. The trainer is freed before the process group is destroyed."""
    trainer = Trainer(config, world, console)
    result = trainer.run()
    if result.finished and config.output.report and world.is_first:
        from tilewise.train.report import write_report

        try:
            with trainer.held_out.encoders() as encoders:
                weights = f"step {trainer.step}, the last one"
                write_report(config.output.folder, encoders, trainer.held_out.pairs, weights)
        except (OSError, TilewiseError) as error:  # the run itself is finished and saved
            trainer.messages.say(
                f"no report: {error}. The run is finished and saved. "
                f"To write the report later: tilewise report {trainer.folder.path}"
            )
    return result
