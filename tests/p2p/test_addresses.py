"""Multiaddrs and peer ids: what is valid survives a round trip, everything else is an AddressError."""

from __future__ import annotations

import ipaddress

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from swarmtrain.p2p.addresses import (
    Address,
    base58_decode,
    base58_encode,
    decode_varint,
    encode_varint,
    group_by_peer,
    key_of_peer_id,
    peer_id_from_bytes,
    peer_id_of_key,
    peer_id_to_bytes,
)
from swarmtrain.p2p.errors import AddressError

PEER = "12D3KooWREJMG744GacRgthJqkpgySJbiwaYATrg7xE1vLqc9Xn1"
RSA_PEER = "QmYyQSo1c1Ym7orWxLYvCrM2EmxFTANf8wXmmE7DWjhx5N"

peer_ids = st.binary(min_size=32, max_size=32).map(peer_id_of_key)
ports = st.integers(0, 65535).map(str)
host_parts = st.one_of(
    st.ip_addresses(v=4).map(lambda ip: ("ip4", str(ip))),
    st.ip_addresses(v=6).map(lambda ip: ("ip6", str(ip))),
    st.sampled_from(["dns", "dns4", "dns6"]).flatmap(
        lambda name: st.sampled_from([(name, "example.org"), (name, "a-b.example"), (name, "x_1")])
    ),
)


@st.composite
def addresses(draw: st.DrawFn) -> Address:
    parts = [draw(host_parts), ("tcp", draw(ports))]
    if draw(st.booleans()):
        parts += [("p2p", draw(peer_ids)), ("p2p-circuit", "")]
    if draw(st.booleans()):
        parts.append(("p2p", draw(peer_ids)))
    return Address(tuple(parts))


@settings(deadline=None, max_examples=200)
@given(addresses())
def test_addresses_survive_text_and_bytes(address: Address) -> None:
    assert Address.parse(str(address)) == address
    assert Address.from_bytes(address.to_bytes()) == address


@settings(deadline=None, max_examples=300)
@given(st.one_of(st.text(max_size=100), st.text(alphabet="/ip4tcp2-circu0123456789.", max_size=60)))
def test_any_text_is_an_address_or_an_address_error(text: str) -> None:
    try:
        address = Address.parse(text)
    except AddressError:
        return
    assert Address.from_bytes(address.to_bytes()) == address


@settings(deadline=None, max_examples=300)
@given(st.binary(max_size=80), addresses(), st.integers(0, 79))
def test_any_bytes_are_an_address_or_an_address_error(noise: bytes, address: Address, cut: int) -> None:
    for raw in (noise, address.to_bytes()[:cut], address.to_bytes() + noise):
        try:
            Address.from_bytes(raw)
        except AddressError:
            continue


def test_the_bytes_are_those_of_libp2p() -> None:
    """Known vectors: /p2p holds the bare multihash, also in front of /p2p-circuit."""
    raw_peer = peer_id_to_bytes(PEER)
    assert len(raw_peer) == 38
    expected = bytes.fromhex("04c0000207060fa1a50326") + raw_peer + bytes.fromhex("a202")
    assert Address.parse(f"/ip4/192.0.2.7/tcp/4001/p2p/{PEER}/p2p-circuit").to_bytes() == expected
    assert Address.parse("/ip6/::1/tcp/1").to_bytes() == b"\x29" + ipaddress.ip_address("::1").packed + b"\x06\x00\x01"
    assert Address.parse("/dns4/a.b/tcp/1").to_bytes() == b"\x36\x03a.b\x06\x00\x01"


@pytest.mark.parametrize(
    "text",
    [
        "",
        "/",
        "ip4/1.2.3.4/tcp/1",
        "/ip4",
        "/ip4/1.2.3.4/tcp",
        "/ip4/1.2.3.4/tcp/65536",
        "/ip4/1.2.3.4/tcp/-1",
        "/ip4/1.2.3.4/tcp/1_0",
        "/ip4/1.2.3.4/tcp/٣",
        "/ip4/1.2.3.4/udp/1/quic-v1",
        "/ip4/1.2.3.4//tcp/1",
        "/ip4/01.2.3.4/tcp/1",
        "/ip6/::1%eth0/tcp/1",
        "/ip6/fe80::1%1/tcp/1",
        "/dns4/-bad-/tcp/1",
        "/dns4/" + "a" * 254 + "/tcp/1",
        "/ip4/1.2.3.4/tcp/1/p2p/0OIl",
        f"/ip4/1.2.3.4/tcp/1/p2p/{PEER}x",
        "/ip4/1.2.3.4/tcp/1/p2p/" + "1" * 400,
        "/ip4/1.2.3.4/tcp/1" + "/ws" * 1000,
    ],
)
def test_what_is_no_address_is_refused(text: str) -> None:
    with pytest.raises(AddressError):
        Address.parse(text)


def test_the_peer_at_the_end_of_an_address() -> None:
    relayed = Address.parse(f"/ip4/192.0.2.7/tcp/4001/p2p/{RSA_PEER}/p2p-circuit/p2p/{PEER}")
    assert (relayed.peer_id, relayed.is_relayed, relayed.port) == (PEER, True, 4001)
    assert relayed.without_peer().peer_id is None
    assert relayed.without_peer().with_peer(PEER) == relayed
    direct = Address.parse("/ip4/127.0.0.1/tcp/4001")
    assert (direct.peer_id, direct.is_relayed, direct.is_loopback) == (None, False, True)
    assert Address.parse(f"/ip4/1.2.3.4/tcp/1/ipfs/{PEER}").peer_id == PEER
    assert list(group_by_peer([str(relayed), str(direct.with_peer(PEER))])) == [PEER]
    with pytest.raises(AddressError, match="does not name its peer"):
        group_by_peer([str(direct)])


@settings(deadline=None, max_examples=200)
@given(st.binary(max_size=64))
def test_base58_and_varints_are_reversible(data: bytes) -> None:
    assert base58_decode(base58_encode(data)) == data
    number = int.from_bytes(data[:7], "big")
    assert decode_varint(encode_varint(number) + data) == (number, len(encode_varint(number)))


def test_a_varint_without_end_is_refused() -> None:
    assert decode_varint(b"\xff" * 8) is None
    with pytest.raises(AddressError):
        decode_varint(b"\xff" * 9)


@settings(deadline=None, max_examples=200)
@given(st.binary(min_size=32, max_size=32), st.binary(max_size=70))
def test_peer_ids_contain_their_key_and_nothing_else_is_one(key: bytes, noise: bytes) -> None:
    peer_id = peer_id_of_key(key)
    assert key_of_peer_id(peer_id) == key
    assert peer_id_from_bytes(peer_id_to_bytes(peer_id)) == peer_id
    if not (len(noise) == 34 and noise.startswith(b"\x12\x20")):
        with pytest.raises(AddressError):
            peer_id_from_bytes(noise)
    with pytest.raises(AddressError):
        key_of_peer_id(RSA_PEER)
