"""Frames of all kinds from a stranger, while a run trains: generated messages, and the same with changed bytes.

Every message of the registry is generated from its fields' own limits, with edge values and with values of the run, so
that many get past the decoder and the first checks. They reach the daemons through real frames, links and handlers.
What becomes of them is counted where they arrive.
"""

from __future__ import annotations

import dataclasses
import random
import types
import typing
from collections import Counter
from enum import Enum
from typing import Annotated, Any

from swarmtrain.p2p.network import ByteStream
from swarmtrain.simulated.stranger import Deaf, Stranger
from swarmtrain.simulated.swarm import Life, SimulatedSwarm
from swarmtrain.wire.checksum import crc32
from swarmtrain.wire.frames import (
    SMALL_MESSAGE_BYTES,
    FrameType,
    Start,
    pack_frame,
    pack_header,
    pack_pair,
    pack_start,
)
from swarmtrain.wire.limits import Lengths, MaxLength, Range
from swarmtrain.wire.messages import MESSAGES
from swarmtrain.wire.schema import encode

BATCH = 40  # frames between two looks at what came of them
BATCH_S = 0.2
MUTATED = 0.5  # share of the messages whose bytes are changed
BROKEN = 0.02  # share of frames that break the link's own rules
MAX_ITEMS = 4
MAX_TEXT = 48
MAX_BYTES = 512


class Fuzzer:
    """Sends frames from `stranger` to all daemons of a swarm in turn."""

    def __init__(self, swarm: SimulatedSwarm, stranger: Stranger, rng: random.Random) -> None:
        self._swarm, self._stranger, self._rng = swarm, stranger, rng
        self._targets = [life for life in swarm.lives.values() if life.is_running]
        self._streams: dict[str, tuple[ByteStream, Deaf, int]] = {}
        self._kinds = list(MESSAGES)
        self._run_id = stranger.run_id
        self._hints: dict[Any, dict[str, Any]] = {}
        self.num_sent = 0
        self._before = self._counted()

    def send(self, count: int) -> None:
        """Send so many frames of a message or of the link."""
        while count > 0:
            for target in self._targets:
                batch = min(BATCH, count)
                count -= batch
                self._send_batch(target, batch)
            self._swarm.run_for(BATCH_S)

    @property
    def answers(self) -> dict[str, int]:
        """What became of them, as the daemons have counted it: malformed, refused, or the end of the link."""
        return {name: count - self._before[name] for name, count in self._counted().items()}

    def _counted(self) -> Counter[str]:
        found = Counter({"malformed": 0, "refused": 0, "violations": 0})
        for life in self._targets:
            node = life.daemon.context.node if life.stage < 0 else life.daemon.assignment.peer.node
            traffic = node.traffic()
            found["malformed"] += traffic.num_malformed
            found["refused"] += sum(traffic.refusals_sent.values())
            found["violations"] += sum(traffic.violations.values())
        return found

    def _send_batch(self, target: Life, count: int) -> None:
        stream, receiver, call_id = self._streams.get(target.name) or self._open(target)
        if receiver.is_closed:
            stream, receiver, call_id = self._open(target)
        for _ in range(count):
            call_id += 2
            stream.write(self._frame(call_id))
            self.num_sent += 1
        self._streams[target.name] = stream, receiver, call_id

    def _open(self, target: Life) -> tuple[ByteStream, Deaf, int]:
        receiver = Deaf()
        return self._stranger.stream_to(target, receiver), receiver, -1

    def _frame(self, call_id: int) -> bytes:
        rng = self._rng
        if rng.random() < BROKEN:
            return self._broken(call_id)
        cls = rng.choice(self._kinds)
        body = encode(self.message(cls)).join()
        if rng.random() < MUTATED:
            body = self._mutated(body)
        body = body[:SMALL_MESSAGE_BYTES] or b"\0"
        deadline_ms = rng.choice((0, 1, 5000, 2**32 - 1))
        start = pack_start(FrameType.REQUEST, call_id, Start(cls.wire.kind, len(body), deadline_ms))
        chunk = pack_header(FrameType.CHUNK, call_id, len(body), crc32(memoryview(body), 0)) + body
        return start + chunk + (pack_frame(FrameType.CANCEL, call_id) if rng.random() < 0.1 else b"")

    def _broken(self, call_id: int) -> bytes:
        rng = self._rng
        return rng.choice(
            (
                rng.randbytes(rng.randrange(1, 100)),
                pack_frame(rng.choice(list(FrameType)), rng.getrandbits(64), rng.randbytes(rng.randrange(64))),
                pack_pair(FrameType.CREDIT, call_id, rng.getrandbits(64), rng.getrandbits(64)),
                pack_pair(FrameType.RECEIVED, call_id, rng.getrandbits(64), rng.getrandbits(64)),
                pack_start(FrameType.REQUEST, call_id, Start("no-such-kind", 5, 0)),
                pack_start(FrameType.REQUEST, call_id, Start("work", 2**63, 0)),
            )
        )

    def _mutated(self, body: bytes) -> bytes:
        rng, found = self._rng, bytearray(body)
        for _ in range(rng.choice((1, 1, 2, 8))):
            where = rng.randrange(len(found) + 1)
            way = rng.randrange(3)
            if way == 0 and where < len(found):
                found[where] = rng.randrange(256)
            elif way == 1:
                del found[where : where + rng.randrange(1, 9)]
            else:
                found[where:where] = rng.randbytes(rng.randrange(1, 9))
        return bytes(found)

    def message(self, cls: type[Any]) -> Any:
        """One message, or one record within a message."""
        hints = self._hints.get(cls)
        if hints is None:
            hints = self._hints[cls] = typing.get_type_hints(cls, include_extras=True)
        return cls(**{field.name: self._value(hints[field.name], field.name) for field in dataclasses.fields(cls)})

    def _value(self, hint: Any, name: str) -> Any:
        marks: dict[type, Any] = {}
        while typing.get_origin(hint) is Annotated:
            marks = {**{type(mark): mark for mark in hint.__metadata__}, **marks}
            hint = hint.__origin__
        rng = self._rng
        origin = typing.get_origin(hint)
        if origin is tuple:
            return self._items(typing.get_args(hint), marks, name)
        if origin in (types.UnionType, typing.Union):  # a blob
            return rng.randbytes(rng.choice((0, 1, 16, min(MAX_BYTES, marks[MaxLength].limit))))
        if hint is bool:
            return rng.random() < 0.5
        if hint is bytes:
            if Lengths in marks:
                return rng.randbytes(rng.choice(marks[Lengths].allowed))
            return rng.randbytes(rng.randrange(min(MAX_BYTES, marks[MaxLength].limit) + 1))
        if hint is str:
            return self._text(name, marks[MaxLength].limit)
        if hint in (int, float):
            return self._number(hint, marks.get(Range), name)
        if issubclass(hint, Enum):
            return rng.choice(list(hint))
        return self.message(hint)

    def _items(self, args: tuple[Any, ...], marks: dict[type, Any], name: str) -> tuple[Any, ...]:
        if args[-1] is not Ellipsis:
            return tuple(self._value(arg, name) for arg in args)
        count = self._rng.randrange(min(MAX_ITEMS, marks[MaxLength].limit) + 1)
        return tuple(self._value(args[0], name) for _ in range(count))

    def _text(self, name: str, limit: int) -> str:
        rng = self._rng
        known = [self._run_id, "serving", "syncing", "gone", "paused", "mallory-1", "x" * limit]
        known += [life.peer_id for life in self._targets]
        if name == "run" and rng.random() < 0.9:
            return self._run_id
        made = "".join(chr(rng.choice((0, 9, 65, 97, 0x202E, 0x1F600))) for _ in range(rng.randrange(MAX_TEXT)))
        return rng.choice((rng.choice(known), made, ""))[:limit]

    def _number(self, kind: type, limits: Range | None, name: str) -> Any:
        rng = self._rng
        low, high = (limits.low, limits.high) if limits is not None else (-1e300, 1e300)
        run = self._swarm.coordinator.daemon.context
        near = [run.term if name == "term" else run.step, 0, 1, run.step + 1]
        value = rng.choice((*near, *near, low, high, rng.uniform(float(low), float(high))))
        return kind(min(max(value, low), high))
