"""Which attempt at a step's reduction counts at a peer: one at a time, the newest; and where others' parts go."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Coroutine
from typing import Any

from swarmtrain.peer.attempt import Attempt
from swarmtrain.peer.context import PeerContext, PeerState
from swarmtrain.peer.listener import Listener
from swarmtrain.wire.messages import Code, Prepare, Prepared, ReduceShare, Unprepared

PART_WAIT_S = 30.0  # how long a share waits for this peer's own prepare; then until its share is computed
MAX_PAST = 3  # finished reductions that are kept for newcomers who are still receiving them
_NO_ATTEMPT = (-1, -1, -1)

Work = Callable[[Prepare], Coroutine[Any, Any, Prepared | Unprepared]]


class Attempts:
    """The attempt under way, and finished ones of which somebody may still be receiving."""

    def __init__(self, context: PeerContext, listener: Listener) -> None:
        self._context, self._listener = context, listener
        self._newest = _NO_ATTEMPT  # term, step, attempt
        self._task: asyncio.Task[Prepared | Unprepared] | None = None
        self._beginning = asyncio.Lock()  # held while one attempt replaces another
        self._reducing: Attempt | None = None
        self._past: dict[tuple[int, int, int], Attempt] = {}
        self._changed = asyncio.Condition()

    async def begin(self, prepare: Prepare, work: Work) -> asyncio.Task[Prepared | Unprepared]:
        """The attempt that is asked for; the one before is given up. One at a time: ending an attempt takes a while."""
        context, wanted = self._context, (prepare.term, prepare.step, prepare.attempt)
        async with self._beginning:
            if wanted < self._newest or prepare.step != context.step:
                raise context.refuse(Code.AHEAD, f"attempt {prepare.attempt} was given up")
            if context.state is PeerState.SYNCING:
                raise context.refuse(Code.BEHIND, "this peer begins to fetch its state", retry_after_s=0.5)
            if wanted > self._newest or self._task is None:
                self._listener.drop()  # it is one of the others now
                await self._end(next_step=prepare.step)
                async with self._changed:
                    self._newest = wanted
                    self._changed.notify_all()
                self._task = asyncio.create_task(work(prepare), name=f"prepare step {prepare.step}")
            return self._task

    async def reduce_in(self, attempt: Attempt) -> None:
        """From now on others' parts go to this one."""
        async with self._changed:
            self._reducing = attempt
            self._changed.notify_all()

    async def of(self, part: ReduceShare) -> Attempt:
        """The attempt that a part belongs to: a kept one, or the one that begins soon. Refuses others."""
        context, wanted = self._context, (part.term, part.step, part.attempt)
        attempt = self._past.get(wanted)
        if attempt is None:
            try:
                await self._begins(wanted)
            except TimeoutError:
                raise context.refuse(Code.UNKNOWN, "this peer was not asked to prepare this attempt") from None
            attempt = self._reducing
        if attempt is None or attempt.key != wanted:
            raise context.refuse(Code.AHEAD, f"attempt {part.attempt} was given up")
        return attempt

    async def _begins(self, wanted: tuple[int, int, int]) -> None:
        """Wait until this attempt reduces, or a later one was asked for. TimeoutError if it is not asked for at all."""
        async with asyncio.timeout(PART_WAIT_S) as patience, self._changed:
            while self._newest <= wanted and (self._reducing is None or self._reducing.key < wanted):
                if self._newest == wanted and patience.when() is not None:
                    patience.reschedule(None)  # it was asked, and its device is at its share
                await self._changed.wait()

    async def call_off(self, prepare: Prepare) -> None:
        """Whoever asked for this attempt does not want it any more."""
        async with self._beginning:
            if self._newest == (prepare.term, prepare.step, prepare.attempt):
                await self._end()

    async def give_up(self) -> None:
        """End what is under way."""
        async with self._beginning:
            await self._end()

    async def forget(self) -> None:
        """End what is under way; whatever is asked for next counts, were it older."""
        async with self._beginning:
            await self._end()
            self._newest = _NO_ATTEMPT

    def drop_past(self) -> None:
        """Nobody gets anything of former steps here any more."""
        self._past.clear()

    async def _end(self, *, next_step: int = -1) -> None:
        """End the attempt under way. One that is finished, and before `next_step`, stays for who is still receiving."""
        attempt = self._reducing
        if attempt is not None:
            self._reducing = None
            step = attempt.prepare.step
            self._past = {key: item for key, item in self._past.items() if item.prepare.step > step - MAX_PAST}
            if attempt.is_finished and attempt.has_listeners and step < next_step:
                self._past[attempt.key] = attempt
            else:
                await attempt.close()
        if self._task is not None and not self._task.done():
            self._task.cancel()
            await asyncio.gather(self._task, return_exceptions=True)
        self._task = None
