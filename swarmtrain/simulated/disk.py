"""A disk that loses what was not synced when its machine loses power.

Files are really written, below one directory. Beside them this keeps what a disk has for sure: the content that each
file had when it was last synced, and the names that each directory had. A loss of power puts that back. A file that was
synced under one name and renamed has its new name only if its directory was synced as well; a name whose file was never
synced is an empty file. SQLite syncs by itself: its pragma says whether its last commits are safe.
"""

from __future__ import annotations

import os
import random
import shutil
import sqlite3
from dataclasses import dataclass, field
from pathlib import Path

MAX_CONTENTS = 256  # remembered file contents; beyond it, those of deleted files are forgotten
FULL = 2  # PRAGMA synchronous: every commit is synced

Tree = dict[Path, bytes | None]  # None: a directory
Names = dict[str, tuple[int, bool]]  # inode, whether it is a directory


@dataclass
class Disk:
    """See the module docstring. Files that exist when it is made count as synced."""

    root: Path
    lost: list[str] = field(default_factory=list)  # names that power losses removed, restored or changed

    def __post_init__(self) -> None:
        self._contents: dict[int, bytes] = {}  # of files, by inode
        self._names: dict[int, Names] = {}  # of directories, by inode
        self._databases: dict[Path, sqlite3.Connection] = {}
        self._left: Tree | None = None  # the files that exist when the power is back
        self._adopt(self.root)

    def sync(self, path: Path) -> None:
        """Note a sync: the file's content, or the directory's names, survive a loss of power."""
        number = path.stat().st_ino
        if path.is_dir():
            self._names[number] = _names(path)
            return
        self._contents[number] = path.read_bytes()
        if len(self._contents) > MAX_CONTENTS:
            kept = {entry.stat().st_ino for entry in self.root.rglob("*")}
            kept |= {inode for names in self._names.values() for inode, _ in names.values()}
            self._contents = {inode: content for inode, content in self._contents.items() if inode in kept}

    def open_database(self, path: Path) -> sqlite3.Connection:
        """Register a database that a process of this machine writes."""
        self._databases[path] = sqlite3.connect(path, isolation_level=None)
        return self._databases[path]

    def lose_power(self, luck: random.Random | None = None) -> None:
        """Decide what survives; `settle` applies it. With `luck`, some unsynced changes survive, and torn files."""
        if self._left is not None:
            return
        here = {path.stat().st_ino: path for path in (self.root, *self.root.rglob("*"))}
        self._left = {}
        self._collect(self.root, self.root.stat().st_ino, here, luck)
        before = {path: None if path.is_dir() else path.read_bytes() for path in here.values() if path != self.root}
        for path, database in self._databases.items():
            self._collect_database(path, database)
        self._databases.clear()
        names = {path for path in before.keys() | self._left.keys() if not path.name.endswith("-shm")}
        changed = [path for path in names if before.get(path, b"") != self._left.get(path, b"")]
        self.lost += sorted(str(path.relative_to(self.root)) for path in changed)

    def settle(self) -> None:
        """After a loss of power: restore the files that survived, and no others."""
        if self._left is None:
            return
        for path in self.root.iterdir():
            if path.is_dir():
                shutil.rmtree(path)
            else:
                path.unlink()
        for path, content in sorted(self._left.items()):
            if content is None:
                path.mkdir()
            else:
                path.write_bytes(content)
                path.chmod(0o600)
        self._left = None
        self._contents.clear()
        self._names.clear()
        self._adopt(self.root)

    def _adopt(self, directory: Path) -> None:
        """Count everything in the directory as synced."""
        for path in directory.iterdir():
            if path.is_dir():
                self._adopt(path)
            else:
                self.sync(path)
        self.sync(directory)

    def _collect(self, place: Path, number: int, here: dict[int, Path], luck: random.Random | None) -> None:
        """The surviving part of the directory with this inode, which will be at `place`."""
        assert self._left is not None
        names = self._names.get(number, {})
        if luck is not None and number in here and luck.random() < 0.5:
            names = _names(here[number])
        for name, (inode, is_directory) in sorted(names.items()):
            if is_directory:
                self._left[place / name] = None
                self._collect(place / name, inode, here, luck)
            else:
                self._left[place / name] = self._content(inode, here, luck)

    def _content(self, number: int, here: dict[int, Path], luck: random.Random | None) -> bytes:
        """The surviving content of the file with this inode."""
        content = self._contents.get(number, b"")
        if luck is not None and number in here and (now := here[number].read_bytes()) != content:
            return luck.choice((content, now, now[: len(now) // 2]))
        return content

    def _collect_database(self, path: Path, database: sqlite3.Connection) -> None:
        """SQLite syncs its files and their names when it makes them. Its log has what was committed since it was last
        moved to the file itself; unless each commit is synced, that may be gone."""
        assert self._left is not None
        log = path.with_name(f"{path.name}-wal")
        self._left.pop(log, None)
        if path.parent != self.root and path.parent not in self._left:
            return
        try:
            (synchronous,) = database.execute("PRAGMA synchronous").fetchone()
        except sqlite3.ProgrammingError:  # it was closed, and therefore synced
            synchronous = FULL
        if path.exists():
            self._left[path] = path.read_bytes()
        if synchronous >= FULL and log.exists():
            self._left[log] = log.read_bytes()


def _names(directory: Path) -> Names:
    with os.scandir(directory) as entries:
        return {entry.name: (entry.inode(), entry.is_dir(follow_symlinks=False)) for entry in entries}
