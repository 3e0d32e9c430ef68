"""What seeds of `scripts/simulate` have found, each as a scenario (the list is in docs/simulated-swarm.md)."""

from __future__ import annotations

from collections.abc import Callable

from swarmtrain.run.manifest import Manifest
from swarmtrain.simulated.command import run_schedule
from swarmtrain.simulated.judge import References
from swarmtrain.simulated.schedule import Fault, Schedule
from swarmtrain.simulated.swarm import SimulatedSwarm

from .scenes import (
    assert_as_good_as_reference,
    assert_reference,
    hold,
    release,
    said,
    tiny,
    wait_phase,
    wait_said,
    wait_step,
)

LATE = 11  # of fifteen peers: the directory does not keep the coordinator's record there

Make = Callable[[Manifest], SimulatedSwarm]


def test_a_state_of_a_history_that_was_rolled_back_is_not_a_replicas_state(
    simulated: Make, references: References
) -> None:
    """Seed 121. With a codec whose sums depend on who adds them up, the step is another one the second time."""
    swarm = simulated(tiny("stages.count=2", "model.num_layers=2", "checkpoint.every=2", "reduce.codec=bf16"))
    swarm.start(num_peers=5)  # three of stage 0, two of stage 1
    wait_step(swarm, 3)
    stale = swarm.peers[0].process
    stale.stop()  # with the state of step 3
    for peer in swarm.peers:
        if peer.stage == 1:
            peer.kill()
    swarm.start_peer("heir", 1)
    wait_said(swarm, swarm.coordinator, "run_rolled_back", to_step=2)
    wait_step(swarm, 3)  # once more
    hold(swarm.lives["heir"])
    stale.resume()
    wait_phase(swarm, swarm.peers[0], "syncing")
    release(swarm.lives["heir"])
    assert_as_good_as_reference(swarm, references)
    assert said(swarm, "run_rolled_back")


def test_a_listener_does_not_follow_on_a_state_of_a_history_that_was_taken_back(
    simulated: Make, references: References
) -> None:
    """Seed 3014. Two of three replicas come back with the state of step 6, from before a roll-back, while the run makes
    that step again: the number of their state is the one on which they could follow, its content is not."""
    swarm = simulated(
        tiny("stages.count=2", "model.num_layers=2", "checkpoint.every=4", "reduce.codec=bf16", "schedule.steps=9")
    )
    swarm.start(num_peers=5)  # three of stage 0, two of stage 1
    wait_step(swarm, 6)
    stale = [peer for peer in swarm.peers if peer.stage == 0][:2]
    for peer in stale:
        peer.process.stop()
    for peer in swarm.peers:
        if peer.stage == 1:
            peer.kill()
    heir = swarm.start_peer("heir", 1)
    wait_said(swarm, swarm.coordinator, "run_rolled_back", to_step=4)
    wait_step(swarm, 5)  # once more
    hold(heir)
    for peer in stale:
        peer.process.resume()
    for peer in stale:
        wait_phase(swarm, peer, "syncing")
    release(heir)
    assert_as_good_as_reference(swarm, references)


def test_a_peer_that_answers_is_not_lost_for_want_of_a_sign_of_life(simulated: Make, references: References) -> None:
    """Seed 11. What the peer says by itself does not get through, and what it is asked it answers."""
    swarm = simulated(tiny("schedule.steps=60"))
    swarm.start(num_peers=6)
    wait_step(swarm, 1)
    peer = swarm.peers[1]
    node = peer.daemon.assignment.peer.node
    calls, real = 0, node.call

    async def call(peer_id: str, request: object, *arguments: object, **options: object) -> object:
        nonlocal calls
        if type(request).__name__ == "Heartbeat" and not swarm.is_over:
            calls += 1
            await swarm.loop.create_future()  # never ends
        return await real(peer_id, request, *arguments, **options)

    node.call = call
    swarm.until(lambda: swarm.step >= 55, "steps for longer than a silent peer is waited for")
    assert calls > 0
    assert swarm.now > 15.0
    assert not said(swarm, "peer_lost", peer=peer.peer_id)
    peer.kill()  # it cannot hear of the end either
    assert_reference(swarm, references)


def test_a_peer_that_was_lost_a_moment_ago_hears_that_the_run_is_complete(
    simulated: Make, references: References
) -> None:
    """Seeds 11 and 65. Once all others had left, no peer could tell it any more, and it waited for ever."""
    swarm = simulated(tiny())
    swarm.start(num_peers=15)
    wait_step(swarm, 4)
    coordinator, peer = swarm.coordinator, swarm.peers[LATE]
    context = coordinator.daemon.context
    member = context.members.get(peer.peer_id)
    assert member is not None

    async def lose() -> None:
        await context.lose(member, "no heartbeat")

    coordinator.process.spawn(lose(), "lose a peer")
    assert_reference(swarm, references)  # which waits until all daemons have ended
    assert said(swarm, "peer_lost", peer=peer.peer_id, reason="no heartbeat")


def test_a_peer_between_two_stages_hears_that_the_run_is_complete(simulated: Make, references: References) -> None:
    """Seed 100861. Its permission to move came with the last step: it had left one stage, and was no member yet of the
    other one when the peers were told."""
    swarm = simulated(tiny("checkpoint.every=5"))
    swarm.start(num_peers=15)
    coordinator, peer = swarm.coordinator, swarm.peers[LATE]
    wait_said(swarm, coordinator, "checkpoint_written", step=5)
    assert not swarm.is_over
    target = (peer.stage + 1) % 3
    coordinator.daemon.moves._moving[peer.peer_id] = (target, swarm.now + 120.0)
    peer.process.call_soon(lambda: peer.daemon.departure.move(target))
    assert_reference(swarm, references)  # which waits until all daemons have ended
    assert peer.has("phase_reached", phase="draining", detail=f"moves to stage {target}")
    assert peer.has("phase_reached", phase="gone", detail="the run is complete")


def test_work_that_waits_for_another_stage_when_its_peer_moves_is_refused(
    simulated: Make, references: References
) -> None:
    """Seed 200034. The answer from below comes when the compute thread of the former assignment has stopped."""
    swarm = simulated(tiny("stages.count=2", "model.num_layers=2", "wire.forward=ef-topk25", "wire.backward=topk25"))
    swarm.start_coordinator(min_peers=4)
    mover = swarm.start_peer("mover", 0, drain_s=0.5)
    swarm.start_peer("other", 0)
    last = [swarm.start_peer(name, 1) for name in ("last0", "last1")]
    wait_step(swarm, 2)
    swarm.until(lambda: any(entry.task for entry in mover.daemon.assignment.clock.ledger), "the mover has work in hand")
    former = mover.daemon.assignment
    for peer in last:
        peer.process.stop()
    mover.process.call_soon(lambda: mover.daemon.departure.move(0))
    swarm.until(lambda: mover.daemon.assignment not in (None, former), "it has another assignment")
    for peer in last:
        peer.process.resume()
    assert_as_good_as_reference(swarm, references)
    assert mover.has("phase_reached", phase="moving")


def test_a_newcomer_that_hears_a_decision_does_not_answer_with_a_state_that_was_taken_back() -> None:
    """Seed 710373. The peer came back with the state of step 3 from before a roll-back to step 0. It listened, and was
    told the third decision before it had fetched a state."""
    faults = (
        Fault("drain", 0, 0.079, "peer2", length_s=7.752),
        Fault("kill", 1, 0.0, "peer2", length_s=1.294),
        Fault("power-loss", 3, 0.0, "peer1", length_s=4.591),
        Fault("one-way", 3, 0.3134, "coordinator", "peer1", length_s=3.8126),
    )
    run = ("stages.count=2", "model.num_layers=2", "batch.microbatches_per_step=3", "schedule.steps=4")
    codecs = ("wire.forward=quant8", "wire.backward=lowrank2-lep", "checkpoint.every=3")
    result = run_schedule(Schedule(710373, (*run, *codecs), 3, faults, (0.25, 0.1, 0.5), 0.001, is_exact=False))
    assert result.num_faults == len(faults)
    assert result.failures == ()
