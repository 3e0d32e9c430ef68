"""A link that carries one direction only: A reaches B, but nothing of B reaches A. Both still reach everybody else."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest
from p2p.netns import Lab, lab, why_not

from .comparison import References, assert_equals_reference
from .faults import hold, last_step, release, three_stages
from .harness import Swarm, until

pytestmark = pytest.mark.swarm

STAGES = {"a": 0, "b": 1, "c": 1, "d": 2}  # one machine per peer
CUTS = {  # what is lost: from, to
    "shares": ("c", "b"),
    "answers": ("b", "a"),
    "requests": ("a", "b"),
    "orders": ("hub", "b"),
}
SHORT = ("answers",)  # what real sockets add; all of them in tests/simulated/test_lines.py


@pytest.fixture(scope="module")
def machines() -> Iterator[Lab]:
    """A machine for the coordinator and one for every peer."""
    reason = why_not()
    if reason is not None:
        pytest.skip(reason)
    with lab("hub", *STAGES) as made:
        yield made


@pytest.mark.timeout(900)
@pytest.mark.parametrize("cut", [pytest.param(cut, marks=() if cut in SHORT else pytest.mark.long) for cut in CUTS])
def test_a_link_that_is_cut_in_one_direction_leaves_no_trace(
    machines: Lab, place: Path, reference: References, cut: str
) -> None:
    source, target = CUTS[cut]
    swarm = Swarm(three_stages("schedule.steps=20"), place, num_peers=len(STAGES))
    is_cut = False
    try:
        swarm.start_coordinator(listen=listen(machines, "hub"), namespace=machines.names["hub"])
        for name, stage in STAGES.items():
            swarm.start_peer(stage, name=name, listen=listen(machines, name), namespace=machines.names[name])
        swarm.wait_step(2)
        gate = swarm.peers[-1]
        hold(gate)  # the cut strikes between two steps of a run that stands still
        machines.cut_one_way(source, target)
        is_cut, before = True, last_step(swarm)
        assert before < swarm.manifest.schedule.steps
        until(lambda: machines.counted_packets(target) > 0, "something is cut off")  # links show that they live
        release(gate)
        swarm.wait_end(timeout_s=240.0)
        dropped, passed = machines.counted_packets(target), machines.counted_packets(source)
        assert dropped > 0, "nothing was cut off"
        assert passed > 0, "the other direction was cut off as well"
        assert_equals_reference(swarm, reference(swarm.manifest))
    finally:
        swarm.close()
        if is_cut:
            machines.mend(source, target)


def listen(machines: Lab, name: str) -> str:
    return f"/ip4/{machines.address(name)}/tcp/0"
