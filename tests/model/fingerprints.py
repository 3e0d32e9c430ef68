"""What two machines must agree on, printed: run as a program it stands for another volunteer's machine."""

from __future__ import annotations

import sys

import torch

from swarmtrain.model.adamw import apply_adamw
from swarmtrain.model.initial import draw_normal
from swarmtrain.model.state import StageState
from swarmtrain.model.subspace import tensor_digest
from swarmtrain.model.worker import StageWorker
from swarmtrain.run.presets import preset

from .chains import tiny


def fingerprints() -> list[str]:
    """U, T, all initial tensors of two runs, the squared norm of a gradient, the state after three steps from it."""
    found: list[str] = []
    for manifest in (tiny(), preset("nano", ["model.num_layers=4"])):
        state = StageState(manifest, 0)
        assert state.basis is not None
        assert state.module.table is not None
        found += [tensor_digest(state.basis), tensor_digest(state.module.table), state.digest()]
        worker = StageWorker(state)
        for step in range(3):
            gradient = draw_normal(step, "gradient", (state.gradient_size,)).double()
            found.append(worker.finish(gradient).hex())
            apply_adamw(state, gradient, 0.01, 1e-2)
        found.append(state.digest())
    return found


if __name__ == "__main__":
    torch.set_num_threads(int(sys.argv[1]))
    print(torch.backends.cpu.get_cpu_capability(), *fingerprints())
