"""Swarms that compute in bf16 end in the reference's bits, whatever dies: optimizers, delay, token tables, joins."""

from __future__ import annotations

import pytest
from needs import needs_bf16

from swarmtrain.run.manifest import Manifest
from swarmtrain.simulated import schedule
from swarmtrain.simulated.judge import References
from swarmtrain.simulated.swarm import SimulatedSwarm

from .conftest import Make
from .scenes import (
    NUM_STAGES,
    assert_reference,
    said,
    start_armed,
    tiny,
    wait_serving,
    wait_step,
    wait_struck,
)

pytestmark = needs_bf16()

SLOW = 0.2  # of machines: a step takes seconds
MUON = ("optimizer.kind=muon", "optimizer.learning_rate=0.02")
DELAYED = ("schedule.delay=1", "schedule.predict=true")


def in_bf16(*overrides: str) -> Manifest:
    return tiny("model.precision=bf16", *overrides)


@pytest.mark.parametrize(
    ("overrides", "point"),
    [
        ((), "before-apply"),
        (MUON, "in-prepare"),
        (DELAYED, "in-prepare"),
        ((*MUON, *DELAYED, "boundary.table=signs"), "before-apply"),
        ((*MUON, "schedule.delay=1", "boundary.kind=learned"), "after-apply"),
        ((*DELAYED, "boundary.kind=dense", "model.tie_embeddings=true"), "before-answer"),
        (("boundary.track_every=2", "boundary.table=signs", "model.tie_embeddings=true"), "before-apply"),
    ],
    ids=lambda value: value if isinstance(value, str) else " ".join(value),
)
def test_a_swarm_that_loses_a_peer_ends_in_the_references_bits(
    simulated: Make, references: References, overrides: tuple[str, ...], point: str
) -> None:
    swarm: SimulatedSwarm = simulated(in_bf16(*overrides))
    swarm.start_coordinator(min_peers=NUM_STAGES + 1)
    for stage in range(NUM_STAGES):
        swarm.start_peer(f"peer{stage}", stage)
    victim = start_armed(swarm, "victim", 1, f"{point}:3:kill")
    wait_struck(swarm, victim, point)
    assert_reference(swarm, references)
    assert not said(swarm, "run_rolled_back")


def test_bf16_is_what_was_trained_with(references: References) -> None:
    """A control: the same run in fp32 ends elsewhere, with another table too."""
    found = [references(tiny(*overrides)).losses for overrides in ((), ("model.precision=bf16",), ("table=signs",))]
    assert found[0] not in found[1:]
    assert found[1] != found[2]


def test_newcomers_download_rounded_versions_and_take_over(simulated: Make, references: References) -> None:
    swarm = simulated(in_bf16(*DELAYED, *MUON, "schedule.steps=11"))
    swarm.start_coordinator(min_peers=NUM_STAGES)
    for stage in range(NUM_STAGES):
        swarm.start_peer(f"peer{stage}", stage, speed=SLOW)
    wait_step(swarm, 2)
    newcomers = [swarm.start_peer(f"newcomer{stage}", stage, speed=SLOW) for stage in range(NUM_STAGES)]
    wait_serving(swarm, *newcomers)
    assert all(newcomer.has("sync_progress", percent=100) for newcomer in newcomers)
    for former in swarm.peers[:NUM_STAGES]:
        former.kill()  # the newcomers now hold the only copies
    assert_reference(swarm, references)
    assert not said(swarm, "run_rolled_back")


def test_a_run_that_goes_back_to_a_checkpoint_rounds_its_parameters_again(
    simulated: Make, references: References
) -> None:
    swarm = simulated(in_bf16(*DELAYED, "schedule.steps=8", "checkpoint.every=2"))
    swarm.start_coordinator(min_peers=NUM_STAGES)
    for stage in range(NUM_STAGES):
        swarm.start_peer(f"peer{stage}", stage)
    wait_step(swarm, 5)
    swarm.run_for(0.1)
    swarm.peers[1].kill()  # the only one of its stage
    swarm.start_peer("peer1", 1)
    assert_reference(swarm, references)
    (back,) = said(swarm, "run_rolled_back")
    assert back.to_step in (2, 4)


def test_schedules_draw_it_and_only_where_it_works(monkeypatch: pytest.MonkeyPatch) -> None:
    def drawn(what: str) -> int:
        return sum(what in schedule.draw(seed).overrides for seed in range(100))

    assert drawn("model.precision=bf16") > 10
    assert drawn("boundary.table=signs") > 10
    for seed in range(100):
        schedule.draw(seed).manifest()  # whatever else is drawn with it, there is such a run
    monkeypatch.setattr(schedule, "has_bf16", lambda: False)
    assert drawn("model.precision=bf16") == 0
