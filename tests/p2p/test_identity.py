"""Keys: kept, private, never replaced; signatures that hold for their data only."""

from __future__ import annotations

from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from swarmtrain.p2p.errors import IdentityError, StateDirectoryError
from swarmtrain.p2p.identity import Identity, RunKey, verify


def mode(path: Path) -> int:
    return path.stat().st_mode & 0o777


def test_an_identity_is_made_once_and_kept(tmp_path: Path) -> None:
    path = tmp_path / "identity.key"
    identity = Identity.load_or_create(path)
    assert mode(path) == 0o600
    assert Identity.load_or_create(path).peer_id == identity.peer_id
    assert list(tmp_path.iterdir()) == [path]
    assert Identity.generate().peer_id != identity.peer_id


def test_a_key_that_others_can_read_is_locked_up(tmp_path: Path) -> None:
    path = tmp_path / "identity.key"
    Identity.load_or_create(path)
    path.chmod(0o644)
    Identity.load_or_create(path)
    assert mode(path) == 0o600


def test_a_run_key_survives_saving(tmp_path: Path) -> None:
    key = RunKey.generate()
    key.save(tmp_path / "run.key")
    assert mode(tmp_path / "run.key") == 0o600
    loaded = RunKey.load(tmp_path / "run.key")
    assert loaded.public_bytes == key.public_bytes
    assert loaded.sign(b"x") == key.sign(b"x")
    assert key._seed.hex() not in repr(key)


def test_a_run_key_that_is_missing_or_damaged_is_an_error(tmp_path: Path) -> None:
    with pytest.raises(IdentityError):
        RunKey.load(tmp_path / "run.key")
    for content in (b"", b"junk", bytes(10_000)):
        (tmp_path / "run.key").write_bytes(content)
        with pytest.raises(IdentityError):
            RunKey.load(tmp_path / "run.key")
    with pytest.raises(StateDirectoryError):
        RunKey.generate().save(tmp_path / "run.key" / "below-a-file")
    (tmp_path / "directory").mkdir()
    with pytest.raises(StateDirectoryError):
        RunKey.load(tmp_path / "directory")


@settings(deadline=None, max_examples=50)
@given(st.binary(max_size=100), st.integers(0, 511), st.binary(max_size=100))
def test_a_signature_holds_for_its_data_and_key_only(data: bytes, bit: int, noise: bytes) -> None:
    key, other = RunKey.generate(), RunKey.generate()
    signature = key.sign(data)
    assert verify(key.public_bytes, signature, data)
    assert not verify(other.public_bytes, signature, data)
    assert not verify(key.public_bytes, signature, data + b"x")
    flipped = bytearray(signature)
    flipped[bit // 8] ^= 1 << bit % 8
    assert not verify(key.public_bytes, bytes(flipped), data)
    assert not verify(noise, signature, data)
    assert not verify(key.public_bytes, noise, data)
