"""The processor time that a daemon spends on being observed: events, snapshots, metrics, HTTP answers.

All of it runs on the event loop, so the clock of one thread is enough. Nested blocks are counted once.
"""

from __future__ import annotations

from types import TracebackType

from swarmtrain import world


class Cost:
    """`with cost:` surrounds code that runs only for observers."""

    __slots__ = ("_began", "_depth", "seconds")

    def __init__(self) -> None:
        self.seconds = 0.0
        self._depth = 0
        self._began = 0.0

    def __enter__(self) -> None:
        if self._depth == 0:
            self._began = world.processor()
        self._depth += 1

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, at: TracebackType | None) -> None:
        self._depth -= 1
        if self._depth == 0:
            self.seconds += world.processor() - self._began
