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
from .fingerprints import fingerprints, plain_fingerprint

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
    assert child_fingerprints(2)[2:] == fingerprints()


@pytest.mark.skipif(torch.backends.cpu.get_cpu_capability() == "DEFAULT", reason="no vector kernels here to do without")
def test_a_machine_without_vector_instructions_finds_the_same_bits() -> None:
    capability, _, *found = child_fingerprints(1, ATEN_CPU_CAPABILITY="default")
    assert capability == "DEFAULT"
    assert found == fingerprints()


# What the libraries that multiply matrices are told of the processor: MKL for fp64, oneDNN for int8.
OLDER_PROCESSORS = {
    "AVX512 without VNNI": {"MKL_ENABLE_INSTRUCTIONS": "AVX2", "ONEDNN_MAX_CPU_ISA": "AVX512_CORE"},
    "AVX2": {"MKL_ENABLE_INSTRUCTIONS": "AVX2", "ONEDNN_MAX_CPU_ISA": "AVX2"},
    "SSE": {"MKL_CBWR": "COMPATIBLE", "ONEDNN_MAX_CPU_ISA": "SSE41", "ATEN_CPU_CAPABILITY": "default"},
}


@pytest.mark.parametrize("name", OLDER_PROCESSORS)
def test_libraries_for_older_processors_multiply_to_the_same_bits(name: str) -> None:
    _, plain, *found = child_fingerprints(1, **OLDER_PROCESSORS[name])
    assert found == fingerprints()
    if name == "SSE":  # a control: these settings do choose other kernels
        assert plain != plain_fingerprint()


def test_every_stage_has_the_same_basis_and_table() -> None:
    chain = Chain(tiny("stages.count=8"), torch.float32)
    assert len({tensor_digest(worker.state.module.basis) for worker in chain.workers}) == 1
    assert len({tensor_digest(worker.state.module.table.whole()) for worker in chain.workers}) == 1


def test_digest_of_a_tensor_tells_values_and_shapes_apart() -> None:
    values = torch.arange(6.0)
    names = {tensor_digest(values), tensor_digest(values.view(2, 3)), tensor_digest(values.view(3, 2))}
    assert len(names) == 3
    changed = values.clone()
    changed[5] = torch.nextafter(changed[5], torch.tensor(9.0))
    assert tensor_digest(changed) not in names
    assert tensor_digest(values.view(2, 3).t().contiguous().t()) == tensor_digest(values.view(2, 3))
