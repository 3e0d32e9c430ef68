"""What a newcomer hears while it fetches its state: the reductions of the steps since then, one after the other.

Nobody waits for it: the others may be steps ahead of what it is still receiving.
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable
from dataclasses import dataclass

from swarmtrain.peer.context import PeerContext
from swarmtrain.wire.messages import Code, Prepare, Prepared, Unprepared

Receive = Callable[[Prepare], Awaitable[Prepared | Unprepared]]


@dataclass(frozen=True)
class _Reception:
    """A newcomer's part in one step's reduction."""

    attempt: tuple[int, int]  # term, attempt
    task: asyncio.Task[Prepared | Unprepared]


class Listener:
    """Receives the sums of steps in order."""

    def __init__(self, context: PeerContext) -> None:
        self._context = context
        self._receptions: dict[int, _Reception] = {}  # by step
        self._turn = asyncio.Lock()

    def hear(self, prepare: Prepare, receive: Receive) -> asyncio.Task[Prepared | Unprepared]:
        """`receive` a step's reduction when those before it are here. A newer attempt replaces the one before."""
        self.drop(before=self._context.step)
        wanted, known = (prepare.term, prepare.attempt), self._receptions.get(prepare.step)
        if known is not None and known.attempt > wanted:
            raise self._context.refuse(Code.AHEAD, f"attempt {prepare.attempt} was given up")
        if known is None or known.attempt < wanted:
            if known is not None:
                known.task.cancel()
            task = asyncio.create_task(self._in_turn(prepare, receive), name=f"hear step {prepare.step}")
            known = self._receptions[prepare.step] = _Reception(wanted, task)
        return known.task

    async def _in_turn(self, prepare: Prepare, receive: Receive) -> Prepared | Unprepared:
        async with self._turn:
            answer = await receive(prepare)
        if isinstance(answer, Unprepared):  # without this one, those after it are of no use
            for step, item in list(self._receptions.items()):
                if step > prepare.step and item.attempt[0] == prepare.term:
                    self._receptions.pop(step).task.cancel()
        return answer

    async def ended(self, step: int) -> None:
        """Wait until what is received of `step` is here, or given up."""
        if (reception := self._receptions.get(step)) is not None:
            await asyncio.wait([reception.task])

    @property
    def is_going_on(self) -> bool:
        """Whether a step's sum is being received."""
        return any(not item.task.done() for item in self._receptions.values())

    def call_off(self, prepare: Prepare) -> None:
        """Whoever asked for this does not want it any more."""
        known = self._receptions.get(prepare.step)
        if known is not None and known.attempt == (prepare.term, prepare.attempt):
            known.task.cancel()

    def drop(self, *, before: int | None = None) -> None:
        """What is received of steps before a newer state is of no use. None: of all steps."""
        for step in [step for step in self._receptions if before is None or step < before]:
            self._receptions.pop(step).task.cancel()

    async def stop(self) -> None:
        """Give everything up, and wait for its end."""
        tasks = [item.task for item in self._receptions.values()]
        self._receptions.clear()
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
