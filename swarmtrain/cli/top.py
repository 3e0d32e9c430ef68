"""`swarmtrain top`: a live view of the whole swarm in the terminal."""

from __future__ import annotations

import contextlib
import json
import os
import select
import shutil
import sys
import termios
import time
import tty
import urllib.error
import urllib.request
from collections.abc import Callable, Iterator
from typing import Annotated, Any

import typer
from rich.console import Group
from rich.live import Live

from swarmtrain.cli.numbers import number
from swarmtrain.cli.places import running
from swarmtrain.cli.top_text import BAD, frame, line
from swarmtrain.errors import ExitCode, SwarmtrainError, UsageError
from swarmtrain.terminal import console

MAX_ANSWER_BYTES = 32 << 20


class PageUnreachable(SwarmtrainError):
    """The coordinator's page does not answer."""

    error_id = "ST-PAGE"
    exit_code = ExitCode.UNREACHABLE


def register(app: typer.Typer) -> None:
    """Add the verb."""
    app.command("top")(top)


def top(
    url: Annotated[
        str | None, typer.Argument(help="The coordinator's page; default: that of the coordinator on this machine.")
    ] = None,
    interval: Annotated[float, number(0.2, 3600, help="Seconds between updates.")] = 1.0,
    once: Annotated[bool, typer.Option("--once", help="Print one frame and exit, as in a pipe.")] = False,
) -> None:
    """Show the whole swarm live: stages, peers, links, where the time goes. `q` quits."""
    source = Source(_address(url))
    if once or not (sys.stdout.isatty() and sys.stdin.isatty()):
        size = shutil.get_terminal_size((120, 40))
        console(sys.stdout, size.columns).print(source.frame(size.columns, size.lines))
        return
    terminal = console(sys.stdout)
    live = Live(console=terminal, screen=True, auto_refresh=False, redirect_stdout=False, redirect_stderr=False)
    with _keyboard() as wants_end, live:
        while True:
            live.update(source.frame(terminal.width, terminal.height, patient=True), refresh=True)
            if wants_end(interval):
                return


class Source:
    """Reads the API of the page and keeps the last answer, for frames while there is none."""

    def __init__(self, url: str) -> None:
        self._url = url.rstrip("/")
        self._last: dict[str, Any] | None = None
        self._losses: list[float] = []

    def frame(self, width: int, height: int, *, patient: bool = False) -> Group:
        """The current frame. With `patient`, a page that does not answer is a line in the last frame, not an error."""
        try:
            self._last = self._look()
        except PageUnreachable as error:
            if not patient or self._last is None:
                raise
            seen = time.strftime("%H:%M:%S", time.localtime(self._last["now"]))
            old = frame(self._last, self._losses, width, height).renderables
            return Group(old[0], line(f"as of {seen}: {error}; trying again", BAD), *old[2:])
        return frame(self._last, self._losses, width, height)

    def _look(self) -> dict[str, Any]:
        now: dict[str, Any] = self._get("/api/status")
        if now.get("kind") != "coordinator":
            raise PageUnreachable(
                f"{self._url} is not a coordinator's page", fix="see `swarmtrain status` for its address"
            )
        now["news"] = self._get("/api/events")
        self._losses = [point["loss"] for point in self._get("/api/history") if point["loss"] is not None]
        return now

    def _get(self, path: str) -> Any:
        try:
            with urllib.request.urlopen(self._url + path, timeout=10) as answer:
                return json.loads(answer.read(MAX_ANSWER_BYTES))
        except (OSError, ValueError, urllib.error.HTTPError) as error:
            reason = getattr(error, "reason", None) or error
            raise PageUnreachable(f"no answer from {self._url}: {reason}", fix="is the coordinator running?") from error


def _address(url: str | None) -> str:
    if url is not None:
        if not url.startswith(("http://", "https://")):
            raise UsageError(f"{url!r:.80} is not the address of a page", fix="write http://HOST:PORT/")
        return url
    for state_dir in running("coordinator"):
        with contextlib.suppress(OSError):
            return (state_dir / "page").read_text().strip()
    raise UsageError(
        "no coordinator with a page runs on this machine", fix="name its page: swarmtrain top http://HOST:PORT/"
    )


@contextlib.contextmanager
def _keyboard() -> Iterator[Callable[[float], bool]]:
    """Keys arrive one by one meanwhile. Yields a function that waits, and returns True if a key asks to quit.

    Ctrl-C ends the block without an error; the terminal is as it was afterwards.
    """
    keyboard = sys.stdin.fileno()
    before = termios.tcgetattr(keyboard)

    def wants_end(seconds: float) -> bool:
        ends_at = time.monotonic() + seconds
        while (left := ends_at - time.monotonic()) > 0:
            ready, _, _ = select.select([keyboard], [], [], left)
            if ready and os.read(keyboard, 1) in (b"q", b"Q", b"\x03", b"\x04", b""):
                return True
        return False

    try:
        tty.setcbreak(keyboard)
        yield wants_end
    except KeyboardInterrupt:
        pass
    finally:
        termios.tcsetattr(keyboard, termios.TCSADRAIN, before)
