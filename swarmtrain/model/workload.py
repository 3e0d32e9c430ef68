"""The demands of a manifest: arithmetic, bytes and memory per stage. Used by the simulator and by `plan`."""

from __future__ import annotations

import math
from dataclasses import dataclass

from swarmtrain.model.footprint import Footprint, choices, on_cpu
from swarmtrain.model.layout import EMBEDDING, StagePlan, boundary_width, plan_stages
from swarmtrain.model.reduce_bytes import ReduceBytes, reduce_bytes
from swarmtrain.model.sizes import id_type
from swarmtrain.run.manifest import Manifest

FP32 = 4
BACKWARD_FACTOR = 2.0  # a backward pass multiplies twice as much as a forward pass


@dataclass(frozen=True, slots=True)
class StageWork:
    """One stage in numbers; `tflop` per microbatch, forward and backward."""

    tflop: float
    num_parameters: int
    state_bytes: int  # parameters and moments: what a newcomer downloads, and a checkpoint holds
    memory_bytes: int  # of a peer that computes on its CPU
    reduced: ReduceBytes  # what a step's all-reduce puts on a peer's line
    ways: tuple[Footprint, ...] = ()  # to host it on a graphics card, the fastest first; none: as on a CPU

    def way(self, memory_bytes: float, host_bytes: float) -> tuple[int, int] | None:
        """(bytes of the device, bytes of the host) of the fastest way that fits a machine; None if none does.

        Without `host_bytes` the machine computes on its CPU, and has one memory.
        """
        if not host_bytes or not self.ways:
            return (0, self.memory_bytes) if self.memory_bytes <= memory_bytes else None
        found = next((way for way in self.ways if way.fits(int(memory_bytes), int(host_bytes))), None)
        return (found.device_bytes, found.host_bytes) if found is not None else None


@dataclass(frozen=True, slots=True)
class Workload:
    """One run in numbers."""

    name: str
    stages: tuple[StageWork, ...]
    boundary_bytes: float  # one boundary tensor on its way forward, with its tokens
    backward_bytes: float  # one on its way back
    token_bytes: int  # of one microbatch, from the coordinator to stage 0
    tokens: int  # per microbatch
    batch: int  # microbatches per optimizer step
    checkpoint_every: int  # steps; 0: only at the end
    steps: int = 1  # of the whole run
    delay: int = 0  # steps by which the weights lag: 1 hides the all-reduce behind the next step
    delay_from: int = 0
    moves_every: int = 0  # steps between moves of the subspace; 0: it does not move

    @property
    def mean_tflop(self) -> float:
        """Per stage and microbatch: the unit in which stage costs are given."""
        return sum(stage.tflop for stage in self.stages) / len(self.stages)

    @property
    def costs(self) -> tuple[float, ...]:
        """Stage costs relative to their mean."""
        return tuple(stage.tflop / self.mean_tflop for stage in self.stages)

    def all_reduce_bytes(self, stage: int, num_peers: int) -> float:
        """Bytes that one peer sends, and receives, in its stage's all-reduce, less the part that it owns itself."""
        return self.stages[stage].reduced.of_group(num_peers)

    @property
    def wire_bytes_per_token(self) -> float:
        """Over one boundary, forward and backward."""
        return (self.boundary_bytes + self.backward_bytes) / self.tokens

    @property
    def synchronous_share(self) -> float:
        """Of the run's steps, those whose microbatches wait until all steps before are applied: see weights_step."""
        if not self.delay:
            return 1.0
        first = min(self.delay_from, self.steps)

        def multiples(period: int) -> int:
            return -(-self.steps // period) + -first // period if period else 0

        both = math.lcm(self.checkpoint_every, self.moves_every)
        found = multiples(self.checkpoint_every) + multiples(self.moves_every) - multiples(both)
        return (first + (found or int(first == 0))) / self.steps

    @property
    def state_bytes(self) -> float:
        """Parameters and moments of all stages: what a checkpoint holds."""
        return float(sum(stage.state_bytes for stage in self.stages))


def workload_of(manifest: Manifest) -> Workload:
    """Count. Attention is counted as causal, embeddings as look-ups."""
    model, batch = manifest.model, manifest.batch
    tokens = batch.sequences_per_microbatch * model.sequence_length
    ids = tokens * int(id_type(model.vocab_size)[2:])
    return Workload(
        name=manifest.run.name,
        stages=tuple(_stage_work(manifest, plan, tokens) for plan in plan_stages(manifest)),
        boundary_bytes=float(tokens * boundary_width(manifest) * FP32 + ids),
        backward_bytes=float(tokens * boundary_width(manifest) * FP32),
        token_bytes=ids,
        tokens=tokens,
        batch=batch.microbatches_per_step,
        checkpoint_every=manifest.checkpoint.every,
        steps=manifest.schedule.steps,
        delay=manifest.schedule.delay,
        delay_from=manifest.schedule.delay_from,
        moves_every=manifest.boundary.track_every,
    )


def _stage_work(manifest: Manifest, plan: StagePlan, tokens: int) -> StageWork:
    model = manifest.model
    multiplied = sum(
        spec.num_elements for spec in plan.tensors if len(spec.shape) == 2 and not spec.name.endswith(EMBEDDING)
    )
    if plan.is_last and model.tie_embeddings:
        multiplied += model.vocab_size * model.hidden_size
    attention = len(plan.layers) * model.sequence_length * model.hidden_size  # causal: half of two n x d products
    forward = 2.0 * tokens * (multiplied + attention)
    return StageWork(
        tflop=(1.0 + BACKWARD_FACTOR) * forward / 1e12,
        num_parameters=plan.num_parameters,
        state_bytes=plan.state_elements * FP32,
        memory_bytes=on_cpu(manifest, plan).host_bytes,
        reduced=reduce_bytes(manifest, plan),
        ways=tuple(choices(manifest, plan)),
    )
