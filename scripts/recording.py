"""Records terminals of 80 columns: a coordinator, two volunteers, `status` and `top` of one small real run.

The texts replace the blocks of docs/terminals.md that follow a marker, `<!-- recorded: NAME -->`.
"""

from __future__ import annotations

import fcntl
import os
import pty
import re
import struct
import subprocess
import sys
import tempfile
import termios
import threading
import time
from collections.abc import Callable
from pathlib import Path

REPOSITORY = Path(__file__).resolve().parents[1]
PAGE = REPOSITORY / "docs" / "terminals.md"
WIDTH, HEIGHT = 80, 40
LOOPBACK = "/ip4/127.0.0.1/tcp/0"
STEPS, SEEN_AT = 40, 25
WAIT_S = 120.0
CONTROL = re.compile(r"\x1b\[([0-9;?]*)([A-Za-z])|([\r\n])|([^\x1b\r\n]+)")


class Screen:
    """A program on a terminal; `lines` is what a person would see, with all that has scrolled away."""

    def __init__(self, home: Path, *arguments: str) -> None:
        self._ours, theirs = pty.openpty()
        fcntl.ioctl(theirs, termios.TIOCSWINSZ, struct.pack("HHHH", HEIGHT, WIDTH, 0, 0))
        environment = {**os.environ, "XDG_STATE_HOME": str(home), "TERM": "xterm", "NO_COLOR": "1"}
        self.process = subprocess.Popen(
            [sys.executable, "-P", "-m", "swarmtrain", *arguments],
            stdin=theirs, stdout=theirs, stderr=theirs, cwd=home, env=environment, start_new_session=True,
        )  # fmt: skip
        os.close(theirs)
        self._written = ""
        self._reader = threading.Thread(target=self._read, daemon=True)
        self._reader.start()

    def _read(self) -> None:
        while True:
            try:
                self._written += os.read(self._ours, 1 << 16).decode(errors="replace")
            except OSError:
                return

    def lines(self) -> list[str]:
        """Replays what was written: text, line ends, cursor up, erased lines. Nothing else is drawn with."""
        rows, row, column = [""], 0, 0
        for numbers, letter, end, text in CONTROL.findall(self._written):
            if end == "\r":
                column = 0
            elif end == "\n":
                row += 1
                rows += [""] * (row + 1 - len(rows))
            elif text:
                rows[row] = rows[row][:column].ljust(column) + text + rows[row][column + len(text) :]
                column += len(text)
            elif letter == "A":
                row = max(0, row - int(numbers or 1))
            elif letter == "K":
                rows[row] = ""
        while rows and not rows[-1].strip():
            rows.pop()
        return [line.rstrip() for line in rows]

    def ended(self) -> list[str]:
        """The screen when the program has ended."""
        self.process.wait(WAIT_S)
        self._reader.join(WAIT_S)
        return self.lines()


def wait(condition: Callable[[], bool], what: str) -> None:
    """Wait until it holds."""
    ends_at = time.monotonic() + WAIT_S
    while not condition():
        if time.monotonic() > ends_at:
            raise SystemExit(f"waited in vain: {what}")
        time.sleep(0.1)


def seen_step(screen: Screen) -> int:
    """The step that stands on a volunteer's screen."""
    found = re.findall(rf"step (\d+)/{STEPS}", "\n".join(screen.lines()))
    return int(found[-1]) if found else 0


def record(home: Path) -> dict[str, list[str]]:
    """All screens, by name."""
    run = Screen(home, "coordinator", "nano", "--steps", str(STEPS), "--set", "stages.count=2", "--listen", LOOPBACK)
    screens = [run]
    try:
        wait(lambda: any("watch it" in line for line in run.lines()), "the coordinator begins")
        for name in ("attic", "cellar"):
            where = ("--state-dir", str(home / name), "--listen", LOOPBACK)
            screens.append(Screen(home, "join", "--name", name, *where))
        attic = screens[1]
        wait(lambda: seen_step(attic) >= SEEN_AT, "the run is under way")
        found = {"coordinator": run.lines(), "volunteer": attic.lines()}
        found["status"] = Screen(home, "status").ended()
        found["top"] = Screen(home, "top", "--once").ended()
        found["end"] = attic.ended()[-3:]
        found["coordinator-end"] = run.ended()[-6:]
        return found
    finally:
        for screen in screens:
            screen.process.kill()


def short(lines: list[str], home: Path) -> list[str]:
    """Without this machine's paths, and with the invite cut short."""
    text = "\n".join(lines).replace(str(home), "~/.local/state")
    text = re.sub(r"st1-[\w-]{20}[\w-]*(\n[\w-]{30,}$)*", "st1-k7A5NmM3...", text, flags=re.MULTILINE)
    shown = text.split("\n")
    steps = [number for number, line in enumerate(shown) if re.match(r"\d\d:\d\d:\d\d  step ", line)]
    if len(steps) > 10:  # the first and the last tell enough
        shown[steps[3] : steps[-4] + 1] = ["..."]
    return shown


def main() -> None:
    """Record, and write the page."""
    with tempfile.TemporaryDirectory() as name:
        home = Path(name)
        page = PAGE.read_text()
        for marker, lines in record(home).items():
            block = "\n".join(f"    {line}".rstrip() for line in short(lines, home))
            pattern = rf"(<!-- recorded: {marker} -->\n)(?:\n|    [^\n]*\n)*"
            page, count = re.subn(pattern, lambda found, block=block: f"{found[1]}\n{block}\n\n", page)
            if count != 1:
                raise SystemExit(f"docs/terminals.md has {count} places for {marker}")
        PAGE.write_text(page.rstrip() + "\n")
    print(f"wrote {PAGE.relative_to(REPOSITORY)}")


if __name__ == "__main__":
    main()
