"""The context that all parts of a simulation share."""

from __future__ import annotations

import random
from dataclasses import dataclass, field

from swarmtrain.sim.directory import SimDirectory
from swarmtrain.sim.engine import Engine
from swarmtrain.sim.meters import Meters
from swarmtrain.sim.peer import SimPeer
from swarmtrain.sim.scenario import Scenario


@dataclass
class World:
    """The event queue, the machines, the directory, and the counters."""

    scenario: Scenario
    engine: Engine
    meters: Meters
    peers: list[SimPeer]
    directory: SimDirectory
    rng: random.Random  # of the machines: compute times
    by_id: dict[str, SimPeer] = field(init=False)

    def __post_init__(self) -> None:
        self.by_id = {peer.peer_id: peer for peer in self.peers}
