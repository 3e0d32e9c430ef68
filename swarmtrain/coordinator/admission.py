"""The verdict on a heartbeat: serve, fetch a state first, wait, leave. Pure."""

from __future__ import annotations

import random
from collections.abc import Mapping
from dataclasses import dataclass, field

from swarmtrain.coordinator.members import Member, Members
from swarmtrain.wire.messages import Directive
from swarmtrain.wire.peer_report import HOLDS_STATE, STALLED, TAKES_NO_WORK

MAX_SERVING = 3840  # of one stage: a roster holds 4,096, and newcomers that listen are in it too
MAX_DONORS = 16  # named to one newcomer: more would not make its download faster, and a verdict must stay small


@dataclass(frozen=True)
class StateOffer:
    """A state of one stage that can be fetched."""

    step: int
    digest: str
    donors: tuple[str, ...]


@dataclass(frozen=True)
class Answer:
    """The directive, its reason, and for SYNC what to fetch."""

    directive: Directive
    reason: str
    offer: StateOffer | None = None


@dataclass
class StageBook:
    """What is known of one stage's states."""

    digest: str = ""  # of the state at the run's current step; empty at step 0, where it follows from the seed
    since: int = 0  # the term of the decision that led to it: a state of an earlier term was rolled back
    voters: frozenset[tuple[str, str]] = frozenset()  # after a restart without the digest: the peers that must know it
    votes: Mapping[tuple[str, str], str] = field(default_factory=dict)  # and the digests of theirs in the journal
    snapshot: StateOffer | None = None  # kept by serving peers for newcomers
    checkpoint: StateOffer | None = None  # kept by the coordinator itself


def some_donors(donors: tuple[str, ...], rng: random.Random) -> tuple[str, ...]:
    """The donors to name in one verdict. The next one names others: that spreads the load, and some may be dead."""
    return donors if len(donors) <= MAX_DONORS else tuple(rng.sample(donors, MAX_DONORS))


def servers(members: Members, stage: int, step: int) -> list[Member]:
    """Peers of a stage that hold the state of `step` and serve."""
    return [member for member in members.of_stage(stage, "serving") if member.step == step]


@dataclass(frozen=True)
class Standing:
    """Where the run stands.

    While the last decision's step is `step`, it is being applied, and a peer that has not applied it is told again.
    Until all stages have, the state of `step` alone is of no use: a peer needs the reduced sum as well to apply.
    """

    step: int  # applied steps
    decided: int | None = None  # the step of the last decision
    prepared: frozenset[tuple[str, str]] = frozenset()  # peers that hold the sums of that decision
    is_over: bool = False
    suspended: Mapping[str, str] = field(default_factory=dict)  # peers that have cost too much (strikes.py), and why

    @property
    def is_applying(self) -> bool:
        """Whether the step under way is decided, and not applied by all stages yet."""
        return self.decided == self.step

    def holds(self, member: Member) -> bool:
        """Whether the run can go on with what this peer has: its state, if that is the run's, or a later one."""
        if self.is_applying and member.step == self.step:
            return member.key in self.prepared
        return member.step >= self.step


def judge(member: Member, members: Members, run: Standing, book: StageBook) -> Answer:
    """What `member` should do."""
    step, decided = run.step, run.decided
    if run.is_over:
        return Answer(Directive.LEAVE, "the run is complete")
    if member.must_sync:
        return Answer(Directive.WAIT, "it was left out of a step, and must sync")
    if member.state == STALLED:  # it drops what it has and comes back, unless the run cannot do without it
        is_alone = not servers(members, member.stage, step)
        return Answer(Directive.SERVE if is_alone else Directive.WAIT, "its device does not answer")
    if member.excluded_at is not None and step <= member.excluded_at and servers(members, member.stage, step):
        return Answer(Directive.WAIT, "this step is done without it")  # else it would fail where it has failed before
    if member.peer_id in run.suspended and [m for m in servers(members, member.stage, step) if m.key != member.key]:
        return Answer(Directive.WAIT, f"it is left out for a while: {run.suspended[member.peer_id]}")
    if members.num_admitted(member.stage) - member.was_admitted >= MAX_SERVING:
        return Answer(Directive.WAIT, "its stage has as many peers as an all-reduce can hold: it waits as a spare")
    if has_state(member, step, book) and (member.state == "serving" or run.holds(member)):
        return Answer(Directive.SERVE, "")
    is_near = member.step == decided == step - 1 or member.step - 1 == decided == step
    if is_near and member.state == "serving":
        return Answer(Directive.SERVE, "")  # its apply is under way, or done before the others'
    return _judge_newcomer(member, members, run, book)


def has_state(member: Member, step: int, book: StageBook) -> bool:
    """Whether the peer's state is the run's.

    While a restarted coordinator does not know the digest, any state of this step may be: the stage's peers will elect
    one. A state of a history that was rolled back never is.
    """
    if member.step != step or step == 0:
        return member.step == step
    return member.report.state_digest == book.digest if book.digest else member.report.state_term >= book.since


def _judge_newcomer(member: Member, members: Members, run: Standing, book: StageBook) -> Answer:
    step = run.step
    if step == 0 and not run.is_applying:
        return Answer(Directive.SYNC, "the first state follows from the seed", StateOffer(0, "", ()))
    if member.listening_from is not None:
        snapshot = book.snapshot
        is_other = (
            snapshot is not None and member.step == snapshot.step and member.report.state_digest != snapshot.digest
        )
        if member.step >= member.listening_from and not is_other:  # another state is of a history that was rolled back
            return Answer(Directive.WAIT, "catching up")  # also when another newcomer was sent to a newer state
        if snapshot is not None and member.listening_from <= snapshot.step:
            return Answer(Directive.SYNC, "", snapshot)
    if run.is_applying:
        holders = members.of_stage(member.stage, *HOLDS_STATE)
        is_held = any(run.holds(holder) for holder in holders)
        return Answer(Directive.WAIT, f"step {step} is being applied" if is_held else _no_peer_has(member.stage, step))
    if book.checkpoint is not None and book.checkpoint.step == step:
        return Answer(Directive.SYNC, "", book.checkpoint)
    if servers(members, member.stage, step):
        return Answer(Directive.WAIT, "a state to fetch is being prepared")
    idle_holders = [m for m in members.of_stage(member.stage, *TAKES_NO_WORK) if has_state(m, step, book)]
    if idle_holders:  # the step stands still until a peer serves, so there will be no snapshot to wait for
        digests = sorted(m.report.state_digest for m in idle_holders)
        digest = book.digest or max(digests, key=digests.count)
        return Answer(Directive.SYNC, "", StateOffer(step, digest, tuple(m.peer_id for m in idle_holders)))
    return Answer(Directive.WAIT, _no_peer_has(member.stage, step))


def _no_peer_has(stage: int, step: int) -> str:
    return f"no peer has the state of stage {stage} at step {step}"
