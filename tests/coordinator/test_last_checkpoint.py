"""The last checkpoint is tried again until it is written, ever less often, and the run says what it waits for."""

from __future__ import annotations

import asyncio
import errno
from types import SimpleNamespace
from typing import Any, cast

import pytest
from safetensors import SafetensorError

from swarmtrain.chain.state_transfer import SyncFailed
from swarmtrain.coordinator import run as run_module
from swarmtrain.coordinator.admission import StageBook
from swarmtrain.coordinator.run import Run
from swarmtrain.errors import StorageError
from swarmtrain.observe.events import Event, RunResumes, RunWaits, StepApplied
from swarmtrain.observe.keeper import StatusKeeper
from swarmtrain.run.presets import preset

from .contexts import bare_context, heartbeat

MANIFEST = preset("nano", ["stages.count=1", "schedule.steps=5", "schedule.warmup_steps=1"])
HEARTBEAT = heartbeat(0, "serving", "1", 5, "d")


def full_disk() -> StorageError:
    error = StorageError("cannot write /secret/place/checkpoints/step-00000005: No space left on device")
    error.__cause__ = OSError(errno.ENOSPC, "No space left on device")
    return error


def full_disk_as_safetensors_says_it() -> StorageError:
    error = StorageError("cannot write /secret/place/checkpoints/step-00000005: I/O error")
    error.__cause__ = SafetensorError("Error while serializing: I/O error: No space left on device (os error 28)")
    return error


def no_permission() -> StorageError:
    error = StorageError("cannot write /secret/place/checkpoints/step-00000005: Permission denied")
    error.__cause__ = PermissionError(errno.EACCES, "Permission denied", "/secret/place")
    return error


def no_donor() -> SyncFailed:
    return SyncFailed("none of 2 donors has the state of step 5")


class Disk:
    """Stands for `Checkpoints`: attempts fail as `failures` say, one after the other, and then one is written."""

    def __init__(self, failures: list[Exception]) -> None:
        self._failures = failures
        self.step, self.num_attempts = 0, 0
        self.failure: Exception | None = None

    async def write(self, step: int, digests: tuple[str, ...], keepers: tuple[tuple[str, ...], ...]) -> bool:
        assert (digests, keepers) == (("d",), (("p",),))
        self.num_attempts += 1
        self.failure = self._failures.pop(0) if self._failures else None
        self.step = 0 if self.failure else step
        return self.failure is None


class Ending:
    """A run after its last step."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch, *failures: Exception) -> None:
        self.happened: list[Event] = []
        self.pauses: list[float] = []
        self.seen: list[tuple[str, str, str]] = []
        self.disk = Disk(list(failures))
        self.keeper = StatusKeeper("coordinator", num_steps=5)
        context = bare_context(MANIFEST, step=5, stages=[StageBook("d")])
        context.events.add(self.happened.append)
        context.events.add(self.keeper)
        context.events.emit(StepApplied(5, 1.0, 1, 1.0, 1.0, 1.0))
        context.members.heartbeat("p", HEARTBEAT, 0.0)
        self.context = context
        self.run = Run(context, cast(Any, self.disk), cast(Any, None), min_peers=1)
        monkeypatch.setattr(run_module, "asyncio", SimpleNamespace(**{**vars(asyncio), "sleep": self._sleep}))

    async def _sleep(self, seconds: float) -> None:
        status = self.keeper.status
        self.pauses.append(seconds)
        self.seen.append((status.state, status.reason, status.next))

    def wait(self) -> None:
        asyncio.run(self.run._final_checkpoint())


def test_a_full_disk_is_tried_ever_less_often_and_the_run_says_that_it_waits_for_space(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    ending = Ending(monkeypatch, *[full_disk() for _ in range(12)])
    ending.wait()
    assert ending.disk.num_attempts == 13
    assert ending.disk.step == 5
    assert ending.pauses == [0.5, 1.0, 2.0, 4.0, 8.0, 16.0, 32.0, 60.0, 60.0, 60.0, 60.0, 60.0]
    assert set(ending.seen) == {
        (
            "waiting",
            "the last checkpoint waits: no disk space",
            "the last checkpoint, then the end, as soon as that has changed",
        )
    }
    assert "/secret" not in str(ending.seen)  # peers are told it, and the page shows it
    told = [type(event).__name__ for event in ending.happened[1:]]
    assert told == [RunWaits.__name__, RunResumes.__name__]  # once, however many attempts there were
    assert ending.context.waits_for is None


def test_peers_that_do_not_give_a_state_are_asked_again_soon(monkeypatch: pytest.MonkeyPatch) -> None:
    ending = Ending(monkeypatch, *[no_donor() for _ in range(6)])
    ending.wait()
    assert ending.pauses == [0.5, 1.0, 2.0, 4.0, 5.0, 5.0]
    assert ending.seen[0][1] == "the last checkpoint waits: none of 2 donors has the state of step 5"


@pytest.mark.parametrize(
    ("failure", "told"),
    [(full_disk_as_safetensors_says_it(), "no disk space"), (no_permission(), "Permission denied")],
)
def test_other_ways_in_which_a_disk_refuses(monkeypatch: pytest.MonkeyPatch, failure: StorageError, told: str) -> None:
    ending = Ending(monkeypatch, failure)
    ending.wait()
    assert ending.seen[0][1] == f"the last checkpoint waits: {told}"


def test_another_reason_is_told(monkeypatch: pytest.MonkeyPatch) -> None:
    ending = Ending(monkeypatch, full_disk(), no_donor(), full_disk())
    ending.wait()
    reasons = [event.reason for event in ending.happened if isinstance(event, RunWaits)]
    assert [("no disk space" in reason, "donors" in reason) for reason in reasons] == [
        (True, False),
        (False, True),
        (True, False),
    ]


def test_control_a_checkpoint_that_is_written_at_once_is_not_waited_for(monkeypatch: pytest.MonkeyPatch) -> None:
    ending = Ending(monkeypatch)
    ending.wait()
    assert ending.pauses == []
    assert len(ending.happened) == 1


def test_a_run_that_goes_back_meanwhile_does_not_wait_for_the_disk_any_more(monkeypatch: pytest.MonkeyPatch) -> None:
    ending = Ending(monkeypatch, full_disk())

    async def cancelled(seconds: float) -> None:
        raise asyncio.CancelledError

    monkeypatch.setattr(run_module, "asyncio", SimpleNamespace(**{**vars(asyncio), "sleep": cancelled}))

    async def main() -> None:
        with pytest.raises(asyncio.CancelledError):
            await ending.run._final_checkpoint()
        await ending.run._all_stages_served()

    asyncio.run(main())
    assert ending.context.waits_for is None
