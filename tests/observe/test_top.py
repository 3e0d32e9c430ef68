"""`swarmtrain top`: frames that fit any window, and a terminal that is left as it was."""

from __future__ import annotations

import asyncio
import fcntl
import io
import os
import pty
import select
import struct
import subprocess
import sys
import termios
import threading
import time
from collections.abc import Iterator
from typing import Any

import pytest
from rich.cells import cell_len
from rich.console import Console
from swarm.harness import REPOSITORY, clean_environment, swarmtrain

from swarmtrain.cli.top_text import frame, sparkline
from swarmtrain.observe.http import HttpServer, as_json

SPLIT = {"lease_s": 0.6, "reduce_s": 0.3, "apply_s": 0.1, "waited_s": 0.0, "slowest_stage": 1}


def member(name: str, stage: int, **changes: Any) -> dict[str, Any]:
    lately = {"compute": 0.6, "reduce": 0.1, "queue": 0.05, "wire": 0.15, "idle": 0.1}
    item = {"peer": f"12D3KooW{name:x>8}", "name": name, "stage": stage, "state": "serving", "step": 4, "silent_s": 1.0}
    item |= {"doubt": "", "microbatches": 12, "forward_ms": 3.0, "backward_ms": 6.0, "lately": lately, "capacity": 1.0}
    return {**item, **changes}


def snapshot(stages: list[list[dict[str, Any]]], **changes: Any) -> dict[str, Any]:
    item: dict[str, Any] = {
        "kind": "coordinator", "name": "nano", "run": "abc", "state": "training", "cause": "training", "reason": "",
        "since": 1.0, "next": "step 5 of 9", "step": 4, "steps": 9, "val_loss": 2.5, "checkpoint_step": 2, "now": 100.0,
        "seconds_left": 90.0, "last_applied_at": 99.0,
        "last": {"loss": 2.25, "tokens_per_s": 1234.0}, "split": SPLIT,
        "stages": stages, "routes": [{"from": "12D3KooWxxxxxfirst"[:16], "to": "y", "share": 1.0}],
        "news": [{"at": 1.0, "line": f"event {number}"} for number in range(60)],
    }  # fmt: skip
    return {**item, **changes}


TWO = snapshot([[member("first", 0)], [member("second", 1)]])


def drawn(now: Any, losses: list[float], width: int, height: int) -> list[tuple[str, set[str]]]:
    """Every line of the window, and the colours in it."""
    console = Console(file=io.StringIO(), width=width, height=height, force_terminal=True, color_system="standard")
    lines = console.render_lines(frame(now, losses, width, height), pad=False)
    colours = [{str(part.style.color.name) for part in line if part.style and part.style.color} for line in lines]
    return [("".join(part.text for part in line), used) for line, used in zip(lines, colours, strict=True)]


def texts(*arguments: Any) -> list[str]:
    return [text for text, _ in drawn(*arguments)]


def test_a_frame_has_the_run_its_peers_and_where_the_time_goes() -> None:
    lines = texts(TWO, [3.0, 2.5, 2.25], 140, 40)
    whole = "\n".join(lines)
    for part in (
        "nano  run abc",
        "training since",
        "next: step 5 of 9",
        "loss 2.2500",
        "validation 2.5000",
        "lease 0.60 s 60 %",
    ):
        assert part in whole
    row = next(line for line in lines if "first" in line)
    assert row.split()[-10:] == ["60", "%", "10", "%", "5", "%", "15", "%", "10", "%"]
    assert "event 59" in whole


def test_what_is_old_is_not_shown_as_new() -> None:
    """A run that waits has no speed; a peer that is silent has no shares of time."""
    waiting = snapshot(
        [[member("first", 0, silent_s=9.0)], []],
        state="waiting", cause="waiting", reason="stage 1 has no peers", seconds_left=None, last_applied_at=20.0,
    )  # fmt: skip
    lines = texts(waiting, [], 80, 24)
    assert not any("tokens/s" in line or " left" in line for line in lines)
    assert any("step 4/9, 80 s ago" in line for line in lines)
    assert next(line for line in lines if "first" in line).split()[-2:] == ["–", "–"]
    assert any("1,234 tokens/s" in line and "90 s left" in line for line in texts(TWO, [], 80, 24))


def test_trouble_stands_out() -> None:
    bad = snapshot(
        [[member("first", 0, doubt="link broke")], []], state="waiting", cause="waiting", reason="stage 1 has no peers"
    )
    lines = drawn(bad, [], 120, 40)
    (broken,) = [colours for text, colours in lines if "link broken" in text]
    (empty,) = [colours for text, colours in lines if text.split()[:3] == ["1", "no", "peers"]]
    assert broken == empty == {"red"}
    assert any("waiting since" in text and "stage 1 has no peers" in text for text, _ in lines)


@pytest.mark.parametrize("width", [20, 60, 79, 120, 300])
@pytest.mark.parametrize("height", [5, 12, 24, 60])
def test_frames_fit_every_window(width: int, height: int) -> None:
    crowd = snapshot([[member(f"p{i}", stage) for i in range(40)] for stage in range(3)])
    lines = texts(crowd, [1.0] * 400, width, height)
    assert len(lines) <= height
    assert all(cell_len(line) <= width for line in lines)


def test_an_80_column_window_shows_the_time_split_in_short() -> None:
    lines = texts(TWO, [3.0], 80, 24)
    assert next(x for x in lines if "STAGE" in x).split() == [
        "STAGE",
        "PEER",
        "STATE",
        "STEP",
        "DONE",
        "FWD+BWD",
        "SEEN",
        "COMPUTE",
        "IDLE",
    ]
    assert next(x for x in lines if "first" in x).split() == [
        *("0", "first", "serving", "4", "12", "9.0", "ms", "1", "s", "60", "%", "10", "%"),
    ]


def test_wide_characters_in_names_do_not_move_the_columns() -> None:
    wide = snapshot([[member("日本語の名前のピアです", 0)], [member("plain", 1)]])
    ends = {cell_len(line[: line.index(" ms")]) for line in texts(wide, [], 80, 24) if " ms" in line}
    assert len(ends) == 1


def test_names_from_other_machines_cannot_move_the_cursor() -> None:
    evil = snapshot([[member("\x1b[2J\x07evil\n", 0)], [member("‮x", 1)]], reason="\x1b]0;title\x07")
    assert all(line.isprintable() for line in texts(evil, [], 200, 40))


def test_a_run_that_has_not_begun_can_be_shown() -> None:
    empty = snapshot([[], []], last=None, split=None, val_loss=None, news=[], routes=[], state="waiting")
    assert any("nothing measured yet" in line for line in texts(empty, [], 80, 24))


def test_sparkline() -> None:
    assert sparkline([1.0, 2.0, 3.0], 10) == "▁▄█" or sparkline([1.0, 2.0, 3.0], 10) == "▁▅█"
    assert sparkline([5.0] * 20, 4) == "▁▁▁▁"
    assert sparkline([], 4) == ""


@pytest.fixture
def page() -> Iterator[str]:
    """A server with a coordinator's API; its numbers are made up."""
    server = HttpServer(
        {
            "/api/status": lambda _: as_json(TWO),
            "/api/events": lambda _: as_json(TWO["news"]),
            "/api/history": lambda _: as_json([{"step": 1, "loss": 3.0}]),
        }
    )
    loop = asyncio.new_event_loop()
    loop.run_until_complete(server.start("127.0.0.1", 0))
    thread = threading.Thread(target=loop.run_forever)
    thread.start()
    yield f"http://{server.address}/"
    asyncio.run_coroutine_threadsafe(server.close(), loop).result(10)
    loop.call_soon_threadsafe(loop.stop)
    thread.join()
    loop.close()


def test_once_and_pipes_get_one_frame(page: str) -> None:
    done = swarmtrain("top", page)
    assert done.returncode == 0
    assert "nano  run abc" in done.stdout
    assert "\x1b" not in done.stdout


def test_pages_that_are_not_there_are_one_clear_line(page: str) -> None:
    for url, code, said in (
        ("http://127.0.0.1:9/", 3, "ST-PAGE: no answer from http://127.0.0.1:9"),
        (page + "nothing", 3, "ST-PAGE: no answer"),
        ("example.org", 2, "ST-USAGE: 'example.org' is not the address of a page"),
    ):
        done = swarmtrain("top", url)
        assert (done.returncode, done.stderr.count("\n")) == (code, 1)
        assert said in done.stderr


def test_q_ends_it_and_the_terminal_is_as_before(page: str) -> None:
    ours, theirs = pty.openpty()
    fcntl.ioctl(theirs, termios.TIOCSWINSZ, struct.pack("HHHH", 30, 100, 0, 0))
    before = termios.tcgetattr(theirs)
    process = subprocess.Popen(
        [sys.executable, "-m", "swarmtrain", "top", page, "--interval", "0.2"],
        stdin=theirs, stdout=theirs, stderr=theirs, env=clean_environment({"TERM": "xterm"}), cwd=REPOSITORY,
        start_new_session=True,
    )  # fmt: skip
    shown = b""
    ends_at = time.monotonic() + 60
    while shown.count(b"nano  run abc") < 3 and time.monotonic() < ends_at:  # three frames
        if select.select([ours], [], [], 0.5)[0]:
            shown += os.read(ours, 1 << 16)
    assert termios.tcgetattr(theirs) != before  # keys arrive one by one
    os.write(ours, b"q")
    assert process.wait(20) == 0
    while select.select([ours], [], [], 0.2)[0]:
        shown += os.read(ours, 1 << 16)
    assert shown.startswith(b"\x1b[?1049h")
    assert shown.endswith(b"\x1b[?25h\x1b[?1049l")
    assert termios.tcgetattr(theirs) == before
    os.close(ours)
    os.close(theirs)


@pytest.mark.parametrize(("waited_s", "told"), [(0.0, False), (0.04, False), (0.3, True)])
def test_a_step_that_waits_for_an_all_reduce_says_for_which(waited_s: float, told: bool) -> None:
    now = {**TWO, "split": {**SPLIT, "waited_s": waited_s}}
    found = [text.strip() for text in texts(now, [2.0], 80, 24) if "all-reduce" in text]
    assert found == (["waits for the all-reduce of stage 1: 0.3 of 1.0 s"] if told else [])
