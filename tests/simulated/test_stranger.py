"""The stranger with which attacks are written: what it says goes through the real wire, and a run goes on beside it."""

from __future__ import annotations

from swarmtrain.simulated.judge import References
from swarmtrain.simulated.stranger import ANSWERED, Stranger
from swarmtrain.wire.messages import Code, FetchRun, Prepare, SeekStage

from .conftest import Make
from .scenes import assert_reference, tiny, wait_serving


def test_a_stranger_speaks_the_wire_and_the_run_ends_as_if_it_were_not_there(
    simulated: Make, references: References
) -> None:
    swarm = simulated(tiny())
    swarm.start_coordinator(min_peers=3)
    peers = [swarm.start_peer(f"peer{stage}", stage) for stage in range(3)]
    wait_serving(swarm, *peers)
    mallory = Stranger(swarm, "mallory")
    assert mallory.outcome(swarm.coordinator, FetchRun(mallory.run_id)) == ANSWERED
    assert mallory.outcome(swarm.coordinator, SeekStage("another", (0,))) == Code.WRONG_RUN
    mallory.beat(0)
    swarm.until(lambda: any(isinstance(item, Prepare) for item in mallory.heard), "it is a member")
    stream = mallory.stream_to(peers[0])
    stream.write(b"this is no frame of this protocol at all")
    assert_reference(swarm, references)
    assert mallory.verdicts
