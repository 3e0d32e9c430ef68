"""One coordinator at a time: whether another process coordinates with the run's key, and which one yields.

A coordinator that was started on an old copy of its directory would set a healthy run back: it takes the next term,
which peers obey, and lacks the steps since the copy was made. It learns of them from the claims of other coordinators,
which the run's key has signed, and from the run's peers: each says how many steps it has applied, and in which term. In
a term that the journal knows of, no peer can have applied a step that is not in it, since a decision is journaled
before a peer hears of it. (States of earlier terms may be ahead: the run has been rolled back since.)
"""

from __future__ import annotations

import logging
from collections.abc import Collection, Mapping
from dataclasses import dataclass

from swarmtrain.chain.claim import Claim, CoordinatorRecord
from swarmtrain.chain.neighbours import stage_reports
from swarmtrain.chain.offer import COORDINATOR_TOPIC
from swarmtrain.coordinator.journal_files import JournalError
from swarmtrain.directory.directory import Directory
from swarmtrain.errors import ExitCode, SwarmtrainError
from swarmtrain.wire.peer_report import HOLDS_STATE, PeerReport
from swarmtrain.wire.records import parse_record

log = logging.getLogger(__name__)


class Superseded(SwarmtrainError):
    """Another coordinator has taken over the run: its term is higher, or the same and it is further."""

    error_id = "ST-SUPERSEDED"
    exit_code = ExitCode.REFUSED

    @classmethod
    def by(cls, other: Claim, own: Claim) -> Superseded:
        """The error with which a coordinator ends whose claim is `own`, when `other` coordinates."""
        subject = f"{other.peer_id[-8:]} coordinates"
        if other.peer_id == own.peer_id:
            subject = "another process with this coordinator's identity, on a copy of its directory, coordinates"
        fix = "leave the run to it, or stop it first"
        if Known(other.term - 1, other.step).is_behind(own.term, own.step):
            fix = "this coordinator is further: the other one ends when peers tell it so; then start this one again"
        return cls(f"{subject} this run under term {other.term}; this coordinator's term is {own.term}", fix=fix)


class StaleJournal(JournalError):
    """The run is further than this journal: it is an old copy, and must not set the run back."""

    error_id = "ST-JOURNAL-STALE"


@dataclass(frozen=True)
class Known:
    """What a journal knows: `num_steps` decided steps, and that nothing was rolled back since `term`."""

    term: int
    num_steps: int

    def is_behind(self, term: int, step: int) -> bool:
        """Whether a peer that has applied `step` steps, the last in `term`, has seen steps that this journal lacks."""
        return term >= self.term and step > self.num_steps

    def error(self, subject: str, step: int) -> StaleJournal:
        """The error with which the coordinator ends."""
        return StaleJournal(
            f"{subject} at step {step}; this coordinator's journal ends at step {self.num_steps}: it is an old copy",
            fix="start the coordinator on the newest copy of its directory; if there is no other, end all peers first, "
            "and this run goes on from its own last checkpoint",
        )


async def next_term(
    directory: Directory, own: Claim, known: Known, num_stages: int, veterans: Collection[str] = ()
) -> int:
    """The term that this coordinator takes. `veterans` are the peers whose word counts, as for `check_peers`.

    Superseded if another process coordinates under that or a later one, unless on an old copy of this journal;
    StaleJournal if this journal is the old copy. `check_running` finds a coordinator that is not listed yet.
    """
    term = own.term
    for other in await _claims(directory, own):
        if known.is_behind(other.term, other.step):
            raise known.error(f"{other.peer_id[-8:]} coordinates this run, or did a minute ago,", other.step)
        if other.term < own.term:
            continue  # it was in charge before, as the journal knows
        if not Known(other.term - 1, other.step).is_behind(known.term, known.num_steps):
            raise Superseded.by(other, own)
        term = max(term, other.term + 1)
    there = await _peers(directory, num_stages)
    check_peers(known, {peer_id: (peer.state_term, peer.step) for peer_id, peer in there.items()}, veterans)
    return term


async def check_running(directory: Directory, own: Claim) -> None:
    """Superseded if another claim is greater. Peers obey the greatest only: there is nothing left to do."""
    for other in await _claims(directory, own):
        if other > own:
            raise Superseded.by(other, own)


def check_peers(known: Known, states: Mapping[str, tuple[int, int]], veterans: Collection[str] = ()) -> None:
    """StaleJournal if most of the peers (the term and the step of each one's state) are further than the journal.

    Most, because a single report may be wrong, or a lie. Only `veterans` count, which by the journal have done some of
    the run, and one of them is not enough if it knows more: identities are free, and newcomers must not end a run. If
    it knows none, all count: there is nothing yet that the run could lose by ending.
    """
    num_known = len(veterans)
    if num_known:
        states = {peer_id: state for peer_id, state in states.items() if peer_id in veterans}
    further = [step for term, step in states.values() if known.is_behind(term, step)]
    if 2 * len(further) > len(states) and len(further) >= min(2, num_known):
        raise known.error(f"{len(further)} of {len(states)} peers are", max(further))


async def _claims(directory: Directory, own: Claim) -> list[Claim]:
    """The claims of all other processes."""
    try:
        records = await directory.lookup(COORDINATOR_TOPIC)
    except SwarmtrainError as error:
        log.info("cannot look for other coordinators: %s", error)
        return []
    found = {peer_id: parse_record(CoordinatorRecord, record.value) for peer_id, record in records.items()}
    claims = [record.claim(peer_id) for peer_id, record in found.items() if record is not None]
    return [claim for claim in claims if (claim.peer_id, claim.life) != (own.peer_id, own.life)]


async def _peers(directory: Directory, num_stages: int) -> dict[str, PeerReport]:
    """The reports of peers that hold a state, as the directory lists them. An identity counts once."""
    found: dict[str, PeerReport] = {}
    for stage in range(num_stages):
        try:
            reports = await stage_reports(directory, stage)
        except SwarmtrainError as error:
            log.info("cannot look for peers of stage %d: %s", stage, error)
            continue
        found |= {peer_id: report for peer_id, report in reports.items() if report.state in HOLDS_STATE}
    return found
