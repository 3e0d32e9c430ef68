"""The bytes of boundary tensors that `plan` and `sim` count are those that the wire codecs send."""

from __future__ import annotations

import pytest

from swarmtrain.errors import ManifestError
from swarmtrain.model.sizes import describe
from swarmtrain.model.workload import workload_of
from swarmtrain.run.presets import resolve_manifest
from swarmtrain.sim.demand import demand_of
from swarmtrain.sim.directory import link_rate, stage_bytes
from swarmtrain.sim.peer import SimPeer
from swarmtrain.sim.scenario import PeerSpec, Scenario
from swarmtrain.sim.settings import with_workload

SETTINGS = ("boundary.k=32", "sequence_length=128", "sequences_per_microbatch=4")
NUMBERS = 4 * 128 * 32
IDS = 4 * 128  # bytes: the vocabulary of nano fits one


def bytes_with(forward: str, backward: str) -> tuple[float, float]:
    found = demand_of(resolve_manifest("nano", [*SETTINGS, f"wire.forward={forward}", f"wire.backward={backward}"]))
    return (found.boundary_bytes - found.token_bytes) / NUMBERS, found.backward_bytes / NUMBERS


@pytest.mark.parametrize(
    ("forward", "backward", "expected"),
    [
        ("fp32", "fp32", (4.0, 4.0)),
        ("bf16", "bf16", (2.0, 2.0)),
        ("quant8", "quant8", (1.0, 1.0)),
        ("quant4", "quant8", (0.5, 1.0)),
        ("topk10", "topk10", (0.26, 0.2)),  # the mask travels forward only
        ("ef21-topk10", "ef21-topk10", (0.26, 0.26)),  # not the first message, which is a key-frame
        ("aqsgd-quant4", "quant8", (0.5, 1.0)),
    ],
)
def test_each_direction_has_the_bytes_of_its_codec(forward: str, backward: str, expected: tuple[float, float]) -> None:
    assert bytes_with(forward, backward) == pytest.approx(expected, rel=0.08)


def test_nothing_else_of_the_workload_changes() -> None:
    manifest = resolve_manifest("nano", ["wire.forward=quant8"])
    plain, coded = workload_of(manifest), demand_of(manifest)
    assert coded.stages == plain.stages
    assert coded.token_bytes == plain.token_bytes
    assert coded.backward_bytes == pytest.approx(plain.backward_bytes, rel=0.01)
    assert coded.boundary_bytes < 0.4 * plain.boundary_bytes


def test_the_bytes_of_a_token_are_those_of_its_numbers_and_its_id() -> None:
    manifest = resolve_manifest("nano", ["wire.forward=fp32", "wire.backward=fp32"])
    assert demand_of(manifest).wire_bytes_per_token == describe(manifest).wire_bytes_per_token


def test_a_tensor_too_large_to_be_encoded_for_this_is_counted_by_its_first_tokens() -> None:
    manifest = resolve_manifest("llama-8b", ["boundary.kind=dense", "wire.forward=quant8", "wire.backward=quant8"])
    numbers = manifest.model.sequence_length * manifest.model.hidden_size
    assert numbers > 1 << 22
    assert demand_of(manifest).backward_bytes == pytest.approx(numbers * (1 + 2 / 128), rel=0.01)


def test_a_bad_codec_is_an_error_of_the_manifest() -> None:
    with pytest.raises(ManifestError, match=r"wire\.backward"):
        demand_of(resolve_manifest("nano", ["wire.backward=quant99"]))


def test_the_simulator_sends_each_direction_with_its_own_bytes() -> None:
    manifest = resolve_manifest("nano", ["wire.forward=quant4", "wire.backward=fp32"])
    load = demand_of(manifest)
    scenario = with_workload(Scenario(), load)
    forward, back = load.boundary_bytes, load.backward_bytes
    assert forward < back
    assert stage_bytes(scenario, 0) == (back, forward)
    assert stage_bytes(scenario, 1) == (forward + back, forward + back)
    assert stage_bytes(scenario, scenario.num_stages - 1) == (forward, back)
    assert link_rate(scenario, SimPeer(0, PeerSpec(up_bytes_per_s=forward + back), 1.0)) == pytest.approx(1.0)
    assert stage_bytes(scenario.with_(backward_bytes=0.0), 1) == (2 * forward, 2 * forward)
