"""What scenarios in simulated time have in common: small manifests, armed peers, proof that a fault happened.

A scenario says what it waits for, never how long that takes: the same seed gives the same run on every machine, and
another order of messages after a change of the daemons must not break it.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any

import pytest

from swarmtrain.observe.events import Event
from swarmtrain.run.manifest import Manifest
from swarmtrain.run.presets import preset
from swarmtrain.simulated.judge import References, judge
from swarmtrain.simulated.schedule import TINY
from swarmtrain.simulated.swarm import Life, SimulatedSwarm

NUM_STAGES = 3


def every_other(cases: Iterable[Any]) -> list[Any]:
    """Cases that show the same: every other one in the ordinary suite, all with --long."""
    return [case if index % 2 == 0 else repetition(case) for index, case in enumerate(cases)]


def every_third(cases: Iterable[Any]) -> list[Any]:
    """The same, where there are many."""
    return [case if index % 3 == 0 else repetition(case) for index, case in enumerate(cases)]


def repetition(case: Any) -> Any:
    """A case that shows what another one shows: only with --long."""
    return pytest.param(*case if isinstance(case, tuple) else (case,), marks=pytest.mark.long)


def tiny(*overrides: str) -> Manifest:
    """First, middle and last: three stages of one small layer, six microbatches per step, five steps."""
    usual = ("stages.count=3", "model.num_layers=3", "batch.microbatches_per_step=6", "schedule.steps=5")
    return preset("nano", [*TINY, *usual, "checkpoint.every=0", *overrides])


def open_ended(*overrides: str) -> Manifest:
    """More steps than a scenario needs, and checkpoints: for scenarios that are not judged by the final weights."""
    return tiny("schedule.steps=500", *overrides)


def start_armed(swarm: SimulatedSwarm, name: str, stage: int, *faults: str, **options: Any) -> Life:
    """A peer that breaks as `faults` say: POINT:NTH:ACTION."""
    life = swarm.start_peer(name, stage, **options)
    arm(life, *faults)
    return life


def arm(life: Life, *faults: str) -> None:
    """Have a daemon break as `faults` say; one that is stopped stays so until it is resumed."""
    life.stop_s = 3600.0
    for fault in faults:
        point, nth, action = fault.split(":")
        life.arm(point, int(nth), action)


def wait_struck(swarm: SimulatedSwarm, life: Life, point: str, action: str = "kill") -> None:
    """The fault happens; a kill ends the process."""
    swarm.until(lambda: f"{action} at {point}" in life.struck, f"{life.name}: {action} at {point}")
    assert action != "kill" or not life.is_running
    assert action != "stop" or life.process.is_stopped


def wait_step(swarm: SimulatedSwarm, step: int) -> None:
    """So many steps are applied."""
    swarm.until(lambda: swarm.step >= step, f"step {step}")


def wait_seen(swarm: SimulatedSwarm, condition: Callable[[], bool], what: str) -> None:
    """A state that costs something to look at: ten times a virtual second."""
    for _ in range(6000):
        if condition():
            return
        assert not swarm.is_over, f"the run is over, and this was not seen: {what}"
        swarm.run_for(0.1)
    raise TimeoutError(f"at {swarm.now:.1f} s: this was not seen: {what}")


def wait_said(swarm: SimulatedSwarm, life: Life, name: str, **wanted: Any) -> Event:
    """A daemon says something; past events count."""
    swarm.until(lambda: life.has(name, **wanted), f"{life.name}: {name} {wanted}")
    return next(life.said(name, **wanted))


def wait_phase(swarm: SimulatedSwarm, life: Life, phase: str, *, after: int = 0) -> None:
    """A peer reaches a phase, after its first `after` ones."""
    swarm.until(lambda: phase in phases(life)[after:], f"{life.name} is {phase}")


def wait_serving(swarm: SimulatedSwarm, *lives: Life) -> None:
    """These peers serve at the same time."""
    swarm.until(lambda: all(life in swarm.serving() for life in lives), f"{[life.name for life in lives]} serve")


def phases(life: Life) -> list[str]:
    """What a peer has gone through: identity, network, ..."""
    return [event.phase for _, event in life.events if event.name == "phase_reached"]  # type: ignore[attr-defined]


def hold(life: Life) -> None:
    """Have the only peer of a stage take no work: the run stands still."""
    life.process.ask("pause")


def release(life: Life) -> None:
    """Let a held run go on."""
    life.process.ask("resume")


def leave(life: Life) -> None:
    """SIGTERM."""
    life.process.call_soon(lambda: life.daemon.leave("asked by a signal"))


def restart_coordinator(swarm: SimulatedSwarm, *faults: str) -> Life:
    """On its state directory, with faults before it."""
    life = swarm.start_coordinator(wait=False)
    arm(life, *faults)
    return life


def said(swarm: SimulatedSwarm, name: str, **wanted: Any) -> list[Event]:
    """What the daemons have said, in order."""
    found = [event for _, event in swarm.happened(name)]
    return [event for event in found if all(getattr(event, key) == value for key, value in wanted.items())]


def assert_reference(swarm: SimulatedSwarm, references: References) -> None:
    """Let the run end: in the reference's bits, with books that balance and no error on the way."""
    swarm.run_to_end()
    assert judge(swarm, references(swarm.manifest)) == []


def assert_as_good_as_reference(swarm: SimulatedSwarm, references: References) -> None:
    """The same for codecs that remember: replicas agree and every loss is close to the reference's."""
    swarm.run_to_end()
    assert judge(swarm, references(swarm.manifest), is_exact=False) == []
