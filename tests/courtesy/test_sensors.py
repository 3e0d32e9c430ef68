"""What this machine says of itself, and a GPU through a library that is not NVIDIA's."""

from __future__ import annotations

import ctypes
import os
import subprocess
import sys
from types import SimpleNamespace
from typing import Any

import psutil
import pytest

from swarmtrain import world
from swarmtrain.courtesy.nvml import GpuFacts, Nvml, physical_gpu
from swarmtrain.courtesy.rules import Rules
from swarmtrain.courtesy.sensors import MachineSensors, running_programs
from swarmtrain.errors import HardwareError

NOBODY = 2**31 - 1  # more than any system counts: of a process that has ended, or as the host of a container counts
GAME = f"a-game-of-{os.getpid()}"  # other tests of this machine have their own


class FakeLibrary:
    """libnvidia-ml with one GPU."""

    def __init__(self, processes: list[tuple[int, int, int]], *, without: tuple[str, ...] = (), code: int = 0) -> None:
        """`processes`: id, time of the sample, percent. `without`: calls that it has not."""
        self.processes, self._without, self._code = processes, without, code
        self.opened: list[int | bytes] = []

    def __getattribute__(self, name: str) -> Any:
        if name.startswith("nvml") and name in object.__getattribute__(self, "_without"):
            raise AttributeError(name)
        return object.__getattribute__(self, name)

    def nvmlInit_v2(self) -> int:
        return self._code

    def nvmlDeviceGetHandleByIndex_v2(self, index: ctypes.c_uint, device: Any) -> int:
        self.opened.append(index.value)
        return 0 if index.value < 4 else 2

    def nvmlDeviceGetHandleByUUID(self, name: ctypes.c_char_p, device: Any) -> int:
        self.opened.append(name.value or b"")
        return 0

    def nvmlDeviceGetTemperature(self, device: Any, kind: ctypes.c_int, value: Any) -> int:
        value._obj.value = 71
        return 0

    def nvmlDeviceGetPowerUsage(self, device: Any, value: Any) -> int:
        value._obj.value = 182_500
        return 0

    def nvmlDeviceGetProcessUtilization(self, device: Any, samples: Any, count: Any, since: Any) -> int:
        new = [item for item in self.processes if item[1] > since.value]
        if not new:
            return 6
        for sample, (pid, time, percent) in zip(samples, new, strict=False):
            sample.pid, sample.timestamp, sample.sm = pid, time, percent
        count._obj.value = len(new)
        return 0


def loader(library: FakeLibrary) -> Any:
    return lambda name: library


def test_a_gpu_says_how_warm_it_is_what_it_draws_and_who_uses_it() -> None:
    library = FakeLibrary([(100, 1, 80), (200, 2, 3), (300, 2, 10)])
    gpu = Nvml(1, loader(library))
    assert gpu.look() == GpuFacts(71.0, 182.5, (100, 300))
    library.processes = [(300, 5, 90)]
    assert gpu.look().busy_pids == (300,)
    assert gpu.look().busy_pids == (), "samples that were seen do not count again"
    assert library.opened == [1]


def test_what_a_card_does_not_measure_is_unknown() -> None:
    library = FakeLibrary([], without=("nvmlDeviceGetPowerUsage", "nvmlDeviceGetProcessUtilization"))
    assert Nvml(0, loader(library)).look() == GpuFacts(71.0, None, None)
    sensors = MachineSensors(0, lambda name: Nvml(name, loader(library)))
    sensors.check(Rules(max_gpu_celsius=80.0))
    for rules, option in ((Rules(max_gpu_watts=200.0), "--max-gpu-power"), (Rules(yields_gpu=True), "--yield-gpu")):
        with pytest.raises(HardwareError, match=option):  # it would never pause, and nobody would know
            sensors.check(rules)


def missing(name: str) -> Any:
    raise OSError(name)


@pytest.mark.parametrize(
    "load", [missing, loader(FakeLibrary([], code=9)), loader(FakeLibrary([], without=("nvmlInit_v2",)))]
)
def test_a_limit_of_a_gpu_that_says_nothing_is_refused_with_what_to_do(load: Any) -> None:
    sensors = MachineSensors(0, lambda name: Nvml(name, load))
    sensors.check(Rules())
    with pytest.raises(HardwareError, match="does not say how warm it is") as caught:
        sensors.check(Rules(max_gpu_celsius=80.0))
    assert caught.value.fix
    with pytest.raises(HardwareError, match="computes on the CPU"):
        MachineSensors(None).check(Rules(yields_gpu=True))


def test_other_processes_on_the_gpu_are_named_and_this_one_is_not(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
    library = FakeLibrary([(os.getpid(), 1, 99), (os.getppid(), 1, 50), (NOBODY, 1, 90)])
    rules = Rules(yields_gpu=True, max_gpu_celsius=80.0)
    sensors = MachineSensors(0, lambda name: Nvml(name, loader(library)))
    sensors.check(rules)  # what was before does not count
    library.processes = [(pid, 2, percent) for pid, _, percent in library.processes]
    seen = sensors.look(rules)
    assert len(seen.gpu_users) == 1
    assert (seen.gpu_celsius, seen.gpu_watts) == (71.0, 182.5)


@pytest.mark.parametrize(
    ("index", "mask", "expected"),
    [(0, None, 0), (1, None, 1), (0, "2,3", 2), (1, "2, 3", 3), (0, "GPU-abc", "GPU-abc"), (5, "2", 5), (0, "", "")],
)
def test_the_gpu_that_cuda_means_is_the_one_that_is_asked(index: int, mask: str | None, expected: int | str) -> None:
    assert physical_gpu(index, mask) == expected
    if isinstance(expected, str) and expected:
        library = FakeLibrary([])
        Nvml(expected, loader(library))
        assert library.opened == [expected.encode()]


@pytest.mark.parametrize(
    ("wanted", "names", "found"),
    [
        (("Game.exe",), ["game"], ("Game.exe",)),
        (("game",), ["C:/Games/GAME.EXE"], ("game",)),
        (("game",), ["gamemode", "mygame", ""], ()),
        (("one", "two"), ["two"], ("two",)),
    ],
)
def test_a_program_is_found_by_its_whole_name(
    wanted: tuple[str, ...], names: list[str], found: tuple[str, ...]
) -> None:
    assert running_programs(wanted, names) == found


def test_a_program_that_runs_here_is_seen_until_it_has_ended() -> None:
    rules, sensors = Rules(programs=(GAME,)), MachineSensors(None)
    assert sensors.look(rules).programs == ()
    command = [sys.executable, "-c", "import sys; print(flush=True); sys.stdin.read()"]
    with subprocess.Popen(
        [GAME, *command[1:]], executable=sys.executable, stdin=subprocess.PIPE, stdout=subprocess.PIPE
    ) as game:
        assert game.stdout is not None
        game.stdout.readline()
        assert sensors.look(rules).programs == (GAME,)
        game.communicate()
    assert sensors.look(rules).programs == ()


def test_what_this_process_computes_is_not_somebody_elses_use_of_the_machine(monkeypatch: pytest.MonkeyPatch) -> None:
    """Two processors, on which 40 seconds were used within 25: 30 by this daemon, or by what steps back for others."""
    times = SimpleNamespace(user=100.0, system=50.0, nice=0.0)
    own = SimpleNamespace(user=10.0, system=5.0)
    clock = [1000.0]
    sensors = MachineSensors(None)
    monkeypatch.setattr(psutil, "cpu_times", lambda: times)
    monkeypatch.setattr(psutil, "cpu_count", lambda: 2)
    monkeypatch.setattr(world, "monotonic", lambda: clock[0])
    process = SimpleNamespace(cpu_times=lambda: own, nice=lambda: 0, children=lambda recursive: [], pid=1)
    monkeypatch.setattr(sensors, "_own", process)
    rules = Rules(idle_s=60.0)
    assert sensors.look(rules).others_cpu is None, "a share needs two looks"
    clock[0] += 25.0
    times.user, times.system, own.user, own.system = 130.0, 60.0, 35.0, 10.0
    assert sensors.look(rules).others_cpu == pytest.approx(10.0 / 50.0)
    process.nice = lambda: 10  # its user time is among the machine's niced time, which does not count at all
    sensors.look(rules)
    clock[0] += 25.0
    times.user, times.nice, own.user = 150.0, 25.0, 60.0
    assert sensors.look(rules).others_cpu == pytest.approx(20.0 / 50.0)
