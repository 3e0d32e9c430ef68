"""The run's checkpoints: which one counts as the newest."""

from __future__ import annotations

import asyncio
from pathlib import Path
from types import SimpleNamespace
from typing import Any

from swarmtrain.chain.state_transfer import StateSource
from swarmtrain.checkpoint import complete
from swarmtrain.coordinator.admission import StageBook
from swarmtrain.coordinator.checkpointing import Checkpoints
from swarmtrain.model.state import StageState
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
