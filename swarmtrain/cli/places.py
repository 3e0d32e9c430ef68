"""Notes about the daemons and runs of this machine, so that verbs find them without arguments."""

from __future__ import annotations

import contextlib
import json
import os
from collections.abc import Iterator
from pathlib import Path

from swarmtrain.cli.options import state_home
from swarmtrain.errors import StorageError, UsageError


@contextlib.contextmanager
def remember_coordinator(state_dir: Path) -> Iterator[None]:
    """While a coordinator runs here, `join` and `status` find it."""
    with _noted("coordinator", state_dir):
        yield


@contextlib.contextmanager
def remember_peer(state_dir: Path) -> Iterator[None]:
    """While a peer runs here, `status` finds it."""
    with _noted("peer", state_dir):
        yield


@contextlib.contextmanager
def _noted(kind: str, state_dir: Path) -> Iterator[None]:
    note = state_home() / "running" / f"{os.getpid()}.json"
    _write(note, json.dumps({"kind": kind, "pid": os.getpid(), "state_dir": str(state_dir.resolve())}))
    try:
        yield
    finally:
        note.unlink(missing_ok=True)


def running(kind: str | None = None) -> list[Path]:
    """State directories of living daemons of this machine, newest first; notes of dead ones are removed."""
    found: list[tuple[float, Path]] = []
    folder = state_home() / "running"
    for note in folder.glob("*.json") if folder.is_dir() else ():
        try:
            content = json.loads(note.read_text())
            os.kill(int(content["pid"]), 0)
        except (OSError, ValueError, KeyError, TypeError):
            note.unlink(missing_ok=True)
            continue
        if kind is None or content.get("kind") == kind:
            found.append((note.stat().st_mtime, Path(content["state_dir"])))
    return [path for _, path in sorted(found, reverse=True)]


def remember_invite(text: str) -> None:
    """Note the invite of the last run joined."""
    _write(state_home() / "last-invite", text + "\n")


def _write(path: Path, text: str) -> None:
    """Replace a note atomically: readers see the old note or the new one. A full disk leaves the old one."""
    partial = path.with_name(f".{path.name}.{os.getpid()}")
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        partial.write_text(text)
        partial.replace(path)
    except OSError as error:
        with contextlib.suppress(OSError):
            partial.unlink()
        raise StorageError(
            f"cannot write {path}: {error.strerror}", fix="free some space, or set XDG_STATE_HOME to another directory"
        ) from error


def find_invite(given: str | None) -> str:
    """The invite that was given (or $SWARMTRAIN_INVITE), else of a coordinator on this machine, else of the last run.

    UsageError if there is none.
    """
    if given:
        return given
    for state_dir in running("coordinator"):
        with contextlib.suppress(OSError):
            return (state_dir / "invite").read_text().strip()
    with contextlib.suppress(OSError):
        return (state_home() / "last-invite").read_text().strip()
    raise UsageError(
        "no invite: none was given, no coordinator runs on this machine, and no run was joined before",
        fix="swarmtrain join INVITE, or set SWARMTRAIN_INVITE, or start `swarmtrain coordinator` here",
    )
