"""A swarm of real daemons in a simulated world: start it, watch it, inject faults, let virtual time pass.

    with SimulatedSwarm(manifest, seed="7", root=directory) as swarm:
        swarm.start(num_peers=8)
        swarm.until(lambda: swarm.step >= 2, "two steps")
        swarm.peers[3].kill()
        swarm.run_to_end()
        assert not judge(swarm)

The daemons are `CoordinatorDaemon` and `PeerDaemon` as the command line starts them, each in a process of its own on a
machine of its own. Everything is synchronous: time passes only in `until`, `run_for` and `run_to_end`.
"""

from __future__ import annotations

import asyncio
import contextlib
import functools
import gc
import hashlib
import logging
import shutil
import sys
import traceback
import warnings
from collections.abc import Callable, Iterator
from dataclasses import asdict, dataclass, field
from pathlib import Path
from types import TracebackType
from typing import Any

import torch

from swarmtrain.chain.rebalancing import MoveRules, RebalanceRule
from swarmtrain.coordinator.daemon import CoordinatorDaemon, CoordinatorOptions
from swarmtrain.errors import SwarmtrainError
from swarmtrain.observe.events import Event, Events, RunEnded, RunRolledBack, StepApplied
from swarmtrain.observe.faults import Action, Faults, Point
from swarmtrain.peer.daemon import PeerDaemon
from swarmtrain.peer.options import PeerOptions
from swarmtrain.reference import make_sampler, open_run_source
from swarmtrain.rpc.errors import LinkClosed
from swarmtrain.run.invite import Invite, parse_invite
from swarmtrain.run.manifest import Manifest
from swarmtrain.simulated.loop import VirtualLoop
from swarmtrain.simulated.machine import Killed, SimulatedMachine, SimulatedProcess
from swarmtrain.simulated.network import Network

MEMORY_BYTES = 8 << 30  # the memory limit of each peer
WAIT_S = 600.0
FIRST_STRANGER = 10_000  # the number of their first machine


@dataclass
class Life:
    """One daemon over all its processes: its events, and how each process ended."""

    swarm: SimulatedSwarm
    machine: SimulatedMachine
    state_dir: Path
    stage: int  # -1: the coordinator
    events: list[tuple[float, Event]] = field(default_factory=list)
    errors: list[BaseException] = field(default_factory=list)  # that ended its processes
    daemon: Any = None  # of its last process
    faults: Faults = field(default_factory=Faults)  # that its last process will meet
    struck: list[str] = field(default_factory=list)  # faults at points that have happened: "kill at before-forward"
    stop_s: float = 8.0  # duration of a stop at a point

    @property
    def name(self) -> str:
        """Its machine's name."""
        return self.machine.name

    @property
    def process(self) -> SimulatedProcess:
        """Its last process."""
        assert self.machine.process is not None
        return self.machine.process

    @property
    def is_running(self) -> bool:
        """Whether there is a process, stopped or not."""
        return self.machine.process is not None and self.machine.process.is_running

    @property
    def peer_id(self) -> str:
        """Its identity, once it has one."""
        host = self.process.host
        return host.peer_id if host is not None else ""

    def has(self, name: str, **wanted: Any) -> bool:
        """Whether it has emitted such an event."""
        return any(True for _ in self.said(name, **wanted))

    def said(self, name: str, **wanted: Any) -> Iterator[Event]:
        """Its events of a name whose fields have these values."""
        for _, event in self.events:
            if event.name == name and all(getattr(event, key) == value for key, value in wanted.items()):
                yield event

    def kill(self, *, power_loss: bool = False) -> None:
        """SIGKILL; or the machine loses power, and with it unsynced changes."""
        self.process.kill(power_loss=power_loss)
        self.machine.disk.settle()

    def arm(self, point: str, nth: int, action: str) -> None:
        """Inject a fault when this daemon reaches a point for the n-th time from now (observe/faults.py)."""
        self.faults.arm(point, nth, action)

    def status(self) -> dict[str, Any]:
        """What `swarmtrain status --json` prints."""
        found: dict[str, Any] = self.process.answer("status")
        return found


class SimulatedSwarm:
    """See the module."""

    def __init__(
        self, manifest: Manifest, *, seed: str, root: Path, trace: Callable[[str], None] | None = None
    ) -> None:
        """`trace` gets a line for every event and every delivery; `trace_hash` covers them either way."""
        self.manifest, self.seed, self.root = manifest, seed, root
        self._listener, self._root_text = trace, str(root)
        self._hash = hashlib.sha256()
        self.loop = VirtualLoop(f"{seed}:loop")
        self.loop.set_exception_handler(self._unhandled)
        self.network = Network(self.loop, f"{seed}:network", self.note)
        self.faults: list[str] = []  # violations: events that must never happen
        self.lives: dict[str, Life] = {}
        self._by_address: dict[str, SimulatedMachine] = {}
        self._strangers: list[SimulatedMachine] = []  # machines of nobody's daemons (stranger.py)
        self._step, self._is_over = 0, False
        self._invite = ""
        self._is_closed = False

    def __enter__(self) -> SimulatedSwarm:
        self._threads = torch.get_num_threads()
        torch.set_num_threads(1)
        self._handler = _ErrorLog(self)
        logging.getLogger("swarmtrain").addHandler(self._handler)
        asyncio.set_event_loop(self.loop)
        self._collects = gc.isenabled()
        gc.disable()  # the time at which objects are freed must not depend on earlier runs
        _forget_imports()
        gc.collect()  # frees the previous swarm
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, at: TracebackType | None) -> None:
        self.close()

    def close(self) -> None:
        """End everything; its directory stays."""
        if self._is_closed:
            return
        self._is_closed = True
        for life in self.lives.values():
            if life.machine.process is not None:
                life.machine.process.kill()
        for machine in self._strangers:
            if machine.process is not None:
                machine.process.kill()
        logging.getLogger("swarmtrain").removeHandler(self._handler)
        with _silence():
            self._bury()
        asyncio.set_event_loop(None)
        torch.set_num_threads(self._threads)
        if self._collects:
            gc.enable()

    def _bury(self) -> None:
        """Free dead processes. Errors of their coroutines during collection are ignored."""
        for task in asyncio.all_tasks(self.loop):
            task._log_destroy_pending = False  # type: ignore[attr-defined]
            with contextlib.suppress(BaseException):
                task.get_coro().close()
        self.loop._ready.clear()
        self.loop._scheduled.clear()
        for life in self.lives.values():
            life.daemon = None
            life.machine.process = None
        for machine in self._strangers:
            machine.process = None
        self.network.hosts.clear()
        self.network.streams.clear()
        self.network.pipes.clear()
        gc.collect()
        self.loop.close()

    # ---- state -------------------------------------------------------------------------------------------------------

    @property
    def now(self) -> float:
        """Virtual seconds."""
        return self.loop.time()

    @property
    def coordinator(self) -> Life:
        """The coordinator that was started last."""
        return [life for life in self.lives.values() if life.stage < 0][-1]

    @property
    def peers(self) -> list[Life]:
        """All peers, dead ones too, in the order of their first start."""
        return [life for life in self.lives.values() if life.stage >= 0]

    def serving(self, stage: int | None = None) -> list[Life]:
        """Peers that run and serve (a stage)."""
        found = []
        for peer in self.peers:
            assignment = peer.daemon.assignment if peer.daemon is not None and peer.is_running else None
            if assignment is None or assignment.peer.state.value != "serving":
                continue
            if stage in (None, assignment.peer.stage):
                found.append(peer)
        return found

    @property
    def step(self) -> int:
        """Steps that the coordinators have told to be applied; goes back with the run."""
        return self._step

    @property
    def is_over(self) -> bool:
        """Whether the run has ended."""
        return self._is_over

    def happened(self, name: str | None = None) -> list[tuple[float, Event]]:
        """Events of all daemons (of a name), in order."""
        found = [item for life in self.lives.values() for item in life.events if name in (None, item[1].name)]
        return sorted(found, key=lambda item: item[0])

    @property
    def trace_hash(self) -> str:
        """The hash over all events and deliveries."""
        return self._hash.hexdigest()

    # ---- daemons -----------------------------------------------------------------------------------------------------

    def start(self, *, num_peers: int) -> None:
        """A coordinator, and peers spread over the stages in turn; the first step waits for all of them."""
        self.start_coordinator(min_peers=num_peers)
        for index in range(num_peers):
            self.start_peer(f"peer{index}", index % self.manifest.stages.count)

    def start_coordinator(
        self, name: str = "coordinator", *, directory: Path | None = None, wait: bool = True, **options: Any
    ) -> Life:
        """Start or restart a coordinator on its state directory. `wait`: until it has an invite."""
        life = self._life(name, -1, directory)
        choice = CoordinatorOptions(
            manifest=self.manifest,
            state_dir=life.state_dir,
            listen=(life.machine.address,),
            page="",
            bootstrap=tuple(options.pop("bootstrap", ())),
            moves=options.pop("moves", MoveRules(rule=RebalanceRule.NONE)),
            faults=self._faults(life),
            **options,
        )

        def make(events: Events) -> CoordinatorDaemon:
            source = open_run_source(self.manifest)
            return CoordinatorDaemon(choice, events, lambda manifest: make_sampler(manifest, source), life.machine)

        self._start(life, make)
        if wait:
            self.until(
                lambda: getattr(life.daemon, "invite", None) is not None or not life.is_running, f"{name} has an invite"
            )
        return life

    def invite(self) -> Invite:
        """The run's invite."""
        path = self.coordinator.state_dir / "invite"
        if path.exists():
            self._invite = path.read_text().strip()
        return parse_invite(self._invite)

    def start_peer(self, name: str, stage: int, *, speed: float | None = None, **options: Any) -> Life:
        """Start a peer, or start it again on its state directory."""
        life = self._life(name, 0)
        life.stage = max(0, stage)  # with AUTO its events name the stage
        if speed is not None:
            life.machine.speed = speed
        choice = PeerOptions(
            invite=self.invite(),
            stage=stage,
            state_dir=life.state_dir,
            listen=(life.machine.address,),
            max_memory_bytes=MEMORY_BYTES,
            name=name,
            drain_s=options.pop("drain_s", 20.0),
            faults=self._faults(life),
            **options,
        )
        self._start(life, lambda events: PeerDaemon(choice, events, life.machine))
        return life

    def _life(self, name: str, stage: int, directory: Path | None = None) -> Life:
        life = self.lives.get(name)
        if life is None:
            state_dir = directory or self.root / name
            state_dir.mkdir(parents=True, exist_ok=True)
            machine = SimulatedMachine(name, len(self.lives) + 1, self.network, self.seed, self._by_address, state_dir)
            life = self.lives[name] = Life(self, machine, state_dir, stage)
        return life

    def stranger_machine(self, name: str) -> SimulatedMachine:
        """A machine for a process that is no daemon of this project."""
        state_dir = self.root / f"stranger-{name}"
        state_dir.mkdir(parents=True, exist_ok=True)
        number = FIRST_STRANGER + len(self._strangers)
        machine = SimulatedMachine(name, number, self.network, self.seed, self._by_address, state_dir)
        self._strangers.append(machine)
        return machine

    def _faults(self, life: Life) -> Faults:
        def strike(action: Action) -> None:
            if action is Action.STOP:
                process = life.process
                process.stop()
                self.at(self.now + life.stop_s, process.resume)
            else:
                life.process.kill()
                raise Killed

        def tell(action: Action, point: Point) -> None:
            life.struck.append(f"{action} at {point}")
            self.note(f"{self.now:.9f} {life.name} test fault: {action} at {point}")

        life.faults = Faults(is_enabled=True, strike=strike, tell=tell)
        return life.faults

    def _start(self, life: Life, make: Callable[[Events], Any]) -> None:
        def note(event: Event) -> None:
            life.events.append((self.now, event))
            if isinstance(event, StepApplied):
                self._step = event.step
            elif isinstance(event, RunRolledBack):
                self._step = event.to_step
            elif isinstance(event, RunEnded):
                self._is_over = True
            fields = {key: value for key, value in asdict(event).items() if key != "at"}
            self.note(f"{self.now:.9f} {life.name} {event.name} {fields}")

        async def main() -> None:
            daemon = life.daemon = make(Events(note))
            process = life.process
            process.at_death.append(lambda: _release(daemon))
            try:
                await daemon.run()
            except SwarmtrainError as error:
                life.errors.append(error)
                self.note(f"{self.now:.9f} {life.name} ended {error}")
            except BaseExceptionGroup as group:
                leaves = [error for error in _leaves(group) if isinstance(error, SwarmtrainError)]
                if not leaves:
                    self.failed(f"{life.name} crashed: {group!r}")
                    raise
                life.errors.extend(leaves)
                self.note(f"{self.now:.9f} {life.name} ended {leaves[0]}")
            except Exception as error:
                self.failed(f"{life.name} crashed: {told(error)}")
                raise
            finally:
                if process.is_alive:
                    _release(daemon)

        life.machine.start(main)

    # ---- time --------------------------------------------------------------------------------------------------------

    def until(self, condition: Callable[[], bool], what: str, *, limit_s: float = WAIT_S) -> None:
        """Let time pass until `condition` holds; TimeoutError if it does not within `limit_s` virtual seconds."""
        if not self.loop.run_until(condition, limit_s=limit_s):
            raise TimeoutError(f"at {self.now:.1f} s: this did not become true within {limit_s:g} s: {what}")

    def run_for(self, seconds: float) -> None:
        """Let time pass."""
        ends_at = self.now + seconds
        self.loop.run_until(lambda: self.now >= ends_at, limit_s=seconds + 1.0)

    def at(self, when: float, action: Callable[[], None]) -> None:
        """Schedule an action, outside all processes."""
        self.loop.call_at(when, action, context=self.network.context)

    def run_to_end(self, *, limit_s: float = WAIT_S) -> None:
        """Let time pass until the run and all its daemons have ended."""
        self.until(lambda: self.is_over, "the run ends", limit_s=limit_s)
        self.until(lambda: not any(life.is_running for life in self.lives.values()), "all daemons end", limit_s=120.0)

    # ---- violations --------------------------------------------------------------------------------------------------

    def failed(self, text: str) -> None:
        """Record a violation: an event that must never happen."""
        if self._is_closed:
            return
        self.faults.append(f"{self.now:.3f} {text}")
        self.note(f"{self.now:.9f} FAULT {text}")

    def _unhandled(self, loop: asyncio.AbstractEventLoop, context: dict[str, Any]) -> None:
        error = context.get("exception")
        if isinstance(error, Killed):
            return
        if isinstance(error, LinkClosed) and "never retrieved" in str(context.get("message")):
            return
        self.failed(f"{context.get('message')}: {told(error)}")

    def note(self, line: str) -> None:
        """Add a line to the trace."""
        if self._is_closed:
            return
        line = line.replace(self._root_text, "ROOT")
        self._hash.update(line.encode())
        self._hash.update(b"\n")
        if self._listener is not None:
            self._listener(line)

    def remove(self) -> None:
        """Its directories too."""
        shutil.rmtree(self.root, ignore_errors=True)


@functools.cache
def _forget_imports() -> None:
    """Exclude the modules' objects from garbage collection, which would otherwise take longer than a run."""
    gc.collect()
    gc.freeze()


def _release(daemon: Any) -> None:
    """Close the files of a dead process and release its locks, as the operating system does."""
    journal = getattr(daemon, "journal", None)
    if journal is not None:
        journal.close(is_lost=True)


def _leaves(group: BaseExceptionGroup[BaseException]) -> Iterator[BaseException]:
    for error in group.exceptions:
        if isinstance(error, BaseExceptionGroup):
            yield from _leaves(error)
        else:
            yield error


def told(error: BaseException | None) -> str:
    """An error with its location."""
    if error is None:
        return ""
    frames = traceback.extract_tb(error.__traceback__)
    return f"{error!r} at {' < '.join(f'{Path(f.filename).name}:{f.lineno}' for f in reversed(frames))}"


class _ErrorLog(logging.Handler):
    """Records everything that daemons log as an error as a violation."""

    def __init__(self, swarm: SimulatedSwarm) -> None:
        super().__init__(logging.ERROR)
        self._swarm = swarm

    def emit(self, record: logging.LogRecord) -> None:
        """See `logging`."""
        error = record.exc_info[1] if record.exc_info else None
        if not isinstance(error, Killed):
            self._swarm.failed(f"logged: {record.getMessage()} {told(error)}")


@contextlib.contextmanager
def _silence() -> Iterator[None]:
    """Errors of coroutines that are collected half-way."""
    before = sys.unraisablehook
    sys.unraisablehook = lambda unraisable: None
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", RuntimeWarning)
            yield
    finally:
        sys.unraisablehook = before
