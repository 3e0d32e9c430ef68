"""The invite: what was printed is understood, and whatever was cut, mistyped or made up is refused in one line."""

from __future__ import annotations

import base64
import zlib

import msgpack
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from swarmtrain.errors import UsageError
from swarmtrain.run.invite import PREFIX, Invite, parse_invite, run_id_of

INVITE = Invite("0123456789abcdef", bytes(range(32)), ("/ip4/10.0.0.1/tcp/4001/p2p/12D3KooWExample",))

INVITES = st.builds(
    Invite,
    st.text(max_size=16),
    st.binary(min_size=32, max_size=32),
    st.lists(st.text(max_size=60), max_size=16).map(tuple),
    st.binary(min_size=16, max_size=16),
    st.integers(0, 2**40 - 1),
    st.sampled_from([b"", bytes(range(16))]),
)


def sealed(content: object) -> str:
    """An invite with a right checksum around any content."""
    packed = msgpack.packb(content)
    return PREFIX + base64.urlsafe_b64encode(packed + zlib.crc32(packed).to_bytes(4, "big")).rstrip(b"=").decode()


@settings(deadline=None, max_examples=80)
@given(INVITES)
def test_what_was_written_is_read(invite: Invite) -> None:
    assert parse_invite(invite.text()) == invite
    assert parse_invite(f"  {invite.text()}\n") == invite


def test_every_cut_and_every_changed_letter_is_noticed() -> None:
    text = INVITE.text()
    for end in range(len(text)):
        with pytest.raises(UsageError):
            parse_invite(text[:end])
    for at in range(len(PREFIX), len(text) - 1):  # the last letter may hold bits that nothing uses
        changed = text[:at] + ("A" if text[at] != "A" else "B") + text[at + 1 :]
        with pytest.raises(UsageError):
            parse_invite(changed)


@settings(deadline=None, max_examples=80)
@given(st.text(max_size=200))
def test_any_other_text_is_refused(text: str) -> None:
    for candidate in (text, PREFIX + text):
        with pytest.raises(UsageError):
            parse_invite(candidate)


@pytest.mark.parametrize(
    "content",
    [
        None,
        [],
        ["run", bytes(32)],
        ["run", bytes(31), []],
        [b"run", bytes(32), []],
        ["run", bytes(32), "address"],
        ["run", bytes(32), [1]],
        ["run", bytes(32), ["a"] * 17],
        ["run", bytes(32), []],  # of an older version
        ["run", bytes(32), [], bytes(15), 0, b""],
        ["run", bytes(32), [], bytes(16), -1, b""],
        ["run", bytes(32), [], bytes(16), True, b""],
        ["run", bytes(32), [], bytes(16), 0, b"short"],
        {"run": 1},
        "x" * 100,
    ],
)
def test_a_sound_checksum_around_the_wrong_content_is_refused(content: object) -> None:
    with pytest.raises(UsageError):
        parse_invite(sealed(content))


def test_an_invite_of_an_older_version_says_so() -> None:
    with pytest.raises(UsageError, match="older version"):
        parse_invite("st1-AAAA")


def test_an_endless_invite_is_refused_before_it_is_decoded() -> None:
    with pytest.raises(UsageError):
        parse_invite(PREFIX + "A" * 10_000_000)


def test_a_run_is_one_manifest_under_one_key() -> None:
    ids = {run_id_of(digest, key) for digest in ("a" * 64, "b" * 64) for key in (bytes(32), bytes([1] * 32))}
    assert len(ids) == 4
    assert all(len(item) == 16 for item in ids)
