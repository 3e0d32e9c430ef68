"""What owners do with their daemons, and where a run ends: stopped, refused, without its journal, diverged."""

from __future__ import annotations

from swarmtrain.coordinator.journal_files import JournalError, JournalGone
from swarmtrain.errors import DivergedError, HardwareError
from swarmtrain.simulated.judge import References

from .conftest import Make
from .scenes import assert_reference, tiny, wait_step


def test_a_coordinator_that_was_asked_to_stop_goes_on_when_it_is_started_again(
    simulated: Make, references: References
) -> None:
    swarm = simulated(tiny())
    swarm.start(num_peers=3)
    wait_step(swarm, 2)
    coordinator = swarm.coordinator
    coordinator.process.ask("stop")
    swarm.until(lambda: not coordinator.is_running, "it has stopped")
    assert coordinator.errors == []
    swarm.run_for(5.0)
    swarm.start_coordinator(wait=False)
    assert_reference(swarm, references)


def test_a_peer_with_little_room_says_that_it_is_busy(simulated: Make, references: References) -> None:
    swarm = simulated(tiny())
    swarm.start_coordinator(min_peers=3)
    for stage in range(3):
        swarm.start_peer(f"peer{stage}", stage, max_queue=1)
    assert_reference(swarm, references)
    assert swarm.coordinator.daemon.context.dispatcher.counters.rerouted["busy"] > 0


def test_a_stage_that_the_run_does_not_have_is_refused(simulated: Make, references: References) -> None:
    swarm = simulated(tiny())
    swarm.start(num_peers=3)
    lost = swarm.start_peer("lost", 9)
    swarm.until(lambda: not lost.is_running, "it has ended")
    assert isinstance(lost.errors[0], HardwareError)
    assert_reference(swarm, references)


def test_a_journal_of_another_manifest_is_refused(simulated: Make, references: References) -> None:
    swarm = simulated(tiny())
    swarm.start(num_peers=3)
    wait_step(swarm, 1)
    coordinator, manifest = swarm.coordinator, swarm.manifest
    coordinator.kill()
    swarm.manifest = tiny("optimizer.learning_rate=0.5")
    swarm.start_coordinator()
    swarm.manifest = manifest
    swarm.until(lambda: not coordinator.is_running, "it has ended")
    assert isinstance(coordinator.errors.pop(), JournalError)
    swarm.start_coordinator(wait=False)
    assert_reference(swarm, references)


def test_a_coordinator_without_its_journal_ends(simulated: Make, references: References) -> None:
    """Put back, it goes on."""
    swarm = simulated(tiny())
    swarm.start(num_peers=3)
    for peer in swarm.peers:
        peer.machine.speed = 0.05
    wait_step(swarm, 1)
    coordinator = swarm.coordinator
    journal = coordinator.state_dir / "journal.sqlite"
    aside = coordinator.state_dir / "aside"
    journal.rename(aside)
    swarm.until(lambda: not coordinator.is_running, "it has ended")
    assert any(isinstance(error, JournalGone) for error in coordinator.errors)
    coordinator.errors.clear()
    aside.rename(journal)
    for peer in swarm.peers:
        peer.machine.speed = 1.0
    swarm.start_coordinator(wait=False)
    assert_reference(swarm, references)


def test_a_run_that_diverges_ends_and_says_so(simulated: Make) -> None:
    swarm = simulated(tiny("optimizer.learning_rate=1000", "schedule.steps=20"))
    swarm.start(num_peers=3)
    coordinator = swarm.coordinator
    swarm.until(lambda: not coordinator.is_running, "it has ended")
    assert any(isinstance(error, DivergedError) for error in coordinator.errors)
