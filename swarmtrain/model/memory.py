"""How much memory there is, and an error for people where a model needs more: the kernel would kill, or torch trace."""

from __future__ import annotations

import psutil
import torch

from swarmtrain.errors import HardwareError
from swarmtrain.units import show_gb


def free_bytes(device: torch.device | str = "cpu") -> int:
    """Memory of a device that is available without swapping."""
    if torch.device(device).type == "cuda":
        free, _ = torch.cuda.mem_get_info(device)
        return int(free)
    return int(psutil.virtual_memory().available)


def check_memory(needed_bytes: int, what: str) -> None:
    """HardwareError if `what` (as in "the state of stage 3") needs more than this machine has free, swap included."""
    available = free_bytes() + int(psutil.swap_memory().free)
    if needed_bytes > available:
        raise does_not_fit(needed_bytes, what, available)


def does_not_fit(needed_bytes: int, what: str, available_bytes: int) -> HardwareError:
    """The error that says what is needed and what there is."""
    return HardwareError(
        f"{what} needs about {show_gb(needed_bytes)} of memory, there are {show_gb(available_bytes)}",
        fix="free memory, take a larger machine, or a smaller model (`swarmtrain plan` says what each stage needs)",
    )
