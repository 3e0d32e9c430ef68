"""Parameters and moments on the host: the device computes with copies, and every bit stays as it was.

Here device and host are one CPU, so what is shown is that nothing reads across: the copies are tensors of their own.
"""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import pytest
import torch
from runs import KINDS, small
from torch import Tensor

from swarmtrain.errors import HardwareError
from swarmtrain.model.exact import ExactSum
from swarmtrain.model.footprint import Offload
from swarmtrain.model.room import Room
from swarmtrain.model.state import StageState
from swarmtrain.model.worker import StageWorker
from swarmtrain.peer.options import choose_device
from swarmtrain.reference import ReferenceTrainer
from swarmtrain.run.manifest import Manifest

STEPS = 4
DELAYED = ("schedule.delay=1", f"schedule.steps={STEPS}")
MUON = ("optimizer.kind=muon", "optimizer.learning_rate=0.02")
RUNS = {
    **{kind: (f"boundary.kind={kind}",) for kind in KINDS},
    "tied": ("model.tie_embeddings=true",),
    "muon, delayed": (*DELAYED, *MUON),
    "delayed, predicted": (*DELAYED, "schedule.predict=true"),
    "delayed, predicted, checkpoints": (*DELAYED, "schedule.predict=true", "checkpoint.every=2"),
    "tracked": ("boundary.track_every=2", "boundary.track_rate=0.5"),
    "tracked, delayed": (*DELAYED, "boundary.track_every=2"),
    "bf16": ("model.precision=bf16", "boundary.table=signs", *DELAYED, "schedule.predict=true", *MUON),
    "bf16, synchronous": ("model.precision=bf16",),
    "lowrank": (*DELAYED, "reduce.codec=lowrank400", *MUON),
}


def trained(manifest: Manifest, offload: Offload, out: Path | None = None) -> list[Any]:
    """Loss, norm, validation loss and the digests of all stages, after each step."""
    trainer = ReferenceTrainer(manifest, offload=offload, out=out)
    found: list[Any] = [[worker.state.digest() for worker in trainer.workers]]
    for _ in range(STEPS):
        loss, norm, _ = trainer.step()
        found.append((loss, norm, trainer.validate(), [worker.state.digest() for worker in trainer.workers]))
    return found


@pytest.mark.parametrize("run", RUNS)
def test_every_bit_is_as_without(run: str) -> None:
    manifest = small(f"schedule.steps={STEPS}", *RUNS[run])
    plain = trained(manifest, Offload.NOTHING)
    assert plain[-1][-1] != plain[0]
    for offload in (Offload.STATE, Offload.SUMS):
        assert trained(manifest, offload) == plain


@pytest.mark.parametrize("settings", [(), DELAYED, ("model.precision=bf16", *DELAYED)])
def test_the_device_never_computes_with_the_hosts_tensors(settings: tuple[str, ...]) -> None:
    state = StageState(small(*settings), 1, offload=Offload.STATE)
    own = state.parameters.untyped_storage().data_ptr()
    for weights in (state.newest, state.weights(0), state.weights(1)):
        assert weights.flat.untyped_storage().data_ptr() != own
    assert state.basis is not None
    assert state.module.basis is not None
    assert state.module.basis.data_ptr() != state.basis.data_ptr()


def test_control_without_it_they_are_one() -> None:
    state = StageState(small(), 1)
    assert state.newest.flat is state.parameters
    assert state.room.bytes_to_device == 0


class Counted(Room):
    """A device whose copies are watched."""

    def __init__(self, offload: Offload) -> None:
        super().__init__("cpu", offload)
        self.uploads: list[int] = []
        self.downloads: list[int] = []
        self.num_ready = 0

    def upload(self, into: Tensor, source: Tensor) -> None:
        self.uploads.append(into.numel())
        super().upload(into, source)

    def ready(self) -> None:
        self.num_ready += 1

    def for_sum(self, gradient: Tensor) -> Tensor:
        self.downloads.append(gradient.numel())
        return super().for_sum(gradient)


@pytest.mark.parametrize("delay", [0, 1])
def test_one_copy_for_each_step_and_one_of_each_gradient(delay: int) -> None:
    manifest = small(f"schedule.delay={delay}", f"schedule.steps={STEPS}")
    state = StageState(manifest, 1, offload=Offload.SUMS)
    state.room = room = Counted(Offload.SUMS)
    worker = StageWorker(state)
    tokens = torch.zeros((2, 17), dtype=torch.int64)
    size = state.parameters.numel()
    for step in range(STEPS):
        for _ in range(3):
            done = worker.forward(tokens, torch.ones(2, 16, 8))
            worker.backward_into_sum(done, torch.full_like(done.output, 1e-3))
        assert room.num_ready == 3 * (step + 1)
        total = worker.reduced_sum()
        worker.finish(total)
        worker.apply(total, 1.0, 1e-3)
        worker.enter_step()
    num_uploads = STEPS + delay  # the last state is a barrier: both steps' weights would be it
    assert room.uploads == [size] * num_uploads
    assert sum(room.downloads) == 3 * STEPS * state.plan.num_parameters
    assert room.bytes_to_device == 4 * size * num_uploads
    assert room.bytes_to_host == 4 * sum(room.downloads)


def test_sums_stay_on_the_device_where_they_may() -> None:
    room = Room("cpu", Offload.STATE)
    gradient = torch.ones(3)
    assert room.for_sum(gradient) is gradient
    assert room.bytes_to_host == 0
    meta = Room("meta", Offload.STATE)
    assert (meta.home.type, meta.sums.type) == ("cpu", "meta")
    assert Room("meta", Offload.SUMS).sums.type == "cpu"
    assert Room("meta").home.type == "meta"


def test_on_a_device_apart_a_stage_holds_only_what_it_computes_with() -> None:
    """On `meta`, whose tensors cannot be read: whatever is not a copy, U, T or a sum is on the host."""
    state = StageState(small(*DELAYED, "schedule.predict=true"), 1, device="meta", offload=Offload.STATE)
    assert {tensor.device.type for tensor in (state.parameters, state.first_moment, state.second_moment)} == {"cpu"}
    assert {parameter.device.type for parameter in state.weights(1).module.parameters()} == {"meta"}
    assert {buffer.device.type for buffer in state.module.buffers()} == {"meta"}
    total = StageWorker(state).sum
    assert isinstance(total, ExactSum)
    assert total.total.device.type == "meta"
    sums = StageWorker(StageState(small(), 1, device="meta", offload=Offload.SUMS)).sum
    assert sums.total.device.type == "cpu"


class Cards:
    """A machine with three graphics cards, as torch shows it: CUDA_VISIBLE_DEVICES says which, and in which order."""

    names = ("large", "small", "middle")

    def visible(self) -> list[str]:
        said = os.environ.get("CUDA_VISIBLE_DEVICES")
        chosen = range(3) if said is None else [int(item) for item in said.split(",") if item]
        return [self.names[index] for index in chosen]


@pytest.mark.parametrize(
    ("said", "found"), [(None, ["large", "small", "middle"]), ("2,0", ["middle", "large"]), ("", [])]
)
def test_cards_are_counted_among_those_that_are_visible(
    monkeypatch: pytest.MonkeyPatch, said: str | None, found: list[str]
) -> None:
    cards = Cards()
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
    if said is not None:
        monkeypatch.setenv("CUDA_VISIBLE_DEVICES", said)
    monkeypatch.setattr(torch.cuda, "is_available", lambda: bool(cards.visible()))
    monkeypatch.setattr(torch.cuda, "device_count", lambda: len(cards.visible()))
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda index: cards.visible()[index])
    assert [choose_device(number) for number in range(len(found))] == [f"cuda:{number}" for number in range(len(found))]
    with pytest.raises(HardwareError) as refused:
        choose_device(len(found))
    text = str(refused.value)
    assert ", ".join(found) in text
    assert (f"CUDA_VISIBLE_DEVICES={said}" in text) is (said is not None)


def test_a_checkpoint_of_the_one_continues_as_the_other(tmp_path: Path) -> None:
    manifest = small(*DELAYED, "schedule.steps=4", "checkpoint.every=2")
    whole = ReferenceTrainer(manifest)
    for _ in range(4):
        whole.step()
    first = ReferenceTrainer(manifest, out=tmp_path, offload=Offload.SUMS)
    for _ in range(2):
        first.step()
    first.save()
    second = ReferenceTrainer(manifest, out=tmp_path)
    assert second.steps_done == 2
    third = ReferenceTrainer(manifest, out=tmp_path, offload=Offload.STATE)
    for trainer in (second, third):
        for _ in range(2):
            trainer.step()
        assert [w.state.digest() for w in trainer.workers] == [w.state.digest() for w in whole.workers]
