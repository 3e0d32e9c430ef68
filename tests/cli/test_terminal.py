"""What is written to a terminal: bars that leave nothing behind, tables that fit, nothing raw from other machines."""

from __future__ import annotations

import contextlib
import io
import re
import sys
from pathlib import Path
from typing import Any
from unittest import mock

import pytest

from swarmtrain.cli.data import PrepareDisplay, figures
from swarmtrain.cli.main import main, report
from swarmtrain.cli.status import status
from swarmtrain.data.prepare import PrepareProgress
from swarmtrain.errors import SwarmtrainError
from swarmtrain.observe import control
from swarmtrain.terminal import ProgressBar, counter, print_table, say

from .programs import call

PEERS = Path(__file__).parents[2] / "peers"
CONTROLS = re.compile(r"\x1b\[[0-9;?]*[A-Za-z]|\r")


class Terminal(io.StringIO):
    def isatty(self) -> bool:
        return True


@pytest.fixture(autouse=True)
def _a_usual_terminal(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TERM", "xterm-256color")
    monkeypatch.setenv("COLUMNS", "80")
    for name in ("NO_COLOR", "FORCE_COLOR", "TTY_COMPATIBLE", "TTY_INTERACTIVE"):
        monkeypatch.delenv(name, raising=False)


def frames(stream: Terminal) -> list[str]:
    """What was drawn one after the other, without colours and moves of the cursor."""
    parts = re.split(r"\x1b\[\?25h|\r", stream.getvalue())
    return [text for part in parts if (text := CONTROLS.sub("", part).strip())]


def at(read_bytes: int, tokens: int = 0, phase: str = "tokenizing") -> PrepareProgress:
    return PrepareProgress(phase, read_bytes, 1000, tokens)


def test_the_figures_of_prepare_are_rates_since_the_phase_began() -> None:
    assert figures(at(500, 2000), at(0), 10.0) == "tokenizing  50 B/s  2k tokens  200 tokens/s"
    assert figures(at(0), at(0), 0.0) == "tokenizing  0 B/s  0 tokens  0 tokens/s"


def test_a_bar_shows_share_estimate_and_figures() -> None:
    stream, now = Terminal(), [0.0]
    with ProgressBar(stream, clock=lambda: now[0]) as bar:
        show = PrepareDisplay(bar, clock=lambda: now[0])
        for read_bytes in (0, 250, 500):
            show(at(read_bytes, 4 * read_bytes))
            now[0] += 5
    last = frames(stream)[-1]
    assert "50%" in last
    assert "0:00:10" in last
    assert "tokenizing  50 B/s  2k tokens  200 tokens/s" in last
    assert len(last) <= 80


def test_a_resumed_run_does_not_count_what_an_earlier_one_did() -> None:
    stream, now = Terminal(), [0.0]
    with ProgressBar(stream, clock=lambda: now[0]) as bar:
        for done in (500, 550, 600):
            bar.update(done, 1000, "steps")
            now[0] += 5
    assert "0:00:40" in frames(stream)[-1]


def test_estimates_begin_anew_with_each_phase() -> None:
    stream, now = Terminal(), [0.0]
    with ProgressBar(stream, clock=lambda: now[0]) as bar:
        show = PrepareDisplay(bar, clock=lambda: now[0])
        for phase, read_bytes in (("training", 0), ("training", 900), ("tokenizing", 0), ("tokenizing", 100),
                                  ("tokenizing", 200)):  # fmt: skip
            show(at(read_bytes, phase=phase))
            now[0] += 10
    last = frames(stream)[-1]
    assert "tokenizing" in last
    assert "0:01:20" in last  # 100 bytes in 10 s, 800 to go


def test_a_slow_task_has_an_estimate() -> None:
    """A step of a large model takes minutes."""
    stream, now = Terminal(), [0.0]
    with ProgressBar(stream, clock=lambda: now[0]) as bar:
        for step in range(4):
            bar.update(step, 10, "steps")
            now[0] += 300
    assert "0:35:00" in frames(stream)[-1]


def test_a_terminal_is_redrawn_ten_times_a_second_and_left_clean() -> None:
    stream, now = Terminal(), [0.0]
    with ProgressBar(stream, clock=lambda: now[0]) as bar:
        for number in range(100):
            bar.update(number, 1000, f"number {number}")
            now[0] += 0.01
    drawn = [text for text in frames(stream) if "number" in text]
    assert 8 <= len(drawn) <= 13
    assert stream.getvalue().endswith("\x1b[2K")  # the line is empty


def test_the_cursor_is_never_hidden_while_a_bar_is_drawn() -> None:
    """A process that is killed must not leave a terminal without one."""
    stream = Terminal()
    with ProgressBar(stream) as bar:
        bar.update(1, 2, "half")
        shown = stream.getvalue()
        assert "half" in shown
        assert shown.rindex("\x1b[?25h") > shown.rindex("\x1b[?25l")


def test_lines_stay_above_the_bar() -> None:
    stream, now = Terminal(), [0.0]
    with ProgressBar(stream, clock=lambda: now[0]) as bar:
        bar.update(1, 4, "one")
        bar.keep("peer abc serves stage 1")
        now[0] += 1
        bar.update(2, 4, "two")
    whole = CONTROLS.sub("", stream.getvalue())
    assert whole.index("peer abc serves stage 1\n") < whole.index("two")


def test_off_a_terminal_nothing_is_drawn_and_lines_are_plain(capsys: pytest.CaptureFixture[str]) -> None:
    with ProgressBar() as bar:
        for number in range(10):
            counter("tensors", bar)(number + 1, 10)
        bar.keep("a line that stays")
    assert capsys.readouterr() == ("a line that stays\n", "")


def test_a_dumb_terminal_gets_lines_and_no_bar(monkeypatch: pytest.MonkeyPatch, capsys: Any) -> None:
    monkeypatch.setenv("TERM", "dumb")
    stream = Terminal()
    with ProgressBar(stream) as bar:
        bar.update(1, 2, "half")
        bar.keep("a line that stays")
    assert stream.getvalue() == ""
    assert capsys.readouterr().out == "a line that stays\n"


def test_no_color_is_honoured(monkeypatch: pytest.MonkeyPatch) -> None:
    coloured, plain = Terminal(), Terminal()
    for stream in (coloured, plain):
        with ProgressBar(stream) as bar:
            bar.update(1, 2, "half")
        monkeypatch.setenv("NO_COLOR", "1")
    colour = re.compile(r"\x1b\[[0-9;]*(3[0-9]|38;[0-9;]+)m")
    assert colour.search(coloured.getvalue())
    assert not colour.search(plain.getvalue())


def test_forced_colours_do_not_reach_a_pipe(monkeypatch: pytest.MonkeyPatch, capsys: Any) -> None:
    monkeypatch.setenv("FORCE_COLOR", "1")
    print_table(("name", "size"), [("a", "1"), ("bc", "20")])
    with ProgressBar() as bar:
        bar.update(1, 2, "half")
    assert capsys.readouterr() == ("name  size\na        1\nbc      20\n", "")


EVIL = "\x1b[2J\x07\x9bevil[red]\u202e"


def test_what_other_machines_say_cannot_move_the_cursor(monkeypatch: pytest.MonkeyPatch) -> None:
    bars, out = Terminal(), Terminal()
    monkeypatch.setattr(sys, "stdout", out)
    with ProgressBar(bars) as bar:
        bar.update(1, 2, EVIL)
        bar.keep(EVIL)
    say(EVIL)
    print_table(("name",), [(EVIL,)])
    for text in (bars.getvalue(), out.getvalue()):
        assert text.count("?[2J??evil[red]?") >= 2
        assert "\x1b[2J" not in text
        assert "\x07" not in text
        assert "\x9b" not in text


def test_errors_and_status_quote_other_machines_without_their_control_characters(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    out, error = Terminal(), Terminal()
    monkeypatch.setattr(sys, "stdout", out)
    monkeypatch.setattr(sys, "stderr", error)
    answer = {"kind": "peer", "peer": "p" * 20, "run": "abc", "stage": 1, "state": "syncing", "cause": "syncing",
              "reason": EVIL, "since": 1.0, "next": EVIL, "step": 4, "microbatches": 2, "memory_bytes": 412e6,
              "traffic": {"sent": {"total_bytes": 1}, "received": {"total_bytes": 2}},
              "name": EVIL, "run_name": "nano", "steps": 9, "run_loss": 2.5, "run_tokens_per_s": 100.0,
              "seconds_left": 60.0, "silent_s": 1.0,
              "credit": {"microbatches": 2, "tokens": 2048, "share": 0.5, "seconds": 0.0},
              "now": 100.0, "started_at": 1.0, "lately": {"compute": 1.0}, "courtesy": {"month": None}}  # fmt: skip

    async def ask(*_: object) -> dict[str, Any]:
        return answer

    monkeypatch.setattr(control, "ask", ask)
    status(tmp_path)
    report(SwarmtrainError(EVIL, fix=EVIL))
    assert "?[2J??evil[red]?" in out.getvalue()
    assert error.getvalue().count("?[2J??evil[red]?") == 2
    for text in (out.getvalue(), error.getvalue()):
        assert all(line.isprintable() for line in text.splitlines())


SIM = ("sim", "--peers", "40", "--minutes", "4", "--warmup", "1")
COMMANDS = [
    ("presets",),
    ("plan", "llama-8b"),
    ("plan", "llama-1b", "--peers", f"{PEERS / 'gaming-gpu.toml'}=100000"),
    ("plan", "llama-1b", "--peers", f"{PEERS / 'laptop-cpu.toml'}=40"),
    ("plan", "nano", "--set", "run.name=" + 48 * "n"),
    SIM,
    (*SIM, "--runs", "2", "--policy", "queue:300+swarm-latency", "--policy", "ours"),
]


@pytest.mark.parametrize("arguments", COMMANDS, ids=lambda words: " ".join(words)[:30])
def test_tables_fit_80_columns_and_are_one_line_per_row_in_a_pipe(
    monkeypatch: pytest.MonkeyPatch, arguments: tuple[str, ...]
) -> None:
    out = Terminal()
    with mock.patch.object(sys, "argv", ["swarmtrain", *arguments]), monkeypatch.context() as patch:
        patch.setattr(sys, "stdout", out)
        with contextlib.suppress(SystemExit):
            main()
    shown = [CONTROLS.sub("", re.sub(r"\x1b\[[0-9;]*m", "", line)) for line in out.getvalue().splitlines()]
    assert max(map(len, shown)) <= 80
    piped = call(*arguments).out
    assert "\x1b" not in piped
    if arguments[0] != "plan":  # its sentence on what limits is one line
        assert max(map(len, piped.splitlines())) <= 80
    for line in piped.splitlines():  # cells are whole on both
        if re.match(r" *(llama-|nano|micro|\d+ )", line):
            assert any(line.split() == other.split() for other in shown), line


def test_long_lines_are_folded_on_a_terminal_only(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    line = "  stage 0: " + ", ".join(f"peer{number} serving" for number in range(12))
    say(line, indent="    ")
    assert capsys.readouterr().out == line + "\n"
    out = Terminal()
    monkeypatch.setattr(sys, "stdout", out)
    say(line, indent="    ")
    lines = out.getvalue().splitlines()
    assert len(lines) > 1
    assert all(len(item) <= 80 for item in lines)
    assert " ".join(lines).split() == line.split()
    invite = "  join with: swarmtrain join " + "x" * 200
    out.truncate(0)
    out.seek(0)
    say(invite, indent="    ")
    assert out.getvalue() == invite + "\n"  # can be copied
