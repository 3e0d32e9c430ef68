"""Proofs, certificates, puzzles: what one daemon accepts of another."""

from __future__ import annotations

from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from swarmtrain.chain.membership import EXPIRY_ALLOWANCE_S, Membership, revoked
from swarmtrain.chain.puzzle import is_solved, solve
from swarmtrain.p2p.identity import RunKey
from swarmtrain.run.invite import Invite
from swarmtrain.wire.certificates import (
    MAX_CREDENTIAL_BYTES,
    Certificate,
    Kind,
    pack_credential,
    parse_credential,
    signed_part,
)
from swarmtrain.wire.messages import Exclusion

KEY = RunKey(bytes(range(32)))
INVITE = Invite("run", KEY.public_bytes, (), b"s" * 16)
CERTIFICATE = Certificate("run", "alice", 7, 1000.0, "attic", stage=2)


def member(peer_id: str, invite: Invite = INVITE) -> Membership:
    found = Membership(invite)
    found.peer_id, found.clock = peer_id, lambda: 900.0
    return found


def issued(certificate: Certificate = CERTIFICATE, key: RunKey = KEY) -> bytes:
    return pack_credential(certificate, key.sign(signed_part(certificate)))


def test_a_proof_is_good_for_one_direction_between_two_peers_with_the_secret() -> None:
    alice, bob, carol = (member(name) for name in ("alice", "bob", "carol"))
    proof = alice.proof("bob")
    assert bob.is_proven("alice", proof)
    assert not carol.is_proven("alice", proof)  # meant for another
    assert not bob.is_proven("carol", proof)  # of another
    assert not alice.is_proven("bob", proof)  # sent back
    assert not bob.is_proven("alice", b"")
    stranger = member("alice", replace(INVITE, secret=b"t" * 16))
    assert not bob.is_proven("alice", stranger.proof("bob"))
    other_run = member("alice", replace(INVITE, run_id="other"))
    assert not bob.is_proven("alice", other_run.proof("bob"))
    assert INVITE.secret not in proof
    assert alice.namespace == bob.namespace != other_run.namespace


def test_a_certificate_counts_for_its_peer_as_long_as_it_is_in_force() -> None:
    bob = member("bob")
    assert bob.met("alice", issued())
    assert bob.certificate_of("alice") == CERTIFICATE
    assert not bob.met("carol", issued())
    assert bob.certificate_of("carol") is None
    bob.clock = lambda: 1000.0 + EXPIRY_ALLOWANCE_S
    assert bob.certificate_of("alice") is None
    assert not bob.vouches("alice", issued())


@pytest.mark.parametrize("subject", ["alice", revoked(7)])
def test_an_exclusion_or_a_revocation_ends_it(subject: str) -> None:
    bob = member("bob")
    bob.met("alice", issued())
    bob.exclusions.hear([Exclusion(1, subject)])
    assert bob.certificate_of("alice") is None
    assert not bob.vouches("alice", issued())
    bob.exclusions.hear([Exclusion(2, subject, is_lifted=True)])
    assert bob.certificate_of("alice") == CERTIFICATE


def test_certificates_of_another_key_or_run_are_none() -> None:
    bob = member("bob")
    for credential in (issued(key=RunKey(bytes(32))), issued(replace(CERTIFICATE, run="other")), b"", b"noise"):
        assert not bob.met("alice", credential)
    tampered = pack_credential(replace(CERTIFICATE, stage=3), KEY.sign(signed_part(CERTIFICATE)))
    assert not bob.met("alice", tampered)
    assert bob.num_flawed == 5
    assert bob.hold(issued()) is None  # it is another peer's


@given(st.binary(max_size=MAX_CREDENTIAL_BYTES + 10))
def test_any_bytes_are_parsed_without_an_error(noise: bytes) -> None:
    assert parse_credential(noise) is None or len(noise) > 64


@given(st.integers(0, len(issued()) - 1), st.integers(1, 255))
def test_a_flipped_bit_makes_it_none(at: int, flip: int) -> None:
    damaged = bytearray(issued())
    damaged[at] ^= flip
    assert not member("bob").met("alice", bytes(damaged))


def test_the_largest_certificate_fits() -> None:
    longest = Certificate("r" * 64, "p" * 64, 2**40, 1e12, "ä" * 64, Kind.STANDBY, 1023, "c" * 64)
    assert len(issued(longest)) <= MAX_CREDENTIAL_BYTES


def test_work_is_for_one_peer_and_one_challenge() -> None:
    work = solve(b"challenge", "alice", 6)
    assert is_solved(b"challenge", "alice", 6, work)
    assert not is_solved(b"challenge", "bob", 6, work)
    assert not is_solved(b"another", "alice", 6, work)
    assert not is_solved(b"challenge", "alice", 20, work)
    assert not is_solved(b"challenge", "alice", 6, work[:-1])
    assert not is_solved(b"challenge", "alice", 0, b"")
