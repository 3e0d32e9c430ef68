"""All-reduces in a simulated swarm: a slow one goes on, a peer that hangs is left out, once."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from swarmtrain.coordinator import strikes
from swarmtrain.observe.events import PeerLost
from swarmtrain.rpc.errors import Refusal
from swarmtrain.run.presets import preset
from swarmtrain.simulated.judge import References, judge
from swarmtrain.simulated.schedule import TINY
from swarmtrain.simulated.swarm import Life, SimulatedSwarm
from swarmtrain.wire.messages import Code, FetchBasis, Prepare, Work

REFERENCES = References()
MakeSwarm = Callable[..., SimulatedSwarm]


@pytest.fixture
def make_swarm(tmp_path: Path) -> Iterator[MakeSwarm]:
    """A swarm of the tiny manifest with overrides; closed after the test."""
    swarms: list[SimulatedSwarm] = []

    def make(*overrides: str, seed: str = "1") -> SimulatedSwarm:
        swarm = SimulatedSwarm(preset("nano", [*TINY, *overrides]), seed=seed, root=tmp_path)
        swarms.append(swarm)
        return swarm.__enter__()

    yield make
    for swarm in swarms:
        swarm.close()


def run(num_stages: int, num_steps: int, *more: str) -> tuple[str, ...]:
    return (
        f"stages.count={num_stages}",
        f"model.num_layers={num_stages}",
        f"schedule.steps={num_steps}",
        "batch.microbatches_per_step=6",
        *more,
    )


def lost(swarm: SimulatedSwarm) -> list[tuple[str, str]]:
    """The lost peers and the reasons."""
    names = {life.peer_id: life.name for life in swarm.peers}
    found = [event for _, event in swarm.happened("peer_lost") if isinstance(event, PeerLost)]
    return [(names[event.peer], event.reason) for event in found]


def ends_well(swarm: SimulatedSwarm, *, limit_s: float = 600.0) -> None:
    swarm.run_to_end(limit_s=limit_s)
    assert judge(swarm, REFERENCES(swarm.manifest)) == []


def serves(swarm: SimulatedSwarm, peer: Life) -> Callable[[], bool]:
    return lambda: peer in swarm.serving()


@pytest.mark.parametrize("num_replicas", [66, pytest.param(200, marks=pytest.mark.long)])
def test_a_stage_takes_newcomers_however_many_replicas_it_has(make_swarm: MakeSwarm, num_replicas: int) -> None:
    swarm = make_swarm(*run(1 + (num_replicas < 100), 40))
    swarm.start_coordinator(min_peers=num_replicas)
    last = swarm.manifest.stages.count - 1
    for index in range(num_replicas):
        swarm.start_peer(f"peer{index}", last)
    if last:
        swarm.start_peer("first", 0)
    swarm.until(lambda: swarm.step >= 2, "two steps")
    newcomer = swarm.start_peer("newcomer", last)
    swarm.until(serves(swarm, newcomer), "the newcomer serves")
    assert len(swarm.serving(last)) > 64
    assert not swarm.faults


def test_a_copy_of_the_state_that_cannot_be_made_costs_nothing_but_the_copy(make_swarm: MakeSwarm) -> None:
    swarm = make_swarm(*run(2, 12))
    swarm.start(num_peers=4)
    swarm.until(lambda: swarm.step >= 2, "two steps")
    failing = swarm.peers[1]
    jobs: Any = failing.daemon.assignment.stage.jobs
    copy, failures = jobs.copy_state, []

    def no_memory() -> Any:
        jobs.copy_state = copy
        failures.append(swarm.step)
        raise MemoryError

    jobs.copy_state = no_memory
    newcomer = swarm.start_peer("newcomer", 1)
    swarm.until(serves(swarm, newcomer), "the newcomer serves")
    assert failures, "no copy was asked for"
    ends_well(swarm)
    assert lost(swarm) == []


def test_a_peer_that_is_in_another_step_is_not_asked_again_and_again(make_swarm: MakeSwarm) -> None:
    swarm = make_swarm(*run(2, 4))
    swarm.start(num_peers=2)
    swarm.until(lambda: swarm.step >= 1, "a step")
    handlers, asked = swarm.peers[0].daemon._handlers, []
    usual = handlers[Work]

    async def refuse(work: Work, exchange: Any) -> Any:
        asked.append(swarm.now)
        raise Refusal(Code.AHEAD, "this step is over")

    handlers[Work] = refuse
    swarm.run_for(60.0)
    assert 0 < len(asked) < 100
    handlers[Work] = usual
    ends_well(swarm)


def test_donors_of_a_basis_that_do_not_answer_cost_seconds(make_swarm: MakeSwarm) -> None:
    swarm = make_swarm(*run(2, 6, "boundary.track_every=3"))
    swarm.start_coordinator(min_peers=5)
    swarm.start_peer("first", 0)
    for index in range(4):
        swarm.start_peer(f"last{index}", 1)
    swarm.until(lambda: swarm.step >= 1, "a step")
    asked = []

    async def never(fetch: FetchBasis, exchange: Any) -> Any:
        asked.append(swarm.now)
        await asyncio.get_running_loop().create_future()

    for life in sorted(swarm.peers[1:], key=lambda life: life.peer_id)[:3]:
        life.daemon._handlers[FetchBasis] = never
    began = swarm.now
    ends_well(swarm)
    assert len(asked) >= 3
    assert swarm.now - began < 30.0


def test_an_all_reduce_over_slow_lines_takes_minutes_and_keeps_both_replicas(make_swarm: MakeSwarm) -> None:
    larger = ("model.hidden_size=64", "model.ffn_size=256", "model.vocab_size=2048")
    swarm = make_swarm(*run(2, 2, *larger))
    swarm.start(num_peers=4)
    swarm.until(lambda: len(swarm.serving()) == 4, "all serve")
    for source, target in (("peer1", "peer3"), ("peer3", "peer1")):
        swarm.network.line(source, target).bytes_per_s = 2500.0
    ends_well(swarm, limit_s=3600.0)
    seconds = [event.seconds for _, event in swarm.happened("stage_prepared") if event.stage == 1]  # type: ignore[attr-defined]
    assert len(seconds) == 2
    assert all(120.0 < value < 1200.0 for value in seconds), seconds
    assert lost(swarm) == []
    assert not swarm.happened("prepare_failed")


@pytest.mark.parametrize("narrow", ["uplink", "downlink"])
def test_a_straggler_whose_bytes_only_trickle_is_left_out(make_swarm: MakeSwarm, narrow: str) -> None:
    """At its pace a step would take hours, although bytes move all the time."""
    larger = ("model.hidden_size=64", "model.ffn_size=256", "model.vocab_size=2048")
    swarm = make_swarm(*run(2, 4, *larger))
    swarm.start_coordinator(min_peers=4)
    swarm.start_peer("first", 0)
    straggler, *others = [swarm.start_peer(f"last{index}", 1) for index in range(3)]
    swarm.until(lambda: swarm.step >= 1, "a step")
    for other in others:
        pair = (straggler.name, other.name) if narrow == "uplink" else (other.name, straggler.name)
        swarm.network.line(*pair).bytes_per_s = 400.0
    swarm.until(lambda: bool(lost(swarm)), "it is left out")
    ends_well(swarm, limit_s=7200.0)
    assert {name for name, _ in lost(swarm)} == {straggler.name}


@pytest.mark.parametrize("seed", ["1", *(pytest.param(seed, marks=pytest.mark.long) for seed in ("2", "3"))])
@pytest.mark.parametrize("index", [0, pytest.param(1, marks=pytest.mark.long)])
def test_a_peer_whose_device_hangs_costs_one_deadline_and_comes_back_when_it_answers(
    make_swarm: MakeSwarm, index: int, seed: str
) -> None:
    swarm = make_swarm(*run(2, 40), seed=seed)
    swarm.start(num_peers=4)
    swarm.until(lambda: swarm.step >= 3, "three steps")
    hung, began = swarm.peers[index], swarm.now
    hung.machine.hangs = True
    swarm.until(lambda: swarm.step >= 20, "steps without it")
    assert swarm.now - began < 17 * 0.5 + 2 * 30.0
    assert {name for name, _ in lost(swarm)} == {hung.name}
    assert len(lost(swarm)) <= 2
    hung.machine.release_device()
    swarm.until(serves(swarm, hung), "it serves again")
    ends_well(swarm)


def test_a_peer_that_hangs_without_knowing_it_costs_one_deadline_and_is_left_out_for_a_while(
    make_swarm: MakeSwarm, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(strikes, "FIRST_OUT_S", 4.0)  # so that it ends before the run
    swarm = make_swarm(*run(2, 40))
    swarm.start(num_peers=4)
    swarm.until(lambda: swarm.step >= 3, "three steps")
    hung, began = swarm.peers[1], swarm.now
    handlers = hung.daemon._handlers
    usual = handlers[Prepare]

    async def never(prepare: Prepare, exchange: Any) -> Any:
        await asyncio.get_running_loop().create_future()

    handlers[Prepare] = never
    swarm.until(lambda: bool(lost(swarm)), "it is lost")
    handlers[Prepare] = usual
    swarm.until(lambda: swarm.step >= 20, "steps without it")
    assert swarm.now - began < 17 * 0.5 + 2 * 30.0
    swarm.until(serves(swarm, hung), "it serves again")
    ends_well(swarm)
    assert [event.peer for _, event in swarm.happened("peer_suspended")] == [hung.peer_id]  # type: ignore[attr-defined]
    assert [name for name, _ in lost(swarm)] == [hung.name]
    assert "it was silent" in lost(swarm)[0][1]


def test_the_only_peer_of_a_stage_may_hang_for_minutes_and_nothing_is_lost(make_swarm: MakeSwarm) -> None:
    swarm = make_swarm(*run(2, 12))
    swarm.start(num_peers=2)
    swarm.until(lambda: swarm.step >= 3, "three steps")
    hung = swarm.peers[1]
    hung.machine.hangs = True
    swarm.run_for(200.0)
    assert swarm.step < 5
    hung.machine.release_device()
    ends_well(swarm)
    assert not swarm.happened("run_rolled_back")


def test_a_newcomer_on_a_slow_line_gets_the_state(make_swarm: MakeSwarm) -> None:
    """One chunk takes longer than any deadline of a call did."""
    larger = ("model.hidden_size=64", "model.ffn_size=256", "model.vocab_size=2048")
    swarm = make_swarm(*run(1, 2, *larger))
    swarm.start_coordinator(min_peers=1)
    keeper = swarm.start_peer("keeper", 0)
    swarm.until(lambda: swarm.step >= 1, "a step")
    keeper.process.ask("pause")
    for other in ("coordinator", "keeper"):
        swarm.network.line(other, "newcomer").bytes_per_s = 12000.0
    newcomer = swarm.start_peer("newcomer", 0)
    began = swarm.now
    swarm.until(serves(swarm, newcomer), "the newcomer serves", limit_s=2000.0)
    assert swarm.now - began > 120.0
    ends_well(swarm, limit_s=2000.0)
