"""Other processes, thread counts and vector instructions find the same U, T, initial model and optimizer steps.

A child process stands for another volunteer's machine: torch is told to do without its vector kernels there.
"""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from swarmtrain.model.subspace import tensor_digest

from .chains import Chain, tiny
from .fingerprints import fingerprints

TESTS = Path(__file__).resolve().parent.parent


def child_fingerprints(threads: int, **environment: str) -> list[str]:
    answer = subprocess.run(
        [sys.executable, "-m", "model.fingerprints", str(threads)],
        cwd=TESTS,
        env={**os.environ, "PYTHONPATH": str(TESTS.parent), **environment},
        capture_output=True,
        text=True,
        timeout=600,
        check=True,
    )
    return answer.stdout.split()


def test_another_process_with_more_threads_finds_the_same_bits() -> None:
    assert child_fingerprints(2)[1:] == fingerprints()


@pytest.mark.skipif(torch.backends.cpu.get_cpu_capability() == "DEFAULT", reason="no vector kernels here to do without")
def test_a_machine_without_vector_instructions_finds_the_same_bits() -> None:
    capability, *found = child_fingerprints(1, ATEN_CPU_CAPABILITY="default")
    assert capability == "DEFAULT"
    assert found == fingerprints()


def test_every_stage_has_the_same_basis_and_table() -> None:
    chain = Chain(tiny("stages.count=8"), torch.float32)
    assert len({tensor_digest(worker.state.module.basis) for worker in chain.workers}) == 1
    assert len({tensor_digest(worker.state.module.table) for worker in chain.workers}) == 1


def test_digest_of_a_tensor_tells_values_and_shapes_apart() -> None:
    values = torch.arange(6.0)
    names = {tensor_digest(values), tensor_digest(values.view(2, 3)), tensor_digest(values.view(3, 2))}
    assert len(names) == 3
    changed = values.clone()
    changed[5] = torch.nextafter(changed[5], torch.tensor(9.0))
    assert tensor_digest(changed) not in names
    assert tensor_digest(values.view(2, 3).t().contiguous().t()) == tensor_digest(values.view(2, 3))
