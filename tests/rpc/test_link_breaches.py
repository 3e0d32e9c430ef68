"""Links with a peer that breaks the protocol: hand-written frames, each breach named, memory bounded."""

from __future__ import annotations

import asyncio
import gc
import random
import struct
import tracemalloc
import zlib

import pytest

from swarmtrain.rpc import calls
from swarmtrain.rpc.errors import CallTimeout, MalformedAnswer, ProtocolViolation, Violation
from swarmtrain.rpc.link import Link, LinkOptions
from swarmtrain.wire import frames
from swarmtrain.wire.frames import FrameType, Start
from swarmtrain.wire.schema import encode

from .helpers import MIB, QUIET, REGISTRY, Ask, Reply, Tensor, echo, pattern, run, until
from .transports import MemoryStream, memory_pair


class RawPeer:
    """A hand-written peer: sends any bytes, collects what comes back."""

    def __init__(self, stream: MemoryStream) -> None:
        self.stream = stream
        self.received = bytearray()
        self._buffer = bytearray(64 << 10)
        self.ended = asyncio.Event()
        stream.start(self)

    def get_buffer(self, sizehint: int) -> memoryview:
        return memoryview(self._buffer)

    def buffer_updated(self, num_bytes: int) -> None:
        self.received += self._buffer[:num_bytes]

    def stream_closed(self, error: Exception | None) -> None:
        self.ended.set()

    def pause_writing(self) -> None:
        pass

    def resume_writing(self) -> None:
        pass

    def has(self, frame_type: FrameType, call_id: int) -> bool:
        """The last frame is of that type and call."""
        return [frame[:2] for frame in self.frames()][-1:] == [(frame_type, call_id)]

    def frames(self) -> list[tuple[FrameType, int, bytes]]:
        """The frames that came back."""
        found, offset = [], 0
        while offset + frames.HEADER_BYTES <= len(self.received):
            header = frames.parse_header(self.received, offset)
            offset += frames.HEADER_BYTES
            found.append((header.frame_type, header.call_id, bytes(self.received[offset : offset + header.length])))
            offset += header.length
        return found


def victim(options: LinkOptions = QUIET) -> tuple[Link, RawPeer]:
    """A link that accepted a stream from a raw peer."""
    raw_stream, stream = memory_pair("raw", "victim")
    link = Link(stream, REGISTRY, echo, initiator=False, options=options)
    link.start()
    return link, RawPeer(raw_stream)


HELLO = frames.pack_hello(b"", "raw")


def started(num_bytes: int, call_id: int = 1, kind: str = "tensor", frame_type: FrameType = FrameType.REQUEST) -> bytes:
    return frames.pack_start(frame_type, call_id, Start(kind, num_bytes, 10_000))


def chunk(data: bytes, call_id: int = 1, crc: int = 0) -> bytes:
    return frames.pack_header(FrameType.CHUNK, call_id, len(data), zlib.crc32(data, crc)) + data


BODY = encode(Ask(5)).join()
LARGE = 1_100_000
BREACHES: list[tuple[Violation, bytes]] = [
    (Violation.BAD_MAGIC, b"GET / HTTP/1.1\r\nHost: example.org\r\n\r\n"),
    (Violation.BAD_MAGIC, random.Random(1).randbytes(5000)),
    (Violation.NO_HELLO, frames.pack_nonce(FrameType.PING, 1)),
    (Violation.NO_HELLO, started(100)),
    (Violation.OUT_OF_ORDER, HELLO + HELLO),
    (Violation.BAD_HEADER, HELLO + frames.pack_header(FrameType.CHUNK, 1, frames.MAX_CHUNK_BYTES + 1, 0)),
    (Violation.BAD_HEADER, HELLO + frames.pack_header(FrameType.PING, 0, 5000, 0)),
    (Violation.BAD_CHECKSUM, HELLO + frames.pack_header(FrameType.PING, 0, 8, 1) + bytes(8)),
    (Violation.BAD_CONTROL, HELLO + frames.pack_frame(FrameType.PING, 0, b"abc")),
    (Violation.BAD_CONTROL, HELLO + frames.pack_frame(FrameType.REQUEST, 1, b"abc")),
    (Violation.BAD_CONTROL, HELLO + frames.pack_frame(FrameType.REQUEST, 1, struct.pack("<QI", 5, 5) + b"\xff\xfe")),
    (Violation.BAD_CONTROL, HELLO + frames.pack_frame(FrameType.GOODBYE, 0, b"")),
    (Violation.UNKNOWN_KIND, HELLO + started(100, kind="nobody")),
    (Violation.TOO_LARGE, HELLO + started(2**62)),
    (Violation.TOO_LARGE, HELLO + started(0)),
    (Violation.TOO_LARGE, HELLO + started(5000, kind="reply")),
    (Violation.TOO_LARGE, HELLO + started(len(BODY) - 1, kind="ask") + chunk(BODY)),
    (Violation.OUT_OF_ORDER, HELLO + started(100) + started(100)),
    (Violation.OUT_OF_ORDER, HELLO + started(100, call_id=5) + started(100, call_id=3)),
    (Violation.UNKNOWN_CALL, HELLO + started(100, call_id=2)),
    (Violation.UNKNOWN_CALL, HELLO + started(100, frame_type=FrameType.ANSWER, call_id=2)),
    (Violation.UNKNOWN_CALL, HELLO + started(100, frame_type=FrameType.ANSWER, call_id=1)),
    (Violation.UNKNOWN_CALL, HELLO + chunk(b"abc")),
    (Violation.UNKNOWN_CALL, HELLO + chunk(b"abc", call_id=2)),
    (Violation.UNKNOWN_CALL, HELLO + frames.pack_frame(FrameType.CANCEL, 7)),
    (Violation.UNKNOWN_CALL, HELLO + frames.pack_refusal(FrameType.REFUSAL, 2, frames.RefusalPayload("x", "", 0))),
    (Violation.UNKNOWN_CALL, HELLO + frames.pack_refusal(FrameType.REFUSAL, 1, frames.RefusalPayload("x", "", 0))),
    (Violation.BAD_CHECKSUM, HELLO + started(6) + chunk(b"abc") + chunk(b"def")),  # the checksum must run on
]


@pytest.mark.parametrize(("violation", "data"), BREACHES)
def test_each_breach_of_the_protocol_closes_the_link_with_its_name(violation: Violation, data: bytes) -> None:
    async def main() -> None:
        link, raw = victim()
        raw.stream.write(data)
        await raw.ended.wait()
        assert isinstance(link.error, ProtocolViolation)
        assert link.error.violation is violation, link.error
        assert link.traffic.violations == {violation.value: 1}
        last_type, _, payload = raw.frames()[-1]
        assert last_type is FrameType.GOODBYE
        assert frames.parse_refusal(memoryview(payload)).code == violation.value
        await link.close()

    run(main())


def test_the_same_frames_without_the_breach_are_accepted() -> None:
    """The negative control of the test above: its building blocks make a valid call."""

    async def main() -> None:
        link, raw = victim()
        raw.stream.write(
            HELLO + started(len(BODY), kind="ask") + chunk(BODY[:10]) + chunk(BODY[10:], crc=zlib.crc32(BODY[:10]))
        )
        await until(lambda: len(raw.frames()) >= 4, "hello, ping, answer and its chunk")
        assert [frame_type for frame_type, *_ in raw.frames()][-2:] == [FrameType.ANSWER, FrameType.CHUNK]
        assert REGISTRY.decode(raw.frames()[-1][2]) == Reply(5)
        raw.stream.write(frames.pack_frame(FrameType.CANCEL, 1))  # crosses the answer: no breach
        raw.stream.write(frames.pack_pair(FrameType.CREDIT, 1, 5, 5))
        raw.stream.write(frames.pack_pair(FrameType.RECEIVED, 1, 2**64 - 1, 0))
        raw.stream.write(frames.pack_nonce(FrameType.PING, 77))
        await until(lambda: raw.frames()[-1][0] is FrameType.PONG, "the link must be alive")
        assert link.is_open
        raw.stream.write(frames.pack_refusal(FrameType.GOODBYE, 0, frames.RefusalPayload("closed", "", 0)))
        await raw.ended.wait()
        assert link.traffic.violations == {}

    run(main())


def test_bytes_beyond_the_credit_are_a_breach() -> None:
    async def main() -> None:
        link, raw = victim(LinkOptions(heartbeat_s=1000, inbound_bytes=3 * MIB))
        blocker = 2 * MIB + 500_000
        raw.stream.write(HELLO + started(blocker, call_id=1) + started(MIB + 500_000, call_id=3))
        crc = 0
        for _ in range(8):  # the whole window of the second message, which has to wait for memory
            data = bytes(MIB // 8)
            raw.stream.write(chunk(data, call_id=3, crc=crc))
            crc = zlib.crc32(data, crc)
        await until(lambda: link.traffic.received.kind("tensor").body_bytes == MIB, "all of it must have arrived")
        assert link.is_open
        raw.stream.write(chunk(b"x", call_id=3, crc=crc))
        await raw.ended.wait()
        assert isinstance(link.error, ProtocolViolation)
        assert link.error.violation is Violation.OVER_CREDIT

    run(main())


def test_a_request_that_breaks_its_schema_is_refused_and_the_link_lives() -> None:
    async def main() -> None:
        link, raw = victim()
        for number, body in enumerate((BODY[:-1], BODY + b"\0", b"\xff" * 40, encode(Reply(3)).join()[:-1] + b"\xc0")):
            call_id = 2 * number + 1
            raw.stream.write(
                (HELLO if number == 0 else b"") + started(len(body), call_id, "ask") + chunk(body, call_id)
            )
            await until(lambda call_id=call_id: raw.has(FrameType.REFUSAL, call_id), "refused")  # type: ignore[misc]
            refusal = frames.parse_refusal(memoryview(raw.frames()[-1][2]))
            assert refusal.code == "malformed"
            assert refusal.text.startswith("ST-WIRE")
        assert link.is_open
        assert link.traffic.num_malformed == 4
        await link.close(0.01)

    run(main())


def test_an_answer_that_breaks_its_schema_fails_its_call_only() -> None:
    async def main() -> None:
        link, raw = victim()
        raw.stream.write(HELLO)
        bad = asyncio.create_task(link.call(Ask(1), deadline_s=10))
        good = asyncio.create_task(link.call(Ask(2), deadline_s=10))
        await until(lambda: sum(f[0] is FrameType.REQUEST for f in raw.frames()) == 2, "both requests must arrive")
        body = encode(Reply(5)).join()
        for call_id, data in ((2, body[:-1] + b"\xc0"), (4, body)):
            raw.stream.write(started(len(data), call_id, "reply", FrameType.ANSWER) + chunk(data, call_id))
        with pytest.raises(MalformedAnswer):
            await bad
        assert await good == Reply(5)
        await link.close(0.01)

    run(main())


def test_an_answer_before_its_request_is_complete_is_a_breach() -> None:
    async def main() -> None:
        raw_stream, stream = memory_pair("raw", "victim")
        stream.wire_out.faults.capacity_bytes = 1000
        link = Link(
            stream, REGISTRY, echo, initiator=False, options=LinkOptions(heartbeat_s=1000.0, chunk_bytes=40_000)
        )
        link.start()
        raw = RawPeer(raw_stream)
        raw_stream.pause_reading()
        raw.stream.write(HELLO)
        call = asyncio.create_task(link.call(Tensor(7, pattern(150_000)), deadline_s=10))
        await until(lambda: link.backlog_bytes > 0, "the request must have been begun and not be done")
        raw.stream.write(started(100, 2, "reply", FrameType.ANSWER))
        with pytest.raises(ProtocolViolation, match="out-of-order"):
            await call
        raw_stream.resume_reading()
        await raw.ended.wait()

    run(main())


def test_a_stalled_request_breaks_the_link_after_its_deadline() -> None:
    async def main() -> None:
        options = LinkOptions(heartbeat_s=0.02, missed_heartbeats=10_000, stall_grace_s=0.0)
        link, raw = victim(options)
        raw.stream.write(HELLO + frames.pack_start(FrameType.REQUEST, 1, Start("tensor", 5000, 10)))
        await raw.ended.wait()
        assert isinstance(link.error, ProtocolViolation)
        assert link.error.violation is Violation.STALLED

    run(main())


def traced_peak(before: int) -> int:
    """Bytes allocated at most since `before`."""
    return tracemalloc.get_traced_memory()[1] - before


def test_a_peer_that_sends_but_takes_nothing_is_given_up() -> None:
    async def main() -> None:
        link, raw = victim(LinkOptions(heartbeat_s=0.02, missed_heartbeats=10_000, write_stall_s=0.1))
        raw.stream.write(HELLO)
        raw.stream.pause_reading()
        with pytest.raises(ProtocolViolation, match="not-reading"):
            await link.call(Tensor(1, pattern(MIB)), deadline_s=20)
        raw.stream.abort()
        await raw.ended.wait()

    run(main())


def test_a_peer_that_never_acknowledges_cancels_is_given_up(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(calls, "_MAX_ABANDONED", 5)

    async def main() -> None:
        link, raw = victim(LinkOptions(heartbeat_s=0.02, missed_heartbeats=10_000))
        raw.stream.write(HELLO)
        for number in range(6):
            with pytest.raises((CallTimeout, ProtocolViolation)):
                await link.call(Ask(number), deadline_s=0.01)
        await raw.ended.wait()
        assert isinstance(link.error, ProtocolViolation)
        assert link.error.violation is Violation.STALLED

    run(main())


@pytest.mark.parametrize("num_bytes", [7 * MIB, MIB, 20_000])
def test_a_flood_of_requests_that_claim_much_takes_little_memory(num_bytes: int) -> None:
    async def main() -> None:
        link, raw = victim(LinkOptions(heartbeat_s=1000, inbound_bytes=8 * MIB, max_inbound_calls=64))
        flood = HELLO + b"".join(started(num_bytes, call_id) for call_id in range(1, 2001, 2))
        gc.collect()
        tracemalloc.start()
        before = tracemalloc.get_traced_memory()[0]
        raw.stream.write(flood)
        await until(lambda: link.error is not None or link.traffic.refusals_sent["busy"] == 936, "refused or closed")
        peak = traced_peak(before)
        tracemalloc.stop()
        assert peak < 8 * MIB + frames.LINK_WINDOW_BYTES + MIB
        raw.stream.abort()
        await until(lambda: link.error is not None, "the end must be noticed")

    run(main())


def test_a_peer_that_asks_and_never_reads_takes_little_memory() -> None:
    async def main() -> None:
        link, raw = victim()
        raw.stream.pause_reading()
        raw.stream.write(HELLO)
        gc.collect()
        tracemalloc.start()
        before = tracemalloc.get_traced_memory()[0]
        pings = b"".join(frames.pack_nonce(FrameType.PING, nonce) for nonce in range(1000))
        for _ in range(1000):
            raw.stream.write(pings)
            await until(lambda: not raw.stream.other.num_waiting or link.error is not None, "taken or closed")
            if link.error is not None:
                break
        peak = traced_peak(before)
        tracemalloc.stop()
        assert isinstance(link.error, ProtocolViolation)
        assert link.error.violation is Violation.NOT_READING
        assert peak < 4 * MIB
        raw.stream.abort()
        await raw.ended.wait()

    run(main())


def test_random_bytes_after_a_hello_never_hang_or_leak() -> None:
    async def main() -> None:
        generator = random.Random(3)
        whole = HELLO + started(len(BODY), kind="ask") + chunk(BODY)
        for _ in range(200):
            link, raw = victim()
            data = bytearray(whole)
            for _ in range(generator.randrange(1, 4)):
                data[generator.randrange(len(data))] = generator.randrange(256)
            cut = generator.randrange(1, len(data) + 1)
            raw.stream.write(bytes(data[:cut]))
            raw.stream.close()
            await raw.ended.wait()
            await until(lambda link=link: link.error is not None, "it must end")  # type: ignore[misc]
            assert link.num_open_calls <= 1

    run(main())
