"""A certificate: what the run's key says of a peer. Whoever has the run's public key can check it.

On links and in records it travels packed, as a *credential*: a few hundred bytes that only their reader decodes.
"""

from __future__ import annotations

from enum import StrEnum
from typing import Annotated

from swarmtrain.wire.errors import WireError
from swarmtrain.wire.field_types import PeerId, RunId
from swarmtrain.wire.schema import Lengths, MaxLength, Message, Priority, Range, message, pack_fields, unpack_fields

MAX_CREDENTIAL_BYTES = 768
NO_STAGE = -1
DOMAIN = b"swarmtrain certificate 1\0"

Credential = Annotated[bytes, MaxLength(MAX_CREDENTIAL_BYTES)]
Serial = Annotated[int, Range(0, 2**40)]


class Kind(StrEnum):
    """What a peer is in the run."""

    MEMBER = "member"
    STANDBY = "standby"
    OBSERVER = "observer"


@message(kind="certificate", priority=Priority.CONTROL)
class Certificate(Message):
    """What the run's key signs."""

    run: RunId
    peer_id: PeerId
    serial: Serial  # of the admission: certificates that renew one another have the same
    expires_at: Annotated[float, Range(0.0, 1e12)]  # by the swarm's time
    name: Annotated[str, MaxLength(64)] = ""
    kind: Kind = Kind.MEMBER
    stage: Annotated[int, Range(NO_STAGE, 1023)] = NO_STAGE  # that it was told to serve last
    numeric_class: Annotated[str, MaxLength(64)] = ""  # peers of one class compute the same bits


@message(kind="signed_certificate", priority=Priority.CONTROL)
class SignedCertificate(Message):
    """A certificate with the signature of the run's key over its fields."""

    certificate: Certificate
    signature: Annotated[bytes, Lengths((64,))]


def signed_part(certificate: Certificate) -> bytes:
    """The bytes that the run's key signs."""
    return DOMAIN + pack_fields(certificate)


def pack_credential(certificate: Certificate, signature: bytes) -> bytes:
    """As it travels."""
    return pack_fields(SignedCertificate(certificate, signature))


def parse_credential(packed: bytes) -> SignedCertificate | None:
    """What is in a credential, unchecked; None for bytes that are none."""
    if not 0 < len(packed) <= MAX_CREDENTIAL_BYTES:
        return None
    try:
        return unpack_fields(SignedCertificate, packed)
    except WireError:
        return None
