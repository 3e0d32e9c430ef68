"""A swarm of real daemons for tests: start it, watch it, hurt it. comparison.py compares it with the reference.

    with Swarm(tiny(), directory, num_peers=6) as swarm:   # starts the coordinator and the peers
        swarm.wait_step(2)                                 # events arrive on their own; waiting is for a state
        swarm.peers[3].kill()
        swarm.wait_end()
    assert_equals_reference(swarm, reference(swarm.manifest))

The daemons are `swarmtrain coordinator` and `swarmtrain join` with `--json`, each a process in a session of its own,
forked from one that has loaded torch (nursery.py), in a network namespace if a test wants that. Everything is
synchronous: one thread per daemon reads its events. All waits have deadlines, and fail with the daemons' last words.
"""

from __future__ import annotations

import asyncio
import functools
import json
import os
import signal
import subprocess
import tempfile
import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from types import TracebackType
from typing import Any

import psutil
from patience import PATIENCE

from swarmtrain.audit import Audit, audit
from swarmtrain.checkpoint import Checkpoint, latest
from swarmtrain.observe.control import ask
from swarmtrain.run.manifest import Manifest
from swarmtrain.run.presets import preset

from .nursery import Forked, Nursery

LOOPBACK = "/ip4/127.0.0.1/tcp/0"
WAIT_S = 90.0
PACE = "0.03:0.03"  # a step takes a few tenths of a second, most of which is sleep
REPOSITORY = Path(__file__).resolve().parents[2]

Event = dict[str, Any]

# A step of milliseconds: what a test of the swarm takes is its start-up.
TINY = (
    "model.hidden_size=32",
    "model.num_layers=4",
    "model.num_heads=4",
    "model.num_kv_heads=2",
    "model.ffn_size=64",
    "model.sequence_length=32",
    "boundary.k=8",
    "batch.sequences_per_microbatch=2",
    "batch.microbatches_per_step=6",
    "stages.count=4",
    "validation.every=0",
    "validation.microbatches=2",
    "checkpoint.every=0",
    "schedule.steps=6",
    "schedule.warmup_steps=2",
)


def tiny(*overrides: str) -> Manifest:
    """Four stages of one small layer each, six microbatches per step, six steps."""
    return preset("nano", [*TINY, *overrides])


def until(condition: Callable[[], bool], what: str, *, timeout_s: float = WAIT_S) -> None:
    """Wait for a state that nobody announces."""
    ends_at = time.monotonic() + timeout_s * PATIENCE
    pause = threading.Event()
    while not condition():
        if time.monotonic() >= ends_at:
            raise TimeoutError(f"this never became true: {what}")
        pause.wait(0.02)


@functools.cache
def nursery() -> Nursery:
    """Where the daemons of this session come from."""
    return Nursery()


def ask_daemon(state_dir: Path, command: str, **arguments: Any) -> dict[str, Any]:
    """Ask a daemon through its control socket."""
    return asyncio.run(ask(state_dir / "control.sock", command, **arguments))


def swarmtrain(
    *arguments: str, environment: Mapping[str, str] | None = None, timeout_s: float = WAIT_S
) -> subprocess.CompletedProcess[str]:
    """Run a verb to its end: a process like the daemons'."""
    with tempfile.TemporaryFile("w+") as errors:
        process = nursery().spawn(arguments, errors, clean_environment(environment), str(REPOSITORY))
        said: list[str] = []
        reader = threading.Thread(
            target=lambda: said.append(process.stdout.read()), name="a verb's output", daemon=True
        )
        reader.start()
        try:
            code = process.wait(timeout_s * PATIENCE)
        except subprocess.TimeoutExpired:
            process.kill()
            raise
        reader.join()
        errors.seek(0)
        return subprocess.CompletedProcess(arguments, code, said[0], errors.read())


def clean_environment(extra: Mapping[str, str] | None = None) -> dict[str, str]:
    """This process's environment without settings of its own runs, one thread, and `extra`."""
    kept = {key: value for key, value in os.environ.items() if not key.startswith("SWARMTRAIN_")}
    return {**kept, "OMP_NUM_THREADS": "1", **(extra or {})}


@dataclass
class Daemon:
    """One process of the swarm. `events` grows as it speaks."""

    name: str
    stage: int  # -1: the coordinator
    state_dir: Path
    log: Path
    process: Forked
    events: list[Event] = field(default_factory=list)
    reader: threading.Thread | None = None

    @property
    def pid(self) -> int:
        """Its process id."""
        return self.process.pid

    @property
    def is_running(self) -> bool:
        """Whether it has not ended yet."""
        return self.process.poll() is None

    def has(self, event: str, **wanted: Any) -> bool:
        """Whether it has said so."""
        return any(_matches(item, event, wanted) for item in list(self.events))

    def phases(self) -> list[str]:
        """Its phases so far: identity, network, ..."""
        return [item["phase"] for item in list(self.events) if item["event"] == "phase_reached"]

    def status(self) -> dict[str, Any]:
        """What `swarmtrain status --json` prints."""
        return ask_daemon(self.state_dir, "status")

    def children(self) -> list[psutil.Process]:
        """The processes that it has started: libp2p's daemon."""
        return psutil.Process(self.pid).children(recursive=True)

    def rss_bytes(self) -> int:
        """Its resident memory."""
        return int(psutil.Process(self.pid).memory_info().rss)

    def kill(self) -> None:
        """SIGKILL; returns when it is gone."""
        self.process.kill()
        self.process.wait()

    def stop(self) -> None:
        """SIGSTOP: it is there and does nothing; its libp2p daemon goes on."""
        self.process.send_signal(signal.SIGSTOP)
        until(lambda: psutil.Process(self.pid).status() == psutil.STATUS_STOPPED, f"{self.name} has stopped")

    def resume(self) -> None:
        """SIGCONT."""
        self.process.send_signal(signal.SIGCONT)

    def end(self, number: int = signal.SIGTERM, *, timeout_s: float = 30.0) -> int:
        """Ask it to go; its exit code. Fails if it does not go in time."""
        self.process.send_signal(number)
        return self.process.wait(timeout_s * PATIENCE)

    def last_words(self, num_lines: int = 15) -> str:
        """The end of its log, for messages of failed tests."""
        lines = self.log.read_text(errors="replace").splitlines() if self.log.exists() else []
        return f"--- {self.name} (exit code {self.process.poll()})\n" + "\n".join(lines[-num_lines:])


class Swarm:
    """A coordinator and its peers. As a context manager it starts everything, and leaves nothing behind."""

    def __init__(
        self,
        manifest: Manifest,
        directory: Path,
        *,
        num_peers: int = 0,
        min_peers: int | None = None,
        environment: Mapping[str, str] | None = None,
        listen: str = LOOPBACK,
        pace: str = "",
    ) -> None:
        """`num_peers` are spread over the stages in turn; the first step waits for `min_peers` (default: all).

        `pace`, as PACE: what a forward and a backward take at least. For swarms that train while something else is
        looked at: they leave the processor to others.
        """
        self.manifest, self.directory = manifest, directory
        self.num_peers = num_peers or manifest.stages.count
        self.min_peers = self.num_peers if min_peers is None else min_peers
        self.environment = {"XDG_STATE_HOME": str(directory / "home"), **(environment or {})}
        self.listen = listen
        self.pace = pace
        self.coordinator_name = "coordinator"  # of its state directory and log; another one is another machine's
        self.daemons: list[Daemon] = []  # everything ever started, in order
        self._changed = threading.Condition()
        self._num_started = 0

    def __enter__(self) -> Swarm:
        try:
            self.start()
        except BaseException:
            self.close()
            raise
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, at: TracebackType | None) -> None:
        self.close()

    @property
    def coordinator(self) -> Daemon:
        """The newest coordinator."""
        return [daemon for daemon in self.daemons if daemon.stage < 0][-1]

    @property
    def peers(self) -> list[Daemon]:
        """All peers that were started, in order, dead ones too."""
        return [daemon for daemon in self.daemons if daemon.stage >= 0]

    @property
    def coordinator_dir(self) -> Path:
        """The coordinator's state directory: journal, checkpoints, key."""
        return self.directory / self.coordinator_name

    def living(self, stage: int | None = None) -> list[Daemon]:
        """Peers that run (of one stage)."""
        return [peer for peer in self.peers if peer.is_running and stage in (None, peer.stage)]

    def start(self) -> None:
        """The coordinator, then the peers."""
        self.start_coordinator()
        for index in range(self.num_peers):
            self.start_peer(index % self.manifest.stages.count)

    def start_coordinator(self, *extra: str, wait: bool = True, listen: str = "", namespace: str = "") -> Daemon:
        """Start or restart the coordinator on its state directory; returns when it has printed its invite."""
        self.directory.mkdir(parents=True, exist_ok=True)
        manifest = self.directory / "run.toml"
        manifest.write_text(self.manifest.canonical())
        arguments = ["coordinator", str(manifest), "--state-dir", str(self.coordinator_dir)]
        arguments += ["--listen", listen or self.listen, "--min-peers", str(self.min_peers), *extra]
        daemon = self.start_daemon(self.coordinator_name, -1, self.coordinator_dir, arguments, namespace=namespace)
        if wait:
            self.wait(daemon, "phase_reached", phase="invite")
        return daemon

    def start_peer(
        self,
        stage: int,
        *extra: str,
        name: str = "",
        environment: Mapping[str, str] | None = None,
        listen: str = "",
        namespace: str = "",
    ) -> Daemon:
        """Start a peer of a stage. With the name of a former one it is that peer again, on its state directory."""
        if not name:
            name = f"peer{self._num_started}"
            self._num_started += 1
        state_dir = self.directory / name
        arguments = ["join", self.invite(), "--stage", str(stage), "--state-dir", str(state_dir), "--name", name]
        arguments += ["--listen", listen or self.listen, "--threads", "1", "--drain-timeout", "20"]
        arguments += ["--nice", "0", *extra]
        if self.pace:
            arguments += ["--enable-test-faults"]
            environment = {"SWARMTRAIN_PACE": self.pace, **(environment or {})}
        return self.start_daemon(name, stage, state_dir, arguments, environment, namespace)

    def invite(self) -> str:
        """What the coordinator printed."""
        return (self.coordinator_dir / "invite").read_text().strip()

    def events(self, event: str | None = None, **wanted: Any) -> list[Event]:
        """Everything that the daemons said, each with `from`; or only what matches."""
        with self._changed:
            found = [item for daemon in self.daemons for item in daemon.events]
        return [item for item in found if event is None or _matches(item, event, wanted)]

    def wait_until(self, condition: Callable[[], bool], what: str, *, timeout_s: float = WAIT_S) -> None:
        """Wait for something that depends on events; looked at whenever one arrives or a daemon ends."""
        ends_at = time.monotonic() + timeout_s * PATIENCE
        with self._changed:
            while not condition():
                left_s = ends_at - time.monotonic()
                if left_s <= 0:
                    words = "\n".join(daemon.last_words() for daemon in self.daemons)
                    raise TimeoutError(f"this never became true: {what}\n{words}")
                self._changed.wait(min(left_s, 0.5))

    def wait(self, daemon: Daemon | None, event: str, *, timeout_s: float = WAIT_S, **wanted: Any) -> Event:
        """Wait until `daemon` (None: anybody) says `event` with these values; returns it. Past events count."""
        found: list[Event] = []

        def said() -> bool:
            sources = [daemon] if daemon is not None else self.daemons
            found[:] = [item for source in sources for item in source.events if _matches(item, event, wanted)]
            if not found and daemon is not None and not daemon.is_running and not _alive(daemon.reader):
                raise AssertionError(f"{daemon.name} ended before {event} {wanted}\n{daemon.last_words()}")
            return bool(found)

        self.wait_until(said, f"{daemon.name if daemon else 'anybody'}: {event} {wanted}", timeout_s=timeout_s)
        return found[0]

    def wait_serving(self, *peers: Daemon, timeout_s: float = WAIT_S) -> None:
        """Wait until these peers (default: all that run) serve."""
        for peer in peers or self.living():
            self.wait(peer, "phase_reached", phase="serving", timeout_s=timeout_s)

    def wait_step(self, step: int, *, timeout_s: float = WAIT_S) -> Event:
        """Wait until `step` steps are applied; the last `step_applied` event of that number."""
        self.wait(None, "step_applied", step=step, timeout_s=timeout_s)
        return self.events("step_applied", step=step)[-1]

    def wait_end(self, *, timeout_s: float = WAIT_S) -> Event:
        """Wait until the run is over; its `run_ended`."""
        return self.wait(None, "run_ended", timeout_s=timeout_s)

    def losses(self) -> list[float]:
        """The loss of every reported step, in their order."""
        return [loss for _, loss in sorted(self.reported().items())]

    def reported(self) -> dict[int, float]:
        """By step, the loss as last reported: a step that was rolled back is reported twice, one that was decided by a
        coordinator that died before it could say so is not reported."""
        return {item["step"]: item["loss"] for item in self.events("step_applied")}

    def checkpoint(self) -> Checkpoint:
        """The newest checkpoint of the run."""
        found = latest(self.coordinator_dir / "checkpoints")
        assert found is not None, "there is no checkpoint"
        return found

    def audit(self) -> Audit:
        """What `swarmtrain audit` finds."""
        return audit(self.coordinator_dir)

    def close(self) -> None:
        """Kill whatever is left, and see that it left nothing."""
        family = [process for daemon in self.daemons for process in _family(daemon)]
        for daemon in self.daemons:
            if daemon.is_running:
                daemon.process.send_signal(signal.SIGCONT)
                daemon.process.kill()
            daemon.process.wait()
        for daemon in self.daemons:
            if daemon.reader is not None:
                daemon.reader.join(10.0)
        psutil.wait_procs(family, timeout=10.0)
        left = [process for process in family if process.is_running() and process.status() != psutil.STATUS_ZOMBIE]
        assert not left, f"left behind: {left}"

    def start_daemon(
        self,
        name: str,
        stage: int,
        state_dir: Path,
        arguments: Sequence[str],
        extra: Mapping[str, str] | None = None,
        namespace: str = "",
    ) -> Daemon:
        """Start any verb that runs a daemon, with `--json`."""
        log = self.directory / f"{name}.log"
        environment = clean_environment({**self.environment, **(extra or {})})
        with log.open("a") as errors:
            process = nursery().spawn([*arguments, "--json"], errors, environment, str(REPOSITORY), namespace)
        daemon = Daemon(name, stage, state_dir, log, process)
        daemon.reader = threading.Thread(target=self._read, args=(daemon,), name=f"events of {name}", daemon=True)
        self.daemons.append(daemon)
        daemon.reader.start()
        return daemon

    def _read(self, daemon: Daemon) -> None:
        for line in daemon.process.stdout:
            event = {**json.loads(line), "from": daemon.name}
            with self._changed:
                daemon.events.append(event)
                self._changed.notify_all()
        with self._changed:
            self._changed.notify_all()


def _family(daemon: Daemon) -> Iterator[psutil.Process]:
    try:
        process = psutil.Process(daemon.pid)
        yield from [process, *process.children(recursive=True)]
    except psutil.NoSuchProcess:
        return


def _alive(thread: threading.Thread | None) -> bool:
    return thread is not None and thread.is_alive()


def _matches(item: Event, event: str, wanted: Mapping[str, Any]) -> bool:
    return item["event"] == event and all(item.get(key) == value for key, value in wanted.items())
