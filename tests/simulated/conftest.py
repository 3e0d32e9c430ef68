"""Reference runs that the session shares, and a simulated swarm's directory in memory."""

from __future__ import annotations

import shutil
import tempfile
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from swarmtrain.run.manifest import Manifest
from swarmtrain.simulated.judge import References
from swarmtrain.simulated.swarm import SimulatedSwarm

pytest.register_assert_rewrite("simulated.scenes")  # so that a failure says what the judge said

Make = Callable[[Manifest], SimulatedSwarm]


@pytest.fixture(scope="session")
def references() -> References:
    """Each manifest is trained once."""
    return References()


@pytest.fixture
def simulated(request: pytest.FixtureRequest) -> Iterator[Make]:
    """Makes the test's swarm, on a seed that is the test's name; it ends with the test."""
    memory = Path("/dev/shm")
    root = Path(tempfile.mkdtemp(prefix="swarmtrain-simulated-", dir=memory if memory.is_dir() else None))
    made: list[SimulatedSwarm] = []

    def make(manifest: Manifest) -> SimulatedSwarm:
        swarm = SimulatedSwarm(manifest, seed=request.node.name, root=root / str(len(made)))
        made.append(swarm)
        return swarm.__enter__()

    try:
        yield make
    finally:
        for swarm in made:
            swarm.close()
        shutil.rmtree(root, ignore_errors=True)
