"""How a volunteer's daemon is set up, and whether the hardware fits. Plain data and arithmetic."""

from __future__ import annotations

import hashlib
import os
from dataclasses import dataclass, field, replace
from pathlib import Path

import torch

from swarmtrain.codec.samples import DEFAULT_BUDGET_BYTES
from swarmtrain.courtesy.rules import Rules
from swarmtrain.errors import HardwareError
from swarmtrain.model.activations import activations
from swarmtrain.model.footprint import Footprint, Offload, best, choices, cpu_choices
from swarmtrain.model.layout import StagePlan, plan_stages
from swarmtrain.model.memory import free_bytes
from swarmtrain.observe.faults import Faults
from swarmtrain.run.invite import Invite
from swarmtrain.run.manifest import Manifest
from swarmtrain.units import show_gb

AUTO = -1


@dataclass(frozen=True)
class PeerOptions:
    """What `swarmtrain join` was told."""

    invite: Invite
    stage: int  # AUTO: where the run needs it most
    state_dir: Path
    device: str = "cpu"
    offload: str = "auto"  # on: parameters and moments are on the host; off: never; auto: where the device is short
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
    courtesy: Rules = field(default_factory=Rules)
    traffic_dir: Path | None = None  # where the daemons of this machine count a month's traffic; None: state_dir
    faults: Faults = field(default_factory=Faults)

    @property
    def gpu_index(self) -> int | None:
        """Of its device; None: the CPU."""
        return int(self.device.partition(":")[2]) if self.device.startswith("cuda:") else None

    @property
    def traffic_file(self) -> Path:
        """The count of this daemon's traffic."""
        name = f"{self.state_dir.name}-{hashlib.sha256(str(self.state_dir).encode()).hexdigest()[:8]}.json"
        return (self.traffic_dir or self.state_dir / "traffic") / name


def choose_device(gpu: int | None) -> str:
    """The torch device for `--gpu N`, or the CPU; HardwareError says what was found instead."""
    if gpu is None:
        return "cpu"
    count = torch.cuda.device_count() if torch.cuda.is_available() else 0
    if gpu >= count:
        names = [torch.cuda.get_device_name(i) for i in range(count)]
        found = f"found {count}: {', '.join(names)}" if count else f"found none (torch {torch.__version__})"
        if (visible := os.environ.get("CUDA_VISIBLE_DEVICES")) is not None:
            found += f" with CUDA_VISIBLE_DEVICES={visible[:80]}"
        raise HardwareError(f"there is no GPU {gpu} here; {found}", fix="choose another --gpu, or --cpu")
    return f"cuda:{gpu}"


@dataclass(frozen=True)
class Fit:
    """How a stage is hosted, and what is left for what microbatches keep from forward to backward.

    With a budget below a whole graph, layers are computed again in backward.
    """

    way: Footprint
    needed_bytes: int  # of the device
    available_bytes: int
    graph_budget_bytes: int


def check_fit(manifest: Manifest, options: PeerOptions) -> Fit:
    """Refuse a stage that does not fit the device's memory (or `--max-memory`), or the host's beside a device."""
    if not 0 <= options.stage < manifest.stages.count:
        raise HardwareError(
            f"there is no stage {options.stage}: the run has stages 0 to {manifest.stages.count - 1}",
            fix="choose another --stage",
        )
    plan = plan_stages(manifest)[options.stage]
    available = options.max_memory_bytes or free_bytes(options.device)
    if options.device == "cpu":
        ways = cpu_choices(manifest, plan, Offload.STATE if options.offload == "on" else Offload.NOTHING)
        way = best(ways, 0, available)
        if way is None:
            raise HardwareError(
                f"stage {options.stage} needs about {show_gb(ways[-1].host_bytes)}, there are {show_gb(available)}",
                fix="choose a smaller stage, free memory, or raise --max-memory",
            )
        return _fit(manifest, plan, way, way.host_bytes, available)
    ways, host = offered(choices(manifest, plan), options.offload), free_bytes()
    way = best(ways, available, host)
    if way is None:
        raise does_not_fit_device(f"stage {options.stage}", ways, available, host, options.offload)
    return _fit(manifest, plan, way, way.device_bytes, available)


def offered(ways: list[Footprint], offload: str) -> list[Footprint]:
    """Those that `--offload` leaves."""
    if offload == "off":
        return [way for way in ways if way.offload is Offload.NOTHING]
    return [way for way in ways if offload != "on" or way.offload is not Offload.NOTHING]


def does_not_fit_device(what: str, ways: list[Footprint], device: int, host: int, offload: str) -> HardwareError:
    """The error that says what the smallest way needs, what there is, and what to change."""
    least = ways[-1]
    if any(way.device_bytes <= device for way in ways):
        least = next(way for way in ways if way.device_bytes <= device)
        fix = f"{show_gb(least.host_bytes - host)} more of the machine's own memory would do, or a smaller stage"
    elif offload == "off":
        fix = "leave out --offload off, choose a smaller stage, or raise --max-memory"
    else:
        fix = "choose a smaller stage, free memory of the device, or raise --max-memory"
    return HardwareError(
        f"{what} needs about {show_gb(least.device_bytes)} of the device and {show_gb(least.host_bytes)} of the host;"
        f" there are {show_gb(device)} and {show_gb(host)}",
        fix=fix,
    )


def _fit(manifest: Manifest, plan: StagePlan, way: Footprint, needed: int, available: int) -> Fit:
    spare = available - needed + way.kept_bytes
    budget = max(way.kept_bytes, spare // 4)
    if way.recomputes:
        budget = min(budget, activations(manifest, plan, recomputes=False).kept_bytes - 1)
    return Fit(way, needed, available, budget)


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
