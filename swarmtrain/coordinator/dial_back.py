"""For `swarmtrain doctor`: can the caller be dialed from here, and how fast is its line? Bounded, so it is no tool.

The coordinator opens one TCP connection to the address from which it sees the caller's own connection, at the port that
the caller names, and closes it at once: nobody can have it dial another machine. The bytes of a measurement are few,
and one caller is served after the other, each rarely.
"""

from __future__ import annotations

import asyncio
from collections import OrderedDict
from typing import Protocol

from swarmtrain.rpc.errors import Refusal
from swarmtrain.wire.messages import MAX_MEASURED_BYTES, Code, DialBack, DialedBack, LineMeasured, MeasureLine

PAUSE_S = 10.0  # of one caller, between two dials
MAX_CALLERS = 1000  # that are remembered
MAX_AT_ONCE = 4
NUM_MEASUREMENTS = 6  # that one dial permits
DIAL_S = 5.0


class Dialer(Protocol):
    """The part of a host that is needed here."""

    async def dial_back(self, peer_id: str, port: int, *, timeout_s: float) -> tuple[str, str]:
        """See `p2p.host.Host`."""


class DialBacks:
    """Answers `DialBack` and `MeasureLine`."""

    def __init__(self, host: Dialer, run_id: str) -> None:
        self._host, self._run_id = host, run_id
        self._served_at: OrderedDict[str, float] = OrderedDict()
        self._permits: dict[str, int] = {}  # measurements that callers may still make
        self._num_dialing = 0

    async def dial(self, message: DialBack, peer_id: str) -> DialedBack:
        """Dial the caller; BUSY if it was dialed a moment ago, or too many others are."""
        self._check_run(message.run)
        self._admit(peer_id)
        self._num_dialing += 1
        try:
            address, error = await self._host.dial_back(peer_id, message.port, timeout_s=DIAL_S)
        finally:
            self._num_dialing -= 1
        return DialedBack(address[:256], error[:1024], MAX_MEASURED_BYTES)

    def measure(self, message: MeasureLine, peer_id: str) -> LineMeasured:
        """As many bytes as the caller wants, after it was dialed."""
        self._check_run(message.run)
        left = self._permits.get(peer_id, 0)
        if not left:
            raise Refusal(Code.BUSY, "ask for a dial first, which says how much may be measured", PAUSE_S)
        self._permits[peer_id] = left - 1
        return LineMeasured(bytes(message.wanted_bytes))

    def _admit(self, peer_id: str) -> None:
        now = asyncio.get_running_loop().time()
        left_s = self._served_at.get(peer_id, -PAUSE_S) + PAUSE_S - now
        if left_s > 0 or self._num_dialing >= MAX_AT_ONCE:
            raise Refusal(Code.BUSY, "others are being dialed" if left_s <= 0 else "not so often", max(1.0, left_s))
        self._served_at[peer_id] = now
        self._served_at.move_to_end(peer_id)
        self._permits[peer_id] = NUM_MEASUREMENTS
        while len(self._served_at) > MAX_CALLERS:
            self._permits.pop(self._served_at.popitem(last=False)[0], None)

    def _check_run(self, run: str) -> None:
        if run != self._run_id:
            raise Refusal(Code.WRONG_RUN, f"this is run {self._run_id}")
