"""A run that stands still says for whom it waits, once, and goes on when they are there."""

from __future__ import annotations

import asyncio
from types import SimpleNamespace
from typing import Any, cast

import pytest

from swarmtrain.coordinator import run as run_module
from swarmtrain.coordinator.admission import StageBook, StateOffer
from swarmtrain.coordinator.run import Run
from swarmtrain.observe.events import Event, RunResumes, RunWaits
from swarmtrain.run.presets import preset

from .contexts import bare_context, heartbeat

NUM_STAGES = 2
STEP = 3


class Waiting:
    """A run of two stages; of the first one a peer serves, of the last one there is whom a test says."""

    def __init__(self) -> None:
        self.happened: list[Event] = []
        manifest = preset("nano", [f"stages.count={NUM_STAGES}"])
        saved = StateOffer(STEP, "d", ())
        stages = [StageBook("d", checkpoint=saved) for _ in range(NUM_STAGES)]
        self._context = bare_context(manifest, step=STEP, stages=stages)
        self._context.events.add(self.happened.append)
        self.run = Run(self._context, cast(Any, SimpleNamespace(step=STEP)), cast(Any, None), min_peers=1)

    async def show(self, stage: int, state: str, step: int = STEP) -> None:
        beat = heartbeat(stage, state, "1", step, "d")
        self._context.members.heartbeat(f"p{stage}", beat, 0.0)
        await self._context.notify()

    async def looks(self) -> None:
        """It is looked after the peers some times, while they show up."""
        for _ in range(20):
            await self._context.notify()
            await asyncio.sleep(0)

    def break_link(self, stage: int) -> None:
        self._context.members.doubt(f"p{stage}", asyncio.get_running_loop().time())

    def said(self) -> list[str]:
        return [type(event).__name__ for event in self.happened]


@pytest.mark.parametrize("is_in_step", [False, True])
@pytest.mark.parametrize("step", [STEP, STEP - 1])
@pytest.mark.parametrize("state", ["paused", "draining"])
def test_a_stage_whose_peers_take_no_work_is_waited_for_and_that_is_told_once(
    monkeypatch: pytest.MonkeyPatch, state: str, step: int, is_in_step: bool
) -> None:
    """Between two steps and in the middle of one. The peer that takes no work has the run's state, or missed a step."""

    async def main() -> None:
        waiting = Waiting()
        await waiting.show(0, "serving")
        await waiting.show(1, state, step)
        tasks = [asyncio.create_task(waiting.run._lost_stage())]
        if not is_in_step:
            tasks.append(asyncio.create_task(waiting.run._all_stages_served()))
        await waiting.looks()
        assert waiting.said() == [RunWaits.__name__]
        await waiting.show(1, "serving")
        await waiting.looks()
        assert waiting.said() == [RunWaits.__name__, RunResumes.__name__]
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)

    monkeypatch.setattr(run_module, "WATCH_S", 0.0)
    asyncio.run(main())


@pytest.mark.parametrize("doubt_s", [0.0, 1e9])
def test_a_stage_whose_only_peer_has_lost_its_link_is_waited_for_until_it_calls_again(
    monkeypatch: pytest.MonkeyPatch, doubt_s: float
) -> None:
    """A killed peer is lost after ten seconds; the page must not say "training" so long. A moment is not told."""

    async def main() -> None:
        waiting = Waiting()
        await waiting.show(0, "serving")
        await waiting.show(1, "serving")
        watching = asyncio.create_task(waiting.run._lost_stage())
        await waiting.looks()
        assert waiting.said() == []
        waiting.break_link(1)
        await waiting.looks()
        told = [RunWaits.__name__] if doubt_s == 0.0 else []
        assert waiting.said() == told
        await waiting.show(1, "serving")
        await waiting.looks()
        assert waiting.said() == [*told, *([RunResumes.__name__] if told else [])]
        watching.cancel()
        await asyncio.gather(watching, return_exceptions=True)

    monkeypatch.setattr(run_module, "WATCH_S", 0.0)
    monkeypatch.setattr(run_module, "DOUBT_S", doubt_s)
    asyncio.run(main())
