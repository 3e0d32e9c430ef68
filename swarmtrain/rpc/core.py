"""What the parts of one link share, and what all links of a daemon share."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Coroutine
from dataclasses import dataclass, field
from typing import Any

from swarmtrain.rpc.budget import Budget
from swarmtrain.rpc.counters import Traffic
from swarmtrain.rpc.inbound import InboundMessage, InboundMessages
from swarmtrain.rpc.limiter import RateLimiter
from swarmtrain.rpc.meter import LinkMeter
from swarmtrain.rpc.outbound import OutboundQueue
from swarmtrain.units import MIB
from swarmtrain.wire.frames import FrameType, RefusalPayload, pack_pair, pack_refusal
from swarmtrain.wire.schema import Registry


@dataclass(frozen=True, slots=True)
class LinkOptions:
    """Settings of one link. The defaults suit home connections."""

    heartbeat_s: float = 2.0
    missed_heartbeats: int = 3  # a peer is dead after this many intervals without a byte from it
    chunk_bytes: int = 128 << 10  # an urgent message waits for at most one chunk: 50 ms at 20 Mbit/s; see fit_chunks
    outbound_bytes: int = 64 * MIB  # per priority; above it, calls wait before they queue their request
    inbound_bytes: int = 512 * MIB  # of requests and, separately, of answers that are being received or handled
    max_inbound_calls: int = 256  # at once; further requests are answered BUSY
    busy_retry_s: float = 0.25  # what a BUSY says about when to try again
    write_stall_s: float = 60.0  # a peer that takes no byte for so long is given up, even if it still sends
    stall_grace_s: float = 30.0  # a request that is not complete so long after its own deadline breaks the link
    close_s: float = 5.0  # how long a graceful close waits for open calls and for the other end


class HandlerTasks:
    """The tasks in which handlers run. They outlive their links: a lost caller does not cancel the work."""

    def __init__(self, limit: int) -> None:
        self._limit = limit
        self._num_claimed = 0
        self._tasks: set[asyncio.Task[None]] = set()

    @property
    def num_running(self) -> int:
        """Tasks that have not ended."""
        return len(self._tasks)

    def try_claim(self) -> bool:
        """Take a place; False if all are taken. Give it back with `unclaim`."""
        if self._num_claimed >= self._limit:
            return False
        self._num_claimed += 1
        return True

    def unclaim(self) -> None:
        """Give a place back."""
        self._num_claimed -= 1

    def spawn(self, coroutine: Coroutine[Any, Any, None]) -> asyncio.Task[None]:
        """Run `coroutine` in a task that is kept until it ends."""
        task = asyncio.get_running_loop().create_task(coroutine)
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)
        return task

    async def drain(self, timeout_s: float) -> None:
        """Wait for all tasks; cancel those that have not ended after `timeout_s`."""
        if self._tasks:
            await asyncio.wait(self._tasks, timeout=timeout_s)
        tasks = tuple(self._tasks)
        for task in tasks:
            task.cancel()
        if tasks:
            await asyncio.gather(*tasks, return_exceptions=True)


@dataclass(slots=True)
class Shared:
    """What all links of a daemon share: rate caps, memory, places for handlers."""

    limiter: RateLimiter = field(default_factory=RateLimiter)
    tasks: HandlerTasks = field(default_factory=lambda: HandlerTasks(4096))
    request_budget: Budget = field(default_factory=lambda: Budget(512 * MIB))
    answer_budget: Budget = field(default_factory=lambda: Budget(512 * MIB))


@dataclass(slots=True)
class LinkCore:
    """What the calling and the answering half of one link work with."""

    peer_id: str
    registry: Registry
    options: LinkOptions
    shared: Shared
    traffic: Traffic
    meter: LinkMeter
    queue: OutboundQueue
    inbound: InboundMessages
    clock: Callable[[], float]
    call_ended: Callable[[], None]  # wakes a graceful close

    def refuse(self, call_id: int, refusal: RefusalPayload) -> None:
        """Answer a call with a refusal."""
        self.traffic.refusals_sent[str(refusal.code)] += 1
        self.queue.send_control(pack_refusal(FrameType.REFUSAL, call_id, refusal))

    def count_received(self, message: InboundMessage, num_blob_bytes: int) -> None:
        """Count a complete message, and tell its sender how fast it came."""
        traffic = self.traffic.received.kind(message.kind)
        traffic.num_messages += 1
        traffic.blob_bytes += num_blob_bytes
        measurement = self.inbound.measure(message)
        if measurement is not None:
            self.meter.down.add(measurement.num_bytes, measurement.seconds)
            microseconds = max(1, round(measurement.seconds * 1e6))
            frame = pack_pair(FrameType.RECEIVED, message.call_id, measurement.num_bytes, microseconds)
            self.queue.send_control(frame)
