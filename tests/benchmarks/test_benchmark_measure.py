"""Measured times and peaks agree with known waits and allocations."""

import time
from itertools import pairwise

import pytest
import torch

from benchmarks import measure

CPU = torch.device("cpu")
MIB = 2**20


def holding(mib, times=1, before=0):
    """Target of `cpu_peak_bytes`: allocate and free `mib` MiB, `times` times; the warm-up does so with `before`."""

    def hold(size):
        block = torch.ones(size * MIB, dtype=torch.uint8)
        return int(block[-1])

    def warm_up():
        hold(1)
        if before:
            hold(before)

    return warm_up, lambda: [hold(mib) for _ in range(times)]


def broken():
    raise RuntimeError("this target does not work")


def cannot_allocate():
    return (lambda: None), (lambda: torch.empty(2**60, dtype=torch.uint8))


@pytest.mark.parametrize(
    "arguments", [{"mib": 96}, {"mib": 96, "times": 3}, {"mib": 96, "before": 400}], ids=["once", "thrice", "after"]
)
def test_cpu_peak_is_what_was_held_at_once(arguments):
    """The peak is the same once, repeatedly, and after a larger allocation was freed."""
    peak = measure.cpu_peak_bytes("tests.benchmarks.test_benchmark_measure:holding", arguments)
    assert abs(peak - 96 * MIB) < 3 * MIB  # a huge page has 2 MiB


def test_cpu_peak_does_not_guess():
    measure.require_counter()
    with pytest.raises(measure.MeasurementError, match="does not work"):
        measure.cpu_peak_bytes("tests.benchmarks.test_benchmark_measure:broken", {})
    with pytest.raises(MemoryError):
        measure.cpu_peak_bytes("tests.benchmarks.test_benchmark_measure:cannot_allocate", {})


def test_time_is_the_median_of_the_turns():
    taken = iter([0.0, 0.02, 0.02, 0.2])
    timing = measure.time_in_turns({"sleeper": lambda: time.sleep(next(taken))}, CPU, repeats=3, budget_s=1e-9)[
        "sleeper"
    ]
    assert timing.repeats == 1
    several = measure.time_in_turns({"x": lambda: None}, CPU, repeats=9, budget_s=0.0, least=3)
    assert several["x"].repeats == 3
    waits = [0.01, 0.01, 0.01, 0.2, 0.01, 0.01]
    timing = measure.time_in_turns(
        {"sleeper": lambda: time.sleep(waits.pop() if waits else 0.01)}, CPU, repeats=9, budget_s=0.3
    )["sleeper"]
    assert 9 <= timing.median_ms < 150  # sleeps of 10 ms and one of 200 ms, on a busy machine
    assert timing.low_ms <= timing.median_ms <= timing.high_ms


def test_a_clock_may_be_chosen():
    """A sleep takes time, and no processor time."""
    found = measure.time_in_turns({"x": lambda: time.sleep(0.05)}, CPU, repeats=3, clock=time.process_time)
    assert found["x"].median_ms < 25.0


def test_methods_take_turns():
    order = []
    steps = {name: (lambda name=name: order.append(name)) for name in "abc"}
    measure.time_in_turns(steps, CPU, repeats=4, budget_s=1e-9)
    warmed = [order.index(name) for name in "abc"]
    assert warmed == sorted(warmed)
    assert sorted(order[-3:]) == ["a", "b", "c"]
    order.clear()
    slow = {name: (lambda name=name: (order.append(name), time.sleep(0.002))) for name in "ab"}
    timings = measure.time_in_turns(slow, CPU, repeats=4, budget_s=10.0)
    assert order[-8:] == ["a", "b"] * 4
    assert all(timing.repeats == 4 for timing in timings.values())


@pytest.mark.parametrize("count", [1, 2, 3, 5, 11])
def test_orders_differ_and_none_follows_itself(count):
    names = [chr(ord("a") + i) for i in range(count)]
    turns = list(measure.orders(names, 12))
    assert turns == list(measure.orders(names, 12))  # the same in every run
    assert all(sorted(turn) == names for turn in turns)
    in_a_row = [name for turn in turns for name in turn]
    before = {name: {x for x, y in pairwise(in_a_row) if y == name} for name in names}
    if count > 1:
        assert all(name not in before[name] for name in names)
    if count > 2:
        assert all(len(before[name]) >= min(count - 1, 4) for name in names)  # each follows many others


def test_a_failure_is_a_result_and_the_others_go_on():
    def no_memory():
        raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 4 TB\nmore")

    def no_luck():
        raise ValueError("odd width")

    steps = {"big": no_memory, "odd": no_luck, "fine": lambda: None, "huge": cannot_allocate()[1]}
    outcome = measure.time_in_turns(steps, CPU, repeats=2)
    assert outcome["big"] == measure.Failure("oom", "CUDA out of memory. Tried to allocate 4 TB")
    assert outcome["odd"] == measure.Failure("error", "ValueError: odd width")
    assert outcome["fine"].repeats == 2
    assert outcome["huge"].status == "oom"
    assert list(outcome) == list(steps)


def test_a_step_starts_without_gradients():
    leaf = torch.ones(3, requires_grad=True)
    step = measure.Step(lambda: (2 * leaf).sum(), [leaf])
    assert step() == 6
    assert step() == 6
    assert leaf.grad.tolist() == [2, 2, 2]  # not accumulated over steps
    step.clear()
    assert leaf.grad is None
    assert measure.Step(lambda: torch.tensor(3.0))() == 3  # no gradient


def test_the_rate_of_products_is_one_that_exists():
    assert 1e8 < measure.sustained_rate(CPU, seconds=0.05) < 1e14
