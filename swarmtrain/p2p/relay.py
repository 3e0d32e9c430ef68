"""Reservations at libp2p relays (circuit relay v2): a peer that cannot be dialed is reached through a relay.

This module requests reservations itself, over a raw stream, instead of leaving them to p2pd. p2pd does not renew a
reservation after a relay restarts (not within 100 s), does not report reservations at relays with private addresses,
and waits for a verdict on its own reachability, which a small network never gives. A request is cheap, so every health
check of the host makes one.

Every p2pd serves libp2p's default relay, which cuts a circuit after 128 KiB. A p2pd that is told to serve as a relay
starts a second service with real limits, and a race at its start decides which of the two answers. The right one wins
if Go schedules on one core (37 of 37 starts, idle and busy; with two cores 0 of 8). Even so, a relay's limits are
checked before it is used, and before it is offered.
"""

from __future__ import annotations

import asyncio
from dataclasses import dataclass
from enum import IntEnum
from pathlib import Path

from swarmtrain.p2p.addresses import Address, decode_varint
from swarmtrain.p2p.errors import AddressError, P2pdFailedError, PeerUnreachable
from swarmtrain.p2p.p2pd import P2pd, P2pdOptions

HOP_PROTOCOL = "/libp2p/circuit/relay/0.2.0/hop"
MAX_ANSWER_BYTES = 4096
USEFUL_CIRCUIT_BYTES = 2**30
MAX_STARTS = 5
_RESERVE = bytes((2, 8, 0))  # length, then HopMessage{type = RESERVE}
_TYPE_FIELD, _LIMIT_FIELD, _STATUS_FIELD = 1, 4, 5
_LIMIT_TIME_FIELD, _LIMIT_BYTES_FIELD = 1, 2
_TYPE_STATUS = 2


class HopStatus(IntEnum):
    """The status codes of a relay's answer."""

    OK = 100
    RESERVATION_REFUSED = 200
    RESOURCE_LIMIT_EXCEEDED = 201
    PERMISSION_DENIED = 202
    CONNECTION_FAILED = 203
    NO_RESERVATION = 204
    MALFORMED_MESSAGE = 400
    UNEXPECTED_MESSAGE = 401


@dataclass(frozen=True, slots=True)
class Reservation:
    """The limits that a relay grants: it cuts a circuit after so many bytes or seconds; 0 means no limit."""

    circuit_bytes: int
    circuit_s: int

    @property
    def is_useful(self) -> bool:
        """False for libp2p's default relay."""
        return self.circuit_bytes == 0 or self.circuit_bytes >= USEFUL_CIRCUIT_BYTES


async def reserve(p2pd: P2pd, relay_peer_id: str, *, timeout_s: float) -> Reservation:
    """Make or renew our reservation at a connected relay. It lasts about an hour, or until the connection ends.

    Raises PeerUnreachable with the relay's reason, HostDownError.
    """
    try:
        async with asyncio.timeout(timeout_s):
            stream = await p2pd.open_stream(relay_peer_id, HOP_PROTOCOL, timeout_s=timeout_s)
            try:
                answer = _Answer()
                stream.start(answer)
                stream.write(_RESERVE)
                message = await answer.message
            finally:
                stream.abort()
    except TimeoutError:
        raise PeerUnreachable(f"relay {relay_peer_id}: no answer within {timeout_s:g} s") from None
    try:
        status, reservation = read_answer(message)
    except AddressError as error:
        raise PeerUnreachable(f"relay {relay_peer_id}: its answer is malformed: {error}") from None
    if status != HopStatus.OK:
        name = HopStatus(status).name if status in set(HopStatus) else str(status)
        raise PeerUnreachable(f"relay {relay_peer_id}: it grants no reservation ({name})")
    return reservation


async def start_relay(options: P2pdOptions, guest_socket: Path, peer_id: str, *, timeout_s: float) -> P2pd:
    """A p2pd that serves as a relay with its real limits: restarted until it does (see the module docstring)."""
    guest = P2pdOptions(options.binary, guest_socket, limits=options.limits)
    addresses = tuple(Address.parse(text).from_here() for text in options.listen)
    for _ in range(MAX_STARTS):
        options.control_path.unlink(missing_ok=True)
        p2pd = await P2pd.start(options, timeout_s=timeout_s)
        try:
            if await _serves_useful_circuits(peer_id, addresses, guest, timeout_s):
                return p2pd
        except BaseException:
            await p2pd.stop()
            raise
        await p2pd.stop()
    raise P2pdFailedError(f"it served as a relay with libp2p's default limits in {MAX_STARTS} starts")


async def _serves_useful_circuits(
    relay_peer_id: str, addresses: tuple[Address, ...], guest: P2pdOptions, timeout_s: float
) -> bool:
    """Request a reservation from the relay as any other peer would, through a short-lived second p2pd."""
    guest.control_path.unlink(missing_ok=True)
    p2pd = await P2pd.start(guest, timeout_s=timeout_s)
    try:
        await p2pd.connect(relay_peer_id, addresses, timeout_s=timeout_s)
        return (await reserve(p2pd, relay_peer_id, timeout_s=timeout_s)).is_useful
    finally:
        await p2pd.stop()


def read_answer(message: bytes) -> tuple[int, Reservation]:
    """Status and limits in a HopMessage; raises AddressError for anything else."""
    numbers, parts = _read_fields(message)
    if numbers.get(_TYPE_FIELD) != _TYPE_STATUS or _STATUS_FIELD not in numbers:
        raise AddressError("it is not a relay's status message")
    limits, _ = _read_fields(parts.get(_LIMIT_FIELD, b""))
    return numbers[_STATUS_FIELD], Reservation(limits.get(_LIMIT_BYTES_FIELD, 0), limits.get(_LIMIT_TIME_FIELD, 0))


def _read_fields(message: bytes) -> tuple[dict[int, int], dict[int, bytes]]:
    """The integers and the byte strings of a protobuf message, by field number."""
    numbers: dict[int, int] = {}
    parts: dict[int, bytes] = {}
    offset = 0
    while offset < len(message):
        key, offset = _varint(message, offset)
        value, offset = _varint(message, offset)
        if key & 7 == 0:
            numbers[key >> 3] = value
        elif key & 7 == 2 and value <= len(message) - offset:
            parts[key >> 3] = message[offset : offset + value]
            offset += value
        else:
            raise AddressError("it is not a relay's message")
    return numbers, parts


def _varint(message: bytes, offset: int) -> tuple[int, int]:
    decoded = decode_varint(message, offset)
    if decoded is None:
        raise AddressError("a relay's message is truncated")
    return decoded


class _Answer:
    """Receives one length-prefixed message."""

    def __init__(self) -> None:
        self.message: asyncio.Future[bytes] = asyncio.get_running_loop().create_future()
        self._scratch = bytearray(MAX_ANSWER_BYTES)
        self._num_filled = 0

    def get_buffer(self, sizehint: int) -> memoryview:
        return memoryview(self._scratch)[self._num_filled :]

    def buffer_updated(self, num_bytes: int) -> None:
        self._num_filled += num_bytes
        received = bytes(self._scratch[: self._num_filled])
        try:
            header = decode_varint(received)
        except AddressError:
            header = (MAX_ANSWER_BYTES, 0)
        if header is not None and header[0] + header[1] >= MAX_ANSWER_BYTES:
            self._fail("its answer is too long")
        elif header is not None and len(received) >= header[0] + header[1] and not self.message.done():
            self.message.set_result(received[header[1] : header[0] + header[1]])
        if self.message.done():
            self._num_filled = 0  # bytes after the message are ignored

    def stream_closed(self, error: Exception | None) -> None:
        self._fail("it closed the stream")

    def pause_writing(self) -> None:
        """Three bytes never fill a buffer."""

    def resume_writing(self) -> None:
        """See pause_writing."""

    def _fail(self, reason: str) -> None:
        if not self.message.done():
            self.message.set_exception(PeerUnreachable(f"the relay gave no answer: {reason}"))
            self.message.exception()  # marks it as retrieved: the waiter may have left
