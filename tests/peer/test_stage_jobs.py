"""What the compute thread does with a stage: kept graphs or recomputation, extra microbatches, stale work."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from swarmtrain.model.sizes import id_type
from swarmtrain.model.state import StageState
from swarmtrain.model.worker import StageWorker
from swarmtrain.peer.jobs import BadTensor, StageJobs, StaleWork
from swarmtrain.peer.ledger import Entry
from swarmtrain.reduce.coding import Reduced
from swarmtrain.run.manifest import Manifest
from swarmtrain.run.presets import preset
from swarmtrain.wire.messages import Done

HUGE = 1 << 40


@pytest.fixture(scope="module")
def manifest() -> Manifest:
    return preset(
        "nano",
        [
            "model.hidden_size=32",
            "model.num_layers=4",
            "model.ffn_size=48",
            "model.sequence_length=16",
            "stages.count=2",
            "batch.sequences_per_microbatch=2",
            "batch.microbatches_per_step=4",
        ],
    )


def jobs_of(manifest: Manifest, stage: int, budget: int = HUGE) -> StageJobs:
    torch.set_num_threads(1)
    return StageJobs(manifest, StageWorker(StageState(manifest, stage)), graph_budget_bytes=budget)


def tokens(manifest: Manifest, seed: int) -> bytes:
    shape = (manifest.batch.sequences_per_microbatch, manifest.model.sequence_length + 1)
    ids = np.random.default_rng(seed).integers(0, manifest.model.vocab_size, shape)
    return ids.astype(id_type(manifest.model.vocab_size)).tobytes()


def run_chain(first: StageJobs, last: StageJobs, manifest: Manifest, microbatches: list[int]) -> list[Entry]:
    """All forwards before all backwards, so that graphs have to be kept or recomputed."""
    entries = [Entry(i, tokens(manifest, i), b"") for i in microbatches]
    sent = [first.forward(entry, 0).payload for entry in entries]
    for entry, payload in zip(entries, sent, strict=True):
        gradient = last.forward(Entry(entry.microbatch, entry.tokens, payload), 0).payload
        first.backward(entry, 0, gradient)
        entry.answer = Done(0.0, (), 0.0, 0.0, 0.0, b"")
    return entries


def test_recomputing_a_stage_gives_the_same_bits_as_keeping_its_graph(manifest: Manifest) -> None:
    keeping, recomputing = jobs_of(manifest, 0), jobs_of(manifest, 0, budget=1)
    run_chain(keeping, jobs_of(manifest, 1), manifest, [0, 1, 2])
    run_chain(recomputing, jobs_of(manifest, 1), manifest, [0, 1, 2])
    assert (keeping.num_recomputed, recomputing.num_recomputed) == (0, 2)  # a budget of nothing still keeps one
    assert torch.equal(keeping.worker.sum.total, recomputing.worker.sum.total)


def test_an_extra_microbatch_is_taken_out_exactly_and_can_come_back(manifest: Manifest) -> None:
    wanted, disturbed = jobs_of(manifest, 0), jobs_of(manifest, 0)
    run_chain(wanted, jobs_of(manifest, 1), manifest, [0, 2])
    entries = run_chain(disturbed, jobs_of(manifest, 1), manifest, [0, 1, 2])
    everything = disturbed.worker.sum.total.clone()
    assert not torch.equal(wanted.worker.sum.total, everything)
    share = disturbed.reconciled_share(entries, {0, 2}, 0)
    assert torch.equal(share, wanted.worker.sum.total)
    assert [entry.accumulated for entry in entries] == [True, False, True]
    assert torch.equal(disturbed.reconciled_share(entries, {0, 1, 2}, 0), everything)


def test_work_of_a_step_that_is_over_is_not_added(manifest: Manifest) -> None:
    first, last = jobs_of(manifest, 0), jobs_of(manifest, 1)
    entry = Entry(0, tokens(manifest, 0), b"")
    gradient = last.forward(Entry(0, entry.tokens, first.forward(entry, 0).payload), 0).payload
    first.apply(Reduced(first.worker.reduced_sum(), lambda: None), 1.0, 0.0)
    with pytest.raises(StaleWork):
        first.backward(entry, 0, gradient)
    with pytest.raises(StaleWork):
        first.forward(entry, 0)
    assert not first.worker.sum.total.any()


def test_tensors_that_are_not_what_they_should_be_are_refused(manifest: Manifest) -> None:
    first, last = jobs_of(manifest, 0), jobs_of(manifest, 1)
    good = first.forward(Entry(0, tokens(manifest, 0), b""), 0).payload
    with pytest.raises(BadTensor):
        last.forward(Entry(0, tokens(manifest, 0), good[:-1]), 0)
    with pytest.raises(BadTensor):
        last.forward(Entry(0, tokens(manifest, 0), b"random bytes" * 20), 0)
    with pytest.raises(BadTensor):
        first.check_tokens(tokens(manifest, 0)[:-1])
    assert not last.worker.sum.total.any()
