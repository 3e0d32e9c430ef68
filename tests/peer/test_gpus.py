"""What is said of each GPU: which number it has, or which layer keeps it from being used."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest

from swarmtrain.peer.gpus import GpuFacts, explain, find_gpus

TWO = ("NVIDIA GeForce RTX 4090", "NVIDIA GeForce RTX 3060")
ALL = GpuFacts(on_bus=2, by_driver=TWO, by_torch=TWO, cuda="12.6", mask=None, torch="2.11.0")


def test_gpus_that_can_be_used_have_their_numbers() -> None:
    assert [(note.text, note.is_usable) for note in explain(ALL)] == [
        ("--gpu 0: NVIDIA GeForce RTX 4090", True),
        ("--gpu 1: NVIDIA GeForce RTX 3060", True),
    ]


def test_under_a_mask_the_numbers_are_those_of_the_mask() -> None:
    first, hidden = explain(replace(ALL, mask="1", by_torch=TWO[1:]))
    assert first.text == "--gpu 0: NVIDIA GeForce RTX 3060, number 0 of CUDA_VISIBLE_DEVICES=1"
    assert not hidden.is_usable
    assert "1 of 2" in hidden.text
    assert "CUDA_VISIBLE_DEVICES=1 hides them" in hidden.text
    assert "--gpu counts what it names, from 0" in hidden.fix


@pytest.mark.parametrize(
    ("changes", "reason"),
    [
        ({"by_driver": (), "by_torch": ()}, "driver is not loaded"),
        ({"by_driver": (), "by_torch": (), "cuda": "", "mask": ""}, "driver is not loaded"),  # the lowest layer first
        ({"by_torch": (), "cuda": ""}, "built without CUDA"),
        ({"by_torch": (), "mask": ""}, "hides them"),
        ({"by_torch": ()}, "does not find them"),
    ],
)
def test_the_lowest_layer_in_the_way_is_named_with_a_fix(changes: dict[str, object], reason: str) -> None:
    (note,) = explain(replace(ALL, **changes))  # type: ignore[arg-type]
    assert reason in note.text
    assert note.fix


def test_a_machine_without_gpus_has_nothing_to_explain() -> None:
    assert explain(replace(ALL, on_bus=0, by_driver=(), by_torch=())) == []


def test_bus_and_driver_are_read(tmp_path: Path) -> None:
    for name, vendor, kind in (("a", "0x10de", "0x030000"), ("b", "0x10de", "0x040300"), ("c", "0x8086", "0x030000")):
        device = tmp_path / "sys/bus/pci/devices" / name
        device.mkdir(parents=True)
        (device / "vendor").write_text(f"{vendor}\n")
        (device / "class").write_text(f"{kind}\n")
    driver = tmp_path / "proc/driver/nvidia/gpus/0000:01:00.0"
    driver.mkdir(parents=True)
    (driver / "information").write_text("Model: \t\t NVIDIA GeForce RTX 4090\nIRQ: 55\n")
    found = find_gpus(tmp_path)
    assert (found.on_bus, found.by_driver) == (1, TWO[:1])
    assert find_gpus(tmp_path / "empty").on_bus == 0
