"""Signed directory records: a peer's statement under a topic of a run, with an expiry.

A record in the DHT is one byte string that contains everything needed to check it: run, topic, owner, expiry, value and
the owner's signature over all of these. The owner's peer id contains its public key, so no peer can speak for another,
move a record to another run or topic, or prolong it. The run's key may countersign a record.

A node stores records of others within hard limits. A key that could grow without bound would make its nodes unable to
answer, and readers would blame them. So there is a cap per key, per owner and for the whole store. In a full key,
owners that are already there may renew their records; newcomers are refused.
"""

from __future__ import annotations

import hashlib
from collections import Counter, OrderedDict
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from enum import StrEnum
from typing import Annotated

from swarmtrain.errors import ExitCode
from swarmtrain.p2p.addresses import key_of_peer_id, peer_id_from_bytes, peer_id_to_bytes
from swarmtrain.p2p.errors import AddressError, HostError
from swarmtrain.p2p.identity import SIGNATURE_BYTES, Identity, verify
from swarmtrain.wire.certificates import MAX_CREDENTIAL_BYTES, Credential
from swarmtrain.wire.errors import TooLong, WireError
from swarmtrain.wire.schema import Lengths, MaxLength, Message, Priority, Range, message, pack_fields, unpack_fields

FORMAT_VERSION = 3
MAX_VALUE_BYTES = 2048
MAX_NAME_BYTES = 128  # run id and topic
MAX_ENVELOPE_BYTES = MAX_VALUE_BYTES + MAX_CREDENTIAL_BYTES + 2 * MAX_NAME_BYTES + 2 * SIGNATURE_BYTES + 96
MAX_PEER_ID_BYTES = 64
MAX_LIFE_S = 60.0
CLOCK_ALLOWANCE_S = 10.0  # by how much the clocks of two honest peers may differ
_OWNER_DOMAIN = b"swarmtrain record 3 owner\0"
_COUNTERSIGN_DOMAIN = b"swarmtrain record 3 countersign\0"
_REMEMBERED_VERDICTS = 8192
Signer = Callable[[bytes], bytes]
Name = Annotated[str, MaxLength(MAX_NAME_BYTES)]


class RecordError(HostError):
    """A directory record may not be announced: it is too large, too long-lived, or not packable."""

    error_id = "ST-RECORD"
    exit_code = ExitCode.INTERNAL


class Flaw(StrEnum):
    """Why a record was dropped; also the label of its counter."""

    MALFORMED = "malformed"
    OVERSIZED = "oversized"
    MISPLACED = "misplaced"  # of another run or topic
    FORGED = "forged"  # the owner's signature is wrong
    UNCERTIFIED = "uncertified"  # its owner's certificate is missing, wrong or not in force
    NOT_COUNTERSIGNED = "not-countersigned"  # the run key's signature is missing or wrong
    EXPIRED = "expired"
    FAR_FUTURE = "far-future"  # it expires later than is allowed
    REFUSED = "refused"  # the topic's own check refused it
    EXCLUDED = "excluded"  # of a peer that is excluded from the run, or asked for by it
    OVER_CAP = "over-cap"  # valid, but its key or the store is full


class FlawedRecord(Exception):
    """A record must be dropped. Internal: readers count it and go on."""

    def __init__(self, flaw: Flaw) -> None:
        super().__init__(flaw.value)
        self.flaw = flaw


@dataclass(frozen=True, slots=True)
class Record:
    """A checked record."""

    peer_id: str
    value: bytes  # usually a message (`wire/records.py`); its reader must check its contents
    expires_at: float
    credential: bytes = b""
    is_countersigned: bool = False  # by the key that the topic asks for


@dataclass(frozen=True, slots=True)
class TopicRule:
    """A topic's conditions on its records beyond the owner's signature.

    `countersigned_by`: a public key that must have signed as well. `accepts`: a further check; must not raise or block.
    """

    countersigned_by: bytes | None = None
    accepts: Callable[[Record], bool] | None = None


@message(kind="statement", priority=Priority.CONTROL)
class Statement(Message):
    """The part of a record that its owner signs."""

    run_id: Name
    topic: Name
    owner: Annotated[bytes, MaxLength(MAX_PEER_ID_BYTES)]  # its peer id, as a multihash
    expires_at: float
    value: Annotated[bytes, MaxLength(MAX_VALUE_BYTES)]
    credential: Credential = b""  # the owner's certificate


@message(kind="signed_record", priority=Priority.CONTROL)
class SignedRecord(Message):
    """A record as the DHT stores it, packed by `pack_fields`. It has its own version, because DHT nodes pass records on
    without reading them."""

    version: Annotated[int, Range(FORMAT_VERSION, FORMAT_VERSION)]
    statement: Statement
    signature: Annotated[bytes, Lengths((SIGNATURE_BYTES,))]
    countersignature: Annotated[bytes, Lengths((0, SIGNATURE_BYTES))]


def dht_key(run_id: str, topic: str) -> str:
    """The DHT key of a topic's records. The length in it keeps two (run, topic) pairs from sharing a key."""
    return f"swarmtrain/{len(run_id)}/{run_id}/{topic}"


def check_name(name: str, what: str) -> None:
    """Raise RecordError unless `name` can be a run id or topic."""
    if not name or len(name.encode()) > MAX_NAME_BYTES:
        raise RecordError(f"a {what} has 1 to {MAX_NAME_BYTES} bytes, {name!r:.200} does not")


def make_record(
    identity: Identity,
    run_id: str,
    topic: str,
    value: bytes,
    expires_at: float,
    signer: Signer | None = None,
    *,
    credential: bytes = b"",
) -> bytes:
    """A signed record, countersigned by `signer` if given. Raises RecordError for a value that is not allowed."""
    check_name(topic, "topic")
    if len(value) > MAX_VALUE_BYTES:
        raise RecordError(f"the record for {topic} has {len(value)} bytes, allowed are {MAX_VALUE_BYTES}")
    try:
        statement = Statement(run_id, topic, peer_id_to_bytes(identity.peer_id), expires_at, value, credential)
        signed = pack_fields(statement)
        countersignature = signer(_COUNTERSIGN_DOMAIN + signed) if signer is not None else b""
        record = SignedRecord(FORMAT_VERSION, statement, identity.sign(_OWNER_DOMAIN + signed), countersignature)
        return pack_fields(record)
    except WireError as error:
        raise RecordError(f"the record for {topic} cannot be packed: {error}") from error


def _opened(raw: bytes) -> SignedRecord:
    """Unpack a record. Raises FlawedRecord for anything that `make_record` cannot have made."""
    if len(raw) > MAX_ENVELOPE_BYTES:
        raise FlawedRecord(Flaw.OVERSIZED)
    try:
        record = unpack_fields(SignedRecord, raw)
    except TooLong:
        raise FlawedRecord(Flaw.OVERSIZED) from None
    except WireError:
        raise FlawedRecord(Flaw.MALFORMED) from None
    if max(len(record.statement.run_id.encode()), len(record.statement.topic.encode())) > MAX_NAME_BYTES:
        raise FlawedRecord(Flaw.OVERSIZED)
    return record


def topic_of(raw: bytes) -> str:
    """The topic that a record claims; raises FlawedRecord."""
    return _opened(raw).statement.topic


class RecordChecker:
    """Checks records of one run, caches its verdicts (a signature costs 100 us), and counts dropped records."""

    def __init__(
        self,
        run_id: str,
        rules: Mapping[str, TopicRule],
        clock: Callable[[], float],
        *,
        vouches: Callable[[str, bytes], bool] = lambda peer_id, credential: True,
    ) -> None:
        """`vouches`: whether a credential entitles a peer to records of its own, now."""
        check_name(run_id, "run id")
        self._vouches = vouches
        self._run_id = run_id
        self._rules = dict(rules)
        self._clock = clock
        self._verdicts: OrderedDict[bytes, Record | Flaw] = OrderedDict()
        self.dropped: Counter[Flaw] = Counter()

    def check(self, raw: bytes, topic: str) -> Record:
        """The record, if it is valid under this topic now; raises FlawedRecord (and counts it)."""
        try:
            record = self._verdict(raw, topic)
            now = self._clock()
            if record.expires_at <= now:
                raise FlawedRecord(Flaw.EXPIRED)
            if record.expires_at > now + MAX_LIFE_S + CLOCK_ALLOWANCE_S:
                raise FlawedRecord(Flaw.FAR_FUTURE)
            if not record.is_countersigned and not self._vouches(record.peer_id, record.credential):
                raise FlawedRecord(Flaw.UNCERTIFIED)
        except FlawedRecord as error:
            self.dropped[error.flaw] += 1
            raise
        return record

    def _verdict(self, raw: bytes, topic: str) -> Record:
        """The part of the check that does not depend on the time, computed once for the same bytes."""
        if len(raw) > MAX_ENVELOPE_BYTES:
            raise FlawedRecord(Flaw.OVERSIZED)  # before hashing
        digest = hashlib.sha256(topic.encode() + b"\0" + raw).digest()
        verdict = self._verdicts.get(digest)
        if verdict is None:
            try:
                verdict = self._examine(raw, topic)
            except FlawedRecord as error:
                verdict = error.flaw
            self._verdicts[digest] = verdict
            if len(self._verdicts) > _REMEMBERED_VERDICTS:
                self._verdicts.popitem(last=False)
        if isinstance(verdict, Flaw):
            raise FlawedRecord(verdict)
        return verdict

    def _examine(self, raw: bytes, topic: str) -> Record:
        record = _opened(raw)
        statement = record.statement
        if statement.run_id != self._run_id or statement.topic != topic:
            raise FlawedRecord(Flaw.MISPLACED)
        try:
            owner = peer_id_from_bytes(statement.owner)
        except AddressError:
            raise FlawedRecord(Flaw.MALFORMED) from None
        try:
            owner_key = key_of_peer_id(owner)
        except AddressError:
            raise FlawedRecord(Flaw.FORGED) from None
        signed = pack_fields(statement)
        if not verify(owner_key, record.signature, _OWNER_DOMAIN + signed):
            raise FlawedRecord(Flaw.FORGED)
        rule = self._rules.get(topic, TopicRule())
        if rule.countersigned_by is not None and not verify(
            rule.countersigned_by, record.countersignature, _COUNTERSIGN_DOMAIN + signed
        ):
            raise FlawedRecord(Flaw.NOT_COUNTERSIGNED)
        is_countersigned = rule.countersigned_by is not None
        checked = Record(owner, statement.value, statement.expires_at, statement.credential, is_countersigned)
        if rule.accepts is not None and not rule.accepts(checked):
            raise FlawedRecord(Flaw.REFUSED)
        return checked


@dataclass(frozen=True, slots=True)
class StoreLimits:
    """One answer carries all records of a key and is limited to 4 MiB: `bytes_per_key` must stay far below that."""

    records_per_key: int = 1024
    bytes_per_key: int = 2**20
    records_per_owner: int = 64
    num_keys: int = 4096
    total_bytes: int = 32 * 2**20


@dataclass(frozen=True, slots=True)
class StoredRecord:
    """A checked record, packed, and its expiry."""

    raw: bytes
    expires_at: float


class RecordStore:
    """Records by key and owner. Expired ones are never returned; they go when their key is used or swept."""

    def __init__(self, limits: StoreLimits, clock: Callable[[], float]) -> None:
        self._limits = limits
        self._clock = clock
        self._keys: dict[int, dict[str, StoredRecord]] = {}
        self._bytes_of_key: Counter[int] = Counter()
        self._records_of_owner: Counter[str] = Counter()
        self._next_sweep = 0.0

    @property
    def num_records(self) -> int:
        """The number of stored records, including some that have just expired."""
        return self._records_of_owner.total()

    @property
    def num_bytes(self) -> int:
        """Their total size."""
        return self._bytes_of_key.total()

    def get(self, key: int) -> list[bytes]:
        """All live records of a key."""
        self._drop_expired(key)
        return [record.raw for record in self._keys.get(key, {}).values()]

    def put(self, key: int, owner: str, raw: bytes, expires_at: float) -> bool:
        """Store a checked record. False if a cap refuses it. An older record does not replace a newer one (True)."""
        self._sweep()
        self._drop_expired(key)
        held = self._keys.get(key, {}).get(owner)
        if held is not None and held.expires_at >= expires_at:
            return True
        if not self._fits(key, owner, len(raw), held):
            return False
        if held is not None:
            self._remove(key, owner)
        self._keys.setdefault(key, {})[owner] = StoredRecord(raw, expires_at)
        self._bytes_of_key[key] += len(raw)
        self._records_of_owner[owner] += 1
        return True

    def clear(self) -> None:
        """Forget all records."""
        self._keys.clear()
        self._bytes_of_key.clear()
        self._records_of_owner.clear()
        self._next_sweep = 0.0

    def _fits(self, key: int, owner: str, num_bytes: int, held: StoredRecord | None) -> bool:
        limits = self._limits
        growth = num_bytes - (len(held.raw) if held is not None else 0)
        is_room = (
            self._bytes_of_key[key] + growth <= limits.bytes_per_key
            and self._bytes_of_key.total() + growth <= limits.total_bytes
        )
        if held is not None:
            return is_room
        return (
            is_room
            and len(self._keys.get(key, {})) < limits.records_per_key
            and self._records_of_owner[owner] < limits.records_per_owner
            and (key in self._keys or len(self._keys) < limits.num_keys)
        )

    def _remove(self, key: int, owner: str) -> None:
        records = self._keys[key]
        self._bytes_of_key[key] -= len(records.pop(owner).raw)
        self._records_of_owner[owner] -= 1
        if self._records_of_owner[owner] == 0:
            del self._records_of_owner[owner]
        if not records:
            del self._keys[key], self._bytes_of_key[key]

    def _drop_expired(self, key: int) -> None:
        now = self._clock()
        expired = [owner for owner, record in self._keys.get(key, {}).items() if record.expires_at <= now]
        for owner in expired:
            self._remove(key, owner)

    def _sweep(self) -> None:
        """Drop expired records of all keys, at most every few seconds: keys that nobody uses must shrink too."""
        now = self._clock()
        if now < self._next_sweep:
            return
        self._next_sweep = now + 5.0
        for key in list(self._keys):
            self._drop_expired(key)
