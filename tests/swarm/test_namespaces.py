"""Daemons on machines of their own: network namespaces with one address each, nothing shared but a switch."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest
from p2p.netns import Lab, lab, why_not

from swarmtrain.run.invite import parse_invite

from .comparison import References, assert_equals_reference
from .harness import Swarm, tiny

pytestmark = pytest.mark.swarm

MACHINES = ("hub", "a", "b", "c", "d")
MANIFEST = tiny("schedule.steps=5", "checkpoint.every=2")


@pytest.fixture(scope="module")
def machines() -> Iterator[Lab]:
    """Five machines and a switch."""
    reason = why_not()
    if reason is not None:
        pytest.skip(reason)
    with lab(*MACHINES) as made:
        yield made


def listen(machines: Lab, name: str) -> str:
    return f"/ip4/{machines.address(name)}/tcp/0"


def start(swarm: Swarm, machines: Lab, nat: tuple[str, ...] = ()) -> None:
    """The coordinator on the hub, a peer of each stage on a machine of its own."""
    swarm.start_coordinator(listen=listen(machines, "hub"), namespace=machines.names["hub"])
    bootstrap = parse_invite(swarm.invite()).bootstrap
    assert all(f"/ip4/{machines.address('hub')}/" in address for address in bootstrap)
    for stage, name in enumerate(MACHINES[1:]):
        extra = ("--behind-nat",) if name in nat else ()
        swarm.start_peer(stage, *extra, listen=listen(machines, name), namespace=machines.names[name], name=name)


def test_machines_with_addresses_of_their_own_train_to_the_references_bits(
    machines: Lab, place: Path, reference: References
) -> None:
    swarm = Swarm(MANIFEST, place, num_peers=4)
    try:
        before = {name: machines.received_bytes(name) for name in MACHINES}
        start(swarm, machines)
        swarm.wait_end()
        assert_equals_reference(swarm, reference(MANIFEST))
        for name in MACHINES:  # it really went over the switch
            assert machines.received_bytes(name) - before[name] > 50_000
    finally:
        swarm.close()


def test_a_peer_that_nobody_can_dial_takes_part_through_the_coordinators_relay(
    machines: Lab, place: Path, reference: References
) -> None:
    machines.outgoing_only("b")
    swarm = Swarm(MANIFEST, place, num_peers=4)
    try:
        start(swarm, machines, nat=("b",))
        swarm.wait_end(timeout_s=120)
        assert_equals_reference(swarm, reference(MANIFEST))
        hidden = swarm.peers[1]
        assert hidden.stage == 1
        addresses = [item["detail"] for item in hidden.events if item.get("phase") == "network"]
        assert "/p2p-circuit" in addresses[0]
    finally:
        swarm.close()
