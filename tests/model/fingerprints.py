"""What two machines must agree on, printed: run as a program it stands for another volunteer's machine."""

from __future__ import annotations

import sys

import torch

from swarmtrain.model.adamw import apply_adamw
from swarmtrain.model.exact_matmul import Engine
from swarmtrain.model.initial import draw_normal
from swarmtrain.model.muon import apply_muon, orthogonalized
from swarmtrain.model.state import StageState
from swarmtrain.model.subspace import tensor_digest
from swarmtrain.model.worker import StageWorker
from swarmtrain.run.presets import preset

from .chains import tiny


def fingerprints() -> list[str]:
    """U, T, all initial tensors of two runs, the squared norm of a gradient, the state after three steps from it."""
    found: list[str] = []
    nano = preset("nano", ["model.num_layers=4"])
    for manifest in (tiny(), nano, tiny("boundary.table=signs")):
        state = StageState(manifest, 0)
        assert state.basis is not None
        assert state.module.table is not None
        found += [tensor_digest(state.basis), tensor_digest(state.module.table.whole()), state.digest()]
        worker = StageWorker(state)
        for step in range(3):
            gradient = draw_normal(step, "gradient", (state.gradient_size,)).double()
            found.append(worker.finish(gradient).hex())
            apply_adamw(state, gradient, 0.01, 1e-2)
        found.append(state.digest())
    return found + muon_fingerprints()


def muon_fingerprints() -> list[str]:
    """States after three steps of Muon, and matrices that are large enough for a library to cut up, by both engines."""
    found: list[str] = []
    for kind in ("subspace", "dense", "learned"):
        state = StageState(preset("nano", ["model.num_layers=4", f"boundary.kind={kind}", "optimizer.kind=muon"]), 1)
        for step in range(3):
            apply_muon(state, draw_normal(step, "gradient", (state.gradient_size,)).double(), 0.01, 0.02)
        found.append(state.digest())
    for shape in ((256, 1024), (700, 300), (40, 4096)):
        matrix = draw_normal(4, "matrix", shape)
        found += [tensor_digest(orthogonalized(matrix, engine)) for engine in Engine]
    return found


def plain_fingerprint() -> str:
    """What is not promised: a product in fp32 as the library computes it."""
    return tensor_digest(draw_normal(4, "left", (256, 1024)) @ draw_normal(4, "right", (1024, 256)))


if __name__ == "__main__":
    torch.set_num_threads(int(sys.argv[1]))
    print(torch.backends.cpu.get_cpu_capability(), plain_fingerprint(), *fingerprints())
