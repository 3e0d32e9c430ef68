"""Checks with journal and checkpoints that every microbatch was counted exactly once, and that replicas agreed."""

from __future__ import annotations

import sqlite3
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path

from swarmtrain.chain.receipt import Receipt, ReceiptError
from swarmtrain.checkpoint import complete, open_checkpoint
from swarmtrain.coordinator.contributions import Contribution
from swarmtrain.coordinator.journal import DATA_DIGEST, Decision, Journal
from swarmtrain.coordinator.journal_files import JournalError
from swarmtrain.coordinator.seals import chain_hash
from swarmtrain.errors import HardwareError, SwarmtrainError
from swarmtrain.run.manifest import Manifest, parse_manifest
from swarmtrain.run.schedule import gradient_scale, learning_rate, mean_loss


@dataclass(frozen=True)
class Audit:
    """What was checked, and the faults that were found."""

    num_steps: int
    num_entries: int
    num_replicas: int
    num_checkpoints: int
    faults: tuple[str, ...]

    @property
    def passed(self) -> bool:
        """Whether there are no faults."""
        return not self.faults


def audit(state_dir: Path) -> Audit:
    """Check the run in `state_dir` (a coordinator's, or a local swarm's)."""
    directory = _directory(state_dir)
    with Journal(directory / "journal.sqlite", read_only=True) as journal:
        faults = journal.broken_seals()
        try:
            counts = _audit_run(journal, directory, faults)
        except (SwarmtrainError, sqlite3.Error, ValueError, TypeError, AttributeError, KeyError) as error:
            if not faults:
                raise
            # The seals have shown already that the journal was altered; now it cannot be read.
            return Audit(0, 0, 0, 0, (*faults, f"the journal cannot be read to its end: {error}"))
        return Audit(*counts, tuple(faults))


def check_receipts(state_dir: Path, receipts: Iterable[Receipt]) -> None:
    """ReceiptError unless each of these genuine receipts says what the journal in `state_dir` says."""
    with Journal(_directory(state_dir) / "journal.sqlite", read_only=True) as journal:
        for receipt in receipts:
            if journal.get("run_id") != receipt.run:
                raise ReceiptError(f"the journal in {state_dir} is of another run", fix="name that run's directory")
            if not receipt.chain or journal.chain_after(receipt.step) != receipt.chain:
                raise ReceiptError(
                    f"the receipt of {receipt.peer[-8:]} is of work that the run has taken back since",
                    fix="a newer receipt says what counts",
                )
            known = journal.contributions(before=receipt.step).get(receipt.peer, Contribution())
            if {str(stage): count for stage, count in known.stages.items()} != receipt.stages:
                raise ReceiptError(
                    f"the journal has {known.microbatches} microbatches of {receipt.peer[-8:]} "
                    f"in {receipt.step} steps, its receipt {receipt.microbatches}",
                    fix="`swarmtrain audit` says whether the journal was altered",
                )


def _directory(state_dir: Path) -> Path:
    """Where the journal of a coordinator, or of a local swarm, is."""
    directory = state_dir if (state_dir / "journal.sqlite").exists() else state_dir / "coordinator"
    if not (directory / "journal.sqlite").exists():
        raise JournalError(f"no journal in {state_dir}", fix="name a coordinator's state directory")
    return directory


def _audit_run(journal: Journal, directory: Path, faults: list[str]) -> tuple[int, int, int, int]:
    """The number of (steps, entries, replicas, checkpoints) that were checked. Adds to `faults`."""
    text = journal.get("manifest")
    if text is None:
        raise JournalError(f"{journal.path} has no manifest")
    manifest = parse_manifest(text)
    num_steps, num_entries = _audit_steps(journal, manifest, faults)
    digests = _audit_replicas(journal, faults)
    num_checkpoints = _audit_checkpoints(journal, directory / "checkpoints", manifest, digests, faults)
    return num_steps, num_entries, len(journal.replicas()), num_checkpoints


def _audit_steps(journal: Journal, manifest: Manifest, faults: list[str]) -> tuple[int, int]:
    num_stages, num_microbatches = manifest.stages.count, manifest.batch.microbatches_per_step
    chain, count, num_entries = "", 0, 0
    for decision, written in journal.decisions():
        where = f"step {decision.step}"
        if decision.step != count:
            faults.append(f"{where}: steps {count} to {decision.step - 1} are missing")
        count = decision.step + 1
        chain = chain_hash(chain, decision.content())
        if chain != written:
            faults.append(f"{where}: a row was altered after it was written (its hash differs)")
            chain = written
        for stage in range(num_stages):
            counted = sorted(i for ids in decision.entries.get(stage, {}).values() for i in ids)
            num_entries += len(counted)
            if counted != list(range(num_microbatches)):
                missing = sorted(set(range(num_microbatches)) - set(counted))
                faults.append(f"{where}, stage {stage}: microbatches {missing or 'counted twice'} do not balance")
        faults += _audit_numbers(decision, manifest, where)
    return count, num_entries


def _audit_numbers(decision: Decision, manifest: Manifest, where: str) -> list[str]:
    faults = []
    losses = [decision.losses[i] for i in sorted(decision.losses)]
    if len(losses) != manifest.batch.microbatches_per_step:
        faults.append(f"{where}: {len(losses)} losses for {manifest.batch.microbatches_per_step} microbatches")
    elif mean_loss(losses) != decision.loss:
        faults.append(f"{where}: the loss is not the mean of its microbatches' losses")
    if len(decision.stages) != manifest.stages.count:
        faults.append(f"{where}: {len(decision.stages)} stages were prepared")
    elif gradient_scale(manifest, [square for _, square in decision.stages]) != (decision.grad_norm, decision.scale):
        faults.append(f"{where}: norm and scale do not follow from the stages' norms")
    if learning_rate(manifest, decision.step) != decision.learning_rate:
        faults.append(f"{where}: the learning rate is not the schedule's")
    return faults


def _audit_replicas(journal: Journal, faults: list[str]) -> dict[tuple[int, int], str]:
    """All replicas of a stage must have the same digest after each step."""
    digests: dict[tuple[int, int], str] = {}
    for step, stage, peer, digest in journal.replicas():
        if digests.setdefault((step, stage), digest) != digest:
            faults.append(f"step {step}, stage {stage}: {peer[-8:]} has another state than its replicas")
    return digests


def _audit_checkpoints(
    journal: Journal, directory: Path, manifest: Manifest, digests: dict[tuple[int, int], str], faults: list[str]
) -> int:
    on_disk = {path.name: path for path in complete(directory)}
    data_digest = journal.get(DATA_DIGEST)  # None in an older journal
    count = 0
    for step, name, states in journal.checkpoints():
        for stage, digest in enumerate(states):
            if digests.get((step, stage), digest) != digest:
                faults.append(f"checkpoint of step {step}: stage {stage} is not the replicas' state")
        if name not in on_disk:
            continue  # pruned
        count += 1
        try:
            checkpoint = open_checkpoint(on_disk[name])
            checkpoint.check_run(manifest)
            if data_digest and checkpoint.data_digest and checkpoint.data_digest != data_digest:
                faults.append(f"checkpoint of step {step}: it was trained on other data than the journal's")
            for stage in range(manifest.stages.count):
                checkpoint.load(stage)  # checks that the file holds the state that the index names
                if checkpoint.stages[stage].state_digest != states[stage]:
                    faults.append(f"checkpoint of step {step}: stage {stage} has another digest than the journal's")
        except HardwareError:
            raise  # a fault of this machine, not of the run
        except SwarmtrainError as error:
            faults.append(f"checkpoint of step {step}: {error}")
    return count
