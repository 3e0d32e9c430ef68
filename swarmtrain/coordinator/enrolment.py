"""Who gets a certificate: the three modes of admission, the invites, and what the operator decides.

An admission is in the journal before the certificate is sent. A peer that asks again, because an answer was lost, its
daemon was restarted or its certificate runs out, gets a certificate of the same serial and spends nothing.
"""

from __future__ import annotations

import hashlib
import hmac
import logging
from collections import OrderedDict
from dataclasses import dataclass
from enum import StrEnum

from swarmtrain import world
from swarmtrain.chain.membership import Membership, revoked
from swarmtrain.chain.puzzle import is_solved
from swarmtrain.coordinator.bans import Bans
from swarmtrain.coordinator.journal import Journal
from swarmtrain.coordinator.journal_files import JournalError
from swarmtrain.coordinator.roll import NO_INVITE, RUNS_OWN, AdmissionRow, InviteRow, why_not
from swarmtrain.errors import UsageError
from swarmtrain.observe.events import Events, PeerAdmitted, PeerAsks
from swarmtrain.p2p.identity import RunKey
from swarmtrain.rpc.errors import Refusal
from swarmtrain.run.invite import Invite
from swarmtrain.wire.certificates import NO_STAGE, Certificate, Kind, pack_credential, signed_part
from swarmtrain.wire.messages import Code, Enrol, Enrolled

COORDINATOR_SERIAL = 0
CHALLENGE_S = 600.0  # a challenge is good for this long, and for as long again
MAX_PENDING = 256  # peers that wait for an operator; the one that asked first is forgotten first
PENDING_S = 5.0  # after which they ask again
MAX_INVITES = 10_000
FULL_S = 2.0  # after which a peer asks again that could not be written down

log = logging.getLogger(__name__)


class Mode(StrEnum):
    """Who is admitted."""

    OPEN = "open"  # whoever has the run's invite, after a proof of work; on probation at first
    TOKEN = "token"  # whoever has an invite whose token still counts; the run's own invite has one
    CLOSED = "closed"  # whom the operator admits


@dataclass(frozen=True)
class AdmissionRules:
    """`swarmtrain coordinator --admission`, and what follows from it."""

    mode: Mode = Mode.TOKEN
    difficulty: int = 19  # zero bits of each puzzle: about four seconds on a core
    probation: int = 64  # decided microbatches until a newcomer of an open run counts as any other peer
    certificate_s: float = 7 * 86400.0


@dataclass(frozen=True)
class Pending:
    """A peer that waits for the operator."""

    peer_id: str
    name: str
    asked_at: float  # seconds since the epoch


class Enrolment:
    """See the module docstring."""

    def __init__(
        self,
        rules: AdmissionRules,
        key: RunKey,
        run_id: str,
        journal: Journal,
        bans: Bans,
        membership: Membership,
        events: Events,
    ) -> None:
        self.rules, self._key, self._run_id = rules, key, run_id
        self._journal, self._bans, self._membership, self._events = journal, bans, membership, events
        self._challenge_key = world.token_bytes(16)
        self._admissions = {row.peer: row for row in journal.admissions()}
        self._invites = {row.number: row for row in journal.invites()}
        self.pending: OrderedDict[str, Pending] = OrderedDict()
        if RUNS_OWN not in self._invites:
            self._invites[RUNS_OWN] = journal.note_invite(RUNS_OWN, "", 0, 0.0)

    # ---- newcomers ---------------------------------------------------------------------------------------------------

    async def enrol(self, message: Enrol, peer_id: str) -> Enrolled:
        """Answer `Enrol`. Nothing is awaited between judging and writing: an invite of one use admits one."""
        if message.run != self._run_id:
            raise Refusal(Code.WRONG_RUN)
        if (row := self._current(peer_id)) is not None:
            return Enrolled(self.issue(row))
        if message.token_proof and self.rules.mode is not Mode.CLOSED:
            if reason := self._token_fault(message, peer_id):
                raise Refusal(Code.NOT_ADMITTED, f"the invite admits nobody: {reason}")
            return self._admit(peer_id, message.name, message.kind, message.token_number)
        if self.rules.mode is Mode.OPEN:
            return self._judge_work(message, peer_id)
        if self.rules.mode is Mode.TOKEN:
            raise Refusal(Code.NOT_ADMITTED, "the run admits only who has an invite with a token")
        return self._wait(peer_id, message.name)

    def _token_fault(self, message: Enrol, peer_id: str) -> str:
        invite = self._invites.get(message.token_number)
        expected = hmac.digest(self.token(message.token_number), peer_id.encode(), hashlib.sha256)
        if not hmac.compare_digest(expected, message.token_proof):
            return why_not(None, 0, 0.0)
        return why_not(invite, self._journal.num_admitted_by(message.token_number), self._membership.clock())

    def _judge_work(self, message: Enrol, peer_id: str) -> Enrolled:
        period = int(self._membership.clock() / CHALLENGE_S)
        good = [self._challenge(peer_id, each) for each in (period, period - 1)]
        if message.challenge in good and is_solved(message.challenge, peer_id, self.rules.difficulty, message.work):
            return self._admit(peer_id, message.name, message.kind, NO_INVITE)
        return Enrolled(challenge=good[0], difficulty=self.rules.difficulty)

    def _challenge(self, peer_id: str, period: int) -> bytes:
        return hmac.digest(self._challenge_key, f"{peer_id} {period}".encode(), hashlib.sha256)[:16]

    def _wait(self, peer_id: str, name: str) -> Enrolled:
        if peer_id not in self.pending:
            self.pending[peer_id] = Pending(peer_id, name, world.wall())
            self._events.emit(PeerAsks(peer_id, name))
            if len(self.pending) > MAX_PENDING:
                self.pending.popitem(last=False)
        return Enrolled(retry_after_s=PENDING_S)

    def _admit(self, peer_id: str, name: str, kind: Kind, invite: int) -> Enrolled:
        try:
            row = self._journal.admit(peer_id, name, kind, invite)
        except JournalError as error:  # as with a full disk; if its files are gone, the coordinator ends by itself
            log.warning("cannot admit %s: %s", peer_id, error)
            raise Refusal(Code.NOT_SERVING, "this coordinator cannot write its journal", FULL_S) from error
        self._admissions[peer_id] = row
        self.pending.pop(peer_id, None)
        self._events.emit(PeerAdmitted(peer_id, name, self._invite_name(invite)))
        return Enrolled(self.issue(row))

    def _current(self, peer_id: str) -> AdmissionRow | None:
        row = self._admissions.get(peer_id)
        return row if row is not None and revoked(row.serial) not in self._bans.exclusions else None

    # ---- certificates ------------------------------------------------------------------------------------------------

    def own_certificate(self, peer_id: str) -> bytes:
        """The coordinator's own."""
        return self.issue(AdmissionRow(COORDINATOR_SERIAL, 0.0, peer_id, "coordinator", Kind.MEMBER, NO_INVITE))

    def issue(self, row: AdmissionRow, stage: int = NO_STAGE) -> bytes:
        """A certificate for an admitted peer."""
        expires_at = self._membership.clock() + self.rules.certificate_s
        kind = Kind(row.kind)
        certificate = Certificate(self._run_id, row.peer, row.serial, expires_at, row.name[:64], kind, stage)
        return pack_credential(certificate, self._key.sign(signed_part(certificate)))

    def renewed(self, peer_id: str, stage: int | None) -> bytes:
        """A new certificate if the peer's runs out soon, or names another stage than the one it is told to serve.

        Empty if the one that it has will do.
        """
        row, shown = self._current(peer_id), self._membership.certificate_of(peer_id)
        if row is None or shown is None:
            return b""
        runs_out = shown.expires_at - self._membership.clock() < self.rules.certificate_s / 2
        if not runs_out and stage in (None, shown.stage):
            return b""
        return self.issue(row, shown.stage if stage is None else stage)

    # ---- the operator ------------------------------------------------------------------------------------------------

    def admit(self, peer_id: str) -> None:
        """The operator admits a peer, whether it waits or not; it may ask from now on."""
        if self._current(peer_id) is not None:
            raise UsageError(f"{peer_id[:64]} is a member already")
        waiting = self.pending.get(peer_id)
        self._admit(peer_id, waiting.name if waiting is not None else "", Kind.MEMBER, NO_INVITE)

    def serial_of(self, peer_id: str) -> int:
        """The serial of a member's admission. UsageError if it is none."""
        row = self._current(peer_id)
        if row is None:
            raise UsageError(f"{peer_id[:64]} is no member", fix="see `swarmtrain members list`")
        return row.serial

    def members(self) -> list[AdmissionRow]:
        """Every admission that counts, oldest first."""
        found = [row for peer_id in self._admissions if (row := self._current(peer_id)) is not None]
        return sorted(found, key=lambda row: row.serial)

    def token(self, number: int) -> bytes:
        """The secret of an invite."""
        return self._key.derive(f"invite token {number}")

    def make_invite(self, name: str, uses: int, lasts_s: float) -> InviteRow:
        """A further invite; 0: any number of uses, no end."""
        if len(self._invites) >= MAX_INVITES:
            raise UsageError(f"there are {MAX_INVITES} invites already")
        expires_at = self._membership.clock() + lasts_s if lasts_s else 0.0
        row = self._journal.note_invite(max(self._invites) + 1, name, uses, expires_at)
        self._invites[row.number] = row
        return row

    def revoke_invite(self, number: int) -> InviteRow:
        """An invite admits nobody from now on; whom it has admitted stays."""
        if number not in self._invites:
            raise UsageError(f"there is no invite {number}", fix="see `swarmtrain invite list`")
        row = self._invites[number]
        row = self._journal.note_invite(number, row.name, row.uses, row.expires_at, is_revoked=True)
        self._invites[number] = row
        return row

    def invites(self) -> list[tuple[InviteRow, int, str]]:
        """Every invite, how often it was used, and why it admits nobody (empty if it does)."""
        now = self._membership.clock()
        found = []
        for row in self._invites.values():
            used = self._journal.num_admitted_by(row.number)
            found.append((row, used, why_not(row, used, now)))
        return found

    def invite(self, row: InviteRow, addresses: tuple[str, ...]) -> Invite:
        """The invite to hand out. That of an open or closed run needs no token."""
        secret = run_secret(self._key)
        if row.number == RUNS_OWN and (self.rules.mode is not Mode.TOKEN or row.is_revoked):
            return Invite(self._run_id, self._key.public_bytes, addresses, secret)
        return Invite(self._run_id, self._key.public_bytes, addresses, secret, row.number, self.token(row.number))

    def own_invite(self, addresses: tuple[str, ...]) -> Invite:
        """The one that the coordinator prints."""
        return self.invite(self._invites[RUNS_OWN], addresses)

    def _invite_name(self, number: int) -> str:
        row = self._invites.get(number)
        return row.name if row is not None else ""

    def is_on_probation(self, peer_id: str, num_decided: int) -> bool:
        """Whether a peer was admitted by its own work alone, and has not done enough yet to count as any other."""
        row = self._current(peer_id)
        is_unknown = row is not None and row.invite == NO_INVITE and self.rules.mode is Mode.OPEN
        return is_unknown and num_decided < self.rules.probation


def run_secret(key: RunKey) -> bytes:
    """The secret that every invite of a run carries."""
    return key.derive("invite secret")
