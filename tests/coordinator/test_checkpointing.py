"""The run's checkpoints: which one counts as the newest."""

from __future__ import annotations

import asyncio
import shutil
import threading
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from swarmtrain import checkpoint as checkpoint_module
from swarmtrain.chain.state_transfer import StateSource
from swarmtrain.checkpoint import Checkpoint, complete
from swarmtrain.coordinator.admission import StageBook
from swarmtrain.coordinator.checkpointing import Checkpoints, LoadedStages
from swarmtrain.model.buffers import StateLayout
from swarmtrain.model.state import StageState
from swarmtrain.observe.events import CheckpointFailed, Event
from swarmtrain.run.presets import preset
from swarmtrain.wire.messages import FetchDigests, FetchState

from .contexts import bare_context

MANIFEST = preset(
    "nano",
    ["model.hidden_size=32", "model.num_layers=2", "model.ffn_size=48", "stages.count=2", "checkpoint.keep=2"],
)


class Keeper:
    """Stands for a node whose only neighbour keeps every stage's state of any step."""

    peer_id = "coordinator"

    async def call_while_moving(self, peer_id: str, request: Any, stall_s: float, *, expect: type[Any]) -> Any:
        source = state_of(request.stage, request.step)
        if isinstance(request, FetchDigests):
            return source.digests()
        assert isinstance(request, FetchState)
        return source.chunk(request.chunk)


def state_of(stage: int, step: int) -> StateSource:
    state = StageState(MANIFEST, stage)
    return StateSource(state.layout, step, 0, [buffer.detach() for buffer in state.buffers])


def checkpoints_in(directory: Path, num_steps: int) -> Checkpoints:
    """Of a coordinator whose journal holds so many steps."""
    journal = SimpleNamespace(num_steps=lambda: num_steps, note_checkpoint=lambda *_: None)
    stages = [StageBook() for _ in range(MANIFEST.stages.count)]
    return Checkpoints(bare_context(MANIFEST, node=Keeper(), journal=journal, stages=stages), directory)


def write(checkpoints: Checkpoints, step: int) -> None:
    digests = []
    for stage in range(MANIFEST.stages.count):
        state = StageState(MANIFEST, stage)
        state.step = step
        digests.append(state.digest())
    keepers = [["keeper"]] * MANIFEST.stages.count
    assert asyncio.run(checkpoints.write(step, digests, keepers))


def test_checkpoints_of_a_history_that_the_journal_does_not_have_never_count(tmp_path: Path) -> None:
    """As when the journal was lost and an older copy of it took over: going back would lead ahead of the journal."""
    lost = checkpoints_in(tmp_path, 0)
    for step in (4, 8, 12):
        write(lost, step)
    assert [path.name for path in complete(tmp_path)] == ["step-00000008", "step-00000012"]
    again = checkpoints_in(tmp_path, 5)
    assert again.step == 0
    for step in (6, 7):
        write(again, step)
        assert again.step == step
        offer = again.offer(1)
        assert offer is not None
        assert offer.step == step
    later = checkpoints_in(tmp_path, 9)  # the journal has passed a lost checkpoint's step
    assert later.step == 7
    for step in (12, 13):
        write(later, step)
    assert [int(path.name[5:]) for path in complete(tmp_path)] == [12, 13]
    assert sorted(path.name for path in tmp_path.glob("lost-*")) == ["lost-step-00000008-1", "lost-step-00000012-1"]


class Counted:
    """Loads of stages of any checkpoint, in order, and how many chunks were hashed for them."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.loads: list[int] = []
        self.num_hashed = 0
        load, chunk_digests = Checkpoint.load, checkpoint_module.chunk_digests

        def counted_load(checkpoint: Checkpoint, index: int, **more: Any) -> Any:
            self.loads.append(index)
            return load(checkpoint, index, **more)

        def counted_digests(*arguments: Any) -> list[bytes]:
            self.num_hashed += 1
            return chunk_digests(*arguments)

        monkeypatch.setattr(Checkpoint, "load", counted_load)
        monkeypatch.setattr(checkpoint_module, "chunk_digests", counted_digests)


async def fetch_in_turn(checkpoints: Checkpoints, step: int) -> None:
    """Newcomers of all stages fetch their states at the same time, chunk by chunk, and check what they get."""
    stages = range(MANIFEST.stages.count)
    digests = [(await checkpoints.fetch_digests(FetchDigests("run", stage, step))).digests for stage in stages]
    assert digests == [state_of(stage, step).digests().digests for stage in stages]
    for number in range(len(StateLayout(MANIFEST, 0).chunks())):
        for stage in stages:
            found = await checkpoints.fetch_state(FetchState("run", stage, step, number))
            wanted = state_of(stage, step).chunk(number)
            assert wanted is not None
            assert bytes(found.values) == bytes(wanted.values)


def test_newcomers_of_different_stages_load_and_hash_each_stage_once(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    checkpoints = checkpoints_in(tmp_path, 0)
    write(checkpoints, 4)
    counted = Counted(monkeypatch)
    asyncio.run(fetch_in_turn(checkpoints, 4))
    assert counted.loads == [0, 1]
    assert counted.num_hashed == 2
    write(checkpoints, 8)
    asyncio.run(fetch_in_turn(checkpoints, 8))  # of a newer one, everything anew
    assert counted.loads == [0, 1, 0, 1]


def test_stages_that_do_not_fit_together_are_loaded_again_and_not_hashed_again(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    checkpoints = checkpoints_in(tmp_path, 0)
    write(checkpoints, 4)
    largest = max(StateLayout(MANIFEST, stage).num_bytes for stage in range(MANIFEST.stages.count))
    checkpoints._loaded = LoadedStages(max_bytes=largest)
    counted = Counted(monkeypatch)
    asyncio.run(fetch_in_turn(checkpoints, 4))
    assert len(counted.loads) > 2
    assert counted.num_hashed == 2
    assert len(checkpoints._loaded._sources) == 1


def test_a_stage_is_kept_however_large_it_is(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    checkpoints = checkpoints_in(tmp_path, 0)
    write(checkpoints, 4)
    checkpoints._loaded = LoadedStages(max_bytes=1)
    counted = Counted(monkeypatch)

    async def main() -> None:
        await asyncio.gather(*(checkpoints.fetch_state(FetchState("run", 1, 4, number)) for number in (0, 1, 2)))

    asyncio.run(main())
    assert counted.loads == [1]


def threads_of_removals(monkeypatch: pytest.MonkeyPatch) -> list[threading.Thread]:
    found: list[threading.Thread] = []
    rmtree = shutil.rmtree

    def noted(path: Path, **more: Any) -> None:
        if path.exists():
            found.append(threading.current_thread())
        rmtree(path, **more)

    monkeypatch.setattr(checkpoint_module.shutil, "rmtree", noted)
    return found


def test_old_checkpoints_and_what_failed_are_not_removed_on_the_event_loop(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Gigabytes take seconds, in which no request would be answered."""
    checkpoints = checkpoints_in(tmp_path, 0)
    happened: list[Event] = []
    checkpoints._context.events.add(happened.append)
    removals = threads_of_removals(monkeypatch)
    for step in (1, 2, 3):
        write(checkpoints, step)
    assert len(removals) == 1  # keep = 2
    no_digest = ["0" * 64] * MANIFEST.stages.count
    assert not asyncio.run(checkpoints.write(4, no_digest, [["keeper"]] * MANIFEST.stages.count))
    assert [type(event) for event in happened if isinstance(event, CheckpointFailed)] == [CheckpointFailed]
    assert len(removals) == 2
    assert threading.main_thread() not in removals
    assert not list(tmp_path.glob(".partial*"))
