"""A peer's time: every second belongs to exactly one part."""

from __future__ import annotations

import random
import threading

import pytest

from swarmtrain.observe.activity import Cause
from swarmtrain.observe.split import MicrobatchTimes, Part, TimeSplit


class Clock:
    def __init__(self) -> None:
        self.now = 100.0

    def __call__(self) -> float:
        return self.now


def test_overlapping_parts_are_counted_once_by_precedence() -> None:
    clock = Clock()
    split = TimeSplit(clock)
    split.explain_idle(Cause.NO_LEASE)
    clock.now += 1  # idle
    split.begin(Part.WIRE)
    clock.now += 2  # wire
    split.begin(Part.QUEUE)
    clock.now += 3  # queue
    split.take()
    clock.now += 4  # compute, although a call is open
    split.end(Part.COMPUTE)
    with split.during(Part.REDUCE):
        clock.now += 5  # reduce
    clock.now += 6  # wire
    split.end(Part.WIRE)
    clock.now += 7  # idle
    read = split.read()
    assert read.parts == {"compute": 4, "reduce": 5, "queue": 3, "wire": 8}
    assert read.idle == {"joining": 0, "no_lease": 8}
    assert read.total_s == 28


def test_a_call_that_waits_for_an_empty_stage_or_a_cap_is_idle_time() -> None:
    clock = Clock()
    split = TimeSplit(clock)
    for cause in (Cause.NEXT_STAGE_EMPTY, Cause.CAPPED):
        split.begin(Part.WIRE)
        split.explain_idle(cause)
        clock.now += 2
        split.end(Part.WIRE)
        clock.now += 1
        split.explain_idle(Cause.WORKING)
    clock.now += 5  # nothing going on, and nothing known to be wrong
    assert split.read().idle == {"joining": 0, "next_stage_empty": 3, "capped": 3, "no_lease": 5}
    assert split.read().parts["wire"] == 0


def test_the_parts_add_up_whatever_happens() -> None:
    clock, rng = Clock(), random.Random(7)
    split = TimeSplit(clock)
    open_parts: list[Part] = []
    for _ in range(5000):
        clock.now += rng.random()
        if open_parts and rng.random() < 0.5:
            split.end(open_parts.pop(rng.randrange(len(open_parts))))
        elif rng.random() < 0.9:
            open_parts.append(rng.choice([Part.COMPUTE, Part.REDUCE, Part.QUEUE, Part.WIRE]))
            split.begin(open_parts[-1])
        else:
            split.explain_idle(rng.choice(list(Cause)))
    read = split.read()
    assert sum(read.parts.values()) + sum(read.idle.values()) == pytest.approx(clock.now - 100.0)
    assert read.total_s == pytest.approx(clock.now - 100.0)


def test_two_threads_lose_no_time() -> None:
    split = TimeSplit()

    def toggle(part: Part) -> None:
        for _ in range(20_000):
            with split.during(part):
                pass

    threads = [threading.Thread(target=toggle, args=(part,)) for part in (Part.COMPUTE, Part.WIRE)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    read = split.read()
    assert sum(read.parts.values()) + sum(read.idle.values()) == pytest.approx(read.total_s)
    assert not any(split.is_going_on(part) for part in Part)


def test_microbatch_times_split_a_microbatchs_stay() -> None:
    times = MicrobatchTimes()
    times.add(1.0, 2.0, 10.0)
    times.add(1.0, 2.0, 2.5)  # clocks of two threads: never below zero
    assert (times.queue_s, times.compute_s, times.downstream_s, times.count) == (2.0, 4.0, 7.0, 2)
