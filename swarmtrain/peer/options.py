"""How a volunteer's daemon is set up, and whether the hardware fits. Plain data and arithmetic."""

from __future__ import annotations

from dataclasses import dataclass, field, replace
from pathlib import Path

import torch

from swarmtrain.codec.samples import DEFAULT_BUDGET_BYTES
from swarmtrain.errors import HardwareError
from swarmtrain.model.activations import activations
from swarmtrain.model.layout import plan_stages
from swarmtrain.model.memory import free_bytes
from swarmtrain.model.sizes import stage_memory
from swarmtrain.observe.faults import Faults
from swarmtrain.run.invite import Invite
from swarmtrain.run.manifest import Manifest
from swarmtrain.units import show_gb

_SHARE_BYTES_PER_PARAMETER = 12  # an all-reduce's copy of the sum (fp64) and its result (fp32)
_PROCESS_BYTES = 400 << 20  # interpreter, torch and the network daemon


AUTO = -1


@dataclass(frozen=True)
class PeerOptions:
    """What `swarmtrain join` was told."""

    invite: Invite
    stage: int  # AUTO: where the run needs it most
    state_dir: Path
    device: str = "cpu"
    threads: int = 1
    listen: tuple[str, ...] = ("/ip4/0.0.0.0/tcp/0",)
    announce: tuple[str, ...] = ()
    relays: tuple[str, ...] = ()
    behind_nat: bool = False
    serve_as_relay: bool = False
    max_memory_bytes: int = 0  # 0: what the machine has free
    max_samples_bytes: int = DEFAULT_BUDGET_BYTES  # on disk, in the state directory: what AQ-SGD remembers on each side
    max_up_bytes_per_s: float = 0.0  # 0: no cap
    max_down_bytes_per_s: float = 0.0
    name: str = ""
    may_move: bool = False  # later to another stage, when that one needs it more
    route: str = "finish-time"
    max_queue: int = 64
    drain_s: float = 60.0
    find_s: float = 0.0  # how long a run that cannot be found is looked for; 0: until its owner ends this peer
    metrics: str = ""  # HOST:PORT to serve metrics at; empty: nowhere
    metrics_announce: str = ""  # HOST:PORT under which the run's Prometheus reaches them, if that is another
    faults: Faults = field(default_factory=Faults)


def choose_device(gpu: int | None) -> str:
    """The torch device for `--gpu N`, or the CPU; HardwareError says what was found instead."""
    if gpu is None:
        return "cpu"
    count = torch.cuda.device_count() if torch.cuda.is_available() else 0
    if gpu >= count:
        names = [torch.cuda.get_device_name(i) for i in range(count)]
        found = f"found {count}: {', '.join(names)}" if count else f"found none (torch {torch.__version__})"
        raise HardwareError(f"there is no GPU {gpu} here; {found}", fix="choose another --gpu, or --cpu")
    return f"cuda:{gpu}"


@dataclass(frozen=True)
class Fit:
    """Memory that a stage needs at least, and what is left for what microbatches keep from forward to backward.

    With a budget below a whole graph, layers are computed again in backward.
    """

    needed_bytes: int
    available_bytes: int
    graph_budget_bytes: int


def check_fit(manifest: Manifest, options: PeerOptions) -> Fit:
    """Refuse a stage that does not fit the device's memory (or `--max-memory`)."""
    if not 0 <= options.stage < manifest.stages.count:
        raise HardwareError(
            f"there is no stage {options.stage}: the run has stages 0 to {manifest.stages.count - 1}",
            fix="choose another --stage",
        )
    plan = plan_stages(manifest)[options.stage]
    fixed = stage_memory(manifest, plan) + plan.num_parameters * _SHARE_BYTES_PER_PARAMETER + _PROCESS_BYTES
    available = options.max_memory_bytes or free_bytes(options.device)
    whole, layered = (activations(manifest, plan, recomputes=recomputes) for recomputes in (False, True))
    needed = fixed + layered.kept_bytes + layered.peak_bytes
    if needed > available:
        raise HardwareError(
            f"stage {options.stage} needs about {show_gb(needed)}, there are {show_gb(available)}",
            fix="choose a smaller stage, free memory, or raise --max-memory",
        )
    if fixed + whole.kept_bytes + whole.peak_bytes > available:  # layers are computed again
        budget = max(layered.kept_bytes, (available - fixed - layered.peak_bytes) // 4)
        return Fit(needed, available, min(budget, whole.kept_bytes - 1))
    return Fit(needed, available, max(whole.kept_bytes, (available - fixed - whole.peak_bytes) // 4))


def fitting_stages(manifest: Manifest, options: PeerOptions) -> list[int]:
    """The stages that this machine's memory holds; HardwareError if there is none."""
    stages = []
    for stage in range(manifest.stages.count):
        try:
            check_fit(manifest, replace(options, stage=stage))
            stages.append(stage)
        except HardwareError as error:
            refused = error
    if not stages:
        raise refused
    return stages
