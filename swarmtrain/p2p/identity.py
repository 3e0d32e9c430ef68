"""Keys: a daemon's libp2p identity, and the key that signs a run. Both are Ed25519.

An Ed25519 peer id contains the public key, so that a peer id is enough to check a signature. p2pd's own default
identities are of this kind too.
"""

from __future__ import annotations

import hashlib
import hmac
import os
from pathlib import Path

from cryptography.exceptions import InvalidSignature
from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey, Ed25519PublicKey

from swarmtrain import world
from swarmtrain.p2p.addresses import peer_id_of_key
from swarmtrain.p2p.errors import IdentityError, StateDirectoryError

SIGNATURE_BYTES = 64
PUBLIC_KEY_BYTES = 32
SEED_BYTES = 32  # any 32 random bytes are an Ed25519 private key

# libp2p's protobuf PrivateKey{type = Ed25519, data = 64 bytes: seed, public key}.
_IDENTITY_PREFIX = bytes((0x08, 0x01, 0x12, 0x40))
_RUN_KEY_PREFIX = b"swarmtrain run key 1\n"


def verify(public_key: bytes, signature: bytes, data: bytes) -> bool:
    """Whether `signature` is the signature of `data` by the raw Ed25519 `public_key`. Never raises."""
    if len(public_key) != PUBLIC_KEY_BYTES or len(signature) != SIGNATURE_BYTES:
        return False
    try:
        Ed25519PublicKey.from_public_bytes(public_key).verify(signature, data)
    except (InvalidSignature, ValueError):
        return False
    return True


class SigningKey:
    """An Ed25519 private key with its public half."""

    def __init__(self, seed: bytes) -> None:
        self._seed = seed
        self._private = Ed25519PrivateKey.from_private_bytes(seed)
        self.public_bytes: bytes = self._private.public_key().public_bytes_raw()

    def sign(self, data: bytes) -> bytes:
        """A signature of SIGNATURE_BYTES bytes; the same data gives the same bytes."""
        return self._private.sign(data)

    def derive(self, purpose: str) -> bytes:
        """A secret of 16 bytes that follows from this key and a purpose, and tells nothing of the key or of others."""
        return hmac.new(self._seed, f"swarmtrain {purpose}".encode(), hashlib.sha256).digest()[:16]

    def __repr__(self) -> str:
        return f"{type(self).__name__}(public {self.public_bytes.hex()})"  # never the seed


class Identity(SigningKey):
    """A daemon's identity on the network: one per state directory, in the file that p2pd reads."""

    def __init__(self, seed: bytes) -> None:
        super().__init__(seed)
        self.peer_id: str = peer_id_of_key(self.public_bytes)

    @classmethod
    def generate(cls) -> Identity:
        """A new identity, not saved."""
        return cls(world.token_bytes(SEED_BYTES))

    @classmethod
    def load_or_create(cls, path: Path) -> Identity:
        """The identity in `path`; if there is no file, a new one is saved there (mode 600).

        Raises IdentityError if the file is damaged: a new identity never replaces an old one.
        """
        try:
            raw = _read_private_file(path)
        except FileNotFoundError:
            identity = cls.generate()
            _write_private_file(path, _IDENTITY_PREFIX + identity._seed + identity.public_bytes)
            return identity
        seed = raw[len(_IDENTITY_PREFIX) : len(_IDENTITY_PREFIX) + 32]
        if len(raw) != 68 or not raw.startswith(_IDENTITY_PREFIX):
            raise IdentityError(f"{path} is not an identity of swarmtrain", fix="restore the file or remove it")
        identity = cls(seed)
        if raw[-32:] != identity.public_bytes:
            raise IdentityError(f"{path} is damaged: private and public key do not match", fix="restore or remove it")
        return identity


class RunKey(SigningKey):
    """The key that signs a run's manifest, its coordinator's records and its invitations."""

    @classmethod
    def generate(cls) -> RunKey:
        """A new run key, not saved."""
        return cls(world.token_bytes(SEED_BYTES))

    @classmethod
    def load(cls, path: Path) -> RunKey:
        """The key that `save` wrote; raises IdentityError if it is missing or damaged."""
        try:
            raw = _read_private_file(path)
        except FileNotFoundError:
            raise IdentityError(f"there is no run key in {path}") from None
        if len(raw) != len(_RUN_KEY_PREFIX) + 32 or not raw.startswith(_RUN_KEY_PREFIX):
            raise IdentityError(f"{path} is not a run key", fix="restore the file from a backup")
        return cls(raw[len(_RUN_KEY_PREFIX) :])

    def save(self, path: Path) -> None:
        """Write the key with mode 600. An existing file is replaced completely or not at all."""
        _write_private_file(path, _RUN_KEY_PREFIX + self._seed)


def _read_private_file(path: Path) -> bytes:
    """Up to 4 KiB of `path`; if others could read the file, its mode becomes 600."""
    try:
        with path.open("rb") as file:
            if os.fstat(file.fileno()).st_mode & 0o077:
                os.fchmod(file.fileno(), 0o600)
            return file.read(4096)
    except FileNotFoundError:
        raise
    except OSError as error:
        raise StateDirectoryError(f"cannot read {path}: {error.strerror}", fix="check its owner and mode") from error


def _write_private_file(path: Path, data: bytes) -> None:
    partial = path.with_name(path.name + ".partial")
    try:
        partial.unlink(missing_ok=True)
        descriptor = os.open(partial, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600)
        with os.fdopen(descriptor, "wb") as file:
            file.write(data)
        world.sync(partial)
        os.replace(partial, path)
        world.sync(path.parent)  # the directory entry too, or a power failure may lose the key
    except OSError as error:
        raise StateDirectoryError(f"cannot write {path}: {error.strerror}", fix="check owner, mode, space") from error
