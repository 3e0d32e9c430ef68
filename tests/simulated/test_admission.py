"""Who is in: what a stranger learns (nothing), what an invite is good for, and what outlives restarts."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest

from swarmtrain.chain.neighbours import stage_topic
from swarmtrain.coordinator.enrolment import AdmissionRules, Mode
from swarmtrain.coordinator.journal_files import JournalError
from swarmtrain.p2p.identity import RunKey
from swarmtrain.run.invite import Invite, parse_invite
from swarmtrain.simulated.judge import References
from swarmtrain.simulated.machine import Killed
from swarmtrain.simulated.stranger import ANSWERED, Stranger
from swarmtrain.simulated.swarm import Life, SimulatedSwarm
from swarmtrain.wire.certificates import Certificate, pack_credential, signed_part
from swarmtrain.wire.messages import Code, FetchDigests, FetchRun, FetchState, Heartbeat, SeekStage, Work
from swarmtrain.wire.peer_report import PeerReport
from swarmtrain.wire.records import pack_record

from .conftest import Make
from .scenes import assert_reference, phases, said, tiny, wait_serving, wait_step

OPEN = AdmissionRules(Mode.OPEN, difficulty=4, probation=6)
CLOSED = AdmissionRules(Mode.CLOSED)


def start(simulated: Make, *overrides: str, rules: AdmissionRules | None = None) -> SimulatedSwarm:
    """A run of three stages that trains."""
    swarm = simulated(tiny("schedule.steps=12", *overrides))
    swarm.start_coordinator(min_peers=3, **({"admission": rules} if rules else {}))
    for stage in range(3):
        swarm.start_peer(f"peer{stage}", stage)
    return swarm


def ask(swarm: SimulatedSwarm, command: str, **arguments: Any) -> dict[str, Any]:
    """What the operator's verbs are answered."""
    found: list[dict[str, Any]] = []

    async def work() -> None:
        found.append(await swarm.coordinator.daemon.operator.commands[command](arguments))

    swarm.coordinator.process.spawn(work(), command)
    swarm.until(lambda: bool(found), f"{command} is answered")
    return found[0]


def with_invite(swarm: SimulatedSwarm, name: str, stage: int, invite: Invite) -> Life:
    """A peer that joins with an invite of its own."""
    usual, swarm.invite = swarm.invite, lambda: invite  # type: ignore[method-assign]
    try:
        return swarm.start_peer(name, stage)
    finally:
        swarm.invite = usual  # type: ignore[method-assign]


def refusal(life: Life) -> str:
    """How its last process ended."""
    return type(life.errors[-1]).__name__ if life.errors else ""


def made(swarm: SimulatedSwarm, **arguments: Any) -> Invite:
    """A further invite."""
    return parse_invite(ask(swarm, "invites.make", name="alice", **arguments)["invite"])


# ---- strangers -------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("which", ["no secret", "another run's"])
def test_who_has_no_invite_of_the_run_is_told_nothing(simulated: Make, references: References, which: str) -> None:
    swarm = start(simulated)
    wait_step(swarm, 1)
    own = swarm.invite()
    secret = bytes(16) if which == "no secret" else RunKey(bytes(32)).derive("invite secret")
    mallory = Stranger(swarm, "mallory", enrols=False, has_directory=True, invite=replace(own, secret=secret))
    messages = [FetchRun(own.run_id), SeekStage(own.run_id, (0,)), FetchState(own.run_id, 0, 0, 0)]
    for target in (swarm.coordinator, swarm.peers[0]):
        for message in messages:
            mallory.node.forgive(target.peer_id)
            assert mallory.outcome(target, message) in ("ProtocolViolation", "LinkClosed")
    heard = mallory.stream_to(swarm.peers[1])
    assert mallory.do(mallory.directory.lookup("coordinator")) == {}
    assert mallory.do(mallory.directory.lookup(stage_topic(0))) == {}
    assert mallory.directory.status().num_neighbours == 0
    violations = swarm.coordinator.status()["traffic"]["violations"]
    assert violations["no-proof"] >= len(messages)
    assert heard.peer_id == swarm.peers[1].peer_id
    assert_reference(swarm, references)


def test_nothing_that_a_stranger_receives_names_the_run(simulated: Make) -> None:
    swarm = start(simulated)
    wait_step(swarm, 1)
    invite = swarm.invite()
    mallory = Stranger(swarm, "mallory", enrols=False, invite=replace(invite, secret=bytes(16)))
    received = bytearray()
    for life in (swarm.coordinator, swarm.peers[0]):
        stream = mallory.stream_to(life)
        taken = stream._receiver  # type: ignore[attr-defined]
        taken.buffer_updated = lambda count, taken=taken: received.extend(taken._scratch[:count])
    swarm.run_for(5.0)
    assert b"no-proof" in received
    assert invite.run_id.encode() not in received
    assert invite.secret not in received
    assert swarm.manifest.run.name.encode() not in received


def test_who_has_the_secret_and_no_certificate_gets_no_answer(simulated: Make, references: References) -> None:
    """Injected work, forged routes, states, heartbeats: all need a certificate."""
    swarm = start(simulated)
    wait_step(swarm, 1)
    run_id, term = swarm.invite().run_id, swarm.coordinator.status()["term"]
    mallory = Stranger(swarm, "mallory", enrols=False, has_directory=True)
    work = Work(run_id, term, 1, swarm.step, 0, 0, False, (), bytes(17), b"")
    beat = Heartbeat(run_id, PeerReport(0, "serving", "liar"), "liar")
    asked = [(swarm.peers[1], work), (swarm.peers[0], FetchDigests(run_id, 0, 0))]
    asked += [(swarm.peers[0], FetchState(run_id, 0, 0, 0)), (swarm.coordinator, beat)]  # type: ignore[list-item]
    for target, message in [*asked, (swarm.coordinator, FetchRun(run_id))]:
        assert mallory.outcome(target, message) == Code.NOT_ADMITTED
    record = pack_record(PeerReport(1, "serving", "liar", addresses=mallory.host.addresses()))
    mallory.do(mallory.directory.announce(stage_topic(1), record, 50.0))
    swarm.run_for(5.0)
    neighbours = swarm.peers[0].daemon.assignment.dispatcher.neighbours
    assert mallory.peer_id not in neighbours.reports
    assert not mallory.heard
    assert_reference(swarm, references)


def test_a_certificate_of_ones_own_making_ends_the_link(simulated: Make, references: References) -> None:
    swarm = start(simulated)
    wait_step(swarm, 1)
    mallory = Stranger(swarm, "mallory", enrols=False)
    forged = Certificate(swarm.invite().run_id, mallory.peer_id, 1, 1e11, stage=0)
    borrowed = swarm.peers[0].daemon.membership.credential()
    for credential in (pack_credential(forged, RunKey(bytes(32)).sign(signed_part(forged))), borrowed, b"nonsense"):
        mallory.membership._own = credential
        mallory.node.cut()
        assert mallory.outcome(swarm.peers[1], FetchDigests("run", 0, 0)) in ("ProtocolViolation", "LinkClosed")
    assert swarm.peers[1].status()["traffic"]["violations"]["bad-certificate"] >= 3
    assert_reference(swarm, references)


def test_a_member_that_serves_another_stage_cannot_inject_work(simulated: Make, references: References) -> None:
    swarm = start(simulated)
    wait_step(swarm, 1)
    run_id, term = swarm.invite().run_id, swarm.coordinator.status()["term"]
    mallory = Stranger(swarm, "mallory")  # enrolled, and never told to serve
    work = Work(run_id, term, 1, swarm.step, 0, 0, False, (), bytes(17), b"")
    assert mallory.outcome(swarm.peers[1], work) == Code.NOT_ADMITTED
    assert mallory.outcome(swarm.peers[2], replace(work, stage=2)) == Code.NOT_ADMITTED
    assert mallory.outcome(swarm.coordinator, FetchRun(run_id)) == ANSWERED
    assert_reference(swarm, references)


# ---- invites ---------------------------------------------------------------------------------------------------------


def test_an_invite_of_one_use_admits_one_of_two_that_come_at_once(simulated: Make, references: References) -> None:
    swarm = start(simulated)
    wait_step(swarm, 1)
    invite = made(swarm, uses=1)
    both = [with_invite(swarm, name, 1, invite) for name in ("alice", "mallory")]
    swarm.until(lambda: any(refusal(life) == "NotAdmitted" for life in both), "one is refused")
    (admitted,) = [life for life in both if life.is_running]
    wait_serving(swarm, admitted)
    (row,) = [row for row in ask(swarm, "invites")["invites"] if row["number"] == invite.token_number]
    assert (row["used"], row["why_not"]) == (1, "it is used up")
    assert swarm.coordinator.daemon.refused[Code.NOT_ADMITTED] >= 1
    assert_reference(swarm, references)


def test_it_admits_the_same_peer_again_when_the_coordinator_dies_between_journal_and_answer(
    simulated: Make, references: References
) -> None:
    swarm = start(simulated)
    wait_step(swarm, 1)
    invite, coordinator = made(swarm, uses=1), swarm.coordinator
    enrolment = coordinator.daemon.enrolment
    admit = enrolment._journal.admit

    def die(*arguments: Any) -> None:
        admit(*arguments)
        coordinator.process.kill()
        raise Killed

    enrolment._journal.admit = die
    alice = with_invite(swarm, "alice", 1, invite)
    swarm.until(lambda: not coordinator.is_running, "the coordinator dies")
    assert "serving" not in phases(alice)
    swarm.start_coordinator()
    wait_serving(swarm, alice)
    (row,) = [row for row in ask(swarm, "invites")["invites"] if row["number"] == invite.token_number]
    assert row["used"] == 1
    mallory = with_invite(swarm, "mallory", 1, invite)
    swarm.until(lambda: refusal(mallory) == "NotAdmitted", "another one is refused")
    assert_reference(swarm, references)


def test_a_newcomer_waits_while_the_journal_cannot_be_written(simulated: Make, references: References) -> None:
    swarm = start(simulated, "schedule.steps=30")
    wait_step(swarm, 1)
    enrolment = swarm.coordinator.daemon.enrolment
    admit, failures = enrolment._journal.admit, []

    def fail(*arguments: Any) -> None:
        failures.append(arguments)
        raise JournalError("no space left on device")

    enrolment._journal.admit = fail
    late = swarm.start_peer("late", 1)
    swarm.until(lambda: len(failures) >= 2, "it asks again")
    enrolment._journal.admit = admit
    wait_serving(swarm, late)
    assert_reference(swarm, references)


@pytest.mark.parametrize("why", ["expired", "revoked", "forged"])
def test_an_invite_that_does_not_count_admits_nobody(simulated: Make, references: References, why: str) -> None:
    swarm = start(simulated)
    wait_step(swarm, 1)
    invite = made(swarm, uses=0, lasts_s=0.001 if why == "expired" else 0.0)
    if why == "revoked":
        ask(swarm, "invites.revoke", number=invite.token_number)
    elif why == "forged":
        invite = replace(invite, token=bytes(16))
    mallory = with_invite(swarm, "mallory", 1, invite)
    swarm.until(lambda: refusal(mallory) == "NotAdmitted", "it is refused")
    assert swarm.coordinator.daemon.refused[Code.NOT_ADMITTED] == 1
    assert "manifest" not in phases(mallory)
    assert_reference(swarm, references)


def test_who_was_admitted_comes_back_when_its_invite_is_revoked_and_everything_was_restarted(
    simulated: Make, references: References
) -> None:
    swarm = start(simulated)
    wait_step(swarm, 1)
    ask(swarm, "invites.revoke", number=0)
    invite = swarm.invite()
    for life in swarm.lives.values():
        life.kill(power_loss=True)
    swarm.start_coordinator()
    peers = [with_invite(swarm, life.name, life.stage, invite) for life in swarm.peers]
    wait_serving(swarm, *peers)
    late = with_invite(swarm, "late", 1, invite)
    swarm.until(lambda: refusal(late) == "NotAdmitted", "a newcomer is refused")
    assert_reference(swarm, references)


# ---- members ---------------------------------------------------------------------------------------------------------


def test_in_an_open_run_work_admits_and_newcomers_own_nothing_at_first(simulated: Make, references: References) -> None:
    swarm = start(simulated, "schedule.steps=40", rules=OPEN)
    assert swarm.invite().token == b""
    wait_step(swarm, 1)
    late = swarm.start_peer("late", 1)
    wait_serving(swarm, late)
    owned: dict[bool, set[bool]] = {True: set(), False: set()}
    context, preparer = swarm.coordinator.daemon.context, swarm.coordinator.daemon.progress._driver._preparer
    rates = preparer._rates

    def note(members: Any) -> Any:
        found = rates(members)
        for member, (up, _) in zip(members, found, strict=True):
            if member.stage == 1 and len(members) > 1 and member.peer_id == late.peer_id:
                owned[context.is_on_probation(late.peer_id)].add(up < 1e-6)
        return found

    preparer._rates = note
    assert context.is_on_probation(late.peer_id)
    swarm.run_to_end()
    assert owned == {True: {True}, False: {False}}
    assert_reference(swarm, references)


def test_in_a_closed_run_the_operator_admits(simulated: Make, references: References) -> None:
    swarm = simulated(tiny("schedule.steps=12"))
    swarm.start_coordinator(min_peers=3, admission=CLOSED)
    peers = [swarm.start_peer(f"peer{stage}", stage) for stage in range(3)]
    swarm.until(lambda: len(said(swarm, "peer_asks")) == 3, "they ask")
    shown = swarm.coordinator.status()
    assert {row["peer"] for row in shown["pending"]} == {life.peer_id for life in peers}
    assert shown["num_members"] == 0
    assert not any("manifest" in phases(life) for life in peers)
    for life in peers:
        ask(swarm, "members.admit", peer=life.peer_id)
    wait_serving(swarm, *peers)
    assert [row["name"] for row in ask(swarm, "members")["members"]] == ["peer0", "peer1", "peer2"]
    assert_reference(swarm, references)


def test_a_forgotten_member_is_out_and_its_certificate_counts_nowhere(simulated: Make, references: References) -> None:
    swarm = start(simulated)
    leak = swarm.start_peer("leak", 1)
    wait_step(swarm, 1)
    credential, peer_id = leak.daemon.membership.credential(), leak.peer_id
    assert all(life.daemon.membership.vouches(peer_id, credential) for life in swarm.peers)
    ask(swarm, "invites.revoke", number=0)
    ask(swarm, "members.forget", peer="leak")
    swarm.until(lambda: refusal(leak) == "NotAdmitted", "it leaves")
    others = [life for life in swarm.peers if life is not leak]
    swarm.until(lambda: not any(life.daemon.membership.vouches(peer_id, credential) for life in others), "all know")
    assert_reference(swarm, references)


def test_certificates_are_renewed_while_the_run_goes_on(simulated: Make, references: References) -> None:
    swarm = start(simulated, "schedule.steps=40", rules=AdmissionRules(certificate_s=6.0))
    wait_step(swarm, 1)
    first = swarm.peers[1].daemon.membership.credential()
    swarm.until(lambda: swarm.peers[1].daemon.membership.credential() != first, "it is renewed")
    assert not said(swarm, "peer_lost")
    assert_reference(swarm, references)
