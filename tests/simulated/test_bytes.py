"""What crosses the wire: the formula and little framing between peers, next to nothing at the coordinator."""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch

from swarmtrain.codec import Direction, MessageContext, make_encoder, parse_spec
from swarmtrain.model.layout import boundary_width
from swarmtrain.model.sizes import id_type
from swarmtrain.run.manifest import Manifest
from swarmtrain.simulated.swarm import SimulatedSwarm

from .conftest import Make
from .scenes import tiny as three_stages
from .scenes import wait_seen, wait_step

FOREVER = "schedule.steps=100000"
HEADERS = 64  # bytes that a codec may put before a tensor, checked below
STATE_KINDS = {"fetch_state", "state_chunk", "fetch_digests", "chunk_digests"}


@dataclass(frozen=True)
class Formula:
    """Bytes of one microbatch on one boundary, by the design: k numbers per token and direction, ids once."""

    forward: int
    backward: int
    ids: int
    header: int
    dense_forward: int

    @classmethod
    def of(cls, manifest: Manifest) -> Formula:
        rows, length = manifest.batch.sequences_per_microbatch, manifest.model.sequence_length
        shape = (rows, length, boundary_width(manifest))
        numbers = 4 * rows * length * boundary_width(manifest)
        encoder = make_encoder(parse_spec("fp32"), boundary=0, direction=Direction.FORWARD)
        encoded = encoder.encode(torch.zeros(shape), MessageContext(0, Direction.FORWARD, step=0, microbatch=0))
        ids = rows * (length + 1) * np.dtype(id_type(manifest.model.vocab_size)).itemsize
        dense = 4 * rows * length * manifest.model.hidden_size
        return cls(numbers, numbers, ids, len(encoded.payload) - numbers, dense)


def kind(status: dict[str, Any], direction: str, name: str) -> dict[str, int]:
    nothing = {"num_messages": 0, "blob_bytes": 0, "body_bytes": 0, "frame_bytes": 0}
    return status["traffic"][direction]["kinds"].get(name, nothing)


def total(statuses: list[dict[str, Any]], name: str, *columns: str) -> int:
    return sum(kind(status, "sent", name)[column] for status in statuses for column in columns)


def tiny(*overrides: str) -> Manifest:
    """Four stages."""
    return three_stages("stages.count=4", "model.num_layers=4", *overrides)


def training(simulated: Make, manifest: Manifest, steps: int) -> SimulatedSwarm:
    """A swarm, one peer per stage, that has applied `steps` steps and goes on."""
    swarm = simulated(manifest)
    swarm.start(num_peers=4)
    wait_step(swarm, steps)
    return swarm


def settled(swarm: SimulatedSwarm) -> list[dict[str, Any]]:
    """The peers' statuses when nothing is on the way: the coordinator is stopped, and every lease has been done."""
    swarm.coordinator.process.stop()
    first = swarm.peers[0]

    def is_quiet() -> bool:
        status = first.status()
        return bool(status["microbatches"] == kind(status, "received", "work")["num_messages"])

    wait_seen(swarm, is_quiet, "all leases are done")
    return [peer.status() for peer in swarm.peers]


def test_boundary_traffic_is_the_formulas_and_ninety_times_below_dense(simulated: Make) -> None:
    shape = ("model.hidden_size=800", "model.num_heads=8", "model.num_kv_heads=2", "model.sequence_length=1024")
    manifest = tiny(
        *shape, "boundary.k=8", "batch.sequences_per_microbatch=1", "batch.microbatches_per_step=2", FOREVER
    )
    formula = Formula.of(manifest)
    assert formula.header < HEADERS
    statuses = settled(training(simulated, manifest, steps=2))
    first, *later = statuses
    forwards = total(statuses, "work", "num_messages")
    assert forwards == total(later, "done", "num_messages") >= 2 * 2 * 3  # steps, microbatches, boundaries
    assert total(statuses, "work", "blob_bytes") == forwards * (formula.forward + formula.ids + formula.header)
    assert total(later, "done", "blob_bytes") == forwards * (formula.backward + formula.header)
    assert kind(first, "sent", "done")["blob_bytes"] == 0  # stage 0 has no gradient to give
    numbers = forwards * (formula.forward + formula.backward + formula.ids)
    everything = total(statuses, "work", "body_bytes", "frame_bytes") + total(
        later, "done", "body_bytes", "frame_bytes"
    )
    assert numbers <= everything < 1.02 * numbers
    assert forwards * 2 * formula.dense_forward / everything >= 90


def boundary_bytes(statuses: list[dict[str, Any]]) -> int:
    forward = total(statuses, "work", "body_bytes", "frame_bytes")
    return forward + total(statuses[1:], "done", "body_bytes", "frame_bytes")


def moved_by_kind(status: dict[str, Any]) -> Counter[str]:
    """Everything that a daemon sent and received, by kind; `control` is the link layer's own."""
    moved: Counter[str] = Counter()
    for direction in (status["traffic"]["sent"], status["traffic"]["received"]):
        moved["control"] += direction["control_bytes"]
        for name, item in direction["kinds"].items():
            moved[name] += item["body_bytes"] + item["frame_bytes"]
    return moved


def test_the_coordinator_moves_below_a_hundredth_of_it_and_no_tensor(simulated: Make) -> None:
    shape = ("model.hidden_size=64", "boundary.k=32", "model.sequence_length=1024", "batch.sequences_per_microbatch=2")
    manifest = tiny(*shape, "batch.microbatches_per_step=4", FOREVER)
    formula = Formula.of(manifest)
    swarm = training(simulated, manifest, steps=1)
    first = swarm.coordinator.status()
    between = boundary_bytes([peer.status() for peer in swarm.peers])
    wait_step(swarm, 3)
    between = boundary_bytes([peer.status() for peer in swarm.peers]) - between
    coordinator = swarm.coordinator.status()
    parts = moved_by_kind(coordinator) - moved_by_kind(first)
    assert sum(parts.values()) < 0.01 * between, (between, parts)
    assert not STATE_KINDS & set(parts)  # there was no checkpoint in between
    lease = kind(coordinator, "sent", "work")
    assert lease["blob_bytes"] == lease["num_messages"] * formula.ids > 0  # token ids and nothing else
    assert kind(coordinator, "received", "done")["num_messages"] >= 3 * 4
    with_blobs = {
        name
        for direction in ("sent", "received")
        for name, item in coordinator["traffic"][direction]["kinds"].items()
        if item["blob_bytes"]
    }
    assert with_blobs == {"work"}
