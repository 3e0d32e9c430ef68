"""Is anybody listening? Asked before p2pd dials, because p2pd remembers failures.

After a failed dial libp2p refuses to try that address again for 5 s, then 6, 9, 14 … A daemon that is started again
within a second, as ours are, would stay out of reach for as long. So p2pd is only sent where a plain TCP connection
was just made: then its memory stays clean, and a peer that came back is reached at once.
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Iterable

from swarmtrain.p2p.addresses import Address

GRACE_S, GRACE_RATIO = 0.1, 3.0
Probe = Callable[[str, int], Awaitable[None]]  # host and port; raises OSError if nobody listens there


async def connect_once(host: str, port: int) -> None:
    """Make a TCP connection and end it. Raises OSError."""
    _, writer = await asyncio.open_connection(host, port)
    writer.transport.abort()


async def answering(addresses: Iterable[Address], probe: Probe, *, timeout_s: float) -> tuple[tuple[Address, ...], str]:
    """Those whose first hop takes TCP connections, in order, and why others do not ("" if all do).

    Of an address through a relay, the relay is asked. Once one has answered, the others get a moment more: a firewall
    swallows dials in silence, and a direct way is worth waiting for when a relay was quicker.
    """
    asked = tuple(addresses)
    loop = asyncio.get_running_loop()
    asking = {end: loop.create_task(_why_not(*end, probe)) for end in dict.fromkeys((a.host, a.port) for a in asked)}
    started_at = loop.time()
    try:
        pending, ends_at = set(asking.values()), started_at + timeout_s
        while pending and (left_s := ends_at - loop.time()) > 0:
            done, pending = await asyncio.wait(pending, timeout=left_s, return_when=asyncio.FIRST_COMPLETED)
            if any(task.result() is None for task in done):
                ends_at = min(ends_at, loop.time() + GRACE_S + GRACE_RATIO * (loop.time() - started_at))
        reasons = {end: task.result() if task.done() else "i/o timeout" for end, task in asking.items()}
    finally:
        for task in asking.values():
            task.cancel()
    good = tuple(address for address in asked if reasons[address.host, address.port] is None)
    return good, "; ".join(reason for reason in dict.fromkeys(reasons.values()) if reason is not None)


async def _why_not(host: str, port: int, probe: Probe) -> str | None:
    try:
        await probe(host, port)
    except ConnectionRefusedError:
        return "connection refused"
    except OSError as error:
        return (error.strerror or str(error)).lower()
    return None
