"""A bounded store on disk of what AQ-SGD remembers of each training sample.

One temporary file of equal slots, without a name: whatever happens to the process, nothing is left behind. The store is
a cache. What was evicted, damaged or never written, because the disk is full or broken, costs a key-frame.
"""

from __future__ import annotations

import hashlib
import logging
import os
import tempfile
from collections import OrderedDict
from dataclasses import dataclass
from pathlib import Path
from typing import IO

log = logging.getLogger(__name__)

DEFAULT_BUDGET_BYTES = 1 << 30


@dataclass(frozen=True, slots=True)
class SampleState:
    """One sample's numbers, as bytes that both ends hold alike."""

    data: bytes
    digest: bytes

    @staticmethod
    def of(data: bytes) -> SampleState:
        return SampleState(data, hashlib.blake2b(data, digest_size=8).digest())


@dataclass(frozen=True, slots=True)
class _Slot:
    number: int
    length: int
    digest: bytes


class SampleStore:
    """Sample id -> SampleState, least recently used out first. Not thread-safe.

    The first state written fixes the size of a slot; larger ones are not stored. `directory` must exist; None stands
    for the system's directory for temporary files.
    """

    def __init__(self, directory: Path | None = None, budget_bytes: int = DEFAULT_BUDGET_BYTES) -> None:
        self._directory = directory
        self._budget_bytes = budget_bytes
        self._slot_bytes = 0
        self._slots: OrderedDict[int, _Slot] = OrderedDict()
        self._free: list[int] = []
        self._file: IO[bytes] | None = None  # opened with the first state
        self._has_complained = False

    def __len__(self) -> int:
        return len(self._slots)

    @property
    def used_bytes(self) -> int:
        """Bytes of the file that are in use or were; never above the budget."""
        return (len(self._slots) + len(self._free)) * self._slot_bytes

    def get(self, sample: int) -> SampleState | None:
        """What is stored of `sample`; None if nothing, or if the disk gave back other bytes than it was given."""
        slot = self._slots.get(sample)
        if slot is None:
            return None
        try:
            state = SampleState.of(os.pread(self._descriptor(), slot.length, slot.number * self._slot_bytes))
        except OSError as error:
            self._complain("read", error)
            self.discard(sample)
            return None
        if state.digest != slot.digest:
            self.discard(sample)
            return None
        self._slots.move_to_end(sample)
        return state

    def digest(self, sample: int) -> bytes | None:
        """Digest of what is stored of `sample`, without reading it."""
        slot = self._slots.get(sample)
        return None if slot is None else slot.digest

    def put(self, sample: int, state: SampleState) -> None:
        """Store or replace; evicts others to stay within the budget. If the disk refuses, nothing is stored."""
        self.discard(sample)
        self._slot_bytes = self._slot_bytes or max(1, len(state.data))
        if len(state.data) > self._slot_bytes or (number := self._take_slot()) is None:
            return
        try:
            written = os.pwrite(self._descriptor(), state.data, number * self._slot_bytes)
            if written != len(state.data):
                raise OSError(f"{written} of {len(state.data)} bytes were taken")
        except OSError as error:
            self._complain("write", error)
            self._free.append(number)
            return
        self._slots[sample] = _Slot(number, len(state.data), state.digest)

    def discard(self, sample: int) -> None:
        """Forget `sample`, if it is there."""
        slot = self._slots.pop(sample, None)
        if slot is not None:
            self._free.append(slot.number)

    def clear(self) -> None:
        """Forget everything and give the disk space back."""
        self._slots.clear()
        self._free.clear()
        self._slot_bytes = 0
        if self._file is not None:
            self._file.close()
            self._file = None

    def _complain(self, what: str, error: OSError) -> None:
        """Once: it goes on with key-frames, and every sample would say the same."""
        if not self._has_complained:
            self._has_complained = True
            log.warning("cannot %s the sample store: %s; key-frames are sent instead", what, error)

    def _descriptor(self) -> int:
        if self._file is None:
            # The file has no name and goes with its descriptor.
            self._file = tempfile.TemporaryFile(dir=self._directory)  # noqa: SIM115
        return self._file.fileno()

    def _take_slot(self) -> int | None:
        """The number of a slot to write; None if the budget is smaller than one."""
        if self._free:
            return self._free.pop()
        if self.used_bytes + self._slot_bytes <= self._budget_bytes:
            return len(self._slots)
        if not self._slots:
            return None
        return self._slots.popitem(last=False)[1].number
