"""Stages of several groups: all-reduces in two levels, and peers that die or fall silent in the second one."""

from __future__ import annotations

import asyncio
import sys
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any

import pytest

from swarmtrain.model.reduce_bytes import MAX_GROUP
from swarmtrain.reduce.all_reduce import AllReduce
from swarmtrain.reduce.groups import Groups
from swarmtrain.reduce.shares import CodedShares, ExactShares
from swarmtrain.simulated.judge import References
from swarmtrain.simulated.swarm import Life, SimulatedSwarm

from .conftest import Make
from .scenes import assert_as_good_as_reference, assert_reference, every_other, said, tiny, wait_serving, wait_step

LARGEST = 3  # members of a group
NUM_REPLICAS = 7  # so: two columns, three groups, and a peer that owns nothing


@dataclass
class SecondLevel:
    """What owners pass on between groups; one of them may never come to it."""

    seen: list[tuple[str, int, int]] = field(default_factory=list)  # owner, step, group of the root
    groups: dict[str, Groups] = field(default_factory=dict)  # as each owner has seen them last
    silent: set[str] = field(default_factory=set)
    struck: list[str] = field(default_factory=list)

    def steps(self) -> set[int]:
        """In which steps there were several groups."""
        return {step for _, step, _ in self.seen}


@pytest.fixture
def second_level(monkeypatch: pytest.MonkeyPatch) -> Iterator[SecondLevel]:
    """Small groups, small pieces with parts for all of them, and a record of what happens between groups."""
    found, sum_of_part = SecondLevel(), AllReduce._sum_of_part

    async def recorded(self: AllReduce, owned: Any, part: Any, total: Any) -> Any:
        owner = self.groups.peer_id
        found.groups[owner] = self.groups
        if owner in found.silent:
            found.struck.append(owner)
            await asyncio.get_running_loop().create_future()
        found.seen.append((owner, self.prepare.step, part.root))
        return await sum_of_part(self, owned, part, total)

    monkeypatch.setattr("swarmtrain.model.reduce_bytes.MAX_GROUP", LARGEST)
    monkeypatch.setattr("swarmtrain.reduce.partition.PIECE_ELEMENTS", 1 << 10)
    for form in (ExactShares, CodedShares):
        monkeypatch.setattr(form, "unit", 256)
    monkeypatch.setattr(AllReduce, "_sum_of_part", recorded)
    yield found
    assert found.seen, "there was one group only"


def start(simulated: Make, *overrides: str) -> SimulatedSwarm:
    """Two stages; the last one has many replicas."""
    swarm = simulated(tiny("stages.count=2", "model.num_layers=2", "batch.microbatches_per_step=9", *overrides))
    swarm.start_coordinator(min_peers=1 + NUM_REPLICAS)
    swarm.start_peer("first", 0)
    for index in range(NUM_REPLICAS):
        swarm.start_peer(f"last{index}", 1)
    return swarm


def left_out(swarm: SimulatedSwarm) -> set[str]:
    """Who was lost, without those that left at the end."""
    return {event.peer for event in said(swarm, "peer_lost") if event.reason != "it has left"}  # type: ignore[attr-defined]


def an_owner(swarm: SimulatedSwarm, level: SecondLevel) -> Life:
    """A replica that has passed on a sum of its group."""
    owner = next(owner for owner, _, _ in level.seen)
    return next(life for life in swarm.peers if life.peer_id == owner)


def test_a_stage_of_several_groups_ends_in_the_bits_of_one_process(
    simulated: Make, references: References, second_level: SecondLevel
) -> None:
    swarm = start(simulated)
    assert_reference(swarm, references)
    assert second_level.steps() == set(range(5))
    assert {root for _, _, root in second_level.seen} == {0, 1, 2}
    assert len({owner for owner, _, _ in second_level.seen}) >= 6
    assert not said(swarm, "prepare_failed")


def test_both_ends_of_the_pipeline_add_up_a_tied_embedding_in_several_groups(
    simulated: Make, references: References, second_level: SecondLevel
) -> None:
    swarm = start(simulated, "model.tie_embeddings=true", "schedule.steps=3")
    assert_reference(swarm, references)
    assert "first" in {
        life.name for life in swarm.peers if life.peer_id in {owner for owner, _, _ in second_level.seen}
    }


@pytest.mark.parametrize("codec", every_other(["topk64", "bf16", "lowrank100", "int8", "powersgd2"]))
def test_groups_agree_on_compressed_gradients(
    simulated: Make, references: References, second_level: SecondLevel, codec: str
) -> None:
    swarm = start(simulated, f"reduce.codec={codec}")
    assert_as_good_as_reference(swarm, references)  # replicas had equal digests after every step
    assert second_level.steps() == set(range(5))


@pytest.mark.parametrize("ends", every_other(["killed", "stopped", "silent"]))
def test_an_owner_that_is_gone_between_its_shares_and_its_groups_sum_is_left_out(
    simulated: Make, references: References, second_level: SecondLevel, ends: str
) -> None:
    """Dead, without a sign of life, or alive and reporting: its group's sum is at no root, and all groups wait."""
    swarm = start(simulated)
    wait_step(swarm, 1)
    owner = an_owner(swarm, second_level)
    second_level.silent.add(owner.peer_id)
    swarm.until(lambda: bool(second_level.struck), "it has its group's sum")
    if ends == "killed":
        owner.kill()
    if ends == "stopped":
        owner.process.stop()
    swarm.until(lambda: bool(said(swarm, "peer_lost")), "it is left out")
    second_level.silent.clear()
    if ends == "stopped":
        owner.process.resume()
    assert_reference(swarm, references)
    assert left_out(swarm) == {owner.peer_id}
    assert said(swarm, "prepare_failed")


def test_a_member_that_sends_no_share_is_left_out_and_not_the_owners_that_wait_for_it(
    simulated: Make, references: References, second_level: SecondLevel, monkeypatch: pytest.MonkeyPatch
) -> None:
    swarm = start(simulated)
    wait_step(swarm, 1)
    silent, waited = an_owner(swarm, second_level).peer_id, []
    exchange = AllReduce._exchange

    async def never(self: AllReduce, piece: Any) -> Any:
        if self.groups.peer_id == silent and not swarm.happened("peer_lost"):
            waited.append(piece.index)
            await asyncio.get_running_loop().create_future()
        return await exchange(self, piece)

    monkeypatch.setattr(AllReduce, "_exchange", never)
    assert_reference(swarm, references)
    assert waited
    assert left_out(swarm) == {silent}


@pytest.mark.parametrize("bytes_per_s", [100.0, 400.0])
def test_a_straggler_between_groups_whose_bytes_only_trickle_is_left_out(
    simulated: Make, second_level: SecondLevel, bytes_per_s: float
) -> None:
    """Its group gets its shares in time; what it sends to other groups would take hours. Slower still, links break."""
    larger = ("model.hidden_size=64", "model.ffn_size=256", "model.vocab_size=2048", "schedule.steps=3")
    swarm = start(simulated, *larger)
    wait_step(swarm, 1)
    owner = an_owner(swarm, second_level)
    groups = second_level.groups[owner.peer_id]
    others = [life for life in swarm.peers if life.peer_id in groups.partners() - groups.members]
    assert others
    for other in others:
        swarm.network.line(owner.name, other.name).bytes_per_s = bytes_per_s
    swarm.until(lambda: bool(left_out(swarm)), "it is left out", limit_s=3600.0)
    swarm.run_to_end(limit_s=7200.0)
    assert not swarm.faults
    assert left_out(swarm) == {owner.peer_id}


def test_a_newcomer_listens_to_the_owners_of_a_group_and_then_serves(
    simulated: Make, references: References, second_level: SecondLevel
) -> None:
    swarm = start(simulated, "schedule.steps=40")
    wait_step(swarm, 2)
    newcomer = swarm.start_peer("newcomer", 1)
    wait_serving(swarm, newcomer)
    joined = swarm.step
    assert 2 <= joined < 38
    assert_reference(swarm, references)
    assert not left_out(swarm)


def test_a_stage_of_more_peers_than_a_group_holds_ends_in_the_bits_of_one_process(
    simulated: Make, references: References, monkeypatch: pytest.MonkeyPatch
) -> None:
    """With groups as large as they are: one microbatch per peer, and one more."""
    num_replicas = MAX_GROUP + 3
    swarm = simulated(
        tiny(
            "stages.count=1",
            "model.num_layers=1",
            f"batch.microbatches_per_step={num_replicas + 1}",
            "schedule.steps=2",
        )
    )
    swarm.start_coordinator(min_peers=num_replicas)
    for index in range(num_replicas):
        swarm.start_peer(f"peer{index}", 0)
    sizes: set[int] = set()
    partners = Groups.partners

    def seen(self: Groups) -> set[str]:
        sizes.add(len(self.members))
        return partners(self)

    monkeypatch.setattr(Groups, "partners", seen)
    assert_reference(swarm, references)
    assert max(sizes) == 18


@pytest.mark.parametrize("codec", ["none", "int8", "topk64"])
def test_an_owner_keeps_the_buffer_of_no_share(simulated: Make, monkeypatch: pytest.MonkeyPatch, codec: str) -> None:
    """Of shares as they come from the network: nobody else holds them when they are added."""
    holders: list[int] = []

    def free(values: Any) -> None:
        buffer = values.obj
        values.release()  # BufferError if something still looks at it
        holders.append(sys.getrefcount(buffer) - 2)  # `buffer` itself, and the argument

    monkeypatch.setattr("swarmtrain.reduce.all_reduce._free", free)
    swarm = simulated(tiny(f"reduce.codec={codec}", "schedule.steps=2"))
    swarm.start(num_peers=6)
    swarm.run_to_end()
    assert not swarm.faults
    assert holders
    assert not any(holders)
