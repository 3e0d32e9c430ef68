"""What counts as a peer's own: its coordinator says it with every verdict, and both say the same in the end."""

from __future__ import annotations

import pytest

from swarmtrain.simulated.judge import References

from .conftest import Make
from .scenes import NUM_STAGES, assert_reference, open_ended, said, tiny, wait_phase, wait_step


def test_what_peers_are_thanked_for_is_what_the_books_say(simulated: Make, references: References) -> None:
    """Also a peer that leaves in the middle, and one that comes back after it was killed."""
    swarm = simulated(tiny("schedule.steps=8"))
    swarm.start(num_peers=2 * NUM_STAGES)
    wait_step(swarm, 3)
    early, killed = swarm.serving(0)[0], swarm.serving(1)[0]
    early.process.ask("drain")
    wait_phase(swarm, early, "gone")
    killed.kill()
    swarm.start_peer(killed.name, 1)
    assert_reference(swarm, references)
    books = swarm.coordinator.daemon.context.tally.contributed
    ended = {life.name: list(life.said("peer_ended"))[-1] for life in swarm.peers}
    assert {life.name: ended[life.name].credit for life in swarm.peers if life is not early} == {
        life.name: books[life.peer_id] for life in swarm.peers if life is not early
    }
    assert 0 < ended[early.name].credit <= books[early.peer_id]  # its last step was decided after it had gone
    manifest = swarm.manifest
    whole = manifest.schedule.steps * manifest.batch.microbatches_per_step * NUM_STAGES
    assert sum(books.values()) == whole
    tokens = manifest.tokens_per_step // manifest.batch.microbatches_per_step
    for life in swarm.peers:
        event = ended[life.name]
        assert event.credit_tokens == event.credit * tokens
        if life is not early:
            assert event.credit_share == pytest.approx(event.credit / whole)
        assert event.sent_bytes > 0
        assert event.received_bytes > 0
    left = {event.peer: event.microbatches for event in said(swarm, "peer_left")}
    assert left[killed.peer_id] == books[killed.peer_id]


def test_a_peer_knows_how_its_run_stands(simulated: Make) -> None:
    swarm = simulated(open_ended())
    swarm.start(num_peers=NUM_STAGES)
    wait_step(swarm, 4)
    swarm.run_for(6.0)  # heartbeats come every two seconds
    told, run = swarm.peers[0].status(), swarm.coordinator.status()
    assert told["steps"] == run["steps"]
    assert 0 < told["run_step"] <= run["step"]
    assert told["run_loss"] in {point["loss"] for point in swarm.coordinator.daemon.keeper.status.curve()}
    assert told["run_tokens_per_s"] > 0
    assert told["seconds_left"] > 0
    assert 0 < told["credit"]["microbatches"] <= swarm.coordinator.daemon.context.tally.contributed[told["peer"]]
    assert 0.0 < told["credit"]["share"] < 0.5
    assert told["silent_s"] < 6.0
    assert sum(told["lately"].values()) == pytest.approx(1.0)
    (member,) = run["stages"][0]
    assert sum(member["lately"].values()) == pytest.approx(1.0)
