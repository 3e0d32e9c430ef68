"""Dialing back and measuring: only the caller, rarely, and with few bytes."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable

import pytest

from swarmtrain.coordinator.dial_back import MAX_AT_ONCE, MAX_CALLERS, NUM_MEASUREMENTS, PAUSE_S, DialBacks
from swarmtrain.rpc.errors import Refusal
from swarmtrain.simulated.loop import VirtualLoop
from swarmtrain.wire.messages import MAX_MEASURED_BYTES, Code, DialBack, MeasureLine


class Dials:
    """A host that notes whom it dials."""

    def __init__(self, *, holds: bool = False) -> None:
        self.dialed: list[tuple[str, int]] = []
        self.release = asyncio.Event()
        if not holds:
            self.release.set()

    async def dial_back(self, peer_id: str, port: int, *, timeout_s: float) -> tuple[str, str]:
        self.dialed.append((peer_id, port))
        await self.release.wait()
        return f"/ip4/192.0.2.7/tcp/{port}", "" if port == 4001 else "connection refused"


def on_virtual_time(main: Callable[[], Awaitable[None]]) -> None:
    loop = VirtualLoop("dial back")
    try:
        loop.run_until_complete(asyncio.ensure_future(main(), loop=loop))
    finally:
        loop.close()


def test_the_caller_is_dialed_at_its_own_address_and_told_what_happened() -> None:
    async def main() -> None:
        host = Dials()
        backs = DialBacks(host, "run")
        good, bad = await backs.dial(DialBack("run", 4001), "a"), await backs.dial(DialBack("run", 4002), "b")
        assert (good.address, good.error, good.measured_bytes) == ("/ip4/192.0.2.7/tcp/4001", "", MAX_MEASURED_BYTES)
        assert bad.error == "connection refused"
        assert host.dialed == [("a", 4001), ("b", 4002)]  # the message names no machine: only the port is the caller's
        with pytest.raises(Refusal) as refused:
            await backs.dial(DialBack("other", 4001), "c")
        assert refused.value.code == Code.WRONG_RUN

    asyncio.run(main())


def test_one_caller_cannot_try_port_after_port() -> None:
    async def main() -> None:
        host = Dials()
        backs = DialBacks(host, "run")
        for _ in range(20):
            await backs.dial(DialBack("run", 4001), "a")
            with pytest.raises(Refusal) as refused:
                await backs.dial(DialBack("run", 4002), "a")
            assert refused.value.code == Code.BUSY
            assert 0 < refused.value.retry_after_s <= PAUSE_S
            await asyncio.sleep(PAUSE_S)
        assert len(host.dialed) == 20

    on_virtual_time(main)


def test_many_callers_at_once_wait_and_are_not_remembered_without_end() -> None:
    async def main() -> None:
        host = Dials(holds=True)
        backs = DialBacks(host, "run")
        dialing = [asyncio.create_task(backs.dial(DialBack("run", 4001), f"p{i}")) for i in range(MAX_AT_ONCE)]
        await asyncio.sleep(0)
        with pytest.raises(Refusal, match="others are being dialed"):
            await backs.dial(DialBack("run", 4001), "late")
        host.release.set()
        await asyncio.gather(*dialing)
        for number in range(2 * MAX_CALLERS):
            await backs.dial(DialBack("run", 4001), f"q{number}")
        assert len(backs._served_at) == len(backs._permits) == MAX_CALLERS

    asyncio.run(main())


def test_bytes_are_sent_only_to_who_was_dialed_and_only_so_often() -> None:
    async def main() -> None:
        backs = DialBacks(Dials(), "run")
        with pytest.raises(Refusal, match="ask for a dial first"):
            backs.measure(MeasureLine("run", 10, b""), "a")
        await backs.dial(DialBack("run", 4001), "a")
        for _ in range(NUM_MEASUREMENTS):
            assert len(backs.measure(MeasureLine("run", 1000, b""), "a").filling) == 1000
        with pytest.raises(Refusal, match="ask for a dial first"):
            backs.measure(MeasureLine("run", 10, b""), "a")
        with pytest.raises(Refusal):
            backs.measure(MeasureLine("run", 10, b""), "b")

    asyncio.run(main())
