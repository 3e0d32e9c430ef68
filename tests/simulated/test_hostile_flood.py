"""Requests without an end, votes of nobody, bytes of all kinds: the run goes on and ends in the reference's bits."""

from __future__ import annotations

import random

import pytest

from swarmtrain.rpc.errors import Violation
from swarmtrain.simulated.fuzz import Fuzzer
from swarmtrain.simulated.judge import References, excesses
from swarmtrain.simulated.stranger import Stranger
from swarmtrain.simulated.swarm import Life, SimulatedSwarm
from swarmtrain.wire.frames import FrameType, Start, pack_nonce, pack_start
from swarmtrain.wire.messages import Applied, Apply

from .conftest import Make
from .scenes import assert_reference, hold, release, said, tiny, wait_serving, wait_step


def training(simulated: Make, *overrides: str) -> tuple[SimulatedSwarm, list[Life]]:
    """Three stages of one peer each."""
    swarm = simulated(tiny(*overrides))
    swarm.start_coordinator(min_peers=3)
    peers = [swarm.start_peer(f"peer{stage}", stage) for stage in range(3)]
    wait_serving(swarm, *peers)
    return swarm, peers


def test_requests_that_begin_and_never_end_are_dropped_in_seconds(simulated: Make, references: References) -> None:
    """Two of them reserve all the memory that a peer has for requests, and their deadline is seven weeks away."""
    swarm, peers = training(simulated)
    hold(peers[2])
    mallory = Stranger(swarm, "mallory")
    stream = mallory.stream_to(peers[1])
    for call_id in (1, 3):
        stream.write(pack_start(FrameType.REQUEST, call_id, Start("work", 256 << 20, 2**32 - 1)))
    budget = peers[1].daemon.assignment.peer.node._shared.request_budget
    swarm.until(lambda: budget.used_bytes > 0, "they hold memory")
    for nonce in range(60):
        stream.write(pack_nonce(FrameType.PING, nonce))  # it is alive, and sends something all the time
        swarm.run_for(1.0)
    assert budget.used_bytes == 0
    assert peers[1].daemon.assignment.peer.node.traffic().violations[Violation.STALLED] == 1
    release(peers[2])
    assert_reference(swarm, references)


def test_four_identities_with_all_the_links_they_may_have_leave_places_to_others(
    simulated: Make, references: References
) -> None:
    """Each begins 1,024 requests: together as many as a daemon has places."""
    swarm, peers = training(simulated)
    hold(peers[2])
    node = peers[1].daemon.assignment.peer.node
    strangers = [Stranger(swarm, f"mallory{number}") for number in range(4)]
    for mallory in strangers:
        for stream in [mallory.stream_to(peers[1]) for _ in range(node.options.max_incoming_per_peer)]:
            for number in range(node.options.link.max_inbound_calls):
                stream.write(pack_start(FrameType.REQUEST, 2 * number + 1, Start("work", 1, 2**32 - 1)))
    limit = node.options.max_inbound_calls
    swarm.until(lambda: node._shared.tasks.num_free < limit / 2, "they have more than half of the places")
    swarm.run_for(5.0)
    assert limit / 4 < node._shared.tasks.num_free < limit / 2
    release(peers[2])
    assert_reference(swarm, references)


def test_a_state_that_a_peer_says_it_has_without_having_prepared_is_no_vote(
    simulated: Make, references: References
) -> None:
    """It is told the decision when it says that it stands at its step, and answers with a state of its own making.

    Nothing of that is in the journal, where `audit` would find it for ever.
    """
    swarm, peers = training(simulated)
    wait_step(swarm, 1)
    hold(peers[2])
    swarm.run_for(5.0)
    mallory = Stranger(swarm, "mallory")
    mallory.answers[Apply] = lambda apply, exchange: Applied(apply.step + 1, "0" * 64)
    mallory.beat(1, "paused", step=swarm.step - 1)
    swarm.until(lambda: any(isinstance(item, Apply) for item in mallory.heard), "it was told a decision")
    swarm.run_for(5.0)
    release(peers[2])
    assert_reference(swarm, references)
    assert not said(swarm, "peer_diverged")
    assert not said(swarm, "run_rolled_back")


@pytest.mark.parametrize("num_frames", [2000, pytest.param(100_000, marks=pytest.mark.long)])
def test_frames_of_all_kinds_change_nothing(simulated: Make, references: References, num_frames: int) -> None:
    swarm, peers = training(simulated)
    wait_step(swarm, 1)
    hold(peers[2])
    fuzzer = Fuzzer(swarm, Stranger(swarm, "mallory"), random.Random(f"{num_frames}"))
    fuzzer.send(num_frames)
    assert fuzzer.num_sent == num_frames
    assert min(fuzzer.answers.values()) > 0, "messages got through, and some were refused"
    release(peers[2])
    assert not excesses(swarm)
    assert_reference(swarm, references)
