"""The conditions on every simulated run: the reference's bits, balanced books, bounds kept, and an end."""

from __future__ import annotations

import tempfile
from dataclasses import dataclass, field, replace
from pathlib import Path

import torch

from swarmtrain.audit import audit
from swarmtrain.checkpoint import latest
from swarmtrain.coordinator.journal import Journal
from swarmtrain.errors import SwarmtrainError
from swarmtrain.reference import ReferenceTrainer
from swarmtrain.run.manifest import Manifest
from swarmtrain.simulated.swarm import SimulatedSwarm

SPARE_JOBS = 32  # step work and messages do not count against the queue for passes
TASKS_PER_LIFE = 16
LOSS_TOLERANCE = 0.3  # for stateful codecs: another peer has other state


@dataclass(frozen=True)
class ReferenceRun:
    """The result of training a manifest in one process."""

    digests: tuple[str, ...]
    losses: tuple[float, ...]


@dataclass
class References:
    """Reference runs, each manifest trained once."""

    _known: dict[str, ReferenceRun] = field(default_factory=dict)

    def __call__(self, manifest: Manifest) -> ReferenceRun:
        """In this process, with one thread.

        The interval between checkpoints changes nothing, unless all-reduces are compressed: a checkpoint drops their
        error feedback; or there is a delay: a checkpoint is a barrier.
        """
        if manifest.reduce.codec == "none" and not manifest.schedule.delay:
            manifest = replace(manifest, checkpoint=replace(manifest.checkpoint, every=0))
        key = manifest.digest()
        if key not in self._known:
            before = torch.get_num_threads()
            torch.set_num_threads(1)
            try:
                with tempfile.TemporaryDirectory(prefix="swarmtrain-reference-") as place:
                    trainer = ReferenceTrainer(manifest, out=Path(place))
                    losses = tuple(report.loss for report in trainer.run())
                    digests = tuple(worker.state.digest() for worker in trainer.workers)
            finally:
                torch.set_num_threads(before)
            self._known[key] = ReferenceRun(digests, losses)
        return self._known[key]


def judge(swarm: SimulatedSwarm, reference: ReferenceRun, *, is_exact: bool = True) -> list[str]:
    """The faults of a run that has ended, or should have."""
    found = list(swarm.faults)
    if not swarm.is_over:
        return found or ["the run has not ended"]
    directory = swarm.coordinator.state_dir
    try:
        newest = latest(directory / "checkpoints")
        with Journal(directory / "journal.sqlite", read_only=True) as journal:
            losses = tuple(decision.loss for decision, _ in journal.decisions())
        found += audit(directory).faults
    except SwarmtrainError as error:
        return [*found, f"what the coordinator left cannot be read: {error}"]
    if newest is None or newest.step != swarm.manifest.schedule.steps:
        return [*found, f"the last checkpoint is of step {newest.step if newest else None}"]
    if is_exact:
        for stage, entry in enumerate(newest.stages):
            if entry.state_digest != reference.digests[stage]:
                found.append(f"stage {stage} does not end in the reference's bits")
        if losses != reference.losses:
            found.append("the decided losses are not the reference's")
    elif len(losses) != len(reference.losses) or any(
        abs(a - b) > LOSS_TOLERANCE for a, b in zip(losses, reference.losses, strict=True)
    ):
        found.append(f"the losses {losses} are too far from the reference's {reference.losses}")
    return found


def excesses(swarm: SimulatedSwarm) -> list[str]:
    """The bounds that running daemons exceed now."""
    found = []
    num_lives, num_microbatches = len(swarm.lives), swarm.manifest.batch.microbatches_per_step
    for life in swarm.lives.values():
        if not life.is_running or life.daemon is None:
            continue
        if life.stage >= 0:
            if (assignment := life.daemon.assignment) is None:
                continue
            node, compute = assignment.peer.node, assignment.stage.compute
            if compute.backlog() > life.daemon.options.max_queue + SPARE_JOBS:
                found.append(f"{life.name}: {compute.backlog()} jobs wait")
            lengths = [len(ledger) for ledger in assignment.clock.ledgers]
            if len(lengths) > 1 + swarm.manifest.schedule.delay or max(lengths, default=0) > num_microbatches:
                found.append(f"{life.name}: {lengths} entries in its ledgers")
        else:
            if (context := getattr(life.daemon, "context", None)) is None:
                continue
            node = context.node
            if len(context.background) > TASKS_PER_LIFE * num_lives:
                found.append(f"{life.name}: {len(context.background)} pieces of work in the background")
        if node.num_handlers > TASKS_PER_LIFE * (num_lives + num_microbatches):
            found.append(f"{life.name}: {node.num_handlers} requests are being answered")
    return found
