"""What a daemon needs for a moment and does not get: the directory, a basis, an owner's order at the right time."""

from __future__ import annotations

from typing import Any

from swarmtrain.chain.rebalancing import MoveRules
from swarmtrain.errors import UsageError
from swarmtrain.p2p.errors import PeerUnreachable
from swarmtrain.rpc.errors import Refusal
from swarmtrain.simulated.judge import References
from swarmtrain.wire.messages import Code, FetchBasis

from .conftest import Make
from .scenes import assert_reference, tiny, wait_step

TWO_STAGES = ("stages.count=2", "model.num_layers=2")


def test_a_directory_that_fails_for_a_while_stops_nothing(simulated: Make, references: References) -> None:
    """Those who know each other go on with what they know."""
    swarm = simulated(tiny(*TWO_STAGES, "schedule.steps=12"))
    swarm.start_coordinator(min_peers=2, moves=MoveRules(look_s=0.5))
    peers = [swarm.start_peer(f"peer{stage}", stage, speed=0.2, may_move=True) for stage in range(2)]
    wait_step(swarm, 2)
    directory: Any = peers[0].daemon.assignment.dispatcher.neighbours._directory
    usual = (directory.lookup, directory.announce)
    failed: set[str] = set()

    async def no_lookup(topic: str) -> Any:
        failed.add(f"lookup {topic}")
        raise PeerUnreachable("nobody")

    async def no_announcement(topic: str, *rest: Any) -> Any:
        failed.add(f"announce {topic}")
        raise PeerUnreachable("nobody")

    directory.lookup, directory.announce = no_lookup, no_announcement
    wanted = {"lookup stage.0", "lookup stage.1", "announce stage.0"}
    swarm.until(lambda: wanted <= failed, f"{wanted} failed")
    began = swarm.step
    swarm.run_for(4.0)  # longer than any peer goes without reading it
    assert began < swarm.step < 12
    directory.lookup, directory.announce = usual
    assert_reference(swarm, references)
    assert not swarm.happened("peer_lost")


def test_a_basis_that_its_donor_does_not_give_is_asked_for_again(simulated: Make, references: References) -> None:
    """The step waits: it cannot be applied without this peer, and no peer may move."""
    swarm = simulated(tiny(*TWO_STAGES, "boundary.track_every=2"))
    swarm.start(num_peers=2)
    wait_step(swarm, 1)
    handlers = swarm.peers[1].daemon._handlers
    give, refused = handlers[FetchBasis], []

    async def refuse(fetch: FetchBasis, exchange: Any) -> Any:
        refused.append(swarm.now)
        if len(refused) == 2:
            handlers[FetchBasis] = give
        raise Refusal(Code.UNKNOWN, "not here")

    handlers[FetchBasis] = refuse
    assert_reference(swarm, references)
    assert len(refused) == 2


def test_an_owners_command_at_the_wrong_time_is_refused(simulated: Make, references: References) -> None:
    """A peer that fetches its state cannot be paused; one that serves has nothing to resume."""
    swarm = simulated(tiny(*TWO_STAGES))
    swarm.start(num_peers=2)
    wait_step(swarm, 1)
    newcomer = swarm.start_peer("newcomer", 1, speed=0.05)
    swarm.until(lambda: newcomer.daemon is not None and newcomer.daemon.assignment is not None, "it has a stage")
    answers: list[Any] = []

    async def ask(life: Any, command: str) -> None:
        try:
            answers.append(await life.process.commands[command]({}))
        except UsageError as error:
            answers.append(str(error))

    assert newcomer not in swarm.serving()
    swarm.until(lambda: "pause" in newcomer.process.commands, "its owner can ask")
    newcomer.process.spawn(ask(newcomer, "pause"), "pause")
    swarm.peers[0].process.spawn(ask(swarm.peers[0], "resume"), "resume")
    swarm.until(lambda: len(answers) == 2, "both are answered")
    assert {"ok": True, "pause": ""} in answers, "nothing else asks it to pause"
    assert any("only a serving one can be paused" in str(answer) for answer in answers)
    assert_reference(swarm, references)
