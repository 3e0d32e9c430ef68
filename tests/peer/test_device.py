"""A device that hangs: when it is taken to, and what becomes of those who wait for it."""

from __future__ import annotations

import asyncio
from types import SimpleNamespace
from typing import Any, cast

import pytest

from swarmtrain.peer.compute import FIRST_HANG_S, HANG_FACTOR, HANG_S, DeviceWatch, hang_limit_s
from swarmtrain.rpc.errors import Refusal


def test_slow_work_of_a_slow_machine_is_no_hang() -> None:
    assert hang_limit_s([60.0, 10.0]) == HANG_FACTOR * 60.0
    assert hang_limit_s([0.01]) == HANG_S
    assert hang_limit_s([]) == FIRST_HANG_S


def test_who_waits_is_refused_when_the_device_hangs_and_the_work_goes_on(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("swarmtrain.peer.compute.DEVICE_LOOK_S", 0.01)

    async def main() -> None:
        compute, changes = SimpleNamespace(hangs=False), asyncio.Queue[bool]()
        watch = DeviceWatch(cast(Any, compute))

        async def look() -> None:
            while True:
                changes.put_nowait(await watch.next_change())

        looking = asyncio.create_task(look())
        work: asyncio.Future[str] = asyncio.get_running_loop().create_future()
        waiting = asyncio.create_task(watch.unless_it_hangs(asyncio.shield(work)))
        compute.hangs = True
        assert await changes.get() is True
        with pytest.raises(Refusal, match="does not answer"):
            await waiting
        with pytest.raises(Refusal, match="does not answer"):
            watch.check()
        assert not work.done()
        compute.hangs = False
        assert await changes.get() is False
        work.set_result("done")
        assert await watch.unless_it_hangs(asyncio.shield(work)) == "done"
        looking.cancel()
        await asyncio.gather(looking, return_exceptions=True)

    asyncio.run(asyncio.wait_for(main(), 20.0))
