"""Links on a bad stream: cuts, flipped bits and silence are noticed, named, and never give a wrong message."""

from __future__ import annotations

import asyncio
import random
from collections.abc import Callable

import pytest

from swarmtrain.rpc.errors import LinkClosed, PeerSilent, ProtocolViolation, Violation
from swarmtrain.rpc.exchange import Exchange
from swarmtrain.rpc.link import Link, LinkOptions
from swarmtrain.wire import frames
from swarmtrain.wire.schema import Message

from .helpers import Ask, Reply, Tensor, close_both, make_links, pattern, run, until
from .transports import MemoryStream, memory_pair

REQUEST = Tensor(7, pattern(150_000, 7))
ANSWER = Tensor(8, pattern(150_000, 8))
SMALL_CHUNKS = LinkOptions(heartbeat_s=1000.0, chunk_bytes=40_000)


def frame_borders(stream: bytes) -> list[int]:
    """The offsets at which frames begin and payloads begin."""
    borders, offset = [], 0
    while offset < len(stream):
        header = frames.parse_header(stream, offset)
        borders += [offset, offset + frames.HEADER_BYTES]
        offset += frames.HEADER_BYTES + header.length
    return [*borders, offset]


async def exchange_with_fault(
    inject: Callable[[MemoryStream, MemoryStream], None],
) -> tuple[Message | BaseException, list[Message], MemoryStream, MemoryStream, Link, Link]:
    """One call with progress over a faulty pipe: its outcome, and what the handler and the progress callback saw."""
    seen: list[Message] = []

    async def handler(request: Message, exchange: Exchange) -> Message:
        seen.append(request)
        exchange.progress(Reply(1))
        return ANSWER

    streams = memory_pair()
    inject(*streams)
    left, right = make_links(right_handler=handler, streams=streams, options=SMALL_CHUNKS)
    progress: list[Message] = []
    (outcome,) = await asyncio.gather(
        left.call(REQUEST, deadline_s=20, on_progress=progress.append), return_exceptions=True
    )
    await close_both(left, right)
    assert seen in ([], [REQUEST]), "a handler sees the whole request or none"
    assert progress in ([], [Reply(1)])
    return outcome, seen, *streams, left, right


def recorded_streams() -> tuple[bytes, bytes]:
    """What both ends write when nothing goes wrong."""
    recorded: list[bytes] = []

    async def main() -> None:
        def keep(left: MemoryStream, right: MemoryStream) -> None:
            left.wire_out.keep = right.wire_out.keep = True

        outcome, seen, left, right, *_ = await exchange_with_fault(keep)
        assert outcome == ANSWER
        assert seen == [REQUEST]
        recorded.extend((bytes(left.wire_out.written), bytes(right.wire_out.written)))

    run(main())
    return recorded[0], recorded[1]


@pytest.mark.parametrize("side", [0, 1])
def test_a_cut_at_any_byte_is_a_closed_link_or_comes_after_the_answer(side: int) -> None:
    stream = recorded_streams()[side]
    offsets = frame_borders(stream)
    assert len(offsets) > 12
    offsets += random.Random(side).sample(range(len(stream)), 40)

    async def main() -> None:
        num_closed = 0
        for offset in sorted(set(offsets)):

            def cut(left: MemoryStream, right: MemoryStream, offset: int = offset) -> None:
                (left, right)[side].wire_out.faults.cut_at = offset

            outcome, *_, left, right = await exchange_with_fault(cut)
            if isinstance(outcome, LinkClosed):
                num_closed += 1
                assert not isinstance(outcome, ProtocolViolation)
            else:
                assert outcome == ANSWER
            assert left.error is not None
            assert right.error is not None
        assert num_closed > len(set(offsets)) // 2

    run(main())


@pytest.mark.parametrize("side", [0, 1])
def test_a_flipped_bit_anywhere_is_found_and_never_gives_a_wrong_message(side: int) -> None:
    stream = recorded_streams()[side]
    generator = random.Random(side)
    borders = frame_borders(stream)
    offsets = [offset + generator.randrange(frames.HEADER_BYTES) for offset in borders[:-1:2]]
    offsets += [min(offset, len(stream) - 1) for offset in borders] + generator.sample(range(len(stream)), 40)

    async def main() -> None:
        num_violations = 0
        for offset in offsets:
            bit = generator.randrange(8)

            def flip(left: MemoryStream, right: MemoryStream, offset: int = offset, bit: int = bit) -> None:
                (left, right)[side].wire_out.faults.flip_bit_at = (offset, bit)

            outcome, *_, left, right = await exchange_with_fault(flip)
            victim = (right, left)[side]
            num_violations += sum(victim.traffic.violations.values())
            if isinstance(outcome, BaseException):
                assert isinstance(outcome, LinkClosed), outcome
            else:
                assert outcome == ANSWER
        # Flips in the frames of the closing handshake may come after the victim has stopped listening.
        assert num_violations > 0.8 * len(offsets)

    run(main())


def test_both_ends_learn_why_a_link_was_closed() -> None:
    async def main() -> None:
        def flip(left: MemoryStream, right: MemoryStream) -> None:
            left.wire_out.faults.flip_bit_at = (100_000, 3)

        outcome, seen, *_, left, right = await exchange_with_fault(flip)
        assert seen == []
        assert isinstance(outcome, LinkClosed)
        assert "bad-checksum" in str(outcome), "the caller is told by the GOODBYE"
        assert isinstance(right.error, ProtocolViolation)
        assert right.error.violation is Violation.BAD_CHECKSUM
        assert right.traffic.violations == {"bad-checksum": 1}
        assert left.traffic.violations == {}

    run(main())


def test_a_silent_peer_fails_all_calls_and_a_talking_one_does_not() -> None:
    async def main() -> None:
        options = LinkOptions(heartbeat_s=0.02, missed_heartbeats=3)
        streams = memory_pair()
        release = asyncio.Event()

        async def handler(request: Message, exchange: Exchange) -> Message:
            await release.wait()
            return Reply(1)

        left, right = make_links(right_handler=handler, streams=streams, options=options)
        call = asyncio.create_task(left.call(Ask(1), deadline_s=30))
        # A long call outlives many keepalives as long as they are answered.
        await until(lambda: left.traffic.received.control_bytes > 20 * 32, "keepalives go on during a call")
        assert not call.done()
        assert left.meter.estimate().rtt_s is not None
        streams[1].wire_out.faults.silent = True
        with pytest.raises(PeerSilent):
            await call
        with pytest.raises(PeerSilent):
            await left.call(Ask(1), deadline_s=1)
        release.set()
        await until(lambda: right.error is not None, "the aborted stream ends the other end, too")
        await until(lambda: right.num_open_calls == 0, "the handler ends by itself")

    run(main())


def test_a_blocked_loop_is_not_taken_for_a_silent_peer() -> None:
    async def main() -> None:
        left, right = make_links(options=LinkOptions(heartbeat_s=0.02, missed_heartbeats=2))
        assert await left.call(Ask(1), deadline_s=10) == Reply(1)
        loop = asyncio.get_running_loop()
        blocked_until = loop.time() + 0.3
        while loop.time() < blocked_until:  # as a long computation would
            pass
        assert await left.call(Ask(2), deadline_s=10) == Reply(2)
        assert left.is_open
        assert right.is_open
        await close_both(left, right)

    run(main())
