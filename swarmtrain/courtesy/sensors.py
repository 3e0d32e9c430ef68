"""What a machine says of itself and its owner: load, keystrokes, programs, the GPU. Thin: it judges nothing."""

from __future__ import annotations

import glob
import os
from collections.abc import Callable, Iterable
from typing import Any, Protocol

import psutil

from swarmtrain import world
from swarmtrain.courtesy.nvml import GpuSensor, Nvml, NvmlError, physical_gpu
from swarmtrain.courtesy.rules import Rules, Seen
from swarmtrain.errors import HardwareError

TERMINALS = ("/dev/tty[0-9]*", "/dev/pts/[0-9]*")  # reading a terminal sets its access time: `w` shows idleness by it
MAX_SHOWN = 40  # characters of a process's name


class Sensors(Protocol):
    """What the policy is told of the machine."""

    def check(self, rules: Rules) -> None:
        """HardwareError if a rule asks for what this machine cannot say. May block."""

    def look(self, rules: Rules) -> Seen:
        """What is asked by `rules`. May block."""


class MachineSensors:
    """This computer's."""

    def __init__(self, gpu_index: int | None, open_gpu: Callable[[int | str], GpuSensor] = Nvml) -> None:
        """`gpu_index` as CUDA counts; None: the peer computes on no GPU."""
        self._gpu_index, self._open_gpu = gpu_index, open_gpu
        self._gpu: GpuSensor | None = None
        self._own = psutil.Process()
        self._used: tuple[float, float, float] | None = None  # of all, of this daemon, of all processors together

    def check(self, rules: Rules) -> None:
        """See `Sensors`."""
        if not rules.needs_gpu:
            return
        if self._gpu_index is None:
            raise HardwareError("a limit of the GPU was given, and this peer computes on the CPU", fix="add --gpu N")
        try:
            self._gpu = self._open_gpu(physical_gpu(self._gpu_index, os.environ.get("CUDA_VISIBLE_DEVICES")))
        except NvmlError as error:
            raise HardwareError(
                f"the GPU does not say how warm it is or who uses it: {error}",
                fix="leave out the limits of the GPU, or install NVIDIA's driver",
            ) from error
        facts = self._gpu.look()
        for option, is_wanted, is_told in (
            ("--max-gpu-temperature", rules.max_gpu_celsius > 0, facts.celsius is not None),
            ("--max-gpu-power", rules.max_gpu_watts > 0, facts.watts is not None),
            ("--yield-gpu", rules.yields_gpu, facts.busy_pids is not None),
        ):
            if is_wanted and not is_told:
                raise HardwareError(f"this GPU's driver does not say what {option} asks", fix=f"leave out {option}")

    def look(self, rules: Rules) -> Seen:
        """See `Sensors`."""
        gpu = self._gpu.look() if self._gpu is not None and rules.needs_gpu else None
        return Seen(
            others_cpu=self._others_cpu() if rules.idle_s else None,
            input_idle_s=_input_idle_s() if rules.idle_s else None,
            programs=running_programs(rules.programs, _process_names()) if rules.programs else (),
            gpu_users=self._others(gpu.busy_pids or ()) if gpu is not None and rules.yields_gpu else (),
            gpu_celsius=gpu.celsius if gpu is not None else None,
            gpu_watts=gpu.watts if gpu is not None else None,
        )

    def _others_cpu(self) -> float | None:
        """The share of all processors that went to others since the last look. What is niced is background, whoever's
        it is: so peers of one machine do not hold each other up, nor a peer itself."""
        all_times = psutil.cpu_times()
        busy_s = float(all_times.user + all_times.system)
        own_s, now = self._own_s(), world.monotonic()
        before, self._used = self._used, (busy_s, own_s, now)
        if before is None or now <= before[2]:
            return None
        others_s = (busy_s - before[0]) - max(0.0, own_s - before[1])
        return max(0.0, min(1.0, others_s / ((now - before[2]) * (psutil.cpu_count() or 1))))

    def _own_s(self) -> float:
        """Processor seconds of this daemon and its children that are in the machine's count of busy ones."""
        total = 0.0
        for process in (self._own, *_children(self._own)):
            try:
                times, nice = process.cpu_times(), process.nice()
            except psutil.Error:
                continue
            is_niced = isinstance(nice, int) and nice > 0 and hasattr(psutil.cpu_times(), "nice")
            total += times.system + (0.0 if is_niced else times.user)
        return total

    def _others(self, pids: Iterable[int]) -> tuple[str, ...]:
        own = {self._own.pid, *(child.pid for child in _children(self._own))}
        return tuple(name for pid in pids if pid not in own and (name := _name_of(pid)) is not None)


def running_programs(wanted: Iterable[str], names: Iterable[str]) -> tuple[str, ...]:
    """The wanted names that are among the running ones; neither case nor `.exe` matters."""
    running = {_plain(name) for name in names}
    return tuple(name for name in wanted if _plain(name) in running)


def _plain(name: str) -> str:
    return os.path.basename(name).casefold().removesuffix(".exe")


def _process_names() -> set[str]:
    """Of a program, of its file and of what an interpreter or Wine runs: the kernel keeps 15 characters of a name."""
    names: set[str] = set()
    for process in psutil.process_iter(["name", "cmdline"]):
        names.add(process.info["name"] or "")
        names.update(part.replace("\\", "/") for part in (process.info["cmdline"] or ())[:2])
    return names


def _children(process: Any) -> list[Any]:
    try:
        found: list[Any] = process.children(recursive=True)
    except psutil.Error:
        return []
    return found


def _name_of(pid: int) -> str | None:
    """None: it has ended, or the driver counts as a container's host does, and then it may be this very one."""
    try:
        return str(psutil.Process(pid).name())[:MAX_SHOWN]
    except psutil.NoSuchProcess:
        return None
    except psutil.Error:
        return f"process {pid}"


def _input_idle_s() -> float | None:
    """Since somebody typed on a terminal of this machine, by ssh as well; None if there is no terminal."""
    times = []
    for pattern in TERMINALS:
        for path in glob.glob(pattern):
            try:
                times.append(os.stat(path).st_atime)
            except OSError:
                continue
    return max(0.0, world.wall() - max(times)) if times else None
