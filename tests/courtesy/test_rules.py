"""When a peer pauses for its owner, and when it works again: no flapping, no forgetting."""

from __future__ import annotations

from dataclasses import replace

import pytest

from swarmtrain.courtesy.hours import parse_hours
from swarmtrain.courtesy.rules import Manners, Rules, Seen
from swarmtrain.courtesy.traffic import TrafficCap
from swarmtrain.observe.activity import Cause

NOON = 1_750_075_200.0  # 12:00 UTC
QUIET = Seen(others_cpu=0.0, input_idle_s=9999.0, gpu_celsius=50.0, gpu_watts=30.0)


def causes(manners: Manners, looks: list[tuple[float, Seen]]) -> list[Cause | None]:
    """What it answers to looks at these times."""
    found = [manners.look(seen, now=now, wall=NOON + now) for now, seen in looks]
    return [pause.cause if pause is not None else None for pause in found]


def test_who_asks_for_nothing_never_pauses() -> None:
    busy = Seen(1.0, 0.0, ("game",), ("blender",), 120.0, 900.0)
    assert Manners(Rules()).look(busy, now=0.0, wall=NOON, month_bytes=1e18) is None


def test_that_the_machine_is_idle_must_be_seen_first_and_one_busy_moment_is_no_use() -> None:
    manners = Manners(Rules(idle_s=60.0))
    loaded = replace(QUIET, others_cpu=0.9)
    looks = [(0.0, QUIET), (59.0, QUIET), (60.0, QUIET), (70.0, loaded), (75.0, QUIET), (80.0, loaded), (90.0, loaded)]
    assert causes(manners, looks) == [Cause.IN_USE, Cause.IN_USE, None, None, None, None, Cause.IN_USE]
    looks = [(100.0, QUIET), (150.0, loaded), (155.0, QUIET), (214.0, QUIET), (215.0, QUIET)]
    assert causes(manners, looks) == [*[Cause.IN_USE] * 4, None], "its time begins anew when the machine is used again"


def test_a_keystroke_counts_at_once() -> None:
    manners = Manners(Rules(idle_s=60.0))
    causes(manners, [(0.0, QUIET), (60.0, QUIET)])
    typed = replace(QUIET, input_idle_s=2.0)
    assert causes(manners, [(70.0, typed), (100.0, QUIET), (160.0, QUIET)]) == [Cause.IN_USE, Cause.IN_USE, None]
    pause = manners.look(typed, now=200.0, wall=NOON)
    assert pause is not None
    assert pause.ends_at == NOON + 60.0


def test_a_machine_that_does_not_say_what_it_does_is_taken_to_be_idle() -> None:
    assert causes(Manners(Rules(idle_s=60.0)), [(0.0, Seen()), (60.0, Seen())])[-1] is None


def test_a_launcher_that_starts_its_game_again_does_not_wake_the_peer() -> None:
    manners, game = Manners(Rules(programs=("game",))), replace(QUIET, programs=("game",))
    looks = [(0.0, QUIET), (5.0, game), (10.0, QUIET), (35.0, QUIET), (36.0, game), (40.0, QUIET), (70.0, QUIET)]
    assert causes(manners, looks) == [None, *[Cause.PROGRAM] * 5, None]


@pytest.mark.parametrize(
    ("rules", "field", "values", "expected"),
    [
        (Rules(max_gpu_celsius=80.0), "gpu_celsius", [80, 81, 79, 76, 75, 80, 81], [0, 1, 1, 1, 0, 0, 1]),
        (Rules(max_gpu_watts=200.0), "gpu_watts", [250, 100, 250, 250, 170, 150, 150], [0, 0, 0, 1, 1, 1, 0]),
    ],
)
def test_heat_and_power_have_a_band(rules: Rules, field: str, values: list[float], expected: list[int]) -> None:
    manners = Manners(rules)
    times = [0.0, 5.0, 10.0, 20.0, 30.0, 60.0, 120.0]
    looks = [(time, replace(QUIET, **{field: value})) for time, value in zip(times, values, strict=True)]
    assert [int(cause is not None) for cause in causes(manners, looks)] == expected


def test_the_words_of_a_cause_do_not_change_with_its_figures() -> None:
    """Else each degree would be an event."""
    manners = Manners(Rules(max_gpu_celsius=80.0))
    reasons = {
        pause.reason
        for number, celsius in enumerate((84.0, 85.0, 86.0))
        if (pause := manners.look(replace(QUIET, gpu_celsius=celsius), now=5.0 * number, wall=NOON)) is not None
    }
    assert len(reasons) == 1


def test_the_nearest_cause_is_told_and_the_others_are_remembered() -> None:
    rules = Rules(hours=parse_hours(["13:00-14:00"]), time_zone="UTC", programs=("game",), traffic=TrafficCap(1000))
    manners, game = Manners(rules), replace(QUIET, programs=("game",))

    def cause(now: float, wall: float, used: float) -> Cause | None:
        pause = manners.look(game, now=now, wall=wall, month_bytes=used)
        return pause.cause if pause is not None else None

    assert cause(0.0, NOON, 2000) is Cause.OFF_HOURS
    assert cause(5.0, NOON + 3600, 2000) is Cause.TRAFFIC
    assert cause(10.0, NOON + 3600, 0) is Cause.PROGRAM
