"""What the compute thread does with a stage: kept graphs or recomputation, extra microbatches, stale work."""

from __future__ import annotations

from types import SimpleNamespace
from unittest.mock import Mock

import numpy as np
import pytest
import torch

from swarmtrain.codec import DEFAULT_LIMITS, Direction, Encoded, MessageContext, Ticket, decode
from swarmtrain.codec.errors import NonFiniteTensor
from swarmtrain.codec.policy import SendEstimate, is_critical
from swarmtrain.model.activations import activations
from swarmtrain.model.layout import plan_stages
from swarmtrain.model.room import Room
from swarmtrain.model.sizes import id_type
from swarmtrain.model.state import StageState
from swarmtrain.model.worker import StageWorker
from swarmtrain.model.workload import workload_of
from swarmtrain.peer import codecs as codecs_module
from swarmtrain.peer.codecs import SAMPLE_EVERY, BadTensor, CodecTimes, Fidelity
from swarmtrain.peer.compute import Kind
from swarmtrain.peer.jobs import StageJobs, StaleWork
from swarmtrain.peer.ledger import Entry
from swarmtrain.peer.stage import Stage
from swarmtrain.reduce.coding import Reduced
from swarmtrain.run.manifest import Manifest, parse_manifest
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
    entries = [Entry(0, i, tokens(manifest, i), b"") for i in microbatches]
    sent = [first.forward(entry, 0).payload for entry in entries]
    for entry, payload in zip(entries, sent, strict=True):
        gradient = last.forward(Entry(0, entry.microbatch, entry.tokens, payload), 0).payload
        first.backward(entry, 0, gradient)
        entry.answer = Done(0.0, (), 0.0, 0.0, 0.0, b"")
    return entries


def test_recomputing_a_stage_gives_the_same_bits_as_keeping_its_graph(manifest: Manifest) -> None:
    keeping, recomputing = jobs_of(manifest, 0), jobs_of(manifest, 0, budget=1)
    run_chain(keeping, jobs_of(manifest, 1), manifest, [0, 1, 2])
    run_chain(recomputing, jobs_of(manifest, 1), manifest, [0, 1, 2])
    assert (keeping.num_recomputed, recomputing.num_recomputed) == (0, 2)  # a budget of nothing still keeps one
    assert torch.equal(keeping.worker.sum.total, recomputing.worker.sum.total)


def test_operations_are_counted_once_for_each_microbatch(manifest: Manifest) -> None:
    """What is computed again is left out; the share of the peak is of the time that jobs took."""
    times = SimpleNamespace(total_s={Kind.FORWARD: 0.0, Kind.BACKWARD: 0.0})
    compute = Mock(times=times)
    recomputing, last = jobs_of(manifest, 0, budget=1), jobs_of(manifest, 1)
    stage = Stage(manifest, compute, compute, recomputing)
    assert stage.computed_tflop == 0.0
    run_chain(recomputing, last, manifest, [0, 1, 2])
    assert recomputing.num_recomputed == 2
    assert stage.computed_tflop == pytest.approx(3 * workload_of(manifest).stages[0].tflop)
    assert Stage(manifest, compute, compute, last).computed_tflop == pytest.approx(
        3 * workload_of(manifest).stages[1].tflop
    )
    assert stage.flops_utilisation == 0.0, "without a peak, and without a job, nothing is said"
    stage.peak_tflops = 2.0
    times.total_s[Kind.FORWARD] = 1.5
    assert stage.flops_utilisation == pytest.approx(stage.computed_tflop / 1.5 / 2.0)


def test_a_message_that_cannot_be_encoded_leaves_nothing_in_the_sum(
    manifest: Manifest, monkeypatch: pytest.MonkeyPatch
) -> None:
    jobs = jobs_of(manifest, 1)
    entry = Entry(0, 0, tokens(manifest, 0), b"")
    payload = jobs_of(manifest, 0).forward(entry, 0).payload
    added: list[bool] = []

    def fails(*_: object) -> None:
        added.append(bool(jobs.worker.sum_of(0).total.any()))
        raise NonFiniteTensor("not finite")

    monkeypatch.setattr(jobs.codecs, "encode_gradient", fails)
    last = Entry(0, 0, entry.tokens, payload)
    with pytest.raises(NonFiniteTensor):
        jobs.forward(last, 0)
    assert added == [True], "it was in the sum by then"
    assert not jobs.worker.sum_of(0).total.any()
    assert not last.accumulated


def test_a_sum_that_holds_a_part_of_a_microbatch_is_made_anew(
    manifest: Manifest, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Memory runs out in the middle of a backward, and once more when that is taken out again."""
    wanted, jobs, last = jobs_of(manifest, 0), jobs_of(manifest, 0), jobs_of(manifest, 1)
    run_chain(wanted, jobs_of(manifest, 1), manifest, [0, 1, 2])
    entries = run_chain(jobs, last, manifest, [0, 1])
    broken = Entry(0, 2, tokens(manifest, 2), b"")
    payload = jobs.forward(broken, 0).payload
    gradient = last.forward(Entry(0, 2, broken.tokens, payload), 0).payload
    before, calls = jobs.worker.sum.total.clone(), [0]
    plain = type(jobs.worker.state.room).for_sum

    def for_sum(room: Room, gradient: torch.Tensor) -> torch.Tensor:
        calls[0] += 1
        if calls[0] > 3:
            raise MemoryError
        return plain(room, gradient)

    monkeypatch.setattr(Room, "for_sum", for_sum)
    with pytest.raises(MemoryError):
        jobs.backward(broken, 0, gradient)
    assert not torch.equal(jobs.worker.sum.total, before), "a part of it is in the sum"
    monkeypatch.undo()
    again = run_chain(jobs, last, manifest, [2])
    share = jobs.reconciled_share([*entries, *again], {0, 1, 2}, 0)
    assert torch.equal(share, wanted.worker.sum.total)
    assert torch.equal(jobs.reconciled_share([*entries, *again], {0, 1, 2}, 0), share)


def test_where_no_whole_graph_fits_the_inputs_of_layers_are_kept(manifest: Manifest) -> None:
    plan = plan_stages(manifest)[0]
    whole, layered = (activations(manifest, plan, recomputes=flag).kept_bytes for flag in (False, True))
    assert layered < whole / 8
    budgets = {whole: (1, False), 3 * whole: (3, False), whole - 1: ((whole - 1) // layered, True), 1: (1, True)}
    for budget, (number, recomputes) in budgets.items():
        jobs = jobs_of(manifest, 0, budget)
        assert (jobs.max_graphs, jobs.worker.state.module.recomputes) == (number, recomputes)
    everything, short = jobs_of(manifest, 0), jobs_of(manifest, 0, whole - 1)
    for jobs in (everything, short):
        run_chain(jobs, jobs_of(manifest, 1), manifest, [0, 1, 2])
        assert jobs.num_recomputed == 0  # of whole stages
    assert torch.equal(everything.worker.sum.total, short.worker.sum.total)


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
    assert torch.equal(share, wanted.worker.sum.total), "what was lent does not change"


def test_a_sum_is_lent_without_a_copy_as_long_as_nothing_is_added(manifest: Manifest) -> None:
    jobs = jobs_of(manifest, 0)
    entries = run_chain(jobs, jobs_of(manifest, 1), manifest, [0, 1])
    first, again = (jobs.reconciled_share(entries, {0, 1}, 0) for _ in range(2))
    assert first.data_ptr() == again.data_ptr() == jobs.worker.sum.total.data_ptr()
    jobs.reconciled_share(entries, {0}, 0)
    assert jobs.worker.sum.total.data_ptr() != first.data_ptr()
    assert not torch.equal(jobs.worker.sum.total, first)


def test_a_sum_that_was_dropped_is_not_taken_for_that_of_the_ledger(manifest: Manifest) -> None:
    """Between the loss of a state and the new ledger entries still say that they are in the sum."""
    first = jobs_of(manifest, 0)
    entries = run_chain(first, jobs_of(manifest, 1), manifest, [0, 1])
    first.drop_work()
    assert all(entry.accumulated for entry in entries)
    with pytest.raises(StaleWork):
        first.reconciled_share(entries, {0, 1}, 0)


def test_work_of_a_step_that_is_over_is_not_added(manifest: Manifest) -> None:
    first, last = jobs_of(manifest, 0), jobs_of(manifest, 1)
    entry = Entry(0, 0, tokens(manifest, 0), b"")
    gradient = last.forward(Entry(0, 0, entry.tokens, first.forward(entry, 0).payload), 0).payload
    end_step(first, {0})
    with pytest.raises(StaleWork):
        first.backward(entry, 0, gradient)
    with pytest.raises(StaleWork):
        first.forward(entry, 0)
    assert not first.worker.sum.total.any()


def test_tensors_that_are_not_what_they_should_be_are_refused(manifest: Manifest) -> None:
    first, last = jobs_of(manifest, 0), jobs_of(manifest, 1)
    good = first.forward(Entry(0, 0, tokens(manifest, 0), b""), 0).payload
    with pytest.raises(BadTensor):
        last.forward(Entry(0, 0, tokens(manifest, 0), good[:-1]), 0)
    with pytest.raises(BadTensor):
        last.forward(Entry(0, 0, tokens(manifest, 0), b"random bytes" * 20), 0)
    with pytest.raises(BadTensor):
        first.codecs.check_tokens(tokens(manifest, 0)[:-1])
    assert not last.worker.sum.total.any()


@pytest.mark.parametrize(
    ("codec", "low", "high"),
    [
        ("fp32", 0.0, 0.0),
        ("bf16", 1e-4, 4e-3),
        ("quant8", 1e-4, 2e-2),
        ("quant4", 2e-2, 0.3),
        ("topk10", 0.3, 1.0),
        ("ef21-topk10", 0.0, 1.0),
    ],
)
def test_what_a_codec_loses_is_known(manifest: Manifest, codec: str, low: float, high: float) -> None:
    lossy = parse_manifest(manifest.canonical(), [f"wire.forward={codec}", f"wire.backward={codec}"])
    first, last = jobs_of(lossy, 0), jobs_of(lossy, 1)
    run_chain(first, last, lossy, [0])
    assert low <= first.codecs.fidelity.errors["forward"] <= high
    assert low <= last.codecs.fidelity.errors["backward"] <= high
    assert set(first.codecs.fidelity.errors) | set(last.codecs.fidelity.errors) == {"forward", "backward"}


def test_few_messages_are_looked_at(manifest: Manifest) -> None:
    fidelity = Fidelity(DEFAULT_LIMITS)
    context = MessageContext(0, Direction.FORWARD)
    found = []
    for number in range(2 * SAMPLE_EVERY):
        tensor = torch.ones(2, 3)
        received = torch.full((2, 3), 1.0 + number / 1000)
        fidelity.look(tensor, Encoded(b"", None, Ticket(0, 0), received), context)
        found.append(fidelity.errors["forward"])
    assert found == pytest.approx([0.0] * SAMPLE_EVERY + [SAMPLE_EVERY / 1000] * SAMPLE_EVERY, abs=1e-6)
    fidelity.look(torch.zeros(2, 3), Encoded(b"", None, Ticket(0, 0), torch.zeros(2, 3)), context)
    assert fidelity.errors["forward"] == 0.0  # nothing was meant, and nothing lost


def end_step(jobs: StageJobs, counted: set[int]) -> None:
    """As a decision ends it; the sum that is applied is zero."""
    step = jobs.worker.state.step
    zero = torch.zeros(jobs.worker.state.gradient_size)
    jobs.apply(jobs.close_step(step, counted), Reduced(zero, lambda: None), 1.0, 0.0)
    jobs.forget_if_due(step + 1, has_moved=False)


def feedback_manifest(manifest: Manifest, *overrides: str) -> Manifest:
    return parse_manifest(manifest.canonical(), ["wire.backward=ef-topk10", *overrides])


def gradient_message(last: StageJobs, run: Manifest, microbatch: int, boundary: bytes) -> tuple[Entry, bytes]:
    """A microbatch on the last stage: its entry, and what goes down."""
    entry = Entry(last.worker.state.step, microbatch, tokens(run, microbatch), boundary, generation=last.generation)
    return entry, last.forward(entry, last.worker.state.step).payload


@pytest.mark.parametrize("fate", ["forgotten", "reconciled out", "dropped with the step", "counted"])
def test_a_message_that_came_to_nothing_gives_its_residual_back(manifest: Manifest, fate: str) -> None:
    """Its peer goes on as one that never had it; only what is counted is owed for."""
    run = feedback_manifest(manifest)
    first = jobs_of(run, 0)
    boundaries = [first.forward(Entry(0, i, tokens(run, i), b""), 0).payload for i in range(3)]
    tried, straight = jobs_of(run, 1), jobs_of(run, 1)
    for jobs in (tried, straight):
        gradient_message(jobs, run, 0, boundaries[0])
    counted = {0}
    entry, _ = gradient_message(tried, run, 1, boundaries[1])
    assert entry.residual_bytes == entry.num_bytes - len(entry.tokens) - len(entry.boundary) > 0
    if fate == "forgotten":
        tried.forget(entry)
        gradient_message(tried, run, 1, boundaries[1])  # leased again to the same peer
        gradient_message(straight, run, 1, boundaries[1])
        counted = {0, 1}
    elif fate == "reconciled out":
        tried.reconciled_share([entry], set(), 0)
    elif fate == "counted":
        counted = {0, 1}
    if fate == "dropped with the step":
        for jobs in (tried, straight):
            jobs.drop_work()
    else:
        for jobs in (tried, straight):
            end_step(jobs, counted)
    after = [gradient_message(jobs, run, 2, boundaries[2])[1] for jobs in (tried, straight)]
    assert (after[0] == after[1]) is (fate != "counted")


def test_work_of_an_older_step_that_fails_late_leaves_the_new_step_alone(manifest: Manifest) -> None:
    run = feedback_manifest(manifest)
    boundary = jobs_of(run, 0).forward(Entry(0, 0, tokens(run, 0), b""), 0).payload
    late, punctual = jobs_of(run, 1), jobs_of(run, 1)
    old, _ = gradient_message(late, run, 0, boundary)
    gradient_message(punctual, run, 0, boundary)
    for jobs in (late, punctual):
        end_step(jobs, {0})
        gradient_message(jobs, run, 0, boundary)
    late.forget(old)
    assert gradient_message(late, run, 1, boundary)[1] == gradient_message(punctual, run, 1, boundary)[1]


@pytest.mark.parametrize("every", [0, 2])
def test_codecs_forget_where_a_checkpoint_lies(manifest: Manifest, every: int) -> None:
    """As in the reference trainer: who is restored there knows no more than who went on."""
    run = feedback_manifest(manifest, f"checkpoint.every={every}")
    boundary = jobs_of(run, 0).forward(Entry(0, 0, tokens(run, 0), b""), 0).payload
    went_on, restored = jobs_of(run, 1), jobs_of(run, 1)
    for _ in range(2):
        gradient_message(went_on, run, 0, boundary)
        end_step(went_on, {0})
    restored.load_state(went_on.copy_state())
    restored.begin_anew()
    after = [gradient_message(jobs, run, 1, boundary)[1] for jobs in (went_on, restored)]
    assert (after[0] == after[1]) is (every > 0)


@pytest.mark.parametrize("backward", ["lowrank2-lep", "lowrank2-lep:critical", "lowrank2"])
def test_a_peer_knows_how_biased_its_error_feedback_is(manifest: Manifest, backward: str) -> None:
    run = parse_manifest(manifest.canonical(), [f"wire.backward={backward}"])
    first, last = jobs_of(run, 0), jobs_of(run, 1)
    run_chain(first, last, run, [0])
    assert last.codecs.residuals.cosine is None  # it takes two messages
    run_chain(first, last, run, [1])
    cosine = last.codecs.residuals.cosine
    if "lep" in backward:
        assert cosine is not None
        assert 0.0 < abs(cosine) < 1.0
    else:
        assert cosine is None


def test_a_gradient_that_was_checked_is_not_decoded_again(manifest: Manifest, monkeypatch: pytest.MonkeyPatch) -> None:
    checking, plain_one, last = jobs_of(manifest, 0), jobs_of(manifest, 0), jobs_of(manifest, 1)
    entry = Entry(0, 0, tokens(manifest, 0), b"")
    gradient = last.forward(Entry(0, 0, entry.tokens, checking.forward(entry, 0).payload), 0).payload
    twin = Entry(0, 0, entry.tokens, b"")
    plain_one.forward(twin, 0)
    decoded = []
    monkeypatch.setattr(
        codecs_module, "decode", lambda raw, *rest, **more: decoded.append(raw) or decode(raw, *rest, **more)
    )
    checking.check_gradient(entry, 0, gradient, keep=True)
    checking.backward(entry, 0, gradient)
    assert len(decoded) == 1
    plain_one.check_gradient(twin, 0, gradient, keep=True)
    plain_one.backward(twin, 0, bytes(bytearray(gradient)))  # equal bytes, but not those that were checked
    assert len(decoded) == 3
    assert torch.equal(checking.worker.sum.total, plain_one.worker.sum.total)
    with pytest.raises(BadTensor):
        checking.check_gradient(entry, 0, gradient[:-1])


@pytest.mark.parametrize("backward", ["topk25", "topk25:critical", "quant8"])
def test_an_answer_to_other_bytes_can_be_decoded_by_who_takes_over(manifest: Manifest, backward: str) -> None:
    """A codec that remembers: the heir of a dead peer makes another mask of the same microbatch."""
    run = parse_manifest(manifest.canonical(), ["wire.forward=ef-topk25", f"wire.backward={backward}"])
    dead, heir, last = jobs_of(run, 0), jobs_of(run, 0), jobs_of(run, 1)
    run_chain(dead, last, run, [0])
    theirs, ours = Entry(0, 1, tokens(run, 1), b""), Entry(0, 1, tokens(run, 1), b"")
    received = Entry(0, 1, theirs.tokens, dead.forward(theirs, 0).payload)
    assert heir.forward(ours, 0).payload != received.boundary
    gradient = last.forward(received, 0).payload
    if backward != "quant8":  # it names the mask it belongs to
        with pytest.raises(BadTensor):
            heir.check_gradient(ours, 0, gradient)
    complete = last.codecs.with_mask(received, 0, gradient)
    heir.check_gradient(ours, 0, complete)
    heir.backward(ours, 0, complete)
    dead.worker.sum.clear()
    dead.backward(theirs, 0, gradient)
    assert torch.equal(heir.worker.sum.total, dead.worker.sum.total)


def test_a_codec_that_takes_longer_than_it_saves_is_not_used(manifest: Manifest) -> None:
    run = parse_manifest(manifest.canonical(), ["wire.backward=quant4:critical"])
    first, last = jobs_of(run, 0), jobs_of(run, 1)
    rate = 1e6

    def critical() -> bool:
        return is_critical(SendEstimate(0.0, *last.codecs.critical_times(rate)))

    exact_s, compressed_s = last.codecs.critical_times(rate)
    assert compressed_s < exact_s
    assert critical()
    run_chain(first, last, run, [0])
    assert last.codecs.times.seconds(True) > 0  # measured with the first message
    assert last.codecs.critical_times(rate)[1] == pytest.approx(compressed_s + last.codecs.times.seconds(True))
    last.codecs.times = CodecTimes()
    last.codecs.times.add(True, 2 * exact_s, lambda: None)
    assert not critical()
    last.codecs.times.add(False, 3 * exact_s, lambda: None)
    assert critical()
