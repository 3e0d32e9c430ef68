"""The files of a journal: one writer at a time, which notices when they are removed or replaced."""

from __future__ import annotations

import fcntl
import os
from pathlib import Path
from typing import IO

from swarmtrain.errors import ExitCode, SwarmtrainError
from swarmtrain.p2p.errors import StateDirectoryInUseError


class JournalError(SwarmtrainError):
    """The journal is damaged, in use, or of another run."""

    error_id = "ST-JOURNAL"
    exit_code = ExitCode.FILES


class JournalGone(JournalError):
    """The journal's files were removed or replaced while open: further writes would be lost with the process."""

    error_id = "ST-JOURNAL-GONE"


class JournalFiles:
    """The files of a journal that this process writes. Holds the writer's lock until it is closed."""

    def __init__(self, path: Path) -> None:
        self._path = path
        self._lock = _lock(path)
        self._opened: tuple[tuple[int, int], ...] = ()

    def note(self) -> None:
        """Remember which files SQLite has opened."""
        self._opened = self._found()

    def check(self) -> None:
        """JournalGone if the files that are open are not those at the journal's path any more."""
        if self._found() != self._opened:
            raise JournalGone(
                f"the journal {self._path} was removed or replaced while the coordinator was running",
                fix="put its state directory back, or a copy of it, and start again; peers keep their states and wait",
            )

    def close(self) -> None:
        """Release the writer's lock."""
        self._lock.close()

    def _found(self) -> tuple[tuple[int, int], ...]:
        """Device and inode of the database and its write-ahead log, where commits go first; empty unless both exist."""
        try:
            found = [os.stat(name) for name in (self._path, f"{self._path}-wal")]
        except OSError:
            return ()
        return tuple((status.st_dev, status.st_ino) for status in found)


def _lock(path: Path) -> IO[bytes]:
    """Take the writer's lock; closing the returned file releases it."""
    try:
        file = path.with_suffix(".lock").open("ab")
    except OSError as error:
        raise JournalError(f"cannot open the journal {path}: {error.strerror}") from error
    try:
        fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError as error:
        file.close()
        raise StateDirectoryInUseError(path.parent, "") from error
    return file
