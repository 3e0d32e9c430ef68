"""A peer that is excluded stays out, whatever is restarted, and the run ends as if it had never come."""

from __future__ import annotations

import pytest

from swarmtrain.p2p.errors import NetError
from swarmtrain.rpc.errors import LinkRefused
from swarmtrain.simulated.judge import References
from swarmtrain.simulated.swarm import Life, SimulatedSwarm
from swarmtrain.wire.messages import Exclusion, FetchDigests

from .conftest import Make
from .scenes import assert_reference, said, tiny, wait_said, wait_serving, wait_step

REASON = "its gradient is not what others computed"


def ban(swarm: SimulatedSwarm, peer_id: str) -> None:
    """As the coordinator's own parts call it."""
    coordinator = swarm.coordinator
    context = coordinator.daemon.context
    coordinator.process.spawn(context.ban(peer_id, REASON), "ban")
    swarm.until(lambda: peer_id in context.bans, "it is excluded")


def has_heard(life: Life, peer_id: str) -> bool:
    """Whether a daemon knows that a peer is excluded."""
    return peer_id in life.daemon.membership.exclusions


def refusal(life: Life) -> str:
    """How its last process ended."""
    return type(life.errors[-1]).__name__ if life.errors else ""


@pytest.mark.parametrize("overrides", [(), ("schedule.delay=1", "schedule.delay_from=1")], ids=["pause", "delay"])
def test_an_excluded_peer_is_gone_at_once_and_its_work_is_done_by_others(
    simulated: Make, references: References, overrides: tuple[str, ...]
) -> None:
    swarm = simulated(tiny("schedule.steps=8", *overrides))
    swarm.start(num_peers=6)
    wait_step(swarm, 2)
    culprit = swarm.peers[4]
    books = swarm.coordinator.daemon.context.books
    swarm.until(
        lambda: any(member[0] == culprit.peer_id for b in books.values() for row in b._claims[1] for member in row),
        "it has work in an open step",
    )
    ban(swarm, culprit.peer_id)
    swarm.until(lambda: not culprit.is_running, "it leaves")
    assert refusal(culprit) == "RunRefused"
    (event,) = said(swarm, "peer_excluded")
    assert (event.peer, event.peer_name, event.reason) == (culprit.peer_id, "peer4", REASON)  # type: ignore[attr-defined]
    assert not said(swarm, "peer_lost", peer=culprit.peer_id)
    shown = swarm.coordinator.status()
    assert [(row["peer"], row["reason"]) for row in shown["excluded"]] == [(culprit.peer_id, REASON)]
    assert_reference(swarm, references)


def test_it_stays_out_when_everything_is_restarted_and_as_another_incarnation(
    simulated: Make, references: References
) -> None:
    swarm = simulated(tiny("schedule.steps=8"))
    swarm.start(num_peers=6)
    wait_step(swarm, 1)
    culprit = swarm.peers[4]
    peer_id = culprit.peer_id
    ban(swarm, peer_id)
    for life in swarm.lives.values():
        if life.is_running:
            life.kill(power_loss=True)
    swarm.start_coordinator()
    peers = [swarm.start_peer(life.name, life.stage) for life in swarm.peers]
    swarm.until(lambda: refusal(culprit) == "RunRefused", "it is refused")
    assert culprit.peer_id == peer_id
    assert swarm.coordinator.daemon.context.node.num_excluded_streams
    wait_serving(swarm, *[life for life in peers if life is not culprit])
    assert_reference(swarm, references)


def test_every_peer_hears_of_it_and_has_no_link_with_it(simulated: Make, references: References) -> None:
    swarm = simulated(tiny("schedule.steps=30"))
    swarm.start(num_peers=6)
    wait_step(swarm, 1)
    culprit, others = swarm.peers[4], [life for life in swarm.peers if life is not swarm.peers[4]]
    culprit.process.stop()  # it cannot leave by itself
    ban(swarm, culprit.peer_id)
    late = swarm.start_peer("late", 0)
    swarm.until(lambda: all(has_heard(life, culprit.peer_id) for life in (*others, late)), "all have heard")
    wait_serving(swarm, late)
    assert not any(life.daemon.assignment.peer.node.has_link(culprit.peer_id) for life in (*others, late))
    culprit.process.resume()
    assert_reference(swarm, references)


def test_one_that_is_readmitted_serves_again(simulated: Make, references: References) -> None:
    swarm = simulated(tiny("schedule.steps=30"))
    swarm.start(num_peers=4)
    wait_step(swarm, 1)
    culprit = swarm.peers[3]
    peer_id = culprit.peer_id
    ban(swarm, peer_id)
    swarm.until(lambda: not culprit.is_running, "it leaves")
    context = swarm.coordinator.daemon.context
    swarm.coordinator.process.spawn(context.unban(peer_id), "unban")
    wait_said(swarm, swarm.coordinator, "peer_readmitted", peer=peer_id)
    swarm.start_peer(culprit.name, culprit.stage)
    wait_serving(swarm, culprit)
    swarm.until(lambda: not any(has_heard(life, peer_id) for life in swarm.peers), "all have heard of it")
    assert_reference(swarm, references)


def test_an_excluded_peer_that_calls_another_one_is_refused(simulated: Make, references: References) -> None:
    swarm = simulated(tiny("schedule.steps=30"))
    swarm.start(num_peers=6)
    wait_step(swarm, 1)
    culprit, victim = swarm.peers[4], swarm.peers[0]
    victim.daemon.membership.exclusions.hear(
        [Exclusion(1, culprit.peer_id)]
    )  # its coordinator and others know nothing of it
    victim.daemon.assignment.peer.node.drop(culprit.peer_id)
    errors: list[Exception] = []

    async def call() -> None:
        try:
            await culprit.daemon.assignment.peer.node.call(victim.peer_id, FetchDigests("run", 0, 0), deadline_s=60.0)
        except NetError as error:
            errors.append(error)

    culprit.process.spawn(call(), "call")
    swarm.until(lambda: bool(errors), "it is answered")
    assert isinstance(errors[0], LinkRefused)
    assert victim.daemon.assignment.peer.node.num_excluded_streams
    assert_reference(swarm, references)
