"""Which GPUs this machine has, and for each of them why it can or cannot be used. `explain` is pure."""

from __future__ import annotations

import os
from dataclasses import dataclass
from pathlib import Path

import torch

MASK = "CUDA_VISIBLE_DEVICES"
_NVIDIA = "0x10de"  # the vendor's number on the PCI bus
_DISPLAY = "0x03"  # the class of display controllers: the same card also has an audio device


@dataclass(frozen=True)
class GpuFacts:
    """What each layer says, from the hardware upwards."""

    on_bus: int  # NVIDIA display devices on the PCI bus
    by_driver: tuple[str, ...]  # names that the loaded driver gives
    by_torch: tuple[str, ...]  # names of the devices that `--gpu 0`, `--gpu 1`, ... are
    cuda: str  # the version of CUDA that torch is built for; empty: none
    mask: str | None  # $CUDA_VISIBLE_DEVICES
    torch: str  # its version


@dataclass(frozen=True)
class GpuNote:
    """About one GPU, or about all: whether it can be used, and if not, what to do."""

    text: str
    is_usable: bool
    fix: str = ""


def find_gpus(root: Path = Path("/")) -> GpuFacts:
    """Look at the bus, the driver and torch. Starts no process."""
    count = torch.cuda.device_count() if torch.cuda.is_available() else 0
    return GpuFacts(
        on_bus=sum(map(_is_nvidia, root.glob("sys/bus/pci/devices/*"))),
        by_driver=tuple(_model(path) for path in sorted(root.glob("proc/driver/nvidia/gpus/*/information"))),
        by_torch=tuple(torch.cuda.get_device_name(number) for number in range(count)),
        cuda=torch.version.cuda or "",
        mask=os.environ.get(MASK),
        torch=torch.__version__,
    )


def explain(facts: GpuFacts) -> list[GpuNote]:
    """One note for each GPU that can be used, and one for those that cannot; empty if there is none at all."""
    under_mask = f", number {{}} of {MASK}={facts.mask}" if facts.mask is not None else ""
    notes = [
        GpuNote(f"--gpu {number}: {name}{under_mask.format(number)}", is_usable=True)
        for number, name in enumerate(facts.by_torch)
    ]
    there = max(facts.on_bus, len(facts.by_driver))
    if there > len(facts.by_torch):
        names = f" ({', '.join(facts.by_driver)})" if facts.by_driver else ""
        what = f"{there - len(facts.by_torch)} of {there} NVIDIA GPUs{names} cannot be used: "
        notes.append(_why_not(facts, what))
    return notes


def _why_not(facts: GpuFacts, what: str) -> GpuNote:
    """The lowest layer that stands in the way."""
    if not facts.by_driver and not facts.by_torch:
        return GpuNote(
            f"{what}its driver is not loaded",
            is_usable=False,
            fix="install NVIDIA's driver, and restart; in a container, start it with --gpus all",
        )
    if not facts.cuda:
        return GpuNote(
            f"{what}torch {facts.torch} is built without CUDA",
            is_usable=False,
            fix="install torch of the same version from PyTorch's CUDA index (docs/guide-volunteer.md)",
        )
    if facts.mask is not None:
        return GpuNote(
            f"{what}{MASK}={facts.mask} hides them from this program",
            is_usable=False,
            fix=f"unset {MASK}, or name there what may be used: --gpu counts what it names, from 0",
        )
    return GpuNote(
        f"{what}torch {facts.torch}, built for CUDA {facts.cuda}, does not find them",
        is_usable=False,
        fix="the driver may be older than this CUDA: update it, or install torch for an older CUDA",
    )


def _is_nvidia(device: Path) -> bool:
    return _read(device / "vendor") == _NVIDIA and _read(device / "class").startswith(_DISPLAY)


def _model(path: Path) -> str:
    lines = (line.partition(":") for line in _read(path).splitlines())
    return next((value.strip() for name, _, value in lines if name.strip() == "Model"), "NVIDIA GPU")


def _read(path: Path) -> str:
    try:
        return path.read_text(errors="replace")[:4096].strip()
    except OSError:
        return ""
