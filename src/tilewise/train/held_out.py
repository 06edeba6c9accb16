"""Evaluations during a run, on its held-out pairs."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from concurrent.futures import CancelledError
from contextlib import contextmanager, nullcontext

import torch

from tilewise.errors import DataError
from tilewise.train.config import RunConfig
from tilewise.train.data import EvalPairs
from tilewise.train.evaluate import Encoders, evaluate_retrieval, telling_k
from tilewise.train.models import TwoTowers
from tilewise.train.progress import RunProgress
from tilewise.train.run_folder import MetricsLog
from tilewise.train.run_state import RunState


class HeldOut:
    """The held-out pairs of a run, and its recalls on them.

    Args:
        pairs: the pairs; None if there are none, and on all ranks but the first.
        state: the state of the run. Keeps the metrics of the last evaluation, and step and recall of the best one.
        config: settings of the run.
        device: where images and captions are encoded.
        steps: total number of steps of the run.
        build: builds the model, if the one of the state is sharded. It then gets the collected weights.
    """

    def __init__(
        self,
        pairs: EvalPairs | None,
        state: RunState,
        config: RunConfig,
        device: torch.device,
        steps: int,
        build: Callable[[], TwoTowers] | None = None,
    ) -> None:
        self.pairs, self.state, self.config, self.device, self.steps = pairs, state, config, device, steps
        self.build = build

    @property
    def due(self) -> bool:
        """Whether the run is evaluated after this step."""
        every = self.config.output.evaluate_every
        return self.state.step == self.steps or bool(every and self.state.step % every == 0)

    @contextmanager
    def encoders(self) -> Iterator[Encoders]:
        """The model, ready to encode images and captions: with the averaged weights, if there are any."""
        loop, average, model = self.config.loop, self.state.average, self.state.model
        if self.build is not None:
            average, model, tensors = None, self.build(), self.state.tensors
            model.load_state_dict(tensors["model"] | tensors.get("average", {}))
            model.to(self.device)
        with average.used() if average is not None else nullcontext():
            yield Encoders(model, self.device, loop.precision, loop.chunk_size)

    def measure(self, log: MetricsLog, bar: RunProgress) -> None:
        """Compute the recalls, write them to the log, and remember the best step."""
        state = self.state
        assert self.pairs is not None
        with self.encoders() as encoders:
            try:
                state.metrics = evaluate_retrieval(encoders, self.pairs, watch=bar.evaluating)
            except CancelledError:
                raise DataError(
                    "stopped by a signal while the held-out images could not be read: a read has not returned. "
                    "The same command continues from the last checkpoint"
                ) from None
        log.write(state.step, "eval", state.metrics)
        k = telling_k(state.metrics)
        recall = state.metrics[f"t2i_r{k}"]
        bar.evaluated(k, recall)
        if recall >= state.best.get("value", -1.0):
            state.best = {"step": float(state.step), "value": recall}
