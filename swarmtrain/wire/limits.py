"""The words in which a message's fields state their limits."""

from __future__ import annotations

from dataclasses import dataclass
from enum import IntEnum
from typing import Annotated, TypeAlias


class Priority(IntEnum):
    """What goes first on a crowded wire. Lower numbers go first."""

    CONTROL = 0  # leases, reports, votes, progress: small, and much waits for them
    BOUNDARY = 1  # activations and gradients: the pipeline stalls without them
    ALL_REDUCE = 2  # gradient sums inside a stage
    STATE = 3  # downloads of newcomers, checkpoints


@dataclass(frozen=True, slots=True)
class Range:
    """Inclusive bounds of a number. Every int field has one."""

    low: int | float
    high: int | float


@dataclass(frozen=True, slots=True)
class MaxLength:
    """Upper bound: characters of a str, bytes of bytes and blobs, items of a tuple, entries of a dict."""

    limit: int


@dataclass(frozen=True, slots=True)
class Lengths:
    """For bytes that have one of a few lengths, such as a signature that may be left out: in place of MaxLength."""

    allowed: tuple[int, ...]


@dataclass(frozen=True, slots=True)
class AllowNonFinite:
    """Lets a float field be infinite or NaN (a loss that blew up is still a report)."""


@dataclass(frozen=True, slots=True)
class BlobMark:
    """Tells a blob from plain bytes; use `Blob`."""


# Bulk bytes. They travel raw behind the msgpack header, are not copied by encoding, and arrive as a memoryview of the
# receive buffer, which has no other holder. Every blob starts at a multiple of BLOB_ALIGNMENT of that buffer.
Blob: TypeAlias = Annotated[bytes | bytearray | memoryview, BlobMark()]

BLOB_ALIGNMENT = 16
