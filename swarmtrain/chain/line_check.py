"""The part of `swarmtrain doctor` that the run helps with: can this machine be dialed, and how fast is its line."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable
from dataclasses import dataclass
from typing import Protocol, TypeVar

from swarmtrain.p2p.addresses import Address
from swarmtrain.p2p.errors import NetError
from swarmtrain.units import show_rate
from swarmtrain.wire.messages import DialBack, DialedBack, LineMeasured, MeasureLine
from swarmtrain.wire.schema import Message

M = TypeVar("M", bound=Message)

DEADLINE_S = 30.0
FIRST_BYTES = 1 << 16  # a line on which these take long is not asked for more
SHORT_S = 0.5
SLOW_BYTES_PER_S = 2.5e6  # 20 Mbit/s up: below it, a cap leaves something for others of the household
KEPT_SHARE = 0.8  # of a slow line that the advice gives to the daemon


class Caller(Protocol):
    """The part of a node that is needed here."""

    async def call(self, peer_id: str, request: Message, deadline_s: float, *, expect: type[M]) -> M:
        """See `rpc.node.Node`."""


@dataclass(frozen=True)
class Line:
    """What was found. Empty `problem`: it could be tried."""

    problem: str = ""
    address: str = ""  # under which this machine was dialed
    error: str = ""  # why that failed; empty: it can be dialed
    up_bytes_per_s: float = 0.0
    down_bytes_per_s: float = 0.0

    @property
    def advice(self) -> str:
        """Options of `swarmtrain join`, or `fine`."""
        options = ["--behind-nat"] if self.error else []
        if 0.0 < self.up_bytes_per_s < SLOW_BYTES_PER_S:
            options.append(f"--max-up {max(1, round(KEPT_SHARE * self.up_bytes_per_s * 8 / 1e6))}mbit")
        return " ".join(options) or "fine"

    def speeds(self) -> str:
        """For people."""
        return f"about {show_rate(self.up_bytes_per_s)} up, {show_rate(self.down_bytes_per_s)} down, to the coordinator"


async def try_line(node: Caller, coordinator: str, run: str, port: int) -> Line:
    """Have the coordinator dial this machine at `port`; then measure both directions, as far as it permits."""
    clock = asyncio.get_running_loop().time
    try:
        back = await node.call(coordinator, DialBack(run, port), DEADLINE_S, expect=DialedBack)

        async def send(num_bytes: int) -> None:
            await node.call(coordinator, MeasureLine(run, 0, bytes(num_bytes)), DEADLINE_S, expect=LineMeasured)

        async def receive(num_bytes: int) -> None:
            await node.call(coordinator, MeasureLine(run, num_bytes, b""), DEADLINE_S, expect=LineMeasured)

        up, down = [await _rate(way, back.measured_bytes, clock) for way in (send, receive)]
    except NetError as error:
        return Line(problem=str(error))
    return Line("", back.address, back.error, up, down)


async def _rate(move: Callable[[int], Awaitable[None]], limit: int, clock: Callable[[], float]) -> float:
    """Bytes per second: of few bytes, and if these were quick, of as many as are permitted."""
    if not limit:
        return 0.0
    first = min(FIRST_BYTES, limit)
    seconds = await _timed(move, first, clock)
    if seconds >= SHORT_S or limit == first:
        return first / seconds
    return limit / await _timed(move, limit, clock)


async def _timed(move: Callable[[int], Awaitable[None]], num_bytes: int, clock: Callable[[], float]) -> float:
    began = clock()
    await move(num_bytes)
    return max(clock() - began, 1e-6)


def listening_port(addresses: tuple[str, ...]) -> int:
    """The TCP port at which this host can be dialed, or 0."""
    for text in addresses:
        address = Address.parse(text)
        if not address.is_relayed:
            return address.port
    return 0
