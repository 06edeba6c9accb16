"""Messages of a run in addition to its progress: sizes, warnings, skipped pairs and damaged shards."""

from __future__ import annotations

from typing import TYPE_CHECKING

from tilewise.train.config import DataConfig, RunConfig
from tilewise.train.data import SkipLog
from tilewise.train.distributed import World
from tilewise.train.models import TwoTowers
from tilewise.train.terminal import say

if TYPE_CHECKING:
    from rich.console import Console

NOTICES = 5  # damaged shards that are named; further ones are counted
# A run of more than so many seconds prints a hint if more than this share of the time was spent waiting for data.
SLOW_DATA_S, SLOW_DATA_SHARE = 20.0, 0.3


class Messages:
    """Messages of a run; without a console nothing is printed."""

    def __init__(self, console: Console | None) -> None:
        self.console = console

    def say(self, text: str) -> None:
        """Print a line."""
        say(self.console, text)

    def sizes(
        self, model: TwoTowers, world: World, pairs: int, held_out: int | None, steps: int, steps_per_epoch: int
    ) -> None:
        """Print the sizes of the run. ``held_out`` is the number of held-out images, or None without any."""
        parameters = sum(p.numel() for p in model.parameters())
        ranks = f", {world.size} ranks" if world.size > 1 else ""
        images = "no" if held_out is None else f"{held_out:,}"
        self.say(
            f"{pairs:,} pairs, {images} held-out images; {parameters:,} parameters on {world.device}{ranks}; "
            f"{steps:,} steps, {steps_per_epoch:,} per epoch"
        )

    def warnings(self, model: TwoTowers, config: RunConfig) -> None:
        """Print warnings about settings that are probably not meant."""
        if mismatch := _name_mismatch(model, config):
            self.say(f"warning: {mismatch}")
        if config.loop.steps and config.loop.epochs:
            self.say(
                f"warning: loop.steps={config.loop.steps} and loop.epochs={config.loop.epochs:g} are both set. The run "
                "has the number of steps, and loop.epochs is not used"
            )
        if config.data.id_column and not config.loss.mask_same_id:
            self.say(
                f"warning: data.id_column={config.data.id_column!r} is set, but loss.mask_same_id is false, so "
                "pairs with the same id are negatives of one another. To mask them, set loss.mask_same_id=true"
            )

    def skipped(self, what: str, skips: SkipLog) -> None:
        """Print how many pairs were skipped and why, if any were, and what is new in the log."""
        if skips.total:
            first = "".join(f". First: {example}" for example in skips.examples[:1])
            self.say(f"{what}: {skips.summary()}{first}")
        self.notices(what, skips)

    def notices(self, what: str, skips: SkipLog) -> None:
        """Print the sentences of a log that were not printed yet: at most `NOTICES`; the rest are counted."""
        new = skips.take_notices()
        for sentence in new[:NOTICES]:
            self.say(f"{what}: {sentence}")
        if len(new) > NOTICES:
            self.say(f"{what}: at least {len(new) - NOTICES} more shards are damaged")

    def slow_data(self, seconds: float, waited: float, data: DataConfig) -> None:
        """Print a hint if ``waited``, the time spent waiting for images, is a large share of ``seconds``."""
        if seconds > SLOW_DATA_S and waited > SLOW_DATA_SHARE * seconds:
            advice = "" if data.source == "icons" else f". Raise data.workers above {data.workers}"
            self.say(f"{100 * waited / seconds:.0f} % of the time was spent waiting for images{advice}")


def _name_mismatch(model: TwoTowers, config: RunConfig) -> str:
    """Return how the name of the model differs from its weights, or an empty string."""
    if model.kind == "icon":
        return ""
    from tilewise.train.models.pretrained import name_mismatch

    return name_mismatch(config.model, model.configs)
