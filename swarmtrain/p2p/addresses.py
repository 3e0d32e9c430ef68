"""Peer ids and multiaddrs: strict conversion between text and bytes.

Written by hand because hivemind's own encoder gives p2pd a form of `/p2p/…` that it rejects inside relay addresses.
Only TCP is supported; QUIC is left out on purpose (it loses the end of streams).
"""

from __future__ import annotations

import functools
import ipaddress
import re
from collections.abc import Iterable
from dataclasses import dataclass

from swarmtrain.p2p.errors import AddressError

MAX_ADDRESS_CHARACTERS = 512
_REMEMBERED = 4096  # cached conversions: the directory reads and writes the same addresses all the time
MAX_ADDRESS_PARTS = 16
MAX_PEER_ID_BYTES = 64

_ALPHABET = "123456789ABCDEFGHJKLMNPQRSTUVWXYZabcdefghijkmnopqrstuvwxyz"
_DIGIT = {character: value for value, character in enumerate(_ALPHABET)}
_DNS_NAME = re.compile(
    r"[A-Za-z0-9_]([A-Za-z0-9_-]{0,62}[A-Za-z0-9_])?(\.[A-Za-z0-9_]([A-Za-z0-9_-]{0,62}[A-Za-z0-9_])?)*\.?"
)

# A peer id is a multihash: for an Ed25519 key the "identity hash", which is the encoded key itself; for RSA a SHA-256.
_ED25519_PREFIX = bytes((0x00, 0x24, 0x08, 0x01, 0x12, 0x20))
_SHA256_PREFIX = bytes((0x12, 0x20))

_CODES = {
    "ip4": 4,
    "tcp": 6,
    "ip6": 41,
    "dns": 53,
    "dns4": 54,
    "dns6": 55,
    "p2p-circuit": 290,
    "p2p": 421,
    "ws": 477,
    "wss": 478,
}
_NAMES = {code: name for name, code in _CODES.items()}
_FIXED_BYTES = {"ip4": 4, "tcp": 2, "ip6": 16, "p2p-circuit": 0, "ws": 0, "wss": 0}
_UNIX_CODE = 400


def base58_encode(data: bytes) -> str:
    """`data` in the Bitcoin alphabet. Quadratic: for short inputs only."""
    number = int.from_bytes(data, "big")
    digits = ""
    while number:
        number, digit = divmod(number, 58)
        digits = _ALPHABET[digit] + digits
    num_zeros = len(data) - len(data.lstrip(b"\0"))
    return _ALPHABET[0] * num_zeros + digits


def base58_decode(text: str) -> bytes:
    """Inverse of `base58_encode`; raises AddressError. Quadratic: the caller bounds the length."""
    number = 0
    for character in text:
        if character not in _DIGIT:
            raise AddressError(f"{character!r} is not a base58 character")
        number = number * 58 + _DIGIT[character]
    num_zeros = len(text) - len(text.lstrip(_ALPHABET[0]))
    return b"\0" * num_zeros + number.to_bytes((number.bit_length() + 7) // 8, "big")


@functools.lru_cache(maxsize=8192)  # base58 is slow, and the same few peers recur all the time
def peer_id_to_bytes(peer_id: str) -> bytes:
    """The multihash of a peer id in text form; raises AddressError unless its key kind is known."""
    if len(peer_id) > 2 * MAX_PEER_ID_BYTES:
        raise AddressError(f"a peer id of {len(peer_id)} characters is too long")
    try:
        raw = base58_decode(peer_id)
    except AddressError as error:
        raise AddressError(f"{peer_id!r} is not a peer id: {error}") from None
    return _checked_peer_id(raw)


@functools.lru_cache(maxsize=8192)
def peer_id_from_bytes(raw: bytes) -> str:
    """The text form of a multihash; raises AddressError for anything else."""
    return base58_encode(_checked_peer_id(raw))


def _checked_peer_id(raw: bytes) -> bytes:
    is_ed25519 = len(raw) == 38 and raw.startswith(_ED25519_PREFIX)
    is_sha256 = len(raw) == 34 and raw.startswith(_SHA256_PREFIX)
    if not (is_ed25519 or is_sha256):
        raise AddressError(f"{raw[:MAX_PEER_ID_BYTES].hex()} is not a peer id")
    return raw


def peer_id_of_key(public_key: bytes) -> str:
    """The peer id of a raw 32-byte Ed25519 public key."""
    if len(public_key) != 32:
        raise AddressError(f"an Ed25519 public key has 32 bytes, not {len(public_key)}")
    return base58_encode(_ED25519_PREFIX + public_key)


def key_of_peer_id(peer_id: str) -> bytes:
    """The Ed25519 public key that a peer id contains; raises AddressError if its key is of another kind."""
    raw = peer_id_to_bytes(peer_id)
    if not raw.startswith(_ED25519_PREFIX):
        raise AddressError(f"{peer_id} is not the id of an Ed25519 key")
    return raw[len(_ED25519_PREFIX) :]


def encode_varint(number: int) -> bytes:
    """Unsigned LEB128, as libp2p and protobuf use it."""
    encoded = bytearray()
    while number >= 0x80:
        encoded.append(number & 0x7F | 0x80)
        number >>= 7
    encoded.append(number)
    return bytes(encoded)


def decode_varint(data: bytes | bytearray | memoryview, offset: int = 0) -> tuple[int, int] | None:
    """(number, offset after it), or None if more bytes are needed; raises AddressError beyond 9 bytes."""
    number = 0
    for index in range(9):
        if offset + index >= len(data):
            return None
        byte = data[offset + index]
        number |= (byte & 0x7F) << (7 * index)
        if byte < 0x80:
            return number, offset + index + 1
    raise AddressError("a varint of more than 9 bytes")


def unix_address_bytes(path: str) -> bytes:
    """The multiaddr of a unix socket, in bytes."""
    raw = path.encode()
    return encode_varint(_UNIX_CODE) + encode_varint(len(raw)) + raw


@dataclass(frozen=True, slots=True)
class Address:
    """A multiaddr such as `/ip4/192.0.2.7/tcp/4001/p2p/12D3…` or `…/p2p/RELAY/p2p-circuit/p2p/PEER`."""

    parts: tuple[tuple[str, str], ...]

    @classmethod
    def parse(cls, text: str) -> Address:
        """Raises AddressError with the reason."""
        if len(text) > MAX_ADDRESS_CHARACTERS:
            raise AddressError(f"an address of {len(text)} characters is too long")
        return cls(_parts_of_text(text))

    @classmethod
    def from_bytes(cls, raw: bytes) -> Address:
        """Decode what p2pd sends; raises AddressError for unknown protocols and damaged bytes."""
        return cls(_parts_of_bytes(bytes(raw)))

    def to_bytes(self) -> bytes:
        """The binary multiaddr, as p2pd reads it."""
        return _bytes_of_parts(self.parts)

    def __str__(self) -> str:
        return "".join(f"/{name}/{value}" if value else f"/{name}" for name, value in self.parts)

    @property
    def peer_id(self) -> str | None:
        """The peer at this address, if the address names it."""
        if self.parts and self.parts[-1][0] == "p2p":
            return self.parts[-1][1]
        return None

    @property
    def is_relayed(self) -> bool:
        """True if the route passes through a relay."""
        return any(name == "p2p-circuit" for name, _ in self.parts)

    @property
    def port(self) -> int:
        """TCP port of the first hop, or 0."""
        return int(self.parts[1][1]) if len(self.parts) > 1 and self.parts[1][0] == "tcp" else 0

    @property
    def host(self) -> str:
        """IP address or host name of the first hop."""
        return self.parts[0][1] if self.parts else ""

    @property
    def is_loopback(self) -> bool:
        """True for 127.0.0.0/8 and ::1."""
        if not self.parts or self.parts[0][0] not in ("ip4", "ip6"):
            return False
        return ipaddress.ip_address(self.parts[0][1]).is_loopback

    def without_peer(self) -> Address:
        """The same address without the peer id at its end."""
        return Address(self.parts[:-1]) if self.peer_id else self

    def with_peer(self, peer_id: str) -> Address:
        """The same address with `peer_id` at its end."""
        return Address((*self.without_peer().parts, ("p2p", peer_id)))

    def through_relay(self) -> Address:
        """The route through the relay at this address; add the target with `with_peer`."""
        return Address((*self.parts, ("p2p-circuit", "")))

    def from_here(self) -> Address:
        """The address at which a process on the same machine dials this listen address."""
        here = {("ip4", "0.0.0.0"): ("ip4", "127.0.0.1"), ("ip6", "::"): ("ip6", "::1")}
        return Address(tuple(here.get(part, part) for part in self.parts))

    def with_port(self, port: int) -> Address:
        """The same address with another TCP port."""
        return Address(tuple((name, str(port) if name == "tcp" else value) for name, value in self.parts))


def group_by_peer(addresses: Iterable[str]) -> dict[str, tuple[Address, ...]]:
    """Dialable addresses grouped by the peer at their end, in order; raises AddressError if one names no peer."""
    grouped: dict[str, tuple[Address, ...]] = {}
    for text in addresses:
        address = Address.parse(text)
        if address.peer_id is None:
            raise AddressError(f"{text} does not name its peer", fix="add /p2p/PEER_ID at its end")
        grouped[address.peer_id] = (*grouped.get(address.peer_id, ()), address)
    return grouped


@functools.lru_cache(maxsize=_REMEMBERED)
def _parts_of_text(text: str) -> tuple[tuple[str, str], ...]:
    words = text.rstrip("/").split("/")
    if len(words) < 2 or words[0]:
        raise AddressError(f"{text!r} is not a multiaddr", fix="write it like /ip4/192.0.2.7/tcp/4001/p2p/12D3…")
    parts: list[tuple[str, str]] = []
    remaining = iter(words[1:])
    for name in remaining:
        parts.append(_part_from_text("p2p" if name == "ipfs" else name, remaining, text))
    return tuple(parts)


@functools.lru_cache(maxsize=_REMEMBERED)
def _parts_of_bytes(raw: bytes) -> tuple[tuple[str, str], ...]:
    parts: list[tuple[str, str]] = []
    offset = 0
    while offset < len(raw):
        if len(parts) >= MAX_ADDRESS_PARTS:
            raise AddressError("an address has too many parts")
        name, offset = _read_name(raw, offset)
        value, offset = _read_value(raw, offset, name)
        parts.append((name, _value_from_bytes(name, value)))
    return tuple(parts)


@functools.lru_cache(maxsize=_REMEMBERED)
def _bytes_of_parts(parts: tuple[tuple[str, str], ...]) -> bytes:
    encoded = bytearray()
    for name, value in parts:
        raw = _value_to_bytes(name, value)
        encoded += encode_varint(_CODES[name])
        if name not in _FIXED_BYTES:
            encoded += encode_varint(len(raw))
        encoded += raw
    return bytes(encoded)


def _part_from_text(name: str, remaining: Iterable[str], text: str) -> tuple[str, str]:
    if name not in _CODES:
        raise AddressError(
            f"{text!r}: {name!r} is not a known part of an address",
            fix="use TCP addresses such as /ip4/192.0.2.7/tcp/4001; QUIC and others are not supported",
        )
    if _FIXED_BYTES.get(name) == 0:
        return name, ""
    value = next(iter(remaining), "")
    if not value:
        raise AddressError(f"{text!r}: a value is missing after {name!r}")
    return name, _value_from_bytes(name, _value_to_bytes(name, value))


def _value_to_bytes(name: str, value: str) -> bytes:
    try:
        if name == "ip4":
            return ipaddress.IPv4Address(value).packed
        if name == "ip6":
            return _unscoped(ipaddress.IPv6Address(value)).packed
    except ValueError as error:
        raise AddressError(f"{value!r} is not an {name} address: {error}") from None
    if name == "tcp":
        return _port_to_bytes(value)
    if name == "p2p":
        return peer_id_to_bytes(value)
    if name.startswith("dns"):
        if len(value) > 253 or not _DNS_NAME.fullmatch(value):
            raise AddressError(f"{value!r} is not a host name")
        return value.encode("ascii")
    return b""


def _unscoped(address: ipaddress.IPv6Address) -> ipaddress.IPv6Address:
    """The address; ValueError if it has a scope, which the binary form cannot express."""
    if address.scope_id is not None:
        raise ValueError("a scope (%...) is not supported")
    return address


def _port_to_bytes(value: str) -> bytes:
    if not (value.isascii() and value.isdigit() and len(value) <= 5 and int(value) <= 65535):
        raise AddressError(f"{value!r} is not a TCP port")
    return int(value).to_bytes(2, "big")


def _value_from_bytes(name: str, raw: bytes) -> str:
    if name == "ip4":
        return str(ipaddress.IPv4Address(raw))
    if name == "ip6":
        return str(ipaddress.IPv6Address(raw))
    if name == "tcp":
        return str(int.from_bytes(raw, "big"))
    if name == "p2p":
        return peer_id_from_bytes(raw)
    if name.startswith("dns"):
        text = raw.decode("ascii", errors="replace")
        if len(text) > 253 or not _DNS_NAME.fullmatch(text):
            raise AddressError(f"{text!r} is not a host name")
        return text
    return ""


def _read_name(raw: bytes, offset: int) -> tuple[str, int]:
    header = decode_varint(raw, offset)
    if header is None or header[0] not in _NAMES:
        raise AddressError("an address has an unknown or truncated protocol code")
    return _NAMES[header[0]], header[1]


def _read_value(raw: bytes, offset: int, name: str) -> tuple[bytes, int]:
    length = _FIXED_BYTES.get(name)
    if length is None:
        header = decode_varint(raw, offset)
        if header is None:
            raise AddressError("an address is truncated")
        length, offset = header
    if length > len(raw) - offset:
        raise AddressError("an address is truncated")
    return raw[offset : offset + length], offset + length
