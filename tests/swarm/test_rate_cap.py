"""Rate caps of a real daemon, counted at the network card: payload, framing, directory, TCP and IP headers."""

from __future__ import annotations

import statistics
import subprocess
import time
from collections.abc import Iterator
from pathlib import Path

import pytest
from p2p.netns import Lab, lab, why_not

from .harness import Swarm, tiny

pytestmark = [pytest.mark.swarm, pytest.mark.long]

CAP = 5e6 / 8
WINDOW_S = 10.0
# A boundary tensor of one megabyte and next to nothing to compute: the line is what everybody waits for.
MANIFEST = tiny(
    "stages.count=2",
    "model.num_layers=2",
    "model.hidden_size=64",
    "model.sequence_length=256",
    "boundary.kind=dense",
    "batch.sequences_per_microbatch=16",
    "batch.microbatches_per_step=64",
)


@pytest.fixture(scope="module")
def machines() -> Iterator[Lab]:
    reason = why_not()
    if reason is not None:
        pytest.skip(reason)
    with lab("hub", "a", "b") as made:
        yield made


def counted_bytes(machines: Lab, name: str, counter: str) -> int:
    command = [*machines.enter(name), "cat", f"/sys/class/net/eth0/statistics/{counter}"]
    return int(subprocess.run(command, capture_output=True, timeout=20, check=True).stdout)


@pytest.mark.parametrize(
    ("name", "option", "counter"), [("a", "--max-up", "tx_bytes"), ("b", "--max-down", "rx_bytes")]
)
def test_a_cap_of_five_megabits_holds_within_a_tenth_over_any_ten_seconds(
    machines: Lab, place: Path, name: str, option: str, counter: str
) -> None:
    """Forward tensors go from a to b; one of the two has the cap."""
    swarm = Swarm(MANIFEST, place, min_peers=2)
    try:
        swarm.start_coordinator(listen=f"/ip4/{machines.address('hub')}/tcp/0", namespace=machines.names["hub"])
        for stage, host in enumerate(("a", "b")):
            extra = (option, "5mbit") if host == name else ()
            listen = f"/ip4/{machines.address(host)}/tcp/0"
            swarm.start_peer(stage, *extra, listen=listen, namespace=machines.names[host], name=host)
        swarm.wait_serving()
        samples = [(time.monotonic(), counted_bytes(machines, name, counter))]
        busy_from = 0.0
        while not busy_from or samples[-1][0] - busy_from < WINDOW_S + 6.0:
            time.sleep(0.2)
            samples.append((time.monotonic(), counted_bytes(machines, name, counter)))
            if not busy_from and samples[-1][1] - samples[0][1] > CAP:
                busy_from = samples[-1][0]
            assert samples[-1][0] - samples[0][0] < 90.0, "the line was never busy"
        rates = [rate for start, rate in windows(samples) if start >= busy_from]
        assert len(rates) > 10
        assert max(rate for _, rate in windows(samples)) <= 1.1 * CAP
        assert statistics.median(rates) >= 0.9 * CAP, "what the cap allows was not used"
    finally:
        swarm.close()


def windows(samples: list[tuple[float, int]]) -> Iterator[tuple[float, float]]:
    """(start, bytes per second) of every stretch of ten seconds between two samples."""
    for index, (start, before) in enumerate(samples):
        for end, after in samples[index:]:
            if end - start >= WINDOW_S:
                yield start, (after - before) / (end - start)
                break
