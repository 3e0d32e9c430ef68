"""One torch thread in every test, since bits depend on it."""

from __future__ import annotations

import pytest
import torch

pytest_plugins = ("needs", "side_by_side")


@pytest.fixture(autouse=True, scope="session")
def _one_torch_thread() -> None:
    torch.set_num_threads(1)
