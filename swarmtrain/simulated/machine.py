"""A simulated machine: its clock, its disk, its device, and the processes that run on it in turn.

A process is one life of a daemon. Killed, it simply never runs again: its callbacks are dropped, no `finally` is
executed, and its directory stays as it was. Stopped, it does nothing until it is resumed, while its network daemon goes
on taking bytes.
"""

from __future__ import annotations

import asyncio
import contextvars
import errno
import random
import sqlite3
from collections import deque
from collections.abc import Callable, Coroutine, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, TypeVar

from swarmtrain import world
from swarmtrain.courtesy.rules import Rules, Seen
from swarmtrain.courtesy.sensors import Sensors, running_programs
from swarmtrain.machine import Door
from swarmtrain.observe.control import Command
from swarmtrain.observe.http import Action, Handler
from swarmtrain.p2p.errors import StateDirectoryInUseError
from swarmtrain.p2p.network import HostOptions, NetworkHost
from swarmtrain.simulated.disk import Disk
from swarmtrain.simulated.host import SimulatedHost
from swarmtrain.simulated.loop import PROCESS, VirtualLoop
from swarmtrain.simulated.network import Network

T = TypeVar("T")

EPOCH_S = 1_750_000_000.0  # the start of every simulated world
# Seconds per job on a machine of speed 1; jobs with other labels take as long as `step`.
JOB_S = {"forward": 0.020, "backward": 0.040, "evaluate": 0.015, "check": 0.060, "message": 0.0005, "step": 0.010}
DISK_S = 0.002  # duration of blocking work, usually disk access


class Killed(BaseException):
    """Unwinds the stack of a process that was killed in the middle of a callback."""


@dataclass
class Owner:
    """What the owner of a machine does with it, beside the peer. As `Seen`."""

    others_cpu: float = 0.0
    input_idle_s: float | None = None
    programs: set[str] = field(default_factory=set)
    gpu_users: tuple[str, ...] = ()
    gpu_celsius: float | None = None
    gpu_watts: float | None = None
    num_looks: int = 0  # at the machine, by the peer

    def check(self, rules: Rules) -> None:
        """See `Sensors`: every sensor is there."""

    def look(self, rules: Rules) -> Seen:
        """See `Sensors`."""
        self.num_looks += 1
        return Seen(
            self.others_cpu,
            self.input_idle_s,
            running_programs(rules.programs, self.programs),
            self.gpu_users,
            self.gpu_celsius,
            self.gpu_watts,
        )


class SimulatedMachine:
    """See the module docstring. A `Machine` for the process that runs on it now."""

    def __init__(
        self,
        name: str,
        number: int,
        network: Network,
        seed: str,
        by_address: dict[str, SimulatedMachine],
        state_dir: Path,
    ) -> None:
        self.name, self.network, self._seed = name, network, seed
        self.disk = Disk(state_dir)
        self.syncs_left: int | None = None  # this many syncs succeed, then the power fails during a write
        self.luck: random.Random | None = None  # draws which unsynced changes survive that; None: none do
        self.address = f"/ip4/10.{number // 65536 % 256}.{number // 256 % 256}.{number % 256}/tcp/4001"
        self.by_address = by_address
        by_address[self.address] = self
        self.speed = 1.0
        self.owner = Owner()
        self.clock_offset_s = 0.0  # of the wall clock
        self.is_off = False  # no power: connections are not even refused
        self.is_disk_full = False
        self.disk_s = DISK_S
        self.hangs = False  # the device does not finish its job
        self.num_processes = 0
        self.process: SimulatedProcess | None = None

    @property
    def loop(self) -> VirtualLoop:
        """The world's."""
        return self.network.loop

    def start(self, main: Callable[[], Coroutine[Any, Any, None]]) -> SimulatedProcess:
        """Start a process of the daemon, which runs `main`."""
        if self.process is not None:
            assert not self.process.is_running, f"{self.name} is still running"
            self.process.kill()  # ends everything that its main has left running
        self.is_off = False
        self.disk.settle()
        self.num_processes += 1
        self.process = SimulatedProcess(self, f"{self._seed}:{self.name}:{self.num_processes}", main)
        return self.process

    def step_clock(self, seconds: float) -> None:
        """Move the wall clock, as an administrator might."""
        self.clock_offset_s += seconds

    def release_device(self) -> None:
        """The device works again."""
        self.hangs = False
        if self.process is not None:
            for engine in self.process.engines:
                engine.go_on()

    # For the daemon: `Machine`.

    async def start_host(self, options: HostOptions) -> NetworkHost:
        """See `Machine`."""
        process = self.process
        assert process is not None
        if any(host.options.state_dir == options.state_dir for host in self.network.hosts.values()):
            raise StateDirectoryInUseError(options.state_dir, "")
        return await SimulatedHost.start(self.network, self, process, options)

    async def serve_control(self, state_dir: Path, commands: Mapping[str, Command]) -> Door:
        """See `Machine`. The owner asks with `SimulatedProcess.ask`."""
        assert self.process is not None
        self.process.commands = commands
        return _Closed()

    async def serve_http(
        self,
        routes: Mapping[str, Handler],
        address: str,
        option: str,
        note: Path | None = None,
        actions: Mapping[str, Action] | None = None,
        known_as: str = "",
    ) -> Door:
        """See `Machine`. No server is started."""
        return _Closed()

    def sensors(self, gpu_index: int | None) -> Sensors:
        """See `Machine`."""
        return self.owner


@dataclass(frozen=True)
class _Closed:
    """A server that accepts no connections."""

    address: str = "127.0.0.1:1"

    async def close(self) -> None:
        """See `Door`."""


class SimulatedProcess:
    """One process of a daemon; also its `World`."""

    def __init__(self, machine: SimulatedMachine, seed: str, main: Callable[[], Coroutine[Any, Any, None]]) -> None:
        self.machine = machine
        self._rng = random.Random(seed)
        self.is_alive = True
        self.held: deque[asyncio.Handle] | None = None
        self.host: SimulatedHost | None = None
        self.engines: list[_Engine] = []
        self.commands: Mapping[str, Command] = {}
        self.at_death: list[Callable[[], None]] = []  # the operating system's work at the end of a process
        self.graveyard: list[object] = []  # kept, so that no `finally` of a killed process is run by the collector
        self.context = contextvars.Context()
        self.context.run(self._enter)
        self.main: asyncio.Task[None] = self.spawn(main(), machine.name)
        self.main.add_done_callback(lambda _: self.kill())  # the end of `main` ends the process

    def _enter(self) -> None:
        PROCESS.set(self)
        world.enter(self)

    @property
    def is_stopped(self) -> bool:
        """Whether it is suspended by SIGSTOP."""
        return self.held is not None

    @property
    def has_ended(self) -> bool:
        """Whether it has ended by itself."""
        return self.main.done()

    @property
    def is_running(self) -> bool:
        """Whether it has neither been killed nor ended."""
        return self.is_alive and not self.main.done()

    def spawn(self, work: Coroutine[Any, Any, None], name: str) -> asyncio.Task[None]:
        """Run `work` in this process."""
        task = self.machine.loop.create_task(work, name=name, context=self.context.copy())
        self.graveyard.append(task)
        if len(self.graveyard) > 256:
            self.graveyard = [item for item in self.graveyard if not (isinstance(item, asyncio.Task) and item.done())]
        return task

    def call_soon(self, callback: Callable[[], None]) -> None:
        """Schedule `callback` in this process."""
        if self.is_alive:
            self.machine.loop.call_soon(callback, context=self.context)

    def ask(self, command: str, **arguments: Any) -> None:
        """Send an owner's request to the daemon: pause, resume, drain, cut."""
        if command in self.commands:
            handler = self.commands[command]

            async def work() -> None:
                await handler(arguments)

            self.spawn(work(), f"owner asks {command}")

    def answer(self, command: str) -> Any:
        """The daemon's answer to its owner, if it needs no time."""
        with self.machine.loop.entered():
            try:
                self.context.run(next, self.commands[command]({}).__await__())
            except StopIteration as end:
                return end.value
        raise AssertionError(f"{self.machine.name} does not answer {command} at once")

    def stop(self) -> None:
        """SIGSTOP."""
        if self.is_running and self.held is None:
            self.held = deque()

    def resume(self) -> None:
        """SIGCONT."""
        self.machine.loop.let_go(self)

    def kill(self, *, power_loss: bool = False) -> None:
        """SIGKILL. With `power_loss` the machine is off, and connections are not closed."""
        if not self.is_alive:
            return
        self.is_alive = False
        self.held = None
        if power_loss:
            self.machine.is_off = True
            self.machine.disk.lose_power(self.machine.luck)
        if self.host is not None:
            self.machine.network.detach(self.host, silently=power_loss)
        for callback in self.at_death:
            callback()

    # For the daemon: `World`.

    def monotonic(self) -> float:
        """See `World`."""
        return self.machine.loop.time()

    def wall(self) -> float:
        """See `World`."""
        return EPOCH_S + self.machine.loop.time() + self.machine.clock_offset_s

    def processor(self) -> float:
        """See `World`: no work costs processor time here."""
        return 0.0

    def random(self) -> random.Random:
        """See `World`."""
        return random.Random(self._rng.getrandbits(64))

    def token_bytes(self, num_bytes: int) -> bytes:
        """See `World`."""
        return self._rng.randbytes(num_bytes)

    async def in_thread(self, work: Callable[[], T]) -> T:
        """See `World`. Work that has begun is done, whether or not a caller still waits for it."""
        loop = self.machine.loop
        done: asyncio.Future[T] = loop.create_future()

        def run() -> None:
            try:
                value = work()
            except Killed:
                raise
            except BaseException as error:
                if not done.done():
                    done.set_exception(error)
                    done.exception()
            else:
                if not done.done():
                    done.set_result(value)

        loop.call_later(self.machine.disk_s * (0.5 + self._rng.random()), run)
        return await done

    def start_engine(self, name: str, take: Callable[[], world.Job | None]) -> world.Engine:
        """See `World`."""
        engine = _Engine(self, take, random.Random(self._rng.getrandbits(64)))
        self.engines.append(engine)
        return engine

    def check_disk(self, path: Path) -> None:
        """See `World`."""
        if not self.is_alive:
            raise Killed
        if self.machine.is_disk_full:
            raise OSError(errno.ENOSPC, "No space left on device", str(path))

    def sync(self, path: Path) -> None:
        """See `World`."""
        if not self.is_alive:
            raise Killed
        machine = self.machine
        if machine.syncs_left == 0:
            machine.syncs_left = None
            self.kill(power_loss=True)
            machine.loop.call_soon(
                machine.disk.settle, context=machine.network.context
            )  # after this callback has unwound
            raise Killed
        if machine.syncs_left is not None:
            machine.syncs_left -= 1
        if path == machine.disk.root or machine.disk.root in path.parents:
            machine.disk.sync(path)

    def open_database(self, path: Path, *, read_only: bool = False) -> sqlite3.Connection:
        """See `World`."""
        if read_only:
            return sqlite3.connect(f"file:{path}?mode=ro", uri=True, isolation_level=None)
        return self.machine.disk.open_database(path)


class _Engine:
    """Runs each job when its virtual time is over."""

    def __init__(self, process: SimulatedProcess, take: Callable[[], world.Job | None], rng: random.Random) -> None:
        self._process, self._take, self._rng = process, take, rng
        self._job: world.Job | None = None
        self._is_woken = self._is_stopping = self._hangs = False
        self._stopped: asyncio.Future[None] | None = None

    def wake(self) -> None:
        """See `Engine`."""
        if self._job is None and not self._is_woken:
            self._is_woken = True
            self._process.call_soon(self._next)

    async def stop(self) -> None:
        """See `Engine`."""
        self._is_stopping = True
        if self._job is not None:
            self._stopped = self._process.machine.loop.create_future()
            await self._stopped

    def go_on(self) -> None:
        """The device no longer hangs."""
        if self._hangs:
            self._hangs = False
            self._process.call_soon(self._finish)

    def _next(self) -> None:
        self._is_woken = False
        if self._is_stopping or self._job is not None:
            return
        self._job = self._take()
        if self._job is not None:
            machine = self._process.machine
            usual_s = JOB_S.get(self._job.label, JOB_S["step"]) / machine.speed
            self._run_s = max(self._job.least_s, usual_s * self._rng.uniform(0.8, 1.2))
            machine.loop.call_later(self._run_s, self._finish)

    def _finish(self) -> None:
        if self._process.machine.hangs:
            self._hangs = True
            return
        job, self._job = self._job, None
        assert job is not None
        job.run()
        job.finished(self._run_s)
        if self._stopped is not None:
            self._stopped.set_result(None)
        else:
            self._next()

    _run_s = 0.0
