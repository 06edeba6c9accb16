"""The plan of a run: the number of steps and the learning rate of each, including steps that were added later."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

from tilewise.errors import ConfigError
from tilewise.train.config import OptimConfig
from tilewise.train.optim import learning_rate


class Leg(NamedTuple):
    """Steps ``first .. last - 1`` of a run, and how their learning rate is computed.

    Args:
        first: number of steps before the leg.
        last: number of steps at the end of the leg.
        kind: "plan" and "stretch" use the curve of a run of `last` steps. "restart" uses the curve of a new run of
            ``last - first`` steps, warm-up included. "constant" uses the final learning rate.
    """

    first: int
    last: int
    kind: str


Plan = tuple[Leg, ...]


def new_plan(steps: int) -> Plan:
    """Return the plan of a new run with `steps` steps."""
    return (Leg(0, steps, "plan"),)


def planned_steps(plan: Plan) -> int:
    """Return the total number of steps."""
    return plan[-1].last


def planned_rate(step: int, plan: Plan, config: OptimConfig) -> float:
    """Return the learning rate of a step. The last leg that has begun determines it.

    >>> plan = (Leg(0, 2, "plan"), Leg(2, 4, "restart"))
    >>> [round(planned_rate(step, plan, OptimConfig(lr=1.0)), 3) for step in range(4)]
    [1.0, 0.5, 1.0, 0.5]
    """
    leg = [leg for leg in plan if leg.first <= step][-1]
    if leg.kind == "constant":
        return config.lr * config.final_lr_share
    if leg.kind == "restart":
        return learning_rate(step - leg.first, leg.last - leg.first, config)
    return learning_rate(step, leg.last, config)


def change_length(plan: Plan, done: int, steps: int, config: OptimConfig) -> Plan:
    """Return the plan of a run whose length changes to `steps`, as ``optim.extend`` says.

    Args:
        plan: the current plan.
        done: the number of steps done.
        steps: the new total number of steps.
        config: ``extend`` and the learning rate.
    """
    before = planned_steps(plan)
    if steps == before:
        return plan
    what = f"the run was planned for {before} steps and has done {done}, and the settings ask for {steps}"
    if config.extend == "refuse":
        raise ConfigError(
            f"{what}. The learning-rate schedule was made for {before} steps. To change the length, also set "
            "optim.extend=restart (warm-up and cosine again over the added steps), stretch (the curve of the new "
            "length from here on) or constant (the final learning rate). Or give the old length, or choose another "
            "output.folder"
        )
    if steps < done:
        raise ConfigError(f"{what}. Steps that are done cannot be undone; choose at least {done}")
    if config.extend == "stretch":
        return (*[leg for leg in plan if leg.first < done], Leg(done, steps, "stretch"))
    if steps < before:
        raise ConfigError(f"{what}. optim.extend={config.extend} adds steps; only stretch can shorten a run")
    if config.extend == "constant" and not config.final_lr_share:
        raise ConfigError(
            f"{what} with optim.extend=constant, but optim.final_lr_share is 0, so nothing would be learned. "
            "Choose restart or stretch"
        )
    return (*plan, Leg(before, steps, config.extend))


def plan_of(saved: Sequence[Sequence[int | str]]) -> Plan:
    """Return the plan that a checkpoint stores as plain values."""
    return tuple(Leg(int(first), int(last), str(kind)) for first, last, kind in saved)
