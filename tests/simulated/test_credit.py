"""What counts as a peer's own: its coordinator says it with every verdict, and both say the same in the end."""

from __future__ import annotations

import sqlite3
from collections import Counter

import pytest

from swarmtrain.audit import check_receipts
from swarmtrain.chain.receipt import Receipt, ReceiptError, newest, read_receipt
from swarmtrain.peer import receipts
from swarmtrain.simulated.judge import References
from swarmtrain.simulated.swarm import Life, SimulatedSwarm

from .conftest import Make
from .scenes import (
    NUM_STAGES,
    arm,
    assert_reference,
    open_ended,
    said,
    tiny,
    wait_phase,
    wait_seen,
    wait_serving,
    wait_step,
)


def test_what_peers_are_thanked_for_is_what_the_books_say(simulated: Make, references: References) -> None:
    """Also a peer that leaves in the middle, and one that comes back after it was killed."""
    swarm = simulated(tiny("schedule.steps=20"))
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


def journal_counts(swarm: SimulatedSwarm) -> dict[str, dict[str, int]]:
    """Peer -> stage -> microbatches, counted row by row; and that no row is there twice."""
    with sqlite3.connect(swarm.coordinator.state_dir / "journal.sqlite") as db:
        rows = db.execute("SELECT step, stage, microbatch, peer FROM entries").fetchall()
    assert len({row[:3] for row in rows}) == len(rows)
    counts: dict[str, Counter[str]] = {}
    for _, stage, _, peer in rows:
        counts.setdefault(peer, Counter())[str(stage)] += 1
    return {peer: dict(found) for peer, found in counts.items()}


def receipt_of(swarm: SimulatedSwarm, life: Life) -> Receipt:
    """What the peer has kept, checked as a stranger would who has nothing but the invite."""
    invite = swarm.invite()
    (path,) = life.state_dir.glob("receipt-*.json")
    return read_receipt(path, invite.run_id, invite.run_key).receipt


def wait_back(swarm: SimulatedSwarm, *lives: Life) -> None:
    """These serve, in their new processes."""
    swarm.until(lambda: all(life.process.commands for life in lives), "they have started")
    wait_serving(swarm, *lives)


def die_and_return(swarm: SimulatedSwarm, *lives: Life) -> None:
    """Killed together, at once; started again together."""
    for life in lives:
        life.kill()
    for life in lives:
        swarm.start_peer(life.name, life.stage)


class Seen:
    """What the counters of peers show before they die."""

    def __init__(self, swarm: SimulatedSwarm) -> None:
        self._swarm, self.stolen, self.replayed = swarm, 0, 0

    def look(self) -> None:
        """Note what has happened in the present lives."""
        for life in self._swarm.serving():
            status = life.status()
            self.stolen = max(self.stolen, status["refused"].get("redirected", 0))
            self.replayed = max(self.replayed, status["replayed"])

    def has_stolen(self) -> bool:
        """Look, and say whether a peer has taken over work."""
        self.look()
        return self.stolen > 0


def test_receipts_add_up_to_the_journal_after_kills_restarts_steals_and_a_roll_back(
    simulated: Make, references: References
) -> None:
    """Ten kills, two restarts of the coordinator, one roll-back, work stolen and work replayed."""
    swarm = simulated(tiny("schedule.steps=16", "checkpoint.every=5", "batch.microbatches_per_step=10"))
    swarm.start(num_peers=2 * NUM_STAGES)
    seen = Seen(swarm)
    for life in swarm.peers:
        life.faults.pace_s = (0.1, 0.1)
    wait_seen(swarm, seen.has_stolen, "work waits, and is stolen")
    for number in range(6):
        wait_back(swarm, *swarm.peers)
        victim = swarm.serving(2 - number % 3)[-1]
        wait_step(swarm, swarm.step + 1)
        arm(victim, "after-forward:3:kill")  # in the middle of a step: what it has is replayed from upstream
        swarm.until(lambda life=victim: not life.is_running, "it is killed")  # type: ignore[misc]
        swarm.start_peer(victim.name, victim.stage)
        wait_back(swarm, victim)
        seen.look()
        if number in (1, 4):
            swarm.coordinator.kill()
            swarm.start_coordinator()
    wait_back(swarm, *swarm.peers)
    assert not said(swarm, "run_rolled_back")
    lost = swarm.serving(1)
    assert len(lost) == 2
    for life in lost:
        life.process.ask("credit")
    swarm.run_for(0.5)
    taken_back = [receipt_of(swarm, life) for life in lost]
    die_and_return(swarm, *lost)
    swarm.until(lambda: bool(said(swarm, "run_rolled_back")), "the run is rolled back")
    wait_back(swarm, *lost)
    for stage in (0, 2):
        victim = swarm.serving(stage)[0]
        die_and_return(swarm, victim)
        wait_back(swarm, victim)
    seen.look()
    assert_reference(swarm, references)
    assert (len(said(swarm, "run_rolled_back")), seen.stolen > 0, seen.replayed > 0) == (1, True, True)

    kept = {life.peer_id: receipt_of(swarm, life) for life in swarm.peers}
    books, manifest = journal_counts(swarm), swarm.manifest
    assert {peer: dict(receipt.stages) for peer, receipt in kept.items()} == books
    whole = manifest.schedule.steps * manifest.batch.microbatches_per_step * NUM_STAGES
    assert sum(receipt.microbatches for receipt in kept.values()) == whole == kept[lost[0].peer_id].whole
    assert {receipt.name for receipt in kept.values()} == {life.name for life in swarm.peers}
    told = {life.peer_id: list(life.said("peer_ended"))[-1].credit for life in swarm.peers}
    assert told == {peer: receipt.microbatches for peer, receipt in kept.items()}

    place = swarm.coordinator.state_dir
    check_receipts(place, kept.values())
    for old in taken_back:
        assert newest([kept[old.peer], old])[old.peer] == kept[old.peer]
        with pytest.raises(ReceiptError, match="taken back"):
            check_receipts(place, [old])


def test_a_receipt_is_renewed_while_credit_grows_and_who_has_done_nothing_has_none(
    simulated: Make, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(receipts, "RENEW_S", 2.0)
    swarm = simulated(open_ended())
    swarm.start(num_peers=NUM_STAGES)
    wait_step(swarm, 2)
    idle = swarm.start_peer("idle", 0)
    swarm.until(lambda: bool(idle.process.commands), "it has a stage")
    idle.process.ask("credit")  # before it has joined
    wait_seen(swarm, lambda: any(swarm.peers[0].state_dir.glob("receipt-*.json")), "a receipt")
    first = receipt_of(swarm, swarm.peers[0])
    assert 0 < first.microbatches <= first.whole
    assert 0.0 < first.seconds < swarm.now
    assert not list(idle.state_dir.glob("receipt-*.json"))
    swarm.run_for(5.0)
    second = receipt_of(swarm, swarm.peers[0])
    assert second.age > first.age
    assert second.microbatches > first.microbatches
    assert second.seconds > first.seconds
