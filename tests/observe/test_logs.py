"""Where events go: people, programs, and a file that cannot grow."""

from __future__ import annotations

import io
import json
import logging
from pathlib import Path

import pytest

from swarmtrain.observe.events import PeerJoined
from swarmtrain.observe.logs import EventFile, LogFormatter, json_lines

EVENT = PeerJoined("peer-abcdefgh", 1, 3, at=1.0)


def test_a_program_reads_one_object_per_event() -> None:
    pipe = io.StringIO()
    json_lines(pipe)(EVENT)
    assert json.loads(pipe.getvalue()) == EVENT.as_dict()


def test_log_messages_are_printable_and_tracebacks_keep_their_lines() -> None:
    try:
        raise ValueError("x")
    except ValueError as error:
        failure = (type(error), error, error.__traceback__)
    record = logging.LogRecord("net", logging.WARNING, __file__, 1, "refused: %s", ("\x1b[2J\nevil",), failure)
    lines = LogFormatter().format(record).splitlines()
    assert lines[0].endswith("W net: refused: ?[2J?evil")
    assert lines[1] == "Traceback (most recent call last):"


def test_the_event_file_rotates_and_loses_nothing_before_that(tmp_path: Path) -> None:
    path = tmp_path / "new" / "events.jsonl"
    line = len(json.dumps(PeerJoined("p", 0, 100, at=1.0).as_dict())) + 1
    sink = EventFile(path, max_bytes=10 * line)
    for number in range(100, 125):
        sink(PeerJoined("p", 0, number, at=1.0))
    sink.close()
    kept = [json.loads(text)["step"] for file in (sink.older, path) for text in file.read_text().splitlines()]
    assert kept == list(range(110, 125))
    assert path.stat().st_size <= 10 * line
    assert sorted(item.name for item in path.parent.iterdir()) == ["events.1.jsonl", "events.jsonl"]
    EventFile(path, max_bytes=10 * line)(PeerJoined("p", 0, 125, at=1.0))  # a restarted daemon appends
    assert len(path.read_text().splitlines()) == 6


def test_a_file_that_cannot_be_written_is_said_once_and_stops_nobody(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    (tmp_path / "file").write_text("")
    sink = EventFile(tmp_path / "file" / "events.jsonl")
    with caplog.at_level(logging.WARNING):
        for _ in range(3):
            sink(EVENT)
    assert len(caplog.records) == 1
    assert "events are not written" in caplog.text


def test_a_full_disk_costs_events_only(caplog: pytest.LogCaptureFixture) -> None:
    sink = EventFile(Path("/dev/full"))
    with caplog.at_level(logging.WARNING):
        sink(EVENT)
        sink(EVENT)
    assert "No space left" in caplog.text
