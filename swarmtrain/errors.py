"""Errors that a user can meet: an id, one line that says what is wrong, a fix, and an exit code.

Everything may import this module; it imports nothing. Each id has an entry in docs/errors.md.
"""

from __future__ import annotations

from enum import IntEnum


class ExitCode(IntEnum):
    """The published exit codes of every `swarmtrain` verb."""

    DONE = 0  # finished, or drained as asked
    INTERNAL = 1  # a fault of swarmtrain itself; the log has the traceback
    USAGE = 2  # bad option, manifest or preset
    UNREACHABLE = 3  # the run, its coordinator or its bootstrap peers cannot be reached
    REFUSED = 4  # the run refused this peer
    HARDWARE = 5  # the hardware does not fit
    DIVERGED = 6  # the state differs from what it must be
    FILES = 7  # data or checkpoint missing, damaged, or of another run
    STORAGE = 8  # cannot write: disk full, no permission
    TOO_OLD = 10  # this version is too old for the run


class SwarmtrainError(Exception):
    """Base of all errors for users. `str(error)` is one line; `fix` says what to do."""

    error_id = "ST-INTERNAL"
    exit_code = ExitCode.INTERNAL

    def __init__(self, message: str, *, fix: str = "") -> None:
        super().__init__(message)
        self.fix = fix


class UsageError(SwarmtrainError):
    """The request cannot be fulfilled: an unknown preset, contradicting options."""

    error_id = "ST-USAGE"
    exit_code = ExitCode.USAGE


class ManifestError(SwarmtrainError):
    """A manifest that does not describe a possible run. Names the key and what is allowed."""

    error_id = "ST-MANIFEST"
    exit_code = ExitCode.USAGE

    def __init__(self, key: str, problem: str, *, fix: str = "") -> None:
        super().__init__(f"{key}: {problem}" if key else problem, fix=fix)
        self.key = key


class DataError(SwarmtrainError):
    """Token shards or source files that are missing, truncated or do not match their index."""

    error_id = "ST-DATA"
    exit_code = ExitCode.FILES


class CheckpointError(SwarmtrainError):
    """A checkpoint that is missing, damaged or belongs to another manifest."""

    error_id = "ST-CHECKPOINT"
    exit_code = ExitCode.FILES


class StorageError(SwarmtrainError):
    """A file could not be written; the previous content is intact."""

    error_id = "ST-STORAGE"
    exit_code = ExitCode.STORAGE


class HardwareError(SwarmtrainError):
    """The device asked for is not there, or the stage does not fit it."""

    error_id = "ST-HARDWARE"
    exit_code = ExitCode.HARDWARE


class DivergedError(SwarmtrainError):
    """Numbers that must be equal or finite are not."""

    error_id = "ST-DIVERGED"
    exit_code = ExitCode.DIVERGED


class MissingExtraError(SwarmtrainError):
    """A verb needs an optional package that is not installed."""

    error_id = "ST-EXTRA"
    exit_code = ExitCode.USAGE

    def __init__(self, package: str, extra: str) -> None:
        super().__init__(f"this needs the package {package!r}", fix=f"in the repository: pip install '.[{extra}]'")
