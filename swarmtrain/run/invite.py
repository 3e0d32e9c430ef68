"""The invite: one short string with which a volunteer finds a run and can trust what it is told about it.

It holds the run's id, the run's public key, addresses of peers to start from, and two secrets: the run's, without which
no daemon of the run says a word, and in most modes of admission a token, which entitles to a certificate (see
docs/security.md). Both follow from the run's private key, so nothing else need be kept.
"""

from __future__ import annotations

import base64
import binascii
import hashlib
import zlib
from dataclasses import dataclass

import msgpack

from swarmtrain.errors import UsageError

PREFIX = "st2-"
_OLD_PREFIX = "st1-"
SECRET_BYTES = 16
_MAX_LENGTH = 4096
_MAX_ADDRESSES = 16
_KEY_BYTES = 32


@dataclass(frozen=True)
class Invite:
    """What a newcomer needs to know."""

    run_id: str
    run_key: bytes  # Ed25519 public key
    bootstrap: tuple[str, ...]  # multiaddresses with /p2p/...
    secret: bytes = bytes(SECRET_BYTES)  # of the run
    token_number: int = 0
    token: bytes = b""  # empty: this invite names none

    def text(self) -> str:
        """The string to hand out."""
        fields = [self.run_id, self.run_key, list(self.bootstrap), self.secret, self.token_number, self.token]
        packed = msgpack.packb(fields)
        sealed = packed + zlib.crc32(packed).to_bytes(4, "big")
        return PREFIX + base64.urlsafe_b64encode(sealed).rstrip(b"=").decode()


def parse_invite(text: str) -> Invite:
    """Read an invite; a mistyped or cut one is a `UsageError`."""
    problem = UsageError("this is not a valid invite", fix="copy the whole string that the coordinator printed")
    text = text.strip()
    if text.startswith(_OLD_PREFIX):
        raise UsageError("this invite is of an older version of swarmtrain", fix="ask the run's operator for a new one")
    if not text.startswith(PREFIX) or len(text) > _MAX_LENGTH:
        raise problem
    body = text[len(PREFIX) :]
    try:
        sealed = base64.urlsafe_b64decode(body + "=" * (-len(body) % 4))
        packed, checksum = sealed[:-4], sealed[-4:]
        if zlib.crc32(packed).to_bytes(4, "big") != checksum:
            raise problem
        run_id, run_key, bootstrap, secret, number, token = msgpack.unpackb(packed)
    except (binascii.Error, ValueError, TypeError, msgpack.UnpackException) as error:
        raise problem from error
    is_sound = isinstance(run_id, str) and isinstance(run_key, bytes) and len(run_key) == _KEY_BYTES
    if not is_sound or not isinstance(bootstrap, list) or len(bootstrap) > _MAX_ADDRESSES:
        raise problem
    if not all(isinstance(address, str) for address in bootstrap):
        raise problem
    is_secret = isinstance(secret, bytes) and len(secret) == SECRET_BYTES
    is_token = isinstance(token, bytes) and len(token) in (0, SECRET_BYTES)
    if not is_secret or not is_token or type(number) is not int or not 0 <= number < 2**40:
        raise problem
    return Invite(run_id, run_key, tuple(bootstrap), secret, number, token)


def run_id_of(manifest_digest: str, run_key: bytes) -> str:
    """A run is one manifest under one key: 16 hex digits."""
    return hashlib.sha256(manifest_digest.encode() + run_key).hexdigest()[:16]
