"""A whole swarm on this machine: a coordinator and peers as real processes that talk libp2p over loopback.

It starts the processes, reads the coordinator's events, and leaves no process behind.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import logging
import os
import random
import signal
import sys
from collections.abc import Callable, Coroutine, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from swarmtrain.errors import ExitCode, StorageError, SwarmtrainError
from swarmtrain.observe.control import ControlError, ask
from swarmtrain.run.manifest import Manifest

log = logging.getLogger(__name__)

LOOPBACK = "/ip4/127.0.0.1/tcp/0"
STOP_S = 20.0
START_S = 60.0
READ_S = 5.0

OnEvent = Callable[[dict[str, Any]], None]
Disturb = Callable[["LocalSwarm"], Coroutine[Any, Any, None]]


class LocalError(SwarmtrainError):
    """A daemon of the local swarm ended when it should not have."""

    error_id = "ST-LOCAL"
    exit_code = ExitCode.INTERNAL


@dataclass(frozen=True)
class LocalOptions:
    """The options of `swarmtrain local`."""

    manifest: Manifest
    state_dir: Path
    num_peers: int
    threads: int = 1
    kill_every_s: float = 0.0
    kill_coordinator: bool = False
    seed: int = 0
    peer_arguments: tuple[str, ...] = ()  # further options for every peer


@dataclass
class Child:
    """One daemon's process."""

    name: str
    stage: int  # -1 for the coordinator
    process: asyncio.subprocess.Process
    reader: asyncio.Task[None]
    is_serving: bool = False
    errors: list[str] = field(default_factory=list)


class LocalSwarm:
    """Starts, watches and stops the daemons."""

    def __init__(self, options: LocalOptions, on_event: OnEvent, disturb: Disturb | None = None) -> None:
        """`disturb` runs beside the swarm and may kill daemons; by default it kills as the options say."""
        self.options, self._on_event = options, on_event
        self._disturb = disturb or (LocalSwarm._kill_now_and_then if options.kill_every_s else None)
        self.coordinator: Child | None = None
        self.peers: list[Child] = []
        self.invite = ""
        self.ended: dict[str, Any] | None = None
        self._invited = asyncio.Event()
        self._trains = asyncio.Event()
        self._over = asyncio.Event()
        self._is_stopping = False
        self._num_started = 0
        self._rng = random.Random(options.seed)

    async def run(self) -> dict[str, Any]:
        """Run to the end; returns the `run_ended` event. All processes have ended afterwards."""
        try:
            await self.start()
            await self._until_over()
        finally:
            await self.stop()
        assert self.ended is not None
        return self.ended

    async def start(self) -> None:
        """Start the coordinator, then the peers, with the stages in turn."""
        self._write_manifest()
        self.coordinator = await self._start_coordinator()
        async with asyncio.timeout(START_S):
            await self._wait_first(self._invited.wait())
        count = self.options.manifest.stages.count
        for index in range(self.options.num_peers):
            self.peers.append(await self.start_peer(index % count))

    def _write_manifest(self) -> None:
        path = self.options.state_dir / "run.toml"
        try:
            path.parent.mkdir(parents=True, exist_ok=True)
            path.write_text(self.options.manifest.canonical())
        except OSError as error:
            raise StorageError(f"cannot write {path}: {error.strerror}", fix="choose another --state-dir") from error

    async def start_peer(self, stage: int, *extra: str) -> Child:
        """Start one more peer of a stage."""
        name = f"peer{self._num_started}"
        self._num_started += 1
        arguments = ["join", self.invite, "--stage", str(stage), "--threads", str(self.options.threads)]
        arguments += ["--nice", "0"]
        arguments += ["--state-dir", str(self.options.state_dir / name), "--listen", LOOPBACK, "--name", name]
        arguments += ["--metrics", "127.0.0.1:0"]
        more = [*self.options.peer_arguments, *extra]
        return await self._spawn(name, stage, [*arguments, "--drain-timeout", "5", "--json", *more])

    async def stop(self) -> None:
        """End all daemons: the coordinator first, so that no step waits for peers that leave."""
        self._is_stopping = True
        children = ([self.coordinator] if self.coordinator is not None else []) + self.peers
        for child in children:
            await self._end(child)
        for child in children:
            child.reader.cancel()
        await asyncio.gather(*(child.reader for child in children), return_exceptions=True)

    async def _start_coordinator(self) -> Child:
        directory = self.options.state_dir / "coordinator"
        arguments = ["coordinator", str(self.options.state_dir / "run.toml"), "--state-dir", str(directory)]
        arguments += ["--listen", LOOPBACK, "--min-peers", str(self.options.num_peers), "--json"]
        return await self._spawn("coordinator", -1, arguments)

    async def _spawn(self, name: str, stage: int, arguments: list[str]) -> Child:
        environment = {**os.environ, "OMP_NUM_THREADS": str(self.options.threads)}
        environment["SWARMTRAIN_DIE_WITH_PARENT"] = str(os.getpid())
        for variable in (
            "SWARMTRAIN_INVITE",
            "SWARMTRAIN_SET",
        ):  # meant for this process: the manifest and the invite hold them already
            environment.pop(variable, None)
        path = self.options.state_dir / f"{name}.log"
        try:
            log_file = path.open("ab")
        except OSError as error:
            raise StorageError(f"cannot write {path}: {error.strerror}", fix="choose another --state-dir") from error
        process = await asyncio.create_subprocess_exec(
            sys.executable,
            "-P",  # a folder named swarmtrain here is not the program
            "-m",
            "swarmtrain",
            *arguments,
            stdin=asyncio.subprocess.DEVNULL,
            stdout=asyncio.subprocess.PIPE,
            stderr=log_file,
            env=environment,
            start_new_session=True,
            limit=1 << 20,
        )
        log_file.close()
        child = Child(name, stage, process, asyncio.create_task(asyncio.sleep(0)))
        child.reader = asyncio.create_task(self._read(child), name=f"events of {name}")
        return child

    async def _read(self, child: Child) -> None:
        assert child.process.stdout is not None
        async for line in child.process.stdout:
            try:
                event = json.loads(line)
            except ValueError:
                log.warning("%s printed %r", child.name, line[:200])
                continue
            self._take(child, event)

    def _take(self, child: Child, event: dict[str, Any]) -> None:
        kind = event.get("event")
        if kind == "phase_reached" and event["phase"] == "invite":
            self.invite = event["detail"]
            self._invited.set()
        if kind == "phase_reached" and event["phase"] == "serving":
            child.is_serving = True
        if kind == "step_applied":
            self._trains.set()
        if kind == "run_ended":
            self.ended = event
            self._over.set()
        self._on_event({**event, "from": child.name})

    async def _until_over(self) -> None:
        tasks = [asyncio.create_task(self._wait_first(self._over.wait()))]
        if self._disturb is not None:
            tasks.append(asyncio.create_task(self._disturb(self)))
        try:
            done, _ = await asyncio.wait(tasks, return_when=asyncio.FIRST_COMPLETED)
            for task in done:
                task.result()
        finally:
            for task in tasks:
                task.cancel()
            await asyncio.gather(*tasks, return_exceptions=True)

    async def _wait_first(self, wanted: Any) -> None:
        """Wait for `wanted`; LocalError if a daemon that must live ends first."""
        waiting = asyncio.create_task(wanted)
        try:
            while not waiting.done():
                await asyncio.wait([waiting], timeout=0.5)
                await self._check_children()
        finally:
            waiting.cancel()

    async def _check_children(self) -> None:
        must_live = [self.coordinator, *(self.peers if self._disturb is None else [])]
        for child in must_live:
            if child is None or child.process.returncode is None:
                continue
            await asyncio.wait([child.reader], timeout=READ_S)  # its last events may still be on their way
            was_asked = child.stage >= 0 and child.process.returncode == 0  # told to leave, or drained by the user
            if not was_asked and not self._over.is_set():
                raise LocalError(
                    f"{child.name} ended with exit code {child.process.returncode}: {self.last_words(child)}",
                    fix=f"its log is {self.options.state_dir / (child.name + '.log')}",
                )

    def last_words(self, child: Child) -> str:
        """The last line of a daemon's log."""
        path = self.options.state_dir / f"{child.name}.log"
        with contextlib.suppress(OSError):
            lines = path.read_text(errors="replace").strip().splitlines()
            return lines[-1] if lines else "it logged nothing"
        return "it logged nothing"

    async def _kill_now_and_then(self) -> None:
        """SIGKILL a peer whose stage has another one (or the coordinator), and start another in its place.

        This begins after the first step: before it there is nothing to recover.
        """
        await self._trains.wait()
        while True:
            await asyncio.sleep(self.options.kill_every_s)
            if self.options.kill_coordinator and self._rng.random() < 0.3:
                await self.replace_coordinator()
                continue
            candidates = replaceable(await self.serving_peers())
            if candidates:
                victim = self._rng.choice(candidates)
                self._on_event({"event": "killed", "from": "local", "victim": victim.name, "stage": victim.stage})
                await self.kill(victim)
                self.peers.remove(victim)
                self.peers.append(await self.start_peer(victim.stage))

    async def serving_peers(self) -> list[Child]:
        """Serving peers, as the coordinator sees it; none if it does not answer."""
        try:
            status = await ask(self.options.state_dir / "coordinator" / "control.sock", "status")
        except ControlError as error:
            log.info("no peer is killed now: %s", error)
            return []
        names = serving_names(status)
        return [peer for peer in self.peers if peer.name in names and peer.process.returncode is None]

    async def replace_coordinator(self) -> None:
        """SIGKILL the coordinator, and start it again with the same state directory."""
        assert self.coordinator is not None
        self._on_event({"event": "killed", "from": "local", "victim": "coordinator", "stage": -1})
        former, self.coordinator = self.coordinator, None
        await self.kill(former)
        self._invited.clear()
        self.coordinator = await self._start_coordinator()
        await self._invited.wait()

    async def kill(self, child: Child) -> None:
        """SIGKILL; returns when the process has ended."""
        with contextlib.suppress(ProcessLookupError):
            child.process.kill()
        await child.process.wait()

    async def _end(self, child: Child) -> None:
        """SIGTERM, and SIGKILL if the daemon does not end in time."""
        if child.process.returncode is None:
            with contextlib.suppress(ProcessLookupError):
                child.process.send_signal(signal.SIGTERM)
            try:
                async with asyncio.timeout(STOP_S):
                    await child.process.wait()
            except TimeoutError:
                log.warning("%s does not end; killing it", child.name)
                await self.kill(child)


def replaceable(peers: Sequence[Child]) -> list[Child]:
    """The peers whose stage has another one among `peers`."""
    return [peer for peer in peers if sum(other.stage == peer.stage for other in peers) > 1]


def serving_names(status: dict[str, Any]) -> set[str]:
    """The names of peers that serve at the run's step over an intact link, from a coordinator's status."""
    members = [member for stage in status["stages"] for member in stage]
    return {
        member["name"]
        for member in members
        if member["state"] == "serving" and member["step"] >= status["step"] and not member["doubt"]
    }
