"""schedule.delay = 1 in the simulator: the all-reduce goes on while the next step computes, on what lines have left."""

from __future__ import annotations

from collections import Counter

import pytest

from swarmtrain.run.presets import resolve_manifest
from swarmtrain.sim.all_reduce import all_reduce_seconds, moved_bytes
from swarmtrain.sim.engine import Engine
from swarmtrain.sim.leases import Leases
from swarmtrain.sim.peer import Microbatch
from swarmtrain.sim.run import Simulation, simulate
from swarmtrain.sim.scenario import ChurnEvent, PeerSpec, Scenario

STEPS = Scenario(
    num_peers=12,
    num_stages=3,
    minutes=40.0,
    warmup_minutes=10.0,
    batch=80,
    gradient_bytes=(8e8,),
    churn="none",
    rebalance="none",
    speed_spread=0.0,
)
CHURN = STEPS.with_(
    churn="exponential", rebalance="capacity", num_peers=18, mean_life_s=600.0, mean_absence_s=100.0, download_s=10.0
)
DELAYED = STEPS.with_(delay=1)


def test_the_weights_that_a_step_needs_are_those_of_the_manifest() -> None:
    for delay, since, every in [(0, 0, 7), (1, 0, 0), (1, 0, 5), (1, 6, 4), (1, 100, 3)]:
        settings = [f"schedule.delay={delay}", f"schedule.delay_from={since}", f"checkpoint.every={every}"]
        manifest = resolve_manifest("nano", settings)
        scenario = STEPS.with_(delay=delay, delay_from=since, checkpoint_every=every)
        for step in range(30):
            assert scenario.weights_step(step) == manifest.weights_step(step)


@pytest.mark.parametrize("scenario", [DELAYED, CHURN.with_(delay=1), CHURN.with_(delay=1, checkpoint_every=3)])
def test_leases_wait_for_their_weights_and_at_most_two_steps_are_open(
    scenario: Scenario, monkeypatch: pytest.MonkeyPatch
) -> None:
    simulation = Simulation(scenario)
    lags: Counter[int] = Counter()
    hand = Leases._hand

    def watched(self: Leases, microbatch: Microbatch, owner: object) -> None:
        applied = simulation.steps.num_steps
        assert scenario.weights_step(microbatch.step) <= applied <= microbatch.step
        lags[microbatch.step - applied] += 1
        hand(self, microbatch, owner)  # type: ignore[arg-type]

    monkeypatch.setattr(Leases, "_hand", watched)
    simulation.run()
    assert set(lags) == {0, 1}, "two steps were open, and never three"


def test_the_delay_hides_the_all_reduce() -> None:
    """It takes about a minute, and so does computing a step: without a delay one comes after the other."""
    plain, delayed = simulate(STEPS), simulate(DELAYED)
    assert plain.shares()["all-reduce"] > 0.25
    assert delayed.shares()["all-reduce"] < 0.1
    assert delayed.throughput > 1.6 * plain.throughput


@pytest.mark.parametrize("changes", [{"delay_from": 10**6}, {"checkpoint_every": 1}])
def test_a_delay_that_does_not_apply_leaves_the_speed_as_it_is(changes: dict[str, int]) -> None:
    plain, delayed = simulate(STEPS), simulate(DELAYED.with_(**changes))
    assert delayed.num_steps == plain.num_steps
    assert delayed.throughput == pytest.approx(plain.throughput, rel=1e-6)


def test_a_checkpoint_step_waits_for_the_all_reduce_and_the_others_do_not() -> None:
    never, rarely, often = (simulate(DELAYED.with_(checkpoint_every=every)) for every in (0, 10, 2))
    assert never.throughput > rarely.throughput > often.throughput
    assert never.shares()["all-reduce"] < often.shares()["all-reduce"]


def test_waiting_for_a_long_all_reduce_has_a_name_of_its_own() -> None:
    for scenario in (STEPS, DELAYED):
        shares = simulate(scenario.with_(gradient_bytes=(8e9,))).shares()
        assert shares["all-reduce"] > 0.7
        assert shares["no work"] < 0.15
    assert simulate(STEPS.with_(batch=0)).shares()["all-reduce"] == 0.0


def test_boundary_traffic_goes_first_and_the_all_reduce_gets_the_rest_of_the_line() -> None:
    """Lines of 12.5 MB/s; an inner peer sends two tensors of 20 MB per microbatch and is busy with it half of the time.

    Its all-reduce needs as much line time as there is left: then it lasts as long as a step, and no longer.
    """
    layout = tuple(PeerSpec(speed=0.15, stage=stage) for stage in (0, 0, 1, 1, 2, 2))
    base = DELAYED.with_(num_peers=6, layout=layout, boundary_bytes=2e7, compute_jitter=0.0, batch=100, minutes=90.0)
    alone = simulate(base.with_(gradient_bytes=(0.0,)))
    step_s = 100 / alone.throughput
    left_bytes = step_s * 12.5e6 - 100 * 2 * 2e7 / 2  # two peers share a step's microbatches
    for share, is_hidden in ((0.7, True), (1.5, False)):
        # Of two peers each moves half of the gradient's bytes.
        result = simulate(base.with_(gradient_bytes=(2.0 * share * left_bytes,)))
        assert (result.throughput > 0.95 * alone.throughput) is is_hidden
    needed_s = (2.0 * 2e9 + 1.5 * left_bytes) / 12.5e6  # what the line carries in a step
    assert 100 / result.throughput == pytest.approx(max(needed_s / 2.0, needed_s - 2e9 / 12.5e6), rel=0.15)


STORM = tuple(ChurnEvent(200.0 + 37.0 * i, -1 if i % 2 else 1) for i in range(50))


@pytest.mark.parametrize("seed", range(3))
def test_whoever_dies_every_microbatch_of_every_step_is_finished_once(seed: int) -> None:
    scenario = CHURN.with_(delay=1, seed=seed, churn="trace", trace=STORM, gradient_bytes=(6e8,))
    simulation = Simulation(scenario)
    finished: list[Microbatch] = []
    meters_finished = simulation.meters.finished

    def watched(microbatch: Microbatch, now: float) -> None:
        finished.append(microbatch)
        meters_finished(microbatch, now)

    simulation.meters.finished = watched  # type: ignore[method-assign]
    result = simulation.run()
    assert result.events["peers lost"] > 10  # the fault did happen
    assert result.events["all-reduces begun again"] > 0
    assert result.events["pieces computed again"] > 0
    assert max(Counter(microbatch.number for microbatch in finished).values()) == 1
    of_step = Counter(microbatch.step for microbatch in finished)
    assert result.num_steps > 10
    assert all(of_step[step] == scenario.batch for step in range(result.num_steps))


def test_a_death_in_the_middle_of_an_all_reduce_costs_less_than_a_step() -> None:
    """All bytes of its stage move again, and others compute its part: the swarm waits, and nothing else is lost."""
    layout = tuple(PeerSpec(stage=number % 3) for number in range(12))
    base = DELAYED.with_(layout=layout, minutes=60.0, warmup_minutes=0.0, gradient_bytes=(4e8,), download_s=1.0)
    step_s = base.batch / simulate(base).throughput
    first_done: list[float] = []

    def steps_with(trace: tuple[ChurnEvent, ...]) -> tuple[float, Counter[str]]:
        """When the tenth step was applied, by how often the swarm looked."""
        simulation = Simulation(base.with_(churn="trace", trace=trace))
        ends: list[float] = []
        applied = simulation.steps._applied

        def watched() -> None:
            applied()
            ends.append(simulation.engine.now)

        simulation.steps._applied = watched  # type: ignore[method-assign]
        result = simulation.run()
        first_done[:] = ends[:1]
        return ends[9], Counter(result.events)

    undisturbed, _ = steps_with(())
    in_the_middle = first_done[0] - 10.0  # of the first step's all-reduce: 24 s at 12.5 MB/s
    disturbed, events = steps_with((ChurnEvent(in_the_middle, -1), ChurnEvent(in_the_middle + 1.0, 1)))
    assert events["all-reduces begun again"] == 1
    assert events["pieces computed again"] > 0
    assert 0.0 < disturbed - undisturbed < step_s


@pytest.mark.parametrize(
    ("rates", "expected"),
    [
        ([5.0], [0.0]),
        ([5.0, 5.0, 5.0, 5.0], [75.0] * 4),
        ([1.0, 100.0], [50.0, 50.0]),
        # The slow one owns nothing: it sends its share once and receives the sum once. Three own a third each.
        ([1.0, 90.0, 90.0, 90.0], [50.0, 50.0 * (1 + 2 / 3), 50.0 * (1 + 2 / 3), 50.0 * (1 + 2 / 3)]),
    ],
)
def test_a_peer_moves_what_the_daemons_owners_leave_it(rates: list[float], expected: list[float]) -> None:
    assert moved_bytes(100.0, rates) == pytest.approx(expected)
    slowest = max(num_bytes / rate for num_bytes, rate in zip(expected, rates, strict=True))
    assert all_reduce_seconds(100.0, rates) == pytest.approx(slowest)


def test_idle_line_time_does_not_count_what_is_still_to_be_sent() -> None:
    simulation = Simulation(STEPS)
    peer, other = simulation.peers[0], simulation.peers[1]
    engine: Engine = simulation.engine
    assert peer.up_idle_s(engine.now) == 0.0
    simulation.pipeline._transfer(peer, other, STEPS.boundary_bytes)
    sending_s = STEPS.boundary_bytes / peer.up_rate
    assert peer.up_idle_s(0.0) == pytest.approx(0.0)
    assert peer.up_idle_s(sending_s) == pytest.approx(0.0)
    assert peer.up_idle_s(sending_s + 3.0) == pytest.approx(3.0)
    assert other.up_idle_s(sending_s + 3.0) == pytest.approx(sending_s + 3.0)
    assert other.down_idle_s(sending_s + 3.0) == pytest.approx(3.0)
