"""Freed memory goes back to the machine."""

from __future__ import annotations

import psutil
import pytest
import torch

from swarmtrain.peer.memory import give_back


def test_holes_between_living_tensors_are_given_back() -> None:
    if not give_back():
        pytest.skip("the C library has no malloc_trim")
    process = psutil.Process()
    tensors = [torch.ones(16 << 10) for _ in range(1600)]  # 64 KiB each: too small for a mapping of their own
    full = process.memory_info().rss
    del tensors[::2]  # what is freed lies between what lives
    assert give_back()
    assert process.memory_info().rss < full - 0.3 * 100 * (1 << 20)
    assert all(float(tensor[0]) == 1.0 for tensor in tensors)
