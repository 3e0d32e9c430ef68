"""A device that hangs while the event loop lives: the peer says so itself, once, and takes no work until it answers.

Nobody else can tell a hang from slow work in less than a deadline, and would pay that deadline in every step and for
every microbatch. What the hanging job was at stays in the ledger and counts if it ends after all.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Awaitable, Callable
from typing import Any, TypeVar

from swarmtrain.peer.compute import ComputeThread
from swarmtrain.rpc.errors import Refusal
from swarmtrain.wire.messages import Code

T = TypeVar("T")

log = logging.getLogger(__name__)

LOOK_S = 1.0
RETRY_S = 5.0  # what callers are told


class DeviceWatch:
    """Looks after one compute thread, and knows who waits for it."""

    def __init__(self, compute: ComputeThread) -> None:
        self._compute = compute
        self._hanging = asyncio.Event()

    @property
    def hangs(self) -> bool:
        """Whether it does not answer."""
        return self._hanging.is_set()

    async def run(self, changed: Callable[[], None]) -> None:
        """Look now and then, until it is cancelled. `changed` is called when it begins to hang or answers again."""
        while True:
            await asyncio.sleep(LOOK_S)
            if self._compute.hangs and not self.hangs:
                log.warning("the device does not answer: this peer takes no work until it does")
                self._hanging.set()
                changed()
            elif self.hangs and not self._compute.hangs:
                log.warning("the device answers again")
                self._hanging.clear()
                changed()

    def check(self) -> None:
        """Refuse what needs the device while it hangs."""
        if self.hangs:
            raise Refusal(Code.NOT_SERVING, "the device of this peer does not answer", RETRY_S)

    async def unless_it_hangs(self, work: Awaitable[T]) -> T:
        """What `work` comes to. If the device begins to hang before, whoever waits is refused; the work goes on."""
        task = asyncio.ensure_future(work)
        try:
            is_done = await self.ends(task)
        except asyncio.CancelledError:
            task.cancel()
            raise
        if not is_done:
            task.add_done_callback(_see_exception)
            self.check()
        return await task

    async def ends(self, task: asyncio.Future[T]) -> bool:
        """Wait for a task, but not while the device hangs; whether it has ended."""
        hanging = asyncio.ensure_future(self._hanging.wait())
        try:
            waiting: set[asyncio.Future[Any]] = {task, hanging}
            await asyncio.wait(waiting, return_when=asyncio.FIRST_COMPLETED)
        finally:
            hanging.cancel()
        return task.done()


def _see_exception(task: asyncio.Future[T]) -> None:
    """Nobody waits for it any more."""
    if not task.cancelled():
        task.exception()
