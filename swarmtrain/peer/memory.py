"""Memory that nobody uses any more goes back to the machine.

How many microbatches are in flight changes all the time. The C library keeps what the largest moment needed, in pieces
that the next large moment may not fit into: a daemon would grow for hours without a leak.
"""

from __future__ import annotations

import asyncio
import ctypes
import functools
from collections.abc import Callable

EVERY_S = 10.0


@functools.cache
def _trim() -> Callable[[int], int] | None:
    try:
        function = ctypes.CDLL(None).malloc_trim
    except (OSError, AttributeError):  # only glibc has it
        return None
    function.argtypes, function.restype = (ctypes.c_size_t,), ctypes.c_int
    return function


def give_back() -> bool:
    """Return all whole free pages; False if the C library cannot. Takes milliseconds, during which allocations wait."""
    trim = _trim()
    if trim is None:
        return False
    trim(0)
    return True


async def give_back_now_and_then(every_s: float = EVERY_S) -> None:
    """Until cancelled, or at once if it cannot be done; beside the event loop."""
    while True:
        if not await asyncio.to_thread(give_back):
            return
        await asyncio.sleep(every_s)
