"""The records a directory node keeps for others, within hard limits.

A key that anybody can grow without bound makes its keepers unable to answer for it, and readers then blame the
keepers. So there is a cap for each key, for each owner and for the whole store. Within a full key, owners that are
already there may renew; newcomers are refused.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class StoreLimits:
    """One answer carries one key whole, and an answer ends at 4 MiB: `bytes_per_key` stays far below."""

    records_per_key: int = 1024
    bytes_per_key: int = 2**20
    records_per_owner: int = 64
    num_keys: int = 4096
    total_bytes: int = 32 * 2**20


@dataclass(frozen=True, slots=True)
class StoredRecord:
    """Checked bytes, and when they stop to hold."""

    raw: bytes
    expires_at: float


class RecordStore:
    """Records by key and owner. Expired ones are never returned, and are removed when their key is touched or swept."""

    def __init__(self, limits: StoreLimits, clock: Callable[[], float]) -> None:
        self._limits = limits
        self._clock = clock
        self._keys: dict[int, dict[str, StoredRecord]] = {}
        self._bytes_of_key: Counter[int] = Counter()
        self._records_of_owner: Counter[str] = Counter()
        self._next_sweep = 0.0

    @property
    def num_records(self) -> int:
        """How many records are kept, including some that have just expired."""
        return self._records_of_owner.total()

    @property
    def num_bytes(self) -> int:
        """Their total size."""
        return self._bytes_of_key.total()

    def get(self, key: int) -> list[bytes]:
        """All live records of a key."""
        self._drop_expired(key)
        return [record.raw for record in self._keys.get(key, {}).values()]

    def put(self, key: int, owner: str, raw: bytes, expires_at: float) -> bool:
        """Keep a checked record. False if a cap refuses it; an older record never replaces a newer one (True)."""
        self._sweep()
        self._drop_expired(key)
        held = self._keys.get(key, {}).get(owner)
        if held is not None and held.expires_at >= expires_at:
            return True
        if not self._fits(key, owner, len(raw), held):
            return False
        if held is not None:
            self._remove(key, owner)
        self._keys.setdefault(key, {})[owner] = StoredRecord(raw, expires_at)
        self._bytes_of_key[key] += len(raw)
        self._records_of_owner[owner] += 1
        return True

    def clear(self) -> None:
        """Forget all records."""
        self._keys.clear()
        self._bytes_of_key.clear()
        self._records_of_owner.clear()
        self._next_sweep = 0.0

    def _fits(self, key: int, owner: str, num_bytes: int, held: StoredRecord | None) -> bool:
        limits = self._limits
        growth = num_bytes - (len(held.raw) if held is not None else 0)
        is_room = (
            self._bytes_of_key[key] + growth <= limits.bytes_per_key
            and self._bytes_of_key.total() + growth <= limits.total_bytes
        )
        if held is not None:
            return is_room
        return (
            is_room
            and len(self._keys.get(key, {})) < limits.records_per_key
            and self._records_of_owner[owner] < limits.records_per_owner
            and (key in self._keys or len(self._keys) < limits.num_keys)
        )

    def _remove(self, key: int, owner: str) -> None:
        records = self._keys[key]
        self._bytes_of_key[key] -= len(records.pop(owner).raw)
        self._records_of_owner[owner] -= 1
        if self._records_of_owner[owner] == 0:
            del self._records_of_owner[owner]
        if not records:
            del self._keys[key], self._bytes_of_key[key]

    def _drop_expired(self, key: int) -> None:
        now = self._clock()
        expired = [owner for owner, record in self._keys.get(key, {}).items() if record.expires_at <= now]
        for owner in expired:
            self._remove(key, owner)

    def _sweep(self) -> None:
        """All keys, at most every few seconds: records of keys that nobody touches must go too."""
        now = self._clock()
        if now < self._next_sweep:
            return
        self._next_sweep = now + 5.0
        for key in list(self._keys):
            self._drop_expired(key)
