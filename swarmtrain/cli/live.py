"""A daemon's terminal: lines that stay, and below them a few that are drawn again and again."""

from __future__ import annotations

import asyncio
import contextlib
import logging
from collections.abc import Callable
from typing import Any, TextIO

from rich.console import Group
from rich.live import Live

from swarmtrain.observe.events import Event, PeerEnded, clock_time
from swarmtrain.observe.logs import LogFormatter
from swarmtrain.terminal import console, folded

REDRAW_S = 1.0
INDENT = " " * 10

Snapshot = dict[str, Any]
TakeSnapshot = Callable[[], Snapshot | None]
Frame = Callable[[Snapshot, int, int], Group]
Line = Callable[[Event], str]


class LiveView:
    """Shows one daemon on `stream`, a terminal. An event becomes a line with `line`, a snapshot the part below it."""

    def __init__(self, stream: TextIO, line: Line, frame: Frame, *, all_events: bool = False) -> None:
        self._console = console(stream)
        self._line, self._frame, self._all_events = line, frame, all_events
        self._live = Live(
            console=self._console,
            auto_refresh=False,
            transient=True,
            redirect_stdout=False,
            redirect_stderr=False,
        )
        self._thanks: PeerEnded | None = None

    def event(self, event: Event) -> None:
        """A sink of events."""
        if isinstance(event, PeerEnded):
            self._thanks = event
            return
        text = self._line(event) or (event.line() if self._all_events else "")
        for number, part in enumerate(text.split("\n")):
            if part:
                self.keep(part if number else f"{clock_time(event.at)}  {part}")

    def keep(self, text: str) -> None:
        """A line that stays."""
        self._console.print(folded(text, self._console.width, indent=INDENT), soft_wrap=True)

    async def run(self, snapshot: TakeSnapshot) -> None:
        """Draw until cancelled."""
        if not self._console.is_interactive:
            return
        try:
            while True:
                self._draw(snapshot())
                await asyncio.sleep(REDRAW_S)
        finally:
            self._live.stop()

    def thank(self) -> None:
        """The last word to a volunteer."""
        if self._thanks is not None:
            self.keep(self._thanks.line())

    def _draw(self, now: Snapshot | None) -> None:
        if now is None:
            return
        self._live.start()
        self._console.show_cursor(True)  # a process that is killed must not leave a terminal without one
        with contextlib.suppress(BlockingIOError):
            self._live.update(self._frame(now, self._console.width, self._console.height), refresh=True)


class LogLines(logging.Handler):
    """Log records as lines above the part that is drawn."""

    def __init__(self, view: LiveView) -> None:
        super().__init__()
        self._view = view
        self.setFormatter(LogFormatter())

    def emit(self, record: logging.LogRecord) -> None:
        """See `logging.Handler`."""
        for part in self.format(record).splitlines():
            self._view.keep(part)
