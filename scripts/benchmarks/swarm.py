"""The swarm against what it replaces: one process, hivemind's expert calls, hivemind's averager.

(a) tokens/s of a swarm of 2 stages and 2 peers (a thread each) against the reference trainer with two threads
(b) a forward and backward hop of the same tensor against hivemind's RemoteExpert and Server (an expert that passes its
    input on, so that the whole call is overhead)
(c) an all-reduce of 10M parameters among 4 peers against hivemind's averager, its wait for a group included
(d) resident memory of a daemon beyond its stage, against a process that has only imported torch and hivemind; of the
    first stage's peer, which keeps graphs of the microbatches in flight, and of the last stage's, which keeps none
(e) time from `join` to serving, against the same imports
Everything takes turns in one run. Run it on a machine that does nothing else.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import os
import selectors
import signal
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any, ClassVar

import psutil
from common import Figure, figure, parser, progress, report

from swarmtrain.local import LocalOptions, LocalSwarm
from swarmtrain.model.footprint import on_cpu
from swarmtrain.model.layout import plan_stages
from swarmtrain.observe.control import ask
from swarmtrain.run.manifest import Manifest
from swarmtrain.run.presets import preset

WORKERS = Path(__file__).with_name("swarm_workers.py")
IMPORTS = "import torch, hivemind, swarmtrain.peer.daemon; import psutil; print(psutil.Process().memory_info().rss)"

SETTLE_S = 1.0  # what one side still has to put away must not fall into the other's turn
START_S = 120.0
ANSWER_S = 30.0  # a hop takes milliseconds: hivemind's client may wait forever for a server that has died
WARM_UP = 3  # hops of a new pair of processes that do not count
MAX_RESTARTS = 5


class WorkerEnded(RuntimeError):
    """A process of swarm_workers.py has died, or does not answer."""


class Worker:
    """A process of swarm_workers.py. Those that are still there at the end are ended by `close_all`."""

    started: ClassVar[list[Worker]] = []

    def __init__(self, role: str, **options: Any) -> None:
        self.process = subprocess.Popen(
            [sys.executable, str(WORKERS), role, json.dumps(options)],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.DEVNULL,
            text=True,
            env={**os.environ, "OMP_NUM_THREADS": "1"},
            start_new_session=True,  # hivemind starts processes of its own: a signal to the group reaches them
        )
        Worker.started.append(self)
        self.hello = self.read(START_S)

    def read(self, timeout_s: float | None = None) -> dict[str, Any]:
        """The next line of the worker. Raises WorkerEnded if there is none, or none within `timeout_s`."""
        assert self.process.stdout is not None
        with selectors.DefaultSelector() as selector:
            selector.register(self.process.stdout, selectors.EVENT_READ)  # one line per command: nothing is buffered
            if not selector.select(timeout_s):
                raise WorkerEnded(f"a benchmark process has not answered within {timeout_s:g} s")
        line = self.process.stdout.readline()
        if not line:
            raise WorkerEnded("a benchmark process ended early")
        answer: dict[str, Any] = json.loads(line)
        return answer

    def tell(self, **command: Any) -> None:
        """Send a command. Raises WorkerEnded."""
        assert self.process.stdin is not None
        try:
            self.process.stdin.write(json.dumps(command) + "\n")
            self.process.stdin.flush()
        except BrokenPipeError:
            raise WorkerEnded("a benchmark process ended early") from None

    def ask(self, timeout_s: float | None = None, **command: Any) -> dict[str, Any]:
        """Send a command and wait for its answer. Raises WorkerEnded."""
        self.tell(**command)
        return self.read(timeout_s)

    @classmethod
    def close_all(cls) -> None:
        """Leave nothing behind."""
        while cls.started:
            cls.started.pop().close()

    def close(self) -> None:
        """End the process, and whatever it leaves behind."""
        assert self.process.stdin is not None
        with contextlib.suppress(BrokenPipeError):  # what it was last told, and never read
            self.process.stdin.close()
        with contextlib.suppress(subprocess.TimeoutExpired):
            self.process.wait(20)
        with contextlib.suppress(ProcessLookupError):
            os.killpg(self.process.pid, signal.SIGKILL)
        self.process.wait()


class HivemindHop:
    """hivemind's Server and RemoteExpert. When either dies, both are started again, and `restarts` counts it."""

    def __init__(self, shape: list[int]) -> None:
        self._shape = shape
        self.restarts = 0
        self._start()

    def _start(self) -> None:
        self._server = Worker("hivemind_server", shape=self._shape)
        self._client = Worker("hivemind_client", shape=self._shape, **self._server.hello)

    def ask(self) -> dict[str, Any]:
        """One hop. Raises WorkerEnded after MAX_RESTARTS."""
        try:
            return self._client.ask(ANSWER_S)
        except WorkerEnded as error:
            if self.restarts == MAX_RESTARTS:
                raise
            self.restarts += 1
            print(f"\nhivemind's server or client: {error}; both are started again", file=sys.stderr, flush=True)
        for worker in (self._client, self._server):
            Worker.started.remove(worker)
            worker.close()
        self._start()
        for _ in range(WARM_UP):
            self.ask()
        return self.ask()


def bench_manifest(steps: int) -> Manifest:
    """Two stages of equal weight, 16 microbatches a step."""
    return preset(
        "micro",
        [
            "stages.count=2",
            f"schedule.steps={steps}",
            "validation.every=0",
            "validation.microbatches=1",
            "checkpoint.every=0",
        ],
    )


def swarm_speed(folder: Path, steps: int) -> tuple[float, dict[str, float]]:
    """Median tokens/s of a swarm's steps after the first, and what its first peer looked like."""
    manifest = bench_manifest(steps)
    speeds: list[float] = []
    seen: dict[str, float] = {}
    started: dict[str, float] = {}

    async def run() -> None:
        def take(event: dict[str, Any]) -> None:
            now = time.perf_counter()
            if event["event"] == "step_applied":
                speeds.append(event["tokens_per_s"])
            if event["event"] == "phase_reached" and event["phase"] == "serving":
                seen.setdefault("join_s", now - started[event["from"]])

        swarm = LocalSwarm(LocalOptions(manifest, folder, num_peers=2), take)
        start_peer = swarm.start_peer

        async def timed_start(stage: int, *extra: str) -> Any:
            started[f"peer{len(started)}"] = time.perf_counter()
            return await start_peer(stage, *extra)

        swarm.start_peer = timed_start  # type: ignore[method-assign]
        running = asyncio.create_task(swarm.run())
        while len(speeds) < steps - 1 and not running.done():
            await asyncio.wait([running], timeout=0.2)
        if not running.done():
            seen.update(await daemon_memory(swarm, manifest))
        await running

    asyncio.run(run())
    return statistics.median(speeds[1:]), seen


DAEMON_NEEDS = ("process", "all-reduce", "copy for newcomers")  # what is to be measured


async def daemon_memory(swarm: LocalSwarm, manifest: Manifest) -> dict[str, float]:
    """Resident bytes of the first and of the last stage's peer with its p2pd, beyond what its stage needs."""
    seen = {}
    for name, child in (("first_bytes", swarm.peers[0]), ("last_bytes", swarm.peers[-1])):
        process = psutil.Process(child.process.pid)
        resident = process.memory_info().rss + sum(item.memory_info().rss for item in process.children(recursive=True))
        await ask(swarm.options.state_dir / child.name / "control.sock", "status")
        needs = on_cpu(manifest, plan_stages(manifest)[child.stage]).needs
        seen[name] = resident - sum(need.host_bytes for need in needs if need.what not in DAEMON_NEEDS)
    return seen


def reference_speed(folder: Path, steps: int) -> float:
    """Median tokens/s of the reference trainer's steps after the first, with two threads."""
    manifest = folder / "run.toml"
    folder.mkdir(parents=True)
    manifest.write_text(bench_manifest(steps).canonical())
    command = [sys.executable, "-m", "swarmtrain", "train", str(manifest), "--json", "--threads", "2"]
    done = subprocess.run(
        [*command, "--out", str(folder / "out")],
        stdout=subprocess.PIPE,
        text=True,
        check=True,
        env={**os.environ, "OMP_NUM_THREADS": "2"},
    )
    rows = [json.loads(line) for line in done.stdout.splitlines()]
    return statistics.median([row["tokens_per_s"] for row in rows if "tokens_per_s" in row][1:])


def bench_training(folder: Path, rounds: int, steps: int) -> list[Figure]:
    """(a), (d) and (e)."""
    ratios, first, last, joins = [], [], [], []
    for number in range(rounds):
        progress(f"training, round {number + 1} of {rounds}")
        swarm, seen = swarm_speed(folder / f"swarm{number}", steps)
        ratios.append(swarm / reference_speed(folder / f"reference{number}", steps))
        began = time.perf_counter()
        bare = subprocess.run([sys.executable, "-c", IMPORTS], stdout=subprocess.PIPE, check=True, text=True)
        joins.append(seen["join_s"] / (time.perf_counter() - began))
        first.append(seen["first_bytes"] / int(bare.stdout))
        last.append(seen["last_bytes"] / int(bare.stdout))
    return [
        figure("(a) swarm of 2 against reference, tokens/s", ratios, 0.85),
        figure("(d) daemon's memory beyond its stage / bare imports", first, 2.0, at_least=False),
        figure("(d) the same of the last stage, which keeps no graphs", last, 2.0, at_least=False),
        figure("(e) join to serving / bare imports, time", joins, 3.0, at_least=False),
    ]


def bench_hop(folder: Path, rounds: int) -> tuple[list[Figure], list[str]]:
    """(b): 2 MiB each way. Also what a reader of the figure should know."""
    shape = [1024, 512]
    ours = Worker("our_hop_server", state_dir=str(folder / "hop-server"))
    our_client = Worker("our_hop_client", state_dir=str(folder / "hop-client"), shape=shape, **ours.hello)
    theirs = HivemindHop(shape)
    ratios = []
    for number in range(-WARM_UP, rounds):
        progress(f"hop, round {number + 1} of {rounds}")
        pair = [our_client.ask(), theirs.ask()] if number % 2 else [theirs.ask(), our_client.ask()][::-1]
        assert all(answer["equal"] for answer in pair)
        if number >= 0:
            ratios.append(pair[1]["seconds"] / pair[0]["seconds"])
    Worker.close_all()
    notes = [f"(b) hivemind's server and client were started again: {theirs.restarts}"] if theirs.restarts else []
    return [figure("(b) hivemind's overhead of a hop / ours", ratios, 3.0)], notes


def bench_all_reduce(folder: Path, rounds: int, size: int, num_peers: int) -> list[Figure]:
    """(c)"""
    ours = [Worker("our_all_reduce", state_dir=str(folder / f"all-reduce{i}"), size=size) for i in range(num_peers)]
    for worker in ours:
        worker.ask(addresses=[address for other in ours if other is not worker for address in other.hello["addresses"]])
    theirs: list[Worker] = []
    for _ in range(num_peers):
        known = theirs[0].hello["addresses"] if theirs else []
        theirs.append(Worker("hivemind_averager", addresses=known, size=size, num_peers=num_peers))
    peers = [worker.hello["peer"] for worker in ours]
    ratios = []
    for number in range(-1, rounds):
        progress(f"all-reduce, round {number + 1} of {rounds}")
        own = together(ours, peers=peers, attempt=number + 1)
        time.sleep(SETTLE_S)
        other = together(theirs)
        time.sleep(SETTLE_S)
        assert len({answer["sum"] for answer in own}) == 1
        if number >= 0 and all(answer["ok"] for answer in other):
            ratios.append(max(a["seconds"] for a in other) / max(a["seconds"] for a in own))
    Worker.close_all()
    return [figure("(c) hivemind's averager, its group found / our all-reduce, time", ratios, 1.0)]


def together(workers: list[Worker], **command: Any) -> list[dict[str, Any]]:
    """All workers at once."""
    for worker in workers:
        worker.tell(**command)
    return [worker.read() for worker in workers]


def main() -> None:
    """Run all parts, or those named with --only."""
    options = parser(__doc__)
    options.add_argument("--rounds", type=int, default=5)
    options.add_argument("--steps", type=int, default=5, help="optimizer steps of (a) in each round")
    options.add_argument("--size", type=int, default=10_000_000, help="parameters of (c)")
    options.add_argument("--only", choices=["training", "hop", "all-reduce"])
    given = options.parse_args()
    figures: list[Figure] = []
    notes: list[str] = []
    with tempfile.TemporaryDirectory(prefix="stbench") as name, contextlib.ExitStack() as stack:
        stack.callback(Worker.close_all)
        folder = Path(name)
        if given.only in (None, "training"):
            figures += bench_training(folder, max(2, given.rounds // 2), given.steps)
        if given.only in (None, "hop"):
            hop, notes = bench_hop(folder, 4 * given.rounds)
            figures += hop
        if given.only in (None, "all-reduce"):
            figures += bench_all_reduce(folder, given.rounds, given.size, 4)
    report(figures, as_json=given.json, notes=notes)


if __name__ == "__main__":
    main()
