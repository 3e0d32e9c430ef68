"""The simulator: reproducible, conserving, and right where the right answer is known."""

from __future__ import annotations

import subprocess
import sys
from collections import Counter
from collections.abc import Callable

import pytest

from swarmtrain.errors import UsageError
from swarmtrain.sim.meters import CAUSES
from swarmtrain.sim.peer import Job, Microbatch, SimPeer
from swarmtrain.sim.processor import Processors
from swarmtrain.sim.run import Result, Simulation, simulate
from swarmtrain.sim.scenario import ChurnEvent, PeerSpec, Scenario

SMALL = Scenario(num_peers=18, num_stages=3, minutes=20.0, warmup_minutes=4.0)
QUIET = SMALL.with_(churn="none", speed_spread=0.0)


def test_same_seed_same_trace_and_another_seed_another_one() -> None:
    first, second, other = simulate(SMALL), simulate(SMALL), simulate(SMALL.with_(seed=1))
    assert first.trace_digest == second.trace_digest
    assert (first.throughput, first.events, first.seconds) == (second.throughput, second.events, second.seconds)
    assert other.trace_digest != first.trace_digest


def test_every_simulated_minute_is_told_and_telling_changes_nothing() -> None:
    told: list[None] = []
    watched = simulate(SMALL.with_(minutes=8.5, warmup_minutes=1.2), lambda: told.append(None))
    assert len(told) == 8
    assert watched.trace_digest == simulate(SMALL.with_(minutes=8.5, warmup_minutes=1.2)).trace_digest


def test_the_trace_does_not_depend_on_the_process() -> None:
    """Hash randomisation, for one, must not leak in."""
    program = (
        "from swarmtrain.sim.run import simulate; from swarmtrain.sim.scenario import Scenario;"
        "print(simulate(Scenario(num_peers=12, num_stages=3, minutes=8.0, warmup_minutes=2.0)).trace_digest)"
    )
    digests = {
        subprocess.run(
            [sys.executable, "-c", program], capture_output=True, text=True, timeout=120, check=True
        ).stdout.strip()
        for _ in range(2)
    }
    assert len(digests) == 1
    assert digests == {str(simulate(SMALL.with_(num_peers=12, minutes=8.0, warmup_minutes=2.0)).trace_digest)}


@pytest.mark.parametrize(
    "scenario",
    [
        SMALL,
        SMALL.with_(queue_limit=3),  # most of what is sent is refused
        SMALL.with_(mean_life_s=400.0, mean_absence_s=100.0, download_s=20.0),
        SMALL.with_(batch=60, mean_life_s=400.0, mean_absence_s=100.0, download_s=10.0, gradient_bytes=(1e7,)),
    ],
    ids=["usual", "busy", "churn", "steps"],
)
def test_leaving_out_arrivals_at_busy_machines_changes_nothing(
    scenario: Scenario, monkeypatch: pytest.MonkeyPatch
) -> None:
    result = simulate(scenario)
    expect = Processors.expect

    def expect_with_an_event(self: Processors, peer: SimPeer, job: Job) -> None:
        expect(self, peer, job)
        self._engine.at(job.arrived_at, self._arrives, peer)

    monkeypatch.setattr(Processors, "expect", expect_with_an_event)
    with_events = simulate(scenario)
    assert with_events.num_events > 1.2 * result.num_events
    assert with_events.trace_digest == result.trace_digest
    assert (with_events.events, with_events.seconds) == (result.events, result.seconds)


def test_a_quiet_equal_swarm_comes_close_to_the_bound_and_never_above() -> None:
    result = simulate(QUIET.with_(num_peers=24, minutes=40.0))
    assert result.bound == pytest.approx(24 * 0.2 / 3)
    assert 0.93 <= result.efficiency <= 1.01
    assert set(result.events) <= {"reroutes: busy", "all busy", "nobody to ask", "stolen"}


def test_one_machine_per_stage_without_choice_runs_at_the_slowest_stage() -> None:
    layout = tuple(PeerSpec(speed=speed, stage=stage) for stage, speed in enumerate((0.4, 0.2, 0.5)))
    result = simulate(
        Scenario(
            num_peers=3, num_stages=3, layout=layout, churn="none", rebalance="none", minutes=60.0, compute_jitter=0.0
        )
    )
    assert result.throughput == pytest.approx(0.2, rel=0.03)


def test_bytes_on_the_wire_are_two_boundary_tensors_per_boundary_when_nothing_goes_wrong() -> None:
    result = simulate(QUIET.with_(queue_limit=1000, num_asked=0))
    assert result.bytes_per_microbatch == pytest.approx(2 * 2 * SMALL.boundary_bytes, rel=0.03)


def test_stolen_work_crosses_its_boundary_once_more() -> None:
    result = simulate(QUIET.with_(queue_limit=1000))
    num_stolen, num_finished = result.events["stolen"], sum(s.finished for s in result.samples)
    assert num_stolen > 100
    # Leases are stolen as well, and weigh nothing.
    extra = result.bytes_per_microbatch / SMALL.boundary_bytes - 2 * 2
    tolerance = 0.03 * 2 * 2  # what is under way when the counting begins and ends, as above
    assert 0.5 * num_stolen / num_finished < extra < num_stolen / num_finished + tolerance


def test_a_slow_uplink_limits_its_machine_as_the_bound_says() -> None:
    # One boundary tensor takes ten seconds on the slow uplink: an inner machine sends two per microbatch.
    layout = (
        PeerSpec(speed=1.0, stage=0),
        PeerSpec(speed=1.0, stage=1, up_bytes_per_s=2.7e5),
        PeerSpec(speed=1.0, stage=2),
    )
    result = simulate(Scenario(num_peers=3, num_stages=3, layout=layout, churn="none", rebalance="none", minutes=120.0))
    assert result.throughput == pytest.approx(0.05, rel=0.06)


def tell_of_finished(simulation: Simulation, tell: Callable[[Microbatch, float], None]) -> None:
    """`tell` is called with every microbatch that comes back, and when."""
    meters_finished = simulation.meters.finished

    def finished(microbatch: Microbatch, now: float) -> None:
        tell(microbatch, now)
        meters_finished(microbatch, now)

    simulation.meters.finished = finished  # type: ignore[method-assign]


def test_what_is_not_waited_is_computing_and_distance_also_where_everybody_is_busy() -> None:
    """The window would take the rest for distance, and everybody would be busier."""
    wide, speeds = 1e12, (1.0, 0.5, 0.25)
    layout = tuple(
        PeerSpec(speed=speed, stage=stage, up_bytes_per_s=wide, down_bytes_per_s=wide)
        for stage, speed in enumerate(speeds)
        for _ in range(4)
    )
    machines = QUIET.with_(num_peers=12, layout=layout, rebalance="none", compute_jitter=0.0, num_asked=0)

    def run_with(queue_limit: int) -> tuple[list[float], Result]:
        simulation, rests = Simulation(machines.with_(queue_limit=queue_limit)), list[float]()
        tell_of_finished(simulation, lambda item, now: rests.append(now - item.started_at - item.queue_s))
        return rests, simulation.run()

    computing_s = sum(1.0 / speed for speed in speeds)
    (unhindered, free), (rests, busy) = run_with(1000), run_with(4)
    assert "all busy" not in free.events
    assert busy.events["all busy"] > len(rests)
    assert computing_s < unhindered[0] < 1.1 * computing_s
    assert max(*unhindered, *rests) == pytest.approx(min(*unhindered, *rests), rel=1e-2)
    assert busy.mean_delay_s < 1.2 * free.mean_delay_s


def all_finished_microbatches(scenario: Scenario) -> tuple[list[Microbatch], Simulation, Result]:
    simulation = Simulation(scenario)
    finished: list[Microbatch] = []
    tell_of_finished(simulation, lambda microbatch, now: finished.append(microbatch))
    return finished, simulation, simulation.run()


STORM = tuple(ChurnEvent(20.0 * i, -1 if i % 2 else 1) for i in range(8, 30))


@pytest.mark.parametrize("seed", range(4))
def test_after_a_storm_every_microbatch_finished_once_or_is_still_held(seed: int) -> None:
    """Nothing is lost for ever and nothing is done twice, whoever died with what."""
    scenario = SMALL.with_(seed=seed, churn="trace", trace=STORM, download_s=20.0, boundary_bytes=2e7)
    finished, simulation, result = all_finished_microbatches(scenario)
    assert result.events["peers lost"] > 5  # the fault did happen
    assert result.events["replays after a loss"] > 0
    assert result.events["leases given again"] > 0
    counts = Counter(microbatch.number for microbatch in finished)
    assert max(counts.values()) == 1
    for microbatch in finished:
        assert all(peer is not None for peer in microbatch.route)
        assert all(microbatch.ready)
    owned = {microbatch.number for peer in simulation.peers for microbatch, stage in peer.held.items() if stage == 0}
    leases = simulation.leases
    pending = list(simulation.engine.pending())
    on_the_way = {arguments[0].number for call, arguments in pending if call == leases._arrives}
    # No caller knows yet of a machine that has just died: its leases are given again after some missed heartbeats.
    on_the_way |= {arguments[0].number for call, arguments in pending if call == simulation.pipeline._recover}
    sent_on = {arguments[0].microbatch.number for call, arguments in pending if call == simulation.pipeline._redirect}
    homeless = {microbatch.number for microbatch in leases.homeless}
    assert set(range(1, leases.num_given + 1)) == set(counts) | owned | on_the_way | sent_on | homeless
    # And those that are still held are young: nobody waits for something that will never come.
    oldest = min(m.started_at for peer in simulation.peers for m in peer.held)
    assert oldest > STORM[-1].time_s


def test_time_is_accounted_for_completely() -> None:
    scenario = SMALL.with_(mean_life_s=600.0, mean_absence_s=200.0)
    simulation = Simulation(scenario)
    live_s = 0.0
    step_s = 1.0

    def count() -> None:
        nonlocal live_s
        if simulation.engine.now >= simulation.meters.warmup_s:
            live_s += step_s * sum(peer.state != "gone" for peer in simulation.peers)
        simulation.engine.after(step_s, count)

    simulation.engine.after(0.5, count)
    result = simulation.run()
    assert sum(result.seconds.values()) == pytest.approx(live_s, rel=0.03)
    assert sum(result.shares().values()) == pytest.approx(1.0)
    assert set(result.shares()) == set(CAUSES)


def test_steps_end_and_lost_pieces_are_computed_again() -> None:
    base = SMALL.with_(batch=60, mean_life_s=400.0, mean_absence_s=100.0, download_s=10.0, gradient_bytes=(1e7,))
    for seed in range(6):
        finished, _, result = all_finished_microbatches(base.with_(seed=seed))
        assert result.num_steps >= 3
        assert result.events["pieces computed again"] > 0
        assert len(finished) >= 60 * result.num_steps
        assert result.seconds["wasted"] > 0.0


def test_a_trace_is_followed() -> None:
    scenario = SMALL.with_(churn="trace", trace=(ChurnEvent(300.0, -6), ChurnEvent(600.0, 4)), download_s=30.0)
    result = simulate(scenario)
    assert result.events["peers lost"] == 6
    assert result.events["peers joined"] == 4
    assert [sample.num_available for sample in result.samples][-1] == 16


def test_the_papers_ordering_no_rebalancing_300_s_60_s_when_downloads_cost_nothing() -> None:
    """If only those move who are there: newcomers that choose by queues do most of the balancing themselves."""
    base = Scenario(
        num_peers=32,
        num_stages=4,
        mix=(PeerSpec(speed=0.1),),
        speed_spread=0.0,
        minutes=70.0,
        mean_life_s=1800.0,
        mean_absence_s=450.0,
        download_s=0.0,
        random_newcomers=1,
        num_asked=0,  # as published: nobody asks for work, and it is done as it comes
        job_order="fifo",
    )

    def reached(**changes: object) -> float:
        return sum(simulate(base.with_(seed=seed, **changes)).efficiency for seed in range(2)) / 2

    none = reached(rebalance="none")
    slow = reached(rebalance="queue", rebalance_period_s=300.0)
    fast = reached(rebalance="queue", rebalance_period_s=60.0)
    assert none < slow - 0.02
    assert slow < fast - 0.02
    assert slow < reached(rebalance="queue", rebalance_period_s=300.0, random_newcomers=0) - 0.02


def test_asking_for_work_keeps_a_deep_pipeline_busier() -> None:
    """Same machines, same churn, same leases under way; only whether peers ask others of their stage."""
    base = Scenario(
        num_peers=100, num_stages=10, minutes=30.0, warmup_minutes=15.0, mean_life_s=4 * 3600.0, window_maximum=400
    )
    asking, silent = simulate(base), simulate(base.with_(num_asked=0))
    published = simulate(base.with_(routing="swarm-latency", minutes=16.0))
    assert "stolen" not in published.events
    assert asking.events["stolen"] > 500
    assert "stolen" not in silent.events
    assert asking.assigned == silent.assigned  # moves do not look at queues
    assert asking.efficiency > silent.efficiency + 0.01
    assert asking.shares()["no work"] < silent.shares()["no work"]


def states_of(simulation: Simulation) -> Counter[str]:
    return Counter(peer.state for peer in simulation.peers)


def test_a_badly_placed_swarm_spreads_by_itself_and_then_is_stable() -> None:
    layout = tuple(PeerSpec(speed=0.2) for _ in range(24))
    scenario = Scenario(
        num_peers=24, num_stages=3, layout=layout, churn="none", placement="random", minutes=90.0, seed=3
    )
    simulation = Simulation(scenario)
    for peer in simulation._alive[6:]:
        peer.spec = PeerSpec(speed=0.2)
    result = simulation.run()
    counts = Counter(peer.stage for peer in simulation.peers)
    assert set(counts.values()) == {8}
    late = [sample.capacity for sample in result.samples[-20:]]
    assert min(late) == pytest.approx(1.6)  # nobody moves any more


def test_balanced_swarms_do_not_thrash() -> None:
    result = simulate(QUIET.with_(num_peers=24, minutes=60.0))
    assert result.events.get("moves", 0) == 0


@pytest.mark.parametrize(
    ("changes", "named"),
    [
        ({"num_stages": 0}, "num_stages"),
        ({"num_peers": 2}, "num_peers"),
        ({"routing": "fastest"}, "routing"),
        ({"rebalance": "magic"}, "rebalance"),
        ({"warmup_minutes": 99.0}, "warmup_minutes"),
        ({"mean_life_s": float("nan")}, "mean_life_s"),
        ({"download_s": -1.0}, "download_s"),
        ({"stage_costs": (1.0, 1.0)}, "stage_costs"),
        ({"mix": (PeerSpec(speed=0.0),)}, "speed"),
        ({"colour": "red"}, "colour"),
    ],
)
def test_impossible_scenarios_are_refused_by_name(changes: dict[str, object], named: str) -> None:
    with pytest.raises(UsageError, match=named):
        SMALL.with_(**changes)


def test_peers_never_hold_what_they_do_not_serve() -> None:
    """Invariant at many moments of a churning run: what a machine holds, or is being sent, names it in its route."""
    simulation = Simulation(SMALL.with_(mean_life_s=400.0, mean_absence_s=100.0, download_s=20.0))
    violations: list[SimPeer] = []

    def check() -> None:
        for peer in simulation.peers:
            for microbatch, stage in peer.held.items():
                if peer.state == "gone" or microbatch.route[stage] is not peer:
                    violations.append(peer)
        simulation.engine.after(7.0, check)

    simulation.engine.after(1.0, check)
    simulation.run()
    assert violations == []
