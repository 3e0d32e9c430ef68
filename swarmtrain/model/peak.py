"""What a device reaches at best: a plain product of matrices. The yardstick of model FLOPs utilisation."""

from __future__ import annotations

import time

import torch

_SIDE = {"cpu": 2048, "cuda": 8192}  # of the matrices
_LASTS_S = 0.5


def measured_peak(device: torch.device | str, dtype: torch.dtype) -> float:
    """TFLOP/s, the best of some products. It takes half a second."""
    device = torch.device(device)
    side = _SIDE[device.type]
    left, right = (torch.ones(side, side, device=device, dtype=dtype) for _ in range(2))
    best_s, ends_at = float("inf"), time.perf_counter() + _LASTS_S
    while True:
        started = time.perf_counter()
        left @ right
        wait_for(device)
        now = time.perf_counter()
        best_s = min(best_s, now - started)
        if now >= ends_at:
            return 2.0 * side**3 / best_s / 1e12


def wait_for(device: torch.device | str) -> None:
    """Until a graphics card has done all that it was given."""
    if torch.device(device).type == "cuda":
        torch.cuda.synchronize(device)
