"""What peers compute is checked by others: a liar is out before its step is applied, and no honest peer ever is."""

from __future__ import annotations

from functools import partial

import pytest

from swarmtrain.observe.events import PeerExcluded
from swarmtrain.run.manifest import Manifest
from swarmtrain.simulated.judge import References, judge
from swarmtrain.simulated.liars import (
    accuse,
    changes,
    hide_sum,
    lie_as_owner,
    lie_backward,
    lie_forward,
    lie_in_sum,
    seal_other_than_received,
    send_other_than_sealed,
    start_with,
)
from swarmtrain.simulated.swarm import Life, SimulatedSwarm

from .conftest import Make
from .scenes import assert_reference, repetition, said, tiny, wait_step

STAGES = [0, 0, 0, 1, 1, 1, 2, 2]  # and one more of stage 2
LIAR_OF = {0: "peer0", 1: "peer3", 2: "peer6"}
ATTACKS = [
    (name, way, stage)
    for stage in range(3)
    for name in changes()
    for way in ("forward", "backward")
    if (way, stage) not in (("forward", 2), ("backward", 0))
]
# A few in the ordinary suite, all with --long.
SHOWN = [case if index % 6 == 0 else repetition(case) for index, case in enumerate(ATTACKS)]


def checked(*overrides: str) -> Manifest:
    return tiny("checks.share=1", "schedule.steps=3", *overrides)


def excluded(swarm: SimulatedSwarm) -> list[PeerExcluded]:
    return [event for event in said(swarm, "peer_excluded") if isinstance(event, PeerExcluded)]


def assert_found(swarm: SimulatedSwarm, name: str, references: References) -> None:
    """The liar and nobody else is excluded, and the run is as if it had never been there."""
    assert_reference(swarm, references)
    found = excluded(swarm)
    assert [event.peer_name for event in found] == [name]


@pytest.mark.parametrize(("name", "way", "stage"), SHOWN)
def test_a_peer_that_sends_other_tensors_is_excluded_before_its_step_is_applied(
    simulated: Make, references: References, name: str, way: str, stage: int
) -> None:
    swarm, change = simulated(checked()), changes()[name]
    lie = lie_forward if way == "forward" else lie_backward
    liar = LIAR_OF[stage]
    start_with(swarm, STAGES, {liar: partial(lie, change=change)})
    assert_found(swarm, liar, references)
    assert ("output" if way == "forward" else "gradient") in excluded(swarm)[0].reason


def test_a_peer_that_adds_another_gradient_than_it_computes_is_excluded(
    simulated: Make, references: References
) -> None:
    swarm = simulated(checked())
    start_with(swarm, STAGES, {"peer3": partial(lie_in_sum, change=changes()["scaled"])})
    assert_found(swarm, "peer3", references)
    assert "sum" in excluded(swarm)[0].reason


def test_who_does_not_say_what_it_has_added_is_excluded(simulated: Make, references: References) -> None:
    """Its sum could be anything."""
    swarm = simulated(checked())

    def begin(life: Life) -> None:
        lie_in_sum(life, changes()["scaled"])
        hide_sum(life)

    start_with(swarm, STAGES, {"peer3": begin})
    assert_found(swarm, "peer3", references)
    assert "sum" in excluded(swarm)[0].reason


def test_nobody_is_excluded_where_nobody_lies(simulated: Make, references: References) -> None:
    swarm = simulated(checked())
    start_with(swarm, STAGES, {})
    assert_reference(swarm, references)
    counts = swarm.coordinator.daemon.context.checks
    assert counts.done > 0
    assert counts.added_again > 0
    assert counts.mismatched == counts.unanswered == counts.excluded == counts.begun_anew == counts.disowned == 0


def test_without_checks_a_liar_spoils_the_weights(simulated: Make, references: References) -> None:
    """The other tests could otherwise pass because the lie does nothing."""
    swarm = simulated(tiny())
    start_with(swarm, STAGES, {"peer3": partial(lie_forward, change=changes()["noisy"])})
    swarm.run_to_end()
    assert "stage 0 does not end in the reference's bits" in judge(swarm, references(swarm.manifest))
    assert not excluded(swarm)


@pytest.mark.parametrize("way", ["forward", "backward"])
def test_with_a_delay_a_liar_is_excluded_before_its_step_is_applied_while_the_next_one_is_open(
    simulated: Make, references: References, way: str
) -> None:
    swarm = simulated(checked("schedule.delay=1", "schedule.steps=8"))
    lie = lie_forward if way == "forward" else lie_backward
    start_with(swarm, STAGES, {})
    wait_step(swarm, 2)
    lie(swarm.lives["peer3"], changes()["flipped"])
    assert_found(swarm, "peer3", references)
    assert said(swarm, "work_begun_anew")


def test_a_peer_that_accuses_an_honest_one_is_excluded_itself(simulated: Make, references: References) -> None:
    swarm = simulated(checked())
    start_with(swarm, STAGES, {"peer4": accuse})
    assert_found(swarm, "peer4", references)
    assert "to check another peer" in excluded(swarm)[0].reason


def test_a_peer_that_sends_other_tensors_than_it_seals_is_proven_wrong_by_its_signature(
    simulated: Make, references: References
) -> None:
    """Its own check would agree: it seals what is right."""
    swarm = simulated(checked())
    start_with(swarm, STAGES, {"peer3": partial(send_other_than_sealed, change=changes()["noisy"])})
    assert_found(swarm, "peer3", references)
    assert "signed another output" in excluded(swarm)[0].reason


def test_a_peer_that_says_it_received_something_else_has_no_signature_to_show(
    simulated: Make, references: References
) -> None:
    swarm = simulated(checked())
    start_with(swarm, STAGES, {"peer3": seal_other_than_received})
    assert_found(swarm, "peer3", references)
    assert "nobody has signed" in excluded(swarm)[0].reason


def test_an_owner_that_adds_up_wrongly_owns_nothing_any_more(simulated: Make, references: References) -> None:
    swarm = simulated(checked())
    start_with(swarm, STAGES, {"peer4": partial(lie_as_owner, change=changes()["scaled"])})
    assert_reference(swarm, references)
    (found,) = said(swarm, "owner_disowned")
    assert found.peer_name == "peer4"  # type: ignore[attr-defined]
    assert not excluded(swarm), "its share could have been changed by who sent it"


def test_who_owns_nothing_any_more_is_in_the_journal(simulated: Make, references: References) -> None:
    swarm = simulated(checked("schedule.steps=6"))
    start_with(swarm, STAGES, {"peer4": partial(lie_as_owner, change=changes()["scaled"])})
    wait_step(swarm, 2)
    swarm.coordinator.kill()
    swarm.start_coordinator(wait=False)
    assert_reference(swarm, references)
    assert len(said(swarm, "owner_disowned")) == 1
    assert len(swarm.coordinator.daemon.context.disowned) == 1


def test_of_two_peers_of_a_stage_nobody_is_excluded(simulated: Make, references: References) -> None:
    """There is no third one to decide: this is said, and the run goes on."""
    swarm = simulated(checked("schedule.steps=3"))
    start_with(swarm, [0, 1, 1, 2], {"peer1": partial(lie_backward, change=changes()["scaled"])})
    swarm.run_to_end()
    assert said(swarm, "check_undecided")
    assert not excluded(swarm)


def test_a_stage_with_one_peer_is_not_checked(simulated: Make, references: References) -> None:
    swarm = simulated(checked("schedule.steps=3"))
    start_with(swarm, [0, 1], {})
    swarm.start_peer("alone", 2)
    assert_reference(swarm, references)
    counts = swarm.coordinator.daemon.context.checks
    assert counts.without_checker > 0
    assert counts.excluded == 0


def test_what_was_begun_anew_stays_so_when_the_coordinator_dies(simulated: Make, references: References) -> None:
    """Ledgers of honest peers still hold what they made of a liar's tensors."""
    swarm = simulated(checked())
    start_with(swarm, STAGES, {"peer3": partial(lie_forward, change=changes()["noisy"])})
    coordinator = swarm.coordinator
    swarm.until(lambda: coordinator.has("work_begun_anew"), "work is begun anew")
    coordinator.kill()
    swarm.run_for(1.0)
    swarm.start_coordinator(wait=False)
    assert_reference(swarm, references)
    assert [event.peer_name for event in excluded(swarm)] == ["peer3"]


def test_a_peer_of_another_numeric_class_checks_nobody(simulated: Make, references: References) -> None:
    """Its numbers would differ without a lie."""
    swarm = simulated(checked("schedule.steps=3"))

    def other_class(life: Life) -> None:
        life.daemon.assignment.stage.numeric_class = "another"
        accuse(life)

    start_with(swarm, STAGES, {"peer4": other_class})
    assert_reference(swarm, references)
    assert not excluded(swarm)
