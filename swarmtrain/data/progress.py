"""A one-line progress bar with rate and estimate. Shows nothing where nobody watches: only on a terminal."""

from __future__ import annotations

import shutil
import time
from collections.abc import Callable
from typing import TextIO

from swarmtrain.data.prepare import PrepareProgress

REDRAW_S = 0.1
BAR_WIDTH = 24


class ProgressBar:
    """Call it with each `PrepareProgress`; `close` clears the line."""

    def __init__(self, stream: TextIO, *, clock: Callable[[], float] = time.monotonic) -> None:
        self._stream = stream
        self._clock = clock
        self._enabled = stream.isatty()
        self._first: tuple[float, PrepareProgress] | None = None
        self._next_draw = 0.0

    def __call__(self, progress: PrepareProgress) -> None:
        """Draw, at most every `REDRAW_S` seconds."""
        if not self._enabled:
            return
        now = self._clock()
        if self._first is None or self._first[1].phase != progress.phase:  # rates count from here
            self._first = (now, progress)
        elif now >= self._next_draw:
            self._next_draw = now + REDRAW_S
            started, first = self._first
            line = render(progress, first, now - started)[: shutil.get_terminal_size().columns - 1]
            self._stream.write(f"\r\x1b[K{line}")
            self._stream.flush()

    def close(self) -> None:
        """Leave the terminal as it was."""
        if self._first is not None:
            self._stream.write("\r\x1b[K")
            self._stream.flush()


def render(progress: PrepareProgress, first: PrepareProgress, elapsed_s: float) -> str:
    """The line to show `elapsed_s` seconds after `first`."""
    share = min(progress.read_bytes / max(progress.total_bytes, 1), 1.0)
    bar = "#" * round(share * BAR_WIDTH)
    seconds = max(elapsed_s, 1e-9)
    bytes_per_s = (progress.read_bytes - first.read_bytes) / seconds
    tokens_per_s = (progress.tokens - first.tokens) / seconds
    left = "?" if bytes_per_s <= 0 else _duration((progress.total_bytes - progress.read_bytes) / bytes_per_s)
    return (
        f"{progress.phase} [{bar:.<{BAR_WIDTH}}] {share:4.0%}  {left} left  {_short(bytes_per_s)}B/s  "
        f"{_short(progress.tokens)} tokens  {_short(tokens_per_s)} tokens/s"
    )


def _short(value: float) -> str:
    for unit in ("", "k", "M", "G"):
        if value < 1000:
            return f"{value:.3g}{unit}"
        value /= 1000
    return f"{value:.0f}T"


def _duration(seconds: float) -> str:
    minutes, rest = divmod(round(max(seconds, 0)), 60)
    hours, minutes = divmod(minutes, 60)
    return f"{hours}:{minutes:02d}:{rest:02d}" if hours else f"{minutes}:{rest:02d}"
