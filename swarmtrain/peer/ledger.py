"""What a peer has computed in an open step, by microbatch: the memory from which lost work is replayed.

An entry keeps the bytes exactly as they travelled. `accumulated` is true exactly while the microbatch's gradient is in
the stage's sum. Everything is kept until the step is applied.
"""

from __future__ import annotations

import asyncio
from collections.abc import Iterator
from dataclasses import dataclass, field

from swarmtrain.codec import Ticket
from swarmtrain.peer.compute import Key
from swarmtrain.rpc.exchange import Exchange
from swarmtrain.wire.messages import Done, Hop

Raw = bytes | bytearray | memoryview
Slot = tuple[int, int, int]  # step, microbatch, round


@dataclass(frozen=True)
class StickyAnswer:
    """A gradient that only the caller can decode. Other callers, and a caller that asks again, get the whole one."""

    payload: bytes
    ticket: Ticket


@dataclass(eq=False)
class Entry:
    """One microbatch of an open step on this stage."""

    step: int
    microbatch: int
    tokens: Raw
    boundary: Raw  # input, as received; empty on stage 0
    output: Raw = b""  # as sent to the next stage; empty on the last
    gradient: Raw = b""  # as received from the next stage; empty on the last
    generation: int = 0  # of the stage's work; that of an older one does not count any more
    round: int = 0  # how often the microbatch was begun anew on all stages
    answer: Done | None = None
    accumulated: bool = False
    task: asyncio.Task[Done] | None = None
    callers: dict[Exchange, None] = field(default_factory=dict)  # that wait for the answer, in the order of arrival
    hops: dict[int, Hop] = field(default_factory=dict)  # the peers that have it downstream, as far as known
    caller: str = ""  # the peer that sent it first
    signature: bytes = b""  # of its input, by that peer
    callee: str = ""  # the peer of the next stage that has answered
    callee_signature: bytes = b""  # of the gradient, by that peer
    was_stolen: bool = False  # another peer of the stage has given it away
    stolen_by: str = ""  # the thief
    caller_busy_until: float = 0.0  # time of the loop until which the caller has other work, as it said
    is_critical: bool = True  # whether the caller would wait for the gradient (codec/policy.py)
    sticky: StickyAnswer | None = None  # for the caller only: a difference to what it holds
    residual_bytes: int = 0  # what codecs keep to take its messages back
    with_mask: Raw = b""  # the answer's gradient for callers that sent other bytes, once there was one

    @property
    def key(self) -> Key:
        """Its step and microbatch."""
        return self.step, self.microbatch

    @property
    def slot(self) -> Slot:
        """What is kept for it is kept under this name: two rounds of a microbatch have nothing in common."""
        return self.step, self.microbatch, self.round

    @property
    def is_awaited(self) -> bool:
        """Whether a caller is still there, and could send the microbatch elsewhere."""
        return any(not exchange.caller_gone.is_set() for exchange in self.callers)

    @property
    def num_bytes(self) -> int:
        """What the entry holds in memory."""
        kept = (self.tokens, self.boundary, self.output, self.gradient, self.with_mask)
        answer = len(self.answer.gradient) if self.answer is not None else 0
        return sum(map(len, kept)) + self.residual_bytes + answer


class Ledger:
    """The entries of one step."""

    def __init__(self, step: int) -> None:
        self.step = step
        self._entries: dict[int, Entry] = {}
        self.discarded: list[Entry] = []  # of former rounds: what they have added is taken out of the sum again

    def __iter__(self) -> Iterator[Entry]:
        return iter(self._entries.values())

    def __len__(self) -> int:
        return len(self._entries)

    def get(self, microbatch: int) -> Entry | None:
        """The entry of a microbatch that this peer has taken."""
        return self._entries.get(microbatch)

    def open(self, microbatch: int, tokens: Raw, boundary: Raw, *, round: int = 0) -> Entry:
        """Take a microbatch. It must not be there yet."""
        assert microbatch not in self._entries
        entry = self._entries[microbatch] = Entry(self.step, microbatch, tokens, boundary, round=round)
        return entry

    def discard(self, microbatch: int, *, before: int) -> None:
        """What was computed of a microbatch before this round does not count. Its task may still be under way."""
        entry = self._entries.get(microbatch)
        if entry is not None and entry.round < before:
            self.discarded.append(self._entries.pop(microbatch))

    def drop(self, entry: Entry) -> None:
        """Forget a microbatch that came to nothing. What is in the sum cannot be forgotten."""
        assert not entry.accumulated
        if self._entries.get(entry.microbatch) is entry:
            del self._entries[entry.microbatch]
        elif entry in self.discarded:
            self.discarded.remove(entry)

    @property
    def num_open(self) -> int:
        """Microbatches that are not answered yet."""
        return sum(entry.answer is None for entry in self)

    def finished(self) -> set[int]:
        """Microbatches whose answer is known."""
        return {entry.microbatch for entry in self if entry.answer is not None}

    def accumulated(self) -> set[int]:
        """Microbatches in the stage's sum."""
        return {entry.microbatch for entry in self if entry.accumulated}

    def num_bytes(self) -> int:
        """What all entries hold."""
        return sum(entry.num_bytes for entry in (*self, *self.discarded))
