"""After which steps a checkpoint is written."""

from __future__ import annotations

import asyncio
from typing import Any, cast

import pytest

from swarmtrain.coordinator.run import Run
from swarmtrain.run.presets import preset

from .contexts import bare_context


async def write_fails() -> bool:
    return False


async def disk_full() -> bool:
    raise OSError("no room")


def due(*overrides: str, failing: Any = None) -> list[int]:
    """The steps of a run of ten after which a checkpoint is due; from the fifth on, the last one came to nothing."""

    async def main() -> list[int]:
        manifest = preset("nano", ["schedule.steps=10", "schedule.warmup_steps=1", "checkpoint.every=4", *overrides])
        run = Run(bare_context(manifest), cast(Any, None), cast(Any, None), min_peers=1)
        found = [step for step in range(1, 5) if run._checkpoint_due(step)]
        if failing is not None:
            run._writing = asyncio.ensure_future(failing())
            await asyncio.wait([run._writing])
        return found + [step for step in range(5, 11) if run._checkpoint_due(step)]

    return asyncio.run(main())


def test_checkpoints_are_due_where_the_manifest_says_and_at_the_end() -> None:
    assert due() == [4, 8, 10]


@pytest.mark.parametrize("failing", [write_fails, disk_full])
@pytest.mark.parametrize("lossy", ["wire.forward=quant4", "reduce.codec=int8"])
def test_one_that_failed_is_made_up_for_at_once(failing: Any, lossy: str) -> None:
    assert due(lossy, failing=failing) == [4, 5, 6, 7, 8, 9, 10]


@pytest.mark.parametrize(
    "codec",
    [
        "wire.backward=ef-topk10",
        "wire.backward=lowrank2",
        "wire.backward=lowrank2-lep:critical",
        "reduce.codec=powersgd2",
        "reduce.codec=lowrank100",
    ],
)
def test_where_codecs_remember_there_is_no_checkpoint_but_where_they_forget(codec: str) -> None:
    """One elsewhere would be restored with codecs that know less than those of the run that went on."""
    assert due(codec, failing=write_fails) == [4, 8, 10]


def test_training_does_not_wait_for_a_slow_checkpoint_and_makes_up_for_what_was_left_out() -> None:
    async def main() -> None:
        manifest = preset("nano", ["schedule.steps=10", "schedule.warmup_steps=1", "checkpoint.every=2"])
        run, written = Run(bare_context(manifest), cast(Any, None), cast(Any, None), min_peers=1), asyncio.Event()

        async def write() -> bool:
            await written.wait()
            return True

        run._writing = asyncio.ensure_future(write())
        assert not any(run._checkpoint_due(step) for step in range(1, 6))
        assert run._checkpoint_due(10), "the last one is written whatever it takes"
        written.set()
        await asyncio.wait([run._writing])
        assert run._checkpoint_due(7), "two were left out"

    asyncio.run(main())
