"""Does training notice that a peer joins?

A real swarm on this machine trains without pause. In turn a peer joins one of its stages (fetches the state, follows,
serves, leaves at once) and no peer does. A round compares the steps between the newcomer's first word with the
coordinator and the moment in which it serves with as many steps before and after that had no newcomer.

A newcomer brings its own machine, and no machine has one core only. So all training processes that were there before
share the first cores; the newcomer has the last one, and with it libp2p's processes of the others, which would have a
core besides the trainer's on any real machine (`--one-core`: they stay with the trainers). What a trainer does to serve
the newcomer, copying its state, hashing and sending it, and the reduced gradients, costs it all that it takes. The
newcomer's line carries 80 Mbit/s, like the links of `bench routing` (`--line ""`: as fast as this machine copies). That
it then serves, and that it leaves, is another swarm than before: these steps are in neither side.
"""

from __future__ import annotations

import asyncio
import os
import signal
import statistics
import tempfile
from collections.abc import Callable
from dataclasses import dataclass, field
from itertools import pairwise
from pathlib import Path
from typing import Any

import psutil
from common import Figure, figure, parser, progress, quartiles, report

from swarmtrain.local import Child, LocalOptions, LocalSwarm
from swarmtrain.model.buffers import StateLayout
from swarmtrain.run.manifest import Manifest
from swarmtrain.run.presets import preset

NUM_STAGES = 2
MIN_STEPS = 4  # of a window without a newcomer
PATIENCE_S = 300.0
END_S = 30.0


def bench_manifest() -> Manifest:
    """A state of tens of megabytes per stage, and steps that compute for much longer than they reduce, as real ones."""
    return preset(
        "micro",
        [
            f"stages.count={NUM_STAGES}",
            "schedule.steps=1000000",
            "model.hidden_size=256",
            "model.num_heads=4",
            "model.num_kv_heads=2",
            "model.ffn_size=704",
            "model.sequence_length=128",
            "batch.sequences_per_microbatch=1",
            "batch.microbatches_per_step=32",
            "validation.every=0",
            "validation.microbatches=1",
            "checkpoint.every=0",
        ],
    )


@dataclass
class Diary:
    """What the daemons have said."""

    applied_at: list[float] = field(default_factory=list)  # when each step was applied
    phases: dict[tuple[str, str], float] = field(default_factory=dict)  # by daemon and phase
    percent: dict[str, int] = field(default_factory=dict)  # of the state that a newcomer has fetched
    changed: asyncio.Event = field(default_factory=asyncio.Event)

    def note(self, event: dict[str, Any]) -> None:
        """An event of any daemon."""
        if event["event"] == "step_applied":
            self.applied_at.append(event["at"])
        elif event["event"] == "phase_reached":
            self.phases.setdefault((event["from"], event["phase"]), event["at"])
        elif event["event"] == "sync_progress":
            self.percent[event["from"]] = event["percent"]
        self.changed.set()

    async def until(self, condition: Callable[[], bool]) -> None:
        """Wait for what only events can bring about."""
        async with asyncio.timeout(PATIENCE_S):
            while not condition():
                self.changed.clear()
                await self.changed.wait()

    async def more_steps(self, number: int) -> None:
        """Wait until `count` more steps are applied."""
        wanted = len(self.applied_at) + number
        await self.until(lambda: len(self.applied_at) >= wanted)

    def steps_between(self, start: float, end: float) -> list[float]:
        """Seconds of every step that was under way at some time in between."""
        return [after - before for before, after in pairwise(self.applied_at) if after > start and before < end]


@dataclass(frozen=True)
class Round:
    """Seconds of steps before, during and after a join, and how long the newcomer fetched and followed."""

    before: list[float]
    during: list[float]
    after: list[float]
    sync_s: float

    def ratio(self, typical: Callable[[list[float]], float]) -> float:
        """With a newcomer, over without one."""
        return typical(self.during) / typical(self.before + self.after)


def give_network_its_core(swarm: LocalSwarm, cores: set[int]) -> None:
    """libp2p's processes run there from now on, with all their threads."""
    for child in (swarm.coordinator, *swarm.peers):
        for helper in psutil.Process(child.process.pid).children():
            for thread in helper.threads():
                os.sched_setaffinity(thread.id, cores)


def take_cores(cores: set[int]) -> None:
    """For whatever is started from now on."""
    os.sched_setaffinity(0, cores)


async def join_once(
    swarm: LocalSwarm, diary: Diary, stage: int, own: set[int], others: set[int], line: str
) -> tuple[float, float]:
    """A newcomer comes and goes; (when it was told to fetch the state, when it served)."""
    take_cores(own)
    try:
        newcomer = await swarm.start_peer(stage, *(("--max-down", line, "--max-up", line) if line else ()))
    finally:
        take_cores(others)
    try:
        await diary.until(lambda: (newcomer.name, "serving") in diary.phases or ended(newcomer))
        if ended(newcomer) or diary.percent.get(newcomer.name) != 100:
            raise SystemExit(f"{newcomer.name} did not fetch a state: {swarm.last_words(newcomer)}")
        newcomer.process.send_signal(signal.SIGTERM)
        async with asyncio.timeout(END_S):
            await newcomer.process.wait()
    finally:
        if not ended(newcomer):
            await swarm.kill(newcomer)
        newcomer.reader.cancel()
    return diary.phases[newcomer.name, "syncing"], diary.phases[newcomer.name, "serving"]


def ended(child: Child) -> bool:
    return child.process.returncode is not None


async def run_rounds(
    number: int, num_peers: int, own: set[int], others: set[int], *, line: str, one_core: bool
) -> list[Round]:
    """Windows with and without a newcomer, in turn."""
    diary, rounds = Diary(), []
    take_cores(others)
    with tempfile.TemporaryDirectory(prefix="st-") as directory:
        options = LocalOptions(bench_manifest(), Path(directory), num_peers=num_peers)
        swarm = LocalSwarm(options, diary.note)
        try:
            await swarm.start()
            if not one_core:
                give_network_its_core(swarm, own)
            await diary.more_steps(2 + MIN_STEPS)
            before = diary.steps_between(diary.applied_at[-MIN_STEPS - 1], diary.applied_at[-1])
            for index in range(-1, number):
                progress(f"round {index + 1} of {number}")
                told_at, served_at = await join_once(swarm, diary, index % NUM_STAGES, own, others, line)
                await diary.more_steps(2)  # the one in which it left, and the first without it
                during = diary.steps_between(told_at, served_at)
                calm_from = diary.applied_at[-1]
                await diary.more_steps(max(MIN_STEPS, len(during)))
                after = diary.steps_between(calm_from, diary.applied_at[-1])
                if index >= 0:
                    rounds.append(Round(before, during, after, served_at - told_at))
                before = after
        finally:
            for peer in swarm.peers:  # nothing of this run is worth draining for
                await swarm.kill(peer)
            await swarm.stop()
    progress("")
    return rounds


def figures_of(rounds: list[Round]) -> tuple[list[Figure], list[str]]:
    """A difference counts as none if it is smaller than the spread of the steps that had no newcomer."""
    calm = [step for item in rounds for step in item.after]
    low, middle, high = quartiles(calm)
    spread = (high - low) / middle
    figures = []
    for name, typical in (("mean", statistics.fmean), ("median", statistics.median)):
        found = figure(f"{name} step with a join / without", [item.ratio(typical) for item in rounds], 1.0 + spread)
        figures.append(
            Figure(found.name, found.ratio, found.low, found.high, found.goal, abs(found.ratio - 1) < spread)
        )
    joined = [step for item in rounds for step in item.during]
    sizes = [StateLayout(bench_manifest(), stage).num_bytes / 1e6 for stage in range(NUM_STAGES)]
    notes = [
        f"without: {len(calm)} steps, median {middle:.3f} s, quartiles {low:.3f} - {high:.3f} s: spread {spread:.1%}",
        f"with: {len(joined)} steps, median {statistics.median(joined):.3f} s, longest {max(joined):.3f} s "
        f"(without: {max(calm):.3f} s)",
        f"fetching {' or '.join(f'{size:.0f}' for size in sizes)} MB and following: "
        f"{statistics.median(item.sync_s for item in rounds):.1f} s",
    ]
    return figures, notes


def main() -> None:
    options = parser(__doc__)
    options.add_argument("--rounds", type=int, default=10)
    options.add_argument("--peers", type=int, default=2 * NUM_STAGES, help="without the newcomer")
    options.add_argument("--line", default="80mbit", help="the newcomer's, both ways; empty: no limit")
    options.add_argument("--one-core", action="store_true", help="libp2p's processes compete with the trainers")
    chosen = options.parse_args()
    cores = sorted(os.sched_getaffinity(0))
    if len(cores) < 2:
        raise SystemExit("the newcomer needs a processor core of its own: this benchmark needs two")
    own, others = {cores[-1]}, set(cores[:-1])
    rounds = asyncio.run(
        run_rounds(chosen.rounds, chosen.peers, own, others, line=chosen.line, one_core=chosen.one_core)
    )
    figures, notes = figures_of(rounds)
    report(figures, as_json=chosen.json, notes=notes)


if __name__ == "__main__":
    main()
