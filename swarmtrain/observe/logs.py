"""Where events go: JSON lines for programs, and a file of bounded size in the state directory."""

from __future__ import annotations

import json
import logging
from pathlib import Path
from typing import TextIO

from swarmtrain.observe.events import Event, Sink

log = logging.getLogger(__name__)

MAX_FILE_BYTES = 8 << 20  # of the event file, and of the older one beside it


def printable(text: str) -> str:
    """The text with `?` for every control character: names and reasons come from other machines."""
    return "".join(character if character.isprintable() else "?" for character in text)


class LogFormatter(logging.Formatter):
    """Of a daemon's log: messages are printable, tracebacks keep their lines."""

    def __init__(self) -> None:
        super().__init__("%(asctime)s %(levelname).1s %(name)s: %(message)s")

    def formatMessage(self, record: logging.LogRecord) -> str:
        """See `logging.Formatter`."""
        return printable(super().formatMessage(record))


def json_lines(stream: TextIO) -> Sink:
    """A sink that writes one JSON object per line."""

    def write(event: Event) -> None:
        print(json.dumps(event.as_dict()), file=stream, flush=True)

    return write


class EventFile:
    """A sink that appends JSON lines to a file and keeps one older file. On a full disk events are lost, no more."""

    def __init__(self, path: Path, *, max_bytes: int = MAX_FILE_BYTES) -> None:
        self.path, self._max_bytes = path, max_bytes
        self._file: TextIO | None = None
        self._is_failing = False

    @property
    def older(self) -> Path:
        """The file before this one."""
        return self.path.with_suffix(".1.jsonl")

    def __call__(self, event: Event) -> None:
        try:
            self._write(json.dumps(event.as_dict()) + "\n")
            self._is_failing = False
        except OSError as error:
            if not self._is_failing:
                log.warning("events are not written to %s: %s", self.path, error.strerror)
            self._is_failing = True
            self.close()

    def close(self) -> None:
        """Close the file; the next event opens it again."""
        file, self._file = self._file, None
        if file is not None:
            try:
                file.close()
            except OSError as error:
                log.debug("%s: %s", self.path, error)

    def _write(self, line: str) -> None:
        if self._file is None:
            self.path.parent.mkdir(parents=True, exist_ok=True)
            self._file = self.path.open("a", encoding="utf-8")
        if self._file.tell() + len(line) > self._max_bytes and self._file.tell() > 0:
            self._file.close()
            self._file = None
            self.path.replace(self.older)
            self._file = self.path.open("a", encoding="utf-8")
        self._file.write(line)
        self._file.flush()
