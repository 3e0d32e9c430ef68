"""What people see: a coordinator and a volunteer on terminals of 80 columns, another volunteer in a pipe."""

from __future__ import annotations

import fcntl
import json
import os
import pty
import re
import struct
import subprocess
import sys
import termios
import threading
from pathlib import Path

import pytest
from patience import PATIENCE
from rich.cells import cell_len

from .harness import LOOPBACK, REPOSITORY, WAIT_S, clean_environment, tiny, until

pytestmark = pytest.mark.swarm

STEPS, WIDTH = 5, 80
CONTROL = re.compile(r"\x1b\[[0-9;?]*[A-Za-z]")
CLOCK = r"\d\d:\d\d:\d\d  "


class Screen:
    """A program on a terminal, and all that it has written there."""

    def __init__(self, *arguments: str, width: int = WIDTH) -> None:
        self._ours, theirs = pty.openpty()
        fcntl.ioctl(theirs, termios.TIOCSWINSZ, struct.pack("HHHH", 24, width, 0, 0))
        self.process = subprocess.Popen(
            [sys.executable, "-m", "swarmtrain", *arguments],
            stdin=theirs, stdout=theirs, stderr=theirs, start_new_session=True, cwd=REPOSITORY,
            env=clean_environment({"TERM": "xterm", "NO_COLOR": "1", "OMP_NUM_THREADS": "1"}),
        )  # fmt: skip
        os.close(theirs)
        self._shown = b""
        self._reader = threading.Thread(target=self._read, daemon=True)
        self._reader.start()

    def _read(self) -> None:
        while True:
            try:
                more = os.read(self._ours, 1 << 16)
            except OSError:  # the program has ended
                return
            self._shown += more

    def lines(self) -> list[str]:
        """What stood in a line at some time, without colours."""
        text = CONTROL.sub("", self._shown.decode(errors="replace"))
        return [line for line in re.split(r"[\r\n]+", text) if line.strip()]

    def has(self, pattern: str) -> bool:
        return any(re.match(pattern, line) for line in self.lines())

    def ended(self) -> int:
        code = self.process.wait(PATIENCE * WAIT_S)
        self._reader.join(PATIENCE * WAIT_S)
        os.close(self._ours)
        return code


def test_what_a_run_looks_like_from_its_first_line_to_its_last(place: Path) -> None:
    manifest = tiny(f"schedule.steps={STEPS}", "stages.count=2", "run.name=small")
    (place / "run.toml").write_text(manifest.canonical())
    run = Screen("coordinator", str(place / "run.toml"), "--state-dir", str(place / "c"), "--listen", LOOPBACK)
    processes: list[subprocess.Popen[bytes]] = [run.process]
    try:
        until(lambda: (place / "c" / "page").exists(), "the coordinator has begun")
        invite = (place / "c" / "invite").read_text().strip()
        join = ("join", invite, "--listen", LOOPBACK, "--name")
        until(lambda: run.has(r"STAGE  PEER +STATE +STEP"), "the table is drawn")
        attic = Screen(*join, "attic", "--stage", "0", "--state-dir", str(place / "a"))
        processes.append(attic.process)
        until(lambda: attic.has("you   0 microbatches, 0 tokens, 0 % of the run's work$"), "what it gives is shown")
        with subprocess.Popen(
            [sys.executable, "-m", "swarmtrain", *join, "cellar", "--stage", "1", "--state-dir", str(place / "b")],
            stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, cwd=REPOSITORY, env=clean_environment(),
            start_new_session=True,
        ) as cellar:  # fmt: skip
            piped, errors = cellar.communicate(timeout=PATIENCE * WAIT_S)
        assert [run.ended(), attic.ended(), cellar.returncode] == [0, 0, 0], errors
    finally:
        for process in processes:
            process.kill()

    shown = run.lines()
    for step in range(1, STEPS + 1):
        assert sum(line.startswith(f"step {step}/{STEPS}  loss ", 10) for line in shown) == 1
    assert run.has(rf"{CLOCK}run [0-9a-f]{{16}} of small: {STEPS} steps, 2 stages")
    assert run.has(rf"{CLOCK}attic \(\w{{8}}\) serves stage 0 from step 1 on")
    assert run.has(r"small  run [0-9a-f]{16}  ")
    assert run.has(rf"{CLOCK}all steps are done")
    assert any(invite in line for line in shown)

    seen = attic.lines()
    for said in ("you are attic", "serving: stage 0 from step 1 on", "you have left: the run is complete"):
        assert attic.has(f"{CLOCK}{re.escape(said)}"), said
    assert "Thank you, attic!" in "".join(seen)
    run_id = next(line for line in shown if " of small: " in line).split()[2]
    assert attic.has(rf"{CLOCK}run small {run_id}")  # one id for people

    for lines in (shown, seen):
        assert not any(re.search(r"\d\.\d{5}", line) for line in lines)  # no raw floats
        assert not any("lost" in line or "Traceback" in line for line in lines)
        assert [line for line in lines if cell_len(line) > WIDTH and invite not in line] == []

    assert "\x1b" not in piped + errors
    told = [json.loads(line) for line in piped.splitlines()]
    thanks = next(event for event in told if event["event"] == "peer_ended")
    assert thanks["peer_name"] == "cellar"
    assert 0 < thanks["credit_share"] <= 0.5


def test_all_events_are_shown_to_those_who_ask(place: Path) -> None:
    manifest = tiny("schedule.steps=2", "stages.count=1")
    (place / "run.toml").write_text(manifest.canonical())
    where = ("--state-dir", str(place / "c"), "--listen", LOOPBACK)
    run = Screen("coordinator", str(place / "run.toml"), *where, "--events", width=120)
    peer = None
    try:
        until(lambda: (place / "c" / "page").exists(), "the coordinator has begun")
        invite = (place / "c" / "invite").read_text().strip()
        peer = Screen("join", invite, "--listen", LOOPBACK, "--state-dir", str(place / "a"), "--events")
        assert [run.ended(), peer.ended()] == [0, 0]
    finally:
        for screen in (run, peer):
            if screen is not None:
                screen.process.kill()
    assert run.has(rf"{CLOCK}step 1: stage 0 holds its sum after \d+\.\d\d\d s")
    assert run.has(rf"{CLOCK}step 2: lease \d+\.\d\d s, reduce ")
    assert peer.has(rf"{CLOCK}draining: the run is complete")
