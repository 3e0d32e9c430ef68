"""The memory that is told in advance is that of a stage that runs: counted for real, and at true size on paper."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from swarmtrain.model.footprint import MICROBATCH, STEP, Offload, best, choices, cpu_choices, on_cpu, on_device
from swarmtrain.model.layout import StagePlan, boundary_width, plan_stages
from swarmtrain.model.sizes import muon_working_bytes
from swarmtrain.model.state import StageState
from swarmtrain.model.tracing import LiveBytes
from swarmtrain.model.worker import StageWorker
from swarmtrain.reduce.coding import Reduced, StageCoder, _add_up, factor_pieces, left_pieces, stage_elements
from swarmtrain.run.manifest import Manifest
from swarmtrain.run.presets import PRESETS, preset

# Matrices of several blocks, and few tokens: no part of the count is small.
SMALL = (
    "model.hidden_size=384",
    "model.num_heads=6",
    "model.ffn_size=1024",
    "model.vocab_size=2048",
    "model.sequence_length=64",
    "batch.sequences_per_microbatch=4",
    "stages.count=4",
    "boundary.k=24",
)


def reduced(coder: StageCoder, total: Tensor) -> Reduced:
    """As a peer reduces: with one peer, and without a network."""
    if not coder.spec.in_factors:
        form, commit = coder.sliced(compress=coder.spec.lossy)
        found = torch.empty(total.numel())
        for start in range(0, total.numel(), 1 << 18):
            piece = total[start : start + (1 << 18)]
            form.own(piece.numpy(), start)
            found[start : start + piece.numel()] = piece
        return Reduced(found, commit)
    one = coder.factors(total)
    pieces = left_pieces(coder.layout, [1])
    left, vector = torch.empty(pieces[-1].stop), torch.empty(stage_elements(coder.layout, compress=True))
    _add_up([one.left_form], pieces, [one.left()], out=left)
    _add_up([one.form], factor_pieces(coder.layout, [vector.numel()]), [one.vector(left)], out=vector)
    return one.reduced(left, vector)


class Running:
    """One stage that works, with what it holds counted. What runs beside each other on two threads is added up."""

    def __init__(self, manifest: Manifest, index: int, *, recomputes: bool) -> None:
        self.manifest = manifest
        with LiveBytes() as seen:
            self.seen = seen
            self.worker = StageWorker(StageState(manifest, index))
            self.coder = StageCoder(self.worker.state)
            for module in self.worker.state.modules:
                module.recomputes = recomputes
            self.tokens = torch.zeros((self.shape[0], self.shape[1] + 1), dtype=torch.int64)
            is_last, delay = self.worker.state.plan.is_last, manifest.schedule.delay
            for step in range(1 + delay):
                self.worker.sum_of(step)
            settled = seen.live
            kept = None if is_last else self.worker.forward(self.tokens, self.boundary(), delay)
            microbatch = self.peak_of(lambda: self.microbatch(delay)) - settled
            del kept
            worked = self.peak_of(self.step) - settled
            copies = [buffer.clone() for buffer in self.worker.state.buffers]
            copied = sum(buffer.untyped_storage().nbytes() for buffer in copies)
        beside = microbatch + worked if delay else max(microbatch, worked)
        self.bytes = settled + beside + copied

    @property
    def shape(self) -> tuple[int, int]:
        return self.manifest.batch.sequences_per_microbatch, self.manifest.model.sequence_length

    def peak_of(self, work: object) -> int:
        assert callable(work)
        self.seen.peak = self.seen.live
        work()
        return self.seen.peak

    def boundary(self) -> Tensor | None:
        return None if self.worker.state.plan.is_first else torch.ones(*self.shape, boundary_width(self.manifest))

    def microbatch(self, step: int) -> None:
        done = self.worker.forward(self.tokens, self.boundary(), step)
        self.worker.backward_into_sum(
            done, None if done.output.dim() == 0 else torch.full_like(done.output, 1e-4), step
        )

    def step(self) -> None:
        """What the thread of the steps does."""
        total = self.worker.take_sum(0)
        total.total.fill_(1e-3)
        found = reduced(self.coder, total.total)
        self.worker.finish(found.gradient)
        self.worker.apply(found.gradient, 1.0, 1e-3)
        found.commit()
        self.worker.enter_step()
        self.worker.give_back(total)


def told(manifest: Manifest, plan: StagePlan, *, recomputes: bool) -> int:
    """Of tensors, as on a CPU. What the library of Muon's products takes for itself is measured in test_sizes.py."""
    unseen = ("process", "sum on its way", "sums of others")  # what no tensor holds, or only a swarm
    way = on_device(manifest, plan, recomputes=recomputes)
    needs = {need.what: need.device_bytes + need.host_bytes for need in way.needs if need.what not in unseen}
    if optimizer := needs.get("optimizer at work", 0):
        library = muon_working_bytes(plan) - muon_working_bytes(plan, in_tensors=True)
        needs["optimizer at work"] = optimizer - library
    passes, step = (sum(needs.pop(what, 0) for what in group) for group in (MICROBATCH, STEP))
    return sum(needs.values()) + (passes + step if manifest.schedule.delay else max(passes, step))


DELAYED, BF16, MUON = ("schedule.delay=1", "schedule.predict=true"), ("model.precision=bf16",), ("optimizer.kind=muon",)
RUNS: tuple[tuple[str, ...], ...] = (
    (),
    ("boundary.kind=projected",),
    ("boundary.kind=dense",),
    ("boundary.kind=learned",),
    ("boundary.table=signs", *BF16),
    (*MUON, "reduce.codec=lowrank40"),
    ("reduce.codec=powersgd4",),
    ("reduce.codec=topk64",),
    ("batch.accumulate=float", "schedule.delay=1"),
    (*DELAYED, *MUON, "reduce.codec=lowrank40"),
    (*DELAYED, *MUON, "reduce.codec=lowrank40", *BF16),
    (*DELAYED, *BF16, "boundary.kind=dense"),
    ("schedule.delay=1", *BF16, "boundary.kind=learned", *MUON),
)


@pytest.mark.parametrize("number", range(len(RUNS)))
def test_a_stage_that_runs_holds_what_is_told(number: int) -> None:
    """Within a tenth. First, middle and last stages in turn; some compute their layers again."""
    settings, stage, recomputes = RUNS[number], (3, 0, 1)[number % 3], number % 2 == 1
    manifest = preset("nano", [*SMALL, *settings])
    counted = Running(manifest, stage, recomputes=recomputes).bytes
    plan = plan_stages(manifest)[stage]
    assert 0.9 * counted < told(manifest, plan, recomputes=recomputes) < 1.1 * counted


def test_with_a_delay_a_step_is_applied_beside_microbatches_and_without_one_after_them() -> None:
    for delay, beside in ((0, False), (1, True)):
        manifest = preset("nano", [*SMALL, f"schedule.delay={delay}"])
        named = {need.what for need in on_cpu(manifest, plan_stages(manifest)[1]).needs}
        assert ("a microbatch" in named and "all-reduce" in named) is beside


@pytest.mark.parametrize("name", PRESETS)
def test_what_is_offloaded_leaves_the_device_and_comes_to_the_host(name: str) -> None:
    manifest = preset(name)
    for plan in plan_stages(manifest):
        for recomputes in (False, True):
            plain, state, sums = (on_device(manifest, plan, offload=item, recomputes=recomputes) for item in Offload)
            assert plain.device_bytes > state.device_bytes > sums.device_bytes
            assert plain.host_bytes < state.host_bytes
        whole, layered = cpu_choices(manifest, plan)
        assert whole.host_bytes >= layered.host_bytes
        ways = choices(manifest, plan)
        assert best(ways, 1 << 50, 1 << 50) == ways[0], "the fastest, where there is room"
        assert best(ways, ways[-1].device_bytes, 1 << 50) == ways[-1]
        assert best(ways, ways[-1].device_bytes - 1, 1 << 50) is None
