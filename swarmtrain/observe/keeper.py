"""Keeps a daemon's status: a sink of its events, and a way to wait for the next change."""

from __future__ import annotations

import asyncio
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import replace

from swarmtrain import world
from swarmtrain.observe.events import CallsRerouted, Event, StepApplied
from swarmtrain.observe.status import Status, apply, point_of, with_point

_USUAL = frozenset({"busy", "redirected"})  # refusals of normal operation: counted, not reported as events


class StatusKeeper:
    """The status after all events so far."""

    def __init__(self, kind: str, *, num_steps: int = 0) -> None:
        now = world.wall()
        self.status = Status(kind, now, num_steps=num_steps, since=now)
        self._bell: asyncio.Future[None] | None = None

    def __call__(self, event: Event) -> None:
        self.status = apply(event, self.status)
        if self._bell is not None and not self._bell.done():
            self._bell.set_result(None)
        self._bell = None

    def recall(self, history: Iterable[StepApplied]) -> None:
        """Restore the curve of a restarted coordinator, from steps that its journal has."""
        for known in history:
            status = with_point(self.status, point_of(known))
            val_loss = status.val_loss if known.val_loss is None else known.val_loss
            self.status = replace(status, step=known.step, last=known, last_applied_at=known.at, val_loss=val_loss)

    async def changed(self, timeout_s: float) -> None:
        """Wait for the next event, at most `timeout_s`."""
        if self._bell is None or self._bell.done():
            self._bell = asyncio.get_running_loop().create_future()
        await asyncio.wait([self._bell], timeout=timeout_s)


class RerouteNews:
    """Turns the growing counters of a dispatcher into events."""

    def __init__(self, stage: int) -> None:
        self._stage = stage
        self._told: dict[str, int] = {}

    def since_last(self, rerouted: Mapping[str, int]) -> Iterator[CallsRerouted]:
        """One event for each cause whose counter has grown."""
        for cause, count in rerouted.items():
            more = count - self._told.get(cause, 0)
            if more > 0 and cause not in _USUAL:
                yield CallsRerouted(self._stage, cause, more)
        self._told = dict(rerouted)
