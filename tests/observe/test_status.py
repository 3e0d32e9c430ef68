"""What events add up to: state, reason, since, next; and nothing in it grows without bound."""

from __future__ import annotations

import itertools
from dataclasses import FrozenInstanceError, is_dataclass

import pytest

from swarmtrain.observe import events as module
from swarmtrain.observe.events import (
    ActivityChanged,
    CheckpointWritten,
    Event,
    PeerDiverged,
    PeerJoined,
    PhaseReached,
    RunEnded,
    RunResumes,
    RunRolledBack,
    RunWaits,
    StepApplied,
    SyncProgress,
)
from swarmtrain.observe.status import MAX_POINTS, MAX_RECENT, Status, apply


def after(*events: Event, kind: str = "coordinator", num_steps: int = 100) -> Status:
    status = Status(kind, 0.0, num_steps=num_steps)
    for event in events:
        status = apply(event, status)
    return status


def step(number: int, *, at: float = 0.0, loss: float = 2.0, val_loss: float | None = None) -> StepApplied:
    return StepApplied(number, loss, 10 * number, 5.0, 1.0, 0.1, val_loss, at=at or float(number))


def test_every_event_is_frozen_and_has_a_name_and_a_line() -> None:
    found = [item for item in vars(module).values() if isinstance(item, type) and issubclass(item, Event)]
    assert len(found) > 20
    for cls in found:
        assert is_dataclass(cls)
        assert cls.__dataclass_params__.frozen  # type: ignore[attr-defined]
        assert cls.__doc__
    event = PeerJoined("peer-abcdefgh", 1, 3)
    assert (event.name, event.line()) == ("peer_joined", "peer abcdefgh serves stage 1 from step 4 on")
    with pytest.raises(FrozenInstanceError):
        event.stage = 2  # type: ignore[misc]


def test_a_run_waits_trains_and_ends_and_says_since_when_and_what_next() -> None:
    waiting = after(RunWaits("stage 2 has no peers", at=5.0))
    assert (waiting.state, waiting.reason, waiting.since) == ("waiting", "stage 2 has no peers", 5.0)
    assert waiting.next == "step 1, as soon as that has changed"
    training = apply(step(1, at=9.0), apply(RunResumes(at=8.0), waiting))
    assert (training.state, training.reason, training.since, training.next) == ("training", "", 8.0, "step 2 of 100")
    assert apply(step(2, at=10.0), training).since == 8.0  # it has been training all the time
    ended = apply(RunEnded("all steps are done", at=11.0), training)
    assert (ended.state, ended.reason, ended.since) == ("complete", "all steps are done", 11.0)


def test_a_step_that_ends_while_the_run_waits_does_not_hide_that_it_waits() -> None:
    status = after(RunWaits("stage 1 has no peers", at=5.0), step(3, at=6.0))
    assert (status.state, status.reason, status.since) == ("waiting", "stage 1 has no peers", 5.0)
    assert status.step == 3


def test_a_peers_activity_explains_its_state() -> None:
    status = after(
        PhaseReached("network", "/ip4/1.2.3.4", at=1.0), PhaseReached("serving", "stage 1", at=2.0), kind="peer"
    )
    assert (status.state, status.since) == ("serving", 2.0)
    status = apply(ActivityChanged("next_stage_empty", "stage 2 has no peers", "waits", 3.0, at=5.0), status)
    assert status.headline() == {
        "state": "serving",
        "cause": "next_stage_empty",
        "reason": "stage 2 has no peers",
        "since": 3.0,
        "next": "waits",
        "started_at": 0.0,
    }


def test_a_download_shows_its_progress_until_the_peer_serves() -> None:
    status = after(PhaseReached("syncing", ""), SyncProgress(7, 40), kind="peer")
    assert (status.sync_percent, status.reason) == (40, "fetching the state of step 7: 40 %")
    assert apply(PhaseReached("serving", "stage 0"), status).sync_percent is None


def test_a_roll_back_takes_the_lost_steps_out_of_the_curve() -> None:
    status = after(*(step(number) for number in range(1, 9)), RunRolledBack(1, 8, 5))
    assert [point.step for point in status.points] == [1, 2, 3, 4, 5]
    assert (status.step, status.last) == (5, None)
    assert [point.step for point in apply(step(6), status).points] == [1, 2, 3, 4, 5, 6]


def test_long_runs_keep_a_bounded_curve_with_its_beginning_and_its_end() -> None:
    status = after()
    for number in range(1, 20_001):
        status = apply(step(number), status)
        assert len(status.points) <= MAX_POINTS
    steps = [point.step for point in status.points]
    assert steps == sorted(set(steps))
    assert steps[-1] == 20_000
    assert steps[0] <= 2 * status.stride
    gaps = {b - a for a, b in itertools.pairwise(steps[:-1])}
    assert gaps == {status.stride}
    assert len(steps) > MAX_POINTS / 3


def test_news_are_bounded_numbered_and_without_what_every_step_brings() -> None:
    status = after(*(PeerJoined("p", 0, number) for number in range(200)), *(step(n) for n in range(1, 50)))
    assert len(status.recent) == MAX_RECENT
    assert [item["number"] for item in status.news()] == list(range(200 - MAX_RECENT + 1, 201))
    assert {item["event"] for item in status.news()} == {"peer_joined"}
    assert dict(status.counts) == {"peer_joined": 200, "step_applied": 49}


def test_what_is_left_is_told_at_the_pace_of_the_last_steps_and_not_while_the_run_waits() -> None:
    status = after(RunResumes(at=0.0), step(1, at=10.0))
    assert status.seconds_left() is None  # one step has no pace
    status = apply(step(3, at=30.0), apply(step(2, at=20.0), status))
    assert status.seconds_left() == pytest.approx(97 * 10.0)
    slower = status
    for number in range(4, 40):
        slower = apply(step(number, at=30.0 + 20.0 * (number - 3)), slower)
    assert slower.seconds_left() == pytest.approx(61 * 20.0)  # steps long ago do not count
    waiting = apply(RunWaits("stage 2 has no peers", at=31.0), status)
    assert waiting.seconds_left() is None
    again = apply(step(5, at=1010.0), apply(step(4, at=1000.0), apply(RunResumes(at=990.0), waiting)))
    assert again.seconds_left() == pytest.approx(95 * 10.0)  # nor does the pause
    assert apply(RunRolledBack(1, 5, 2), again).seconds_left() is None
    assert after(RunResumes(at=0.0), step(99, at=10.0), step(100, at=20.0)).seconds_left() == 0.0


def test_numbers_that_events_carry_are_kept() -> None:
    status = after(step(1, val_loss=3.5), step(2), CheckpointWritten(2, "x"), PeerDiverged("p", 0, 2))
    assert (status.val_loss, status.checkpoint_step, status.diverged) == (3.5, 2, 1)
    assert status.last is not None
    assert status.last.step == 2
