"""Writing files so that a name either holds the whole content or does not exist.

Everything goes to a temporary name in the same directory first, is flushed to the disk, and is then renamed. A reader,
or a later run after a crash, never sees half a file under its final name.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from types import TracebackType

from swarmtrain import world
from swarmtrain.errors import StorageError

TEMPORARY_SUFFIX = ".tmp"


@contextmanager
def writing(path: Path) -> Iterator[None]:
    """Turn an operating-system error on the way to `path` (disk full, no permission) into a `StorageError`."""
    try:
        yield
    except OSError as error:
        reason = error.strerror or str(error)
        fix = "free some space or choose another directory, then run the same command again"
        raise StorageError(f"cannot write {path}: {reason}", fix=fix) from error


class AtomicFile:
    """A file that takes its name only in `commit`. Leaving the `with` block without a commit removes it.

    The temporary name is the same for every attempt at `path`, so that killed attempts do not pile up.
    """

    def __init__(self, path: Path) -> None:
        self._path = path
        self._temporary = path.with_name(f".{path.name}{TEMPORARY_SUFFIX}")
        with writing(path):
            self._file = self._temporary.open("wb")

    def write(self, data: bytes | memoryview) -> None:
        """Append `data`; a failure raises `StorageError` and the file must be discarded."""
        with writing(self._path):
            self._file.write(data)

    def commit(self) -> None:
        """Flush to the disk and rename: from here on the content survives a crash."""
        with writing(self._path):
            self._file.close()
            world.sync(self._temporary)
            self._temporary.replace(self._path)
            sync_directory(self._path.parent)

    def discard(self) -> None:
        """Remove what was written; does nothing after `commit`."""
        with suppress(OSError):  # closing flushes again, which fails again on a full disk; that was reported before
            self._file.close()
        with suppress(OSError):  # a leftover is harmless: the next attempt overwrites it, and it is never read
            self._temporary.unlink(missing_ok=True)

    def __enter__(self) -> AtomicFile:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        self.discard()


def atomic_write(path: Path, content: bytes) -> None:
    """Make `path` hold exactly `content`, or raise `StorageError` and leave what was there."""
    with AtomicFile(path) as file:
        file.write(content)
        file.commit()


def sync_directory(path: Path) -> None:
    """Make the renames done in this directory survive a loss of power."""
    world.sync(path)
