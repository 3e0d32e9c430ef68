"""One torch thread in every test, since bits depend on it."""

from __future__ import annotations

import os

import pytest
import torch
from hypothesis import settings

pytest_plugins = ("needs", "side_by_side")


# The same examples every time: a suite that is green must be green again. HYPOTHESIS_PROFILE=default draws others.
settings.register_profile("same", derandomize=True)
settings.load_profile(os.environ.get("HYPOTHESIS_PROFILE", "same"))


@pytest.fixture(autouse=True, scope="session")
def _one_torch_thread() -> None:
    torch.set_num_threads(1)
