"""Training diverged, says a peer: others are asked before the run ends."""

from __future__ import annotations

from functools import partial

import pytest

from swarmtrain.coordinator.strikes import Offence
from swarmtrain.errors import DivergedError
from swarmtrain.simulated.judge import References
from swarmtrain.simulated.liars import huge, lie_backward, say_diverged, start_with
from swarmtrain.wire.messages import Work

from .conftest import Make
from .scenes import assert_reference, tiny

STAGES = [0, 1, 2, 0, 1, 2]  # and one more of the last


@pytest.mark.parametrize("stage", [0, 1, 2])
def test_one_peer_that_says_so_does_not_end_the_run(simulated: Make, references: References, stage: int) -> None:
    swarm = simulated(tiny("schedule.steps=4"))
    asked: list[Work] = []
    start_with(swarm, STAGES, {f"peer{stage}": partial(say_diverged, asked=asked)})
    assert_reference(swarm, references)
    assert asked, "and it said so"
    held_against = swarm.coordinator.daemon.context.strikes.reason(swarm.lives[f"peer{stage}"].peer_id)
    assert held_against == (Offence.DISPUTED_DIVERGENCE.text if stage == 0 else "")


def test_one_peer_whose_gradients_make_those_of_others_diverge_does_not_end_the_run(simulated: Make) -> None:
    """Both peers of the stage before it say so, until the coordinator leads them past it."""
    swarm = simulated(tiny("schedule.steps=3"))
    start_with(swarm, STAGES, {"peer1": partial(lie_backward, change=huge)})
    swarm.until(lambda: swarm.step == 3 or not swarm.coordinator.is_running, "it ends")
    assert swarm.coordinator.daemon.context.dispatcher.counters.rerouted["diverged"], "somebody said so"
    assert not swarm.coordinator.errors


@pytest.mark.parametrize("liars", [["peer1", "peer4"], ["peer0", "peer3"]])
def test_what_all_peers_of_a_stage_say_ends_it(simulated: Make, liars: list[str]) -> None:
    swarm = simulated(tiny("schedule.steps=3"))
    start_with(swarm, STAGES, dict.fromkeys(liars, partial(say_diverged, asked=[])))
    swarm.until(lambda: not swarm.coordinator.is_running, "it ends")
    assert isinstance(swarm.coordinator.errors[0], DivergedError), swarm.coordinator.errors
