"""What people see in a terminal: lines, tables and progress bars, drawn by rich.

Off a terminal everything is plain text without colours, and bars are not drawn. NO_COLOR and TERM=dumb are honoured.
Control characters never pass: names and reasons come from other machines.
"""

from __future__ import annotations

import sys
import textwrap
import time
from collections.abc import Callable, Iterable, Sequence
from typing import TextIO

from rich.console import Console
from rich.progress import BarColumn, Progress, TaskID, TaskProgressColumn, TextColumn, TimeRemainingColumn
from rich.table import Column, Table

from swarmtrain.observe.logs import printable

REDRAW_S = 0.1
ESTIMATE_S = 3600.0  # speeds are means over so long: a step of a large model may take minutes
BAR_WIDTH = 16  # leaves 50 columns of 80 for the figures
PLAIN_WIDTH = 1000  # off a terminal no table is folded


def on_terminal() -> bool:
    """Whether a person is looking at stderr."""
    return sys.stderr.isatty()


def console(stream: TextIO, width: int | None = None) -> Console:
    """A console on `stream` that is a terminal only if `stream` is one, whatever FORCE_COLOR says."""
    is_terminal = stream.isatty()
    return Console(
        file=stream,
        force_terminal=is_terminal,
        width=width or (None if is_terminal else PLAIN_WIDTH),
        markup=False,
        emoji=False,
        highlight=False,
    )


def say(line: str, *, indent: str = "") -> None:
    """A line on stdout. A terminal gets it folded between words; further lines begin with `indent`.

    A line with a word that is longer than the window, such as an invite, stays whole: it is there to be copied.
    """
    is_terminal = sys.stdout.isatty()
    print(folded(line, console(sys.stdout).width, indent=indent) if is_terminal else printable(line), flush=True)


def folded(line: str, width: int, *, indent: str = "") -> str:
    """The line, printable, folded between words as `say` does."""
    line = printable(line)
    if max(map(len, line.split()), default=0) > width - len(indent):
        return line
    return textwrap.fill(line, width, subsequent_indent=indent, break_on_hyphens=False)


def print_table(headers: Sequence[str], rows: Iterable[Sequence[str]], *, num_left: int = 1) -> None:
    """A table on stdout: the first `num_left` columns to the left, the others to the right.

    Headers are folded where they have a newline, except off a terminal: there the table has one line of headers.
    """
    screen = console(sys.stdout)
    table = Table(box=None, pad_edge=False, header_style="bold")
    for number, header in enumerate(headers):
        shown = header if screen.is_terminal else header.replace("\n", " ")
        table.add_column(shown, justify="left" if number < num_left else "right")
    for row in rows:
        table.add_row(*(printable(cell) for cell in row))
    screen.print(table)


class ProgressBar:
    """A bar with an estimate and figures on stderr of a terminal, and lines that stay above it.

    Redrawn at most every `REDRAW_S` seconds, when it is updated; `close` takes it away. The cursor stays visible, so
    that a process that is killed leaves a usable terminal.
    """

    def __init__(self, stream: TextIO | None = None, *, clock: Callable[[], float] = time.monotonic) -> None:
        self._console = console(stream or sys.stderr)
        self._clock = clock
        self._progress = Progress(
            BarColumn(BAR_WIDTH),
            TaskProgressColumn("{task.percentage:>3.0f}%", markup=False),
            TimeRemainingColumn(),
            TextColumn("{task.description}", markup=False, table_column=Column(ratio=1, no_wrap=True)),
            console=self._console,
            auto_refresh=False,
            transient=True,
            redirect_stdout=False,
            redirect_stderr=False,
            get_time=clock,
            speed_estimate_period=ESTIMATE_S,
            expand=True,
        )
        self._task: tuple[str, TaskID] | None = None
        self._next_draw = 0.0

    def __enter__(self) -> ProgressBar:
        return self

    def __exit__(self, *failure: object) -> None:
        self.close()

    def update(self, done: int, total: int, figures: str, *, phase: str = "") -> None:
        """`done` of `total`. The estimate counts from the first update of a phase: a resumed run did less than all."""
        if not self._console.is_interactive:
            return
        if self._task is None or self._task[0] != phase:
            if self._task is not None:
                self._progress.remove_task(self._task[1])
            self._task = phase, self._progress.add_task("", completed=done, total=total)
        task = self._task[1]
        self._progress.update(task, completed=done, total=total, description=printable(figures))
        now = self._clock()
        if now >= self._next_draw or done >= total:
            self._next_draw = now + REDRAW_S
            self._progress.start()
            self._console.show_cursor(True)
            self._progress.refresh()

    def keep(self, line: str) -> None:
        """A line that stays: above the bar on a terminal, on stdout elsewhere."""
        if self._console.is_interactive:
            self._console.print(printable(line), soft_wrap=True)
        else:
            print(printable(line), flush=True)

    def close(self) -> None:
        """Leave the terminal as it was. An update shows the bar again."""
        if self._progress.live.is_started:
            self._progress.stop()


def counter(noun: str, bar: ProgressBar) -> Callable[[int, int], None]:
    """Shows `done of total` in the bar."""

    def show(done: int, total: int) -> None:
        bar.update(done, total, f"{done:,} of {total:,} {noun}")

    return show
