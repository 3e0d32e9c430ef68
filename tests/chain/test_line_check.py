"""What the doctor makes of a dial and of measured times."""

from __future__ import annotations

import asyncio
from typing import Any

import pytest

from swarmtrain.chain.line_check import FIRST_BYTES, Line, listening_port, try_line
from swarmtrain.doctor import Grade, line_findings
from swarmtrain.rpc.errors import CallRefused
from swarmtrain.simulated.loop import VirtualLoop
from swarmtrain.wire.messages import DialBack, DialedBack, LineMeasured, MeasureLine

PEER = "12D3KooWDpJ7As7BWAwRMfu1VU2WCqNjvq387JEYKDBj4kx6nXTN"


class Wire:
    """A coordinator behind a line of these rates, in virtual time."""

    def __init__(self, up: float, down: float, *, error: str = "", limit: int = 1 << 20) -> None:
        self.up, self.down, self.error, self.limit = up, down, error, limit
        self.moved = 0

    async def call(self, peer_id: str, request: Any, deadline_s: float, *, expect: type[Any]) -> Any:
        if isinstance(request, DialBack):
            return DialedBack("/ip4/192.0.2.7/tcp/4001", self.error, self.limit)
        assert isinstance(request, MeasureLine)
        assert len(request.filling) <= self.limit
        assert request.wanted_bytes <= self.limit
        self.moved += len(request.filling) + request.wanted_bytes
        await asyncio.sleep(len(request.filling) / self.up + request.wanted_bytes / self.down)
        return LineMeasured(b"")


class Nobody:
    async def call(self, *_: Any, **__: Any) -> Any:
        raise CallRefused("busy", "not so often")


def tried(node: Any) -> Line:
    loop = VirtualLoop("line")
    try:
        return loop.run_until_complete(try_line(node, PEER, "run", 4001))
    finally:
        loop.close()


@pytest.mark.parametrize(
    ("wire", "advice"),
    [
        (Wire(1e7, 1e7), "fine"),
        (Wire(1e7, 1e7, error="no answer"), "--behind-nat"),
        (Wire(1.25e6, 1e7), "--max-up 8mbit"),
        (Wire(1.25e6, 1e7, error="no answer"), "--behind-nat --max-up 8mbit"),
        (Wire(1e7, 1e7, limit=0), "fine"),
    ],
)
def test_the_advice_follows_from_what_was_found(wire: Wire, advice: str) -> None:
    line = tried(wire)
    assert line.advice == advice
    if wire.limit:
        assert (line.up_bytes_per_s, line.down_bytes_per_s) == pytest.approx((wire.up, wire.down), rel=0.01)


def test_a_slow_line_is_not_filled_for_minutes() -> None:
    slow = Wire(FIRST_BYTES / 10, FIRST_BYTES / 10)
    tried(slow)
    assert slow.moved == 2 * FIRST_BYTES


def test_findings_say_what_to_do() -> None:
    def found(line: Line) -> list[tuple[str, Grade]]:
        return [(item.name, item.verdict) for item in line_findings(line)]

    assert found(tried(Wire(1e7, 1e7))) == [("dial", Grade.GOOD), ("line", Grade.GOOD), ("advice", Grade.GOOD)]
    assert found(tried(Wire(1e5, 1e7, error="no answer"))) == [("dial", Grade.ODD), ("line", Grade.ODD)]
    assert found(tried(Nobody())) == [("dial", Grade.SKIPPED), ("line", Grade.SKIPPED)]
    assert "--behind-nat" in next(iter(line_findings(tried(Wire(1e7, 1e7, error="no answer"))))).fix
    for line in (tried(Wire(1e5, 1e7, error="no answer")), tried(Nobody())):
        for item in line_findings(line):
            assert (item.verdict is Grade.ODD) == bool(item.fix)


def test_the_port_is_that_of_a_direct_address() -> None:
    relayed = f"/ip4/192.0.2.9/tcp/4009/p2p/{PEER}/p2p-circuit/p2p/{PEER}"
    assert listening_port((relayed, f"/ip4/192.0.2.7/tcp/4001/p2p/{PEER}")) == 4001
    assert listening_port(()) == 0
