"""Running a daemon from the command line: event loop, signals, event output, and ending with the parent process."""

from __future__ import annotations

import asyncio
import ctypes
import faulthandler
import logging
import os
import signal
import sys
from collections.abc import Callable, Coroutine
from pathlib import Path
from typing import Any, Protocol

from swarmtrain.cli.live import LiveView, LogLines
from swarmtrain.errors import ExitCode, SwarmtrainError
from swarmtrain.observe.events import Events
from swarmtrain.observe.logs import EventFile, LogFormatter, json_lines

log = logging.getLogger(__name__)

_PR_SET_PDEATHSIG = 1
_M_TRIM_THRESHOLD, _M_MMAP_THRESHOLD = -1, -3
DIE_WITH_PARENT = "SWARMTRAIN_DIE_WITH_PARENT"


class Daemon(Protocol):
    """A daemon, as the runner sees it."""

    def run(self) -> Coroutine[Any, Any, None]:
        """Run until the daemon has ended or was stopped."""

    def snapshot(self) -> dict[str, Any] | None:
        """Everything that it shows of itself; None while it is starting."""


def run_daemon(
    make: Callable[[Events], Daemon], stop: Callable[[Any], None], *, view: LiveView | None, state_dir: Path
) -> None:
    """Run the daemon that `make` builds on the loop. SIGTERM and Ctrl-C call `stop`; a second one leaves at once.

    `view` shows it; without one its events go to stdout as JSON lines. A file in its state directory has them always.
    """
    handler: logging.Handler = logging.StreamHandler(sys.stderr)
    handler.setFormatter(LogFormatter())
    if view is not None and sys.stderr.isatty():
        handler = LogLines(view)
    logging.basicConfig(level=os.environ.get("SWARMTRAIN_LOG", "WARNING").upper(), handlers=[handler])
    keep_freed_memory()
    faulthandler.register(signal.SIGUSR1, file=sys.stderr)  # prints where it hangs, for a bug report
    if os.environ.get(DIE_WITH_PARENT):
        _die_with_parent(int(os.environ[DIE_WITH_PARENT]))

    async def main() -> None:
        events = Events(view.event if view is not None else json_lines(sys.stdout))
        events.add(EventFile(state_dir / "events.jsonl"))
        daemon = make(events)
        loop = asyncio.get_running_loop()
        task = asyncio.current_task()
        asked = 0

        def signalled() -> None:
            nonlocal asked
            asked += 1
            if asked == 1:
                stop(daemon)
            elif task is not None:
                task.cancel()

        for number in (signal.SIGTERM, signal.SIGINT):
            loop.add_signal_handler(number, signalled)
        drawing = asyncio.create_task(view.run(daemon.snapshot)) if view is not None else None
        try:
            await daemon.run()
        except asyncio.CancelledError:
            if not asked:
                raise
        finally:
            if drawing is not None:
                drawing.cancel()
                (failure,) = await asyncio.gather(drawing, return_exceptions=True)
                if isinstance(failure, Exception):
                    log.error("the terminal could not be drawn", exc_info=failure)
        if view is not None:
            view.thank()

    try:
        run_loop(main())
    except BaseExceptionGroup as group:
        raise _first_expected(group) from group


def run_loop(main: Coroutine[Any, Any, None]) -> None:
    """Run `main` on uvloop, or on asyncio's own loop where that is not to be had, as on Windows."""
    try:
        import uvloop
    except ImportError:
        asyncio.run(main)
    else:
        uvloop.run(main)


def keep_freed_memory() -> None:
    """Have the C library keep up to 64 MiB of freed memory instead of returning it after every message.

    Fresh memory costs a page fault per 4 KiB: with it, a copy of a 4 MiB message took 7 times as long (glibc; other C
    libraries have no such switch and need none).
    """
    mallopt = getattr(ctypes.CDLL(None), "mallopt", None)
    if mallopt is not None:
        mallopt(_M_MMAP_THRESHOLD, 32 << 20)
        mallopt(_M_TRIM_THRESHOLD, 64 << 20)


def _die_with_parent(process_id: int) -> None:
    """Have the kernel end this process with its parent, which may have ended while this process was loading."""
    ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)
    if os.getppid() != process_id:
        os._exit(ExitCode.INTERNAL)


def _first_expected(group: BaseExceptionGroup[BaseException]) -> BaseException:
    """The error to report: an expected one if the group has any."""
    leaves: list[BaseException] = []
    stack: list[BaseException] = [group]
    while stack:
        error = stack.pop()
        if isinstance(error, BaseExceptionGroup):
            stack.extend(error.exceptions)
        else:
            leaves.append(error)
    return next((error for error in leaves if isinstance(error, SwarmtrainError)), leaves[0])
