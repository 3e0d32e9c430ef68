"""One stage of a run, built from its seed and tried on this machine: a microbatch forward and backward.

It says what the model of memory promises and what was measured, how long a microbatch takes, and which share of the
device's peak that is: of a plain product of matrices, in the run's precision, measured here too.
"""

from __future__ import annotations

import os
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import psutil
import torch
from torch import Tensor

from swarmtrain.errors import HardwareError, UsageError
from swarmtrain.model.footprint import Footprint, best, of_microbatch
from swarmtrain.model.layout import boundary_width, plan_stages
from swarmtrain.model.memory import free_bytes
from swarmtrain.model.peak import measured_peak, wait_for
from swarmtrain.model.state import StageState
from swarmtrain.model.worker import StageWorker
from swarmtrain.model.workload import workload_of
from swarmtrain.peer.options import does_not_fit_device, offered
from swarmtrain.run.manifest import Manifest
from swarmtrain.units import show_gb

AGAIN_BELOW_S = 10.0  # a microbatch that took less is computed again: the first one warms up
_STATUS, _RESET = Path("/proc/self/status"), Path("/proc/self/clear_refs")

Note = Callable[[str], None]


@dataclass(frozen=True, slots=True)
class Measured:
    """What a trial came to."""

    way: Footprint  # what was promised
    num_parameters: int
    tokens: int
    build_s: float
    microbatch_s: float
    tflop: float  # of a microbatch, what is computed again not counted
    peak_tflops: float
    device_bytes: int  # the most; 0 on a CPU
    host_bytes: int

    @property
    def tflops(self) -> float:
        """Achieved."""
        return self.tflop / self.microbatch_s

    @property
    def share_of_peak(self) -> float:
        """Model FLOPs utilisation: the useful operations by what a plain product reaches."""
        return self.tflops / self.peak_tflops


def try_stage(manifest: Manifest, stage: int, device: str, offload: str, note: Note) -> Measured:
    """Build, compute, measure. HardwareError if the stage does not fit; `note` says what is going on."""
    way = _way(manifest, stage, device, offload)
    plan = plan_stages(manifest)[stage]
    note(f"building stage {stage}: {plan.num_parameters:,} parameters from the seed")
    _reset_peak(device)
    started = time.perf_counter()
    state = StageState(manifest, stage, device=device, offload=way.offload)
    for module in state.modules:
        module.recomputes = way.recomputes
    worker = StageWorker(state)
    build_s = time.perf_counter() - started
    note("measuring the device's peak with a plain product of matrices")
    peak_tflops = measured_peak(device, torch.bfloat16 if manifest.is_rounded else torch.float32)
    tokens = manifest.batch.sequences_per_microbatch * manifest.model.sequence_length
    note(f"a microbatch of {tokens:,} tokens, forward and backward")
    seconds = one_microbatch(worker, device)
    if seconds < AGAIN_BELOW_S:
        seconds = one_microbatch(worker, device)
    device_bytes, host_bytes = _peak(device)
    tflop = workload_of(manifest).stages[stage].tflop
    return Measured(way, plan.num_parameters, tokens, build_s, seconds, tflop, peak_tflops, device_bytes, host_bytes)


def _way(manifest: Manifest, stage: int, device: str, offload: str) -> Footprint:
    """The fastest way in which a microbatch of the stage fits here."""
    if not 0 <= stage < manifest.stages.count:
        raise UsageError(f"there is no stage {stage}: {manifest.run.name} has stages 0 to {manifest.stages.count - 1}")
    plan, host = plan_stages(manifest)[stage], free_bytes()
    ways = of_microbatch(manifest, plan, is_cpu=device == "cpu")
    if device != "cpu":
        ways, free = offered(ways, offload), free_bytes(device)
        if (way := best(ways, free, host)) is None:
            raise does_not_fit_device(f"a microbatch of stage {stage}", ways, free, host, offload)
        return way
    if (way := best(ways, 0, host)) is None:
        raise HardwareError(
            f"a microbatch of stage {stage} needs about {show_gb(ways[-1].host_bytes)}, there are {show_gb(host)}",
            fix="free memory, take a larger machine, or a smaller stage",
        )
    return way


def one_microbatch(worker: StageWorker, device: str) -> float:
    """Seconds of one: any tokens, as they would come from the stage before."""
    manifest, plan = worker.state.manifest, worker.state.plan
    shape = (manifest.batch.sequences_per_microbatch, manifest.model.sequence_length)
    generator = torch.Generator().manual_seed(0)
    tokens = torch.randint(manifest.model.vocab_size, (shape[0], shape[1] + 1), generator=generator).to(device)
    boundary: Tensor | None = None
    if not plan.is_first:
        boundary = torch.randn(*shape, boundary_width(manifest), generator=generator).to(device)
    wait_for(device)
    started = time.perf_counter()
    done = worker.forward(tokens, boundary)
    gradient = None if plan.is_last else torch.full_like(done.output, 1e-6)
    worker.backward_into_sum(done, gradient)
    wait_for(device)
    return time.perf_counter() - started


def _reset_peak(device: str) -> None:
    if device != "cpu":
        torch.cuda.reset_peak_memory_stats(device)
    if os.access(_RESET, os.W_OK):
        _RESET.write_text("5")  # the highest resident memory begins anew; Linux


def _peak(device: str) -> tuple[int, int]:
    """The most that the device's tensors and this process have held."""
    on_device = 0 if device == "cpu" else torch.cuda.max_memory_allocated(device)
    if _STATUS.exists():
        found = [line for line in _STATUS.read_text().splitlines() if line.startswith("VmHWM:")]
        if found:
            return on_device, 1024 * int(found[0].split()[1])
    return on_device, int(psutil.Process().memory_info().rss)
