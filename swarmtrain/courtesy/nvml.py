"""What NVIDIA's management library says of a GPU: temperature, power, and who uses it. By ctypes: no package is needed.

The structures are those of nvml.h, whose layout of these calls does not change within a version suffix.
"""

from __future__ import annotations

import ctypes
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Protocol

LIBRARIES = ("libnvidia-ml.so.1", "libnvidia-ml.so", "nvml.dll")
MAX_SAMPLES = 1024  # processes; more are not looked at
BUSY_PERCENT = 10  # of the GPU's multiprocessors, below which a desktop's own drawing stays
_SUCCESS = 0
_NOT_FOUND = 6  # no process has used the GPU since then
_TEMPERATURE_GPU = 0


class NvmlError(Exception):
    """A call failed."""

    def __init__(self, text: str, code: int | None = None) -> None:
        """`code` is the library's; None: it was not asked."""
        super().__init__(text)
        self.code = code


class _Sample(ctypes.Structure):
    """nvmlProcessUtilizationSample_t"""

    _fields_ = (
        ("pid", ctypes.c_uint),
        ("timestamp", ctypes.c_ulonglong),
        ("sm", ctypes.c_uint),
        ("memory", ctypes.c_uint),
        ("encoder", ctypes.c_uint),
        ("decoder", ctypes.c_uint),
    )


@dataclass(frozen=True)
class GpuFacts:
    """One look at one GPU. None: it does not say."""

    celsius: float | None
    watts: float | None
    busy_pids: tuple[int, ...] | None  # processes that computed or drew since the last look


class GpuSensor(Protocol):
    """One GPU."""

    def look(self) -> GpuFacts:
        """What it says now."""


class Nvml:
    """One GPU, through the library."""

    def __init__(self, name: int | str, load: Callable[[str], Any] = ctypes.CDLL) -> None:
        """A GPU by its number or its identity. NvmlError if there is no library, no driver or no such GPU."""
        self._library = _load(load)
        self._call("nvmlInit_v2")
        self._device = ctypes.c_void_p()
        if isinstance(name, int):
            self._call("nvmlDeviceGetHandleByIndex_v2", ctypes.c_uint(name), ctypes.byref(self._device))
        else:
            self._call("nvmlDeviceGetHandleByUUID", ctypes.c_char_p(name.encode()), ctypes.byref(self._device))
        self._seen_until = ctypes.c_ulonglong(0)

    def look(self) -> GpuFacts:
        """See `GpuSensor`."""
        milliwatts = self._number("nvmlDeviceGetPowerUsage")
        return GpuFacts(
            self._number("nvmlDeviceGetTemperature", ctypes.c_int(_TEMPERATURE_GPU)),
            None if milliwatts is None else milliwatts / 1000.0,
            self._busy_pids(),
        )

    def _number(self, name: str, *arguments: Any) -> float | None:
        value = ctypes.c_uint()
        try:
            self._call(name, self._device, *arguments, ctypes.byref(value))
        except NvmlError:
            return None  # laptops and older cards do not measure everything
        return float(value.value)

    def _busy_pids(self) -> tuple[int, ...] | None:
        """By samples of the driver since the last look; None where it takes none, as in WSL."""
        count = ctypes.c_uint(MAX_SAMPLES)
        samples = (_Sample * MAX_SAMPLES)()
        try:
            self._call("nvmlDeviceGetProcessUtilization", self._device, samples, ctypes.byref(count), self._seen_until)
        except NvmlError as error:
            return () if error.code == _NOT_FOUND else None
        found = samples[: min(count.value, MAX_SAMPLES)]
        self._seen_until = ctypes.c_ulonglong(max([self._seen_until.value, *(sample.timestamp for sample in found)]))
        return tuple(sorted({sample.pid for sample in found if sample.sm >= BUSY_PERCENT}))

    def _call(self, name: str, *arguments: Any) -> None:
        try:
            code = getattr(self._library, name)(*arguments)
        except AttributeError as error:
            raise NvmlError(f"this driver has no {name}") from error
        if code != _SUCCESS:
            raise NvmlError(f"{name} failed with code {code}", code)


def physical_gpu(index: int, mask: str | None) -> int | str:
    """The GPU that CUDA calls `index` under CUDA_VISIBLE_DEVICES, as the driver calls it: its number or identity."""
    names = [name.strip() for name in (mask or "").split(",")]
    if mask is None or index >= len(names):
        return index
    return int(names[index]) if names[index].isdecimal() else names[index]


def _load(load: Callable[[str], Any]) -> Any:
    for name in LIBRARIES:
        try:
            return load(name)
        except OSError:
            continue
    raise NvmlError("NVIDIA's management library is not installed")
