"""A message while it is read: items pulled one by one from its header, blobs cut from behind it."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import Any

from msgpack import Unpacker

from swarmtrain.wire.errors import ExtraBytes, TruncatedMessage
from swarmtrain.wire.limits import BLOB_ALIGNMENT


class Reader:
    """A message being read: the msgpack header through `next`/`array`/`map`, the blobs behind it in order."""

    __slots__ = ("_body", "_cursor", "array", "map", "next", "num_blob_bytes")

    def __init__(self, unpacker: Unpacker, body: memoryview, blobs_start: int) -> None:
        self.next: Callable[[], Any] = unpacker.unpack
        self.array: Callable[[], int] = unpacker.read_array_header
        self.map: Callable[[], int] = unpacker.read_map_header
        self._body = body
        self._cursor = blobs_start
        self.num_blob_bytes = 0

    def take_blob(self, num_bytes: int, path: str) -> memoryview:
        """The next blob, without a copy."""
        start = aligned(self._cursor)
        end = start + num_bytes
        if end > len(self._body):
            raise TruncatedMessage(f"{path}: {num_bytes} bytes announced, {max(0, len(self._body) - start)} present")
        if any(self._body[self._cursor : start]):
            raise ExtraBytes(f"{path}: padding is not zero")
        self._cursor = end
        self.num_blob_bytes += num_bytes
        return self._body[start:end]

    def check_all_taken(self) -> None:
        """Every blob byte belongs to a field."""
        if self._cursor != len(self._body):
            raise ExtraBytes(f"{len(self._body) - self._cursor} bytes after the last field")


class BlobListReader(Reader):
    """A reader whose blobs are at hand one by one."""

    __slots__ = ("_blobs",)

    def __init__(self, unpacker: Unpacker, blobs: Iterable[memoryview]) -> None:
        super().__init__(unpacker, memoryview(b""), 0)
        self._blobs = iter(blobs)

    def take_blob(self, num_bytes: int, path: str) -> memoryview:
        """The next blob of the list."""
        return next(self._blobs)


@dataclass(frozen=True, slots=True)
class FieldCodec:
    """How one field travels. `pack` appends blobs to the list it is given; both functions raise `WireError` only."""

    pack: Callable[[Any, list[memoryview]], object]
    unpack: Callable[[Reader], Any]
    max_bytes: int  # of the msgpack form
    max_blob_bytes: int  # of the raw blobs, padding included
    shape: str  # what the fingerprint sees: types without limits


def aligned(offset: int) -> int:
    """The first multiple of the blob alignment at or after `offset`."""
    return -(-offset // BLOB_ALIGNMENT) * BLOB_ALIGNMENT
