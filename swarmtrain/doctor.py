"""Can this machine take part in a run, and if not, what has to be fixed? Each need of a daemon is checked separately.

Whatever can be tried is tried. The network is tried with a temporary host in a temporary directory: a daemon that runs
on this machine is not disturbed.
"""

from __future__ import annotations

import asyncio
import os
import shutil
import tempfile
from collections.abc import AsyncIterator, Callable, Iterator
from contextlib import asynccontextmanager, contextmanager, suppress
from dataclasses import asdict, dataclass
from enum import StrEnum
from pathlib import Path
from typing import Any

import psutil
import torch

from swarmtrain.chain.claim import CoordinatorRecord
from swarmtrain.chain.line_check import Line, listening_port, try_line
from swarmtrain.chain.membership import Membership
from swarmtrain.chain.offer import COORDINATOR_TOPIC
from swarmtrain.directory.directory import MAX_CLOCK_OFFSET_S, Directory, DirectoryOptions
from swarmtrain.errors import ExitCode, SwarmtrainError
from swarmtrain.native.bf16 import RESTRICTED, VARIABLE, Bf16, require_bf16, tried
from swarmtrain.p2p.errors import AddressInUseError, CannotListenError, DialResult, HostError
from swarmtrain.p2p.host import Host
from swarmtrain.p2p.network import HostOptions
from swarmtrain.p2p.p2pd import bundled_p2pd
from swarmtrain.peer.contacts import directory_rules
from swarmtrain.peer.gpus import explain, find_gpus
from swarmtrain.peer.options import choose_device
from swarmtrain.rpc.errors import Refusal
from swarmtrain.rpc.exchange import Exchange
from swarmtrain.rpc.node import Node
from swarmtrain.run.invite import Invite
from swarmtrain.units import show_gb
from swarmtrain.wire.messages import MESSAGES, Code
from swarmtrain.wire.records import parse_record
from swarmtrain.wire.schema import Message

ENOUGH_MEMORY_BYTES = 1 << 30  # interpreter, torch, network daemon, and a small stage
ENOUGH_DISK_BYTES = 256 << 20  # identity, logs and events of a peer
LOOK_S = 15.0  # a coordinator's record is spread within seconds


class Grade(StrEnum):
    """The outcome of one check."""

    GOOD = "good"
    ODD = "odd"  # usable, but worth knowing
    BAD = "bad"
    SKIPPED = "skipped"  # an earlier check failed, or there is nothing to check


@dataclass(frozen=True, slots=True)
class Finding:
    """The outcome of one check; if it is bad, the fix, and the exit code that a daemon would end with."""

    name: str
    verdict: Grade
    detail: str
    fix: str = ""
    exit_code: ExitCode = ExitCode.DONE

    def as_dict(self) -> dict[str, Any]:
        """As plain data."""
        return {**asdict(self), "verdict": self.verdict.value, "exit_code": int(self.exit_code)}


Tell = Callable[[Finding], None]


@dataclass(frozen=True, slots=True)
class Patient:
    """What to check."""

    state_dir: Path  # where the daemon would write
    gpu: int | None = None
    listen: tuple[str, ...] = ("/ip4/0.0.0.0/tcp/0",)
    invite: Invite | None = None
    p2pd_binary: Path | None = None
    look_s: float = LOOK_S


async def examine(patient: Patient, tell: Tell) -> None:
    """Check everything from the machine to the run; `tell` gets each finding as soon as it is known."""
    tell(device(patient.gpu))
    for finding in gpus():
        tell(finding)
    tell(bf16(patient.gpu))
    tell(memory())
    tell(disk(patient.state_dir))
    async with _host(patient) as host:
        if isinstance(host, HostError):
            is_port = isinstance(host, AddressInUseError | CannotListenError)
            tell(_bad("ports" if is_port else "p2pd", host))
            _skip(tell, ("bootstrap", "clock", "run"), "the network daemon did not start")
            return
        tell(Finding("p2pd", Grade.GOOD, f"{patient.p2pd_binary or bundled_p2pd()} runs"))
        tell(Finding("ports", Grade.GOOD, f"listening on {', '.join(host.addresses()[:3])}"))
        if patient.invite is None:
            _skip(tell, ("bootstrap", "clock", "run"), "there is no invite")
        elif _bootstrap(await host.connect(patient.invite.bootstrap), tell):
            await _run(host, patient.invite, patient.look_s, tell)
        else:
            _skip(tell, ("clock", "run"), "no bootstrap peer can be reached")


def exit_code(findings: list[Finding]) -> ExitCode:
    """The exit code of the first bad finding; DONE if there is none."""
    return next((item.exit_code for item in findings if item.verdict is Grade.BAD), ExitCode.DONE)


def device(gpu: int | None) -> Finding:
    """Check the GPU with this number, or the CPU."""
    try:
        chosen = choose_device(gpu)
    except SwarmtrainError as error:
        return _bad("device", error)
    cores = len(os.sched_getaffinity(0))
    if chosen == "cpu":
        return Finding("device", Grade.GOOD, f"CPU with {cores} cores, torch {torch.__version__}")
    free, total = torch.cuda.mem_get_info(chosen)
    what = f"{torch.cuda.get_device_name(chosen)}, {show_gb(free)} of {show_gb(total)} free"
    return Finding("device", Grade.GOOD, f"{what}, torch {torch.__version__}")


def gpus() -> Iterator[Finding]:
    """Each NVIDIA GPU of this machine, with the reason why it can or cannot be used."""
    for note in explain(find_gpus()):
        yield Finding("gpu", Grade.GOOD if note.is_usable else Grade.ODD, note.text, note.fix)


def bf16(gpu: int | None) -> Finding:
    """Check whether the device could take part in a run with model.precision = "bf16"."""
    try:
        chosen = choose_device(gpu)
    except SwarmtrainError:
        return Finding("bf16", Grade.SKIPPED, "there is no device")
    try:
        require_bf16(chosen)
    except SwarmtrainError as error:
        return Finding("bf16", Grade.ODD, str(error), error.fix or "see docs/errors.md")
    if chosen == "cpu" and tried() is Bf16.RESTRICTED:
        return Finding("bf16", Grade.GOOD, f"works with {VARIABLE}={RESTRICTED}, which daemons set for themselves")
    return Finding("bf16", Grade.GOOD, 'runs with model.precision = "bf16" can be joined')


def memory(available_bytes: int | None = None) -> Finding:
    """Check free memory."""
    known = psutil.virtual_memory()
    available = known.available if available_bytes is None else available_bytes
    detail = f"{show_gb(available)} of {show_gb(known.total)} free"
    if available >= ENOUGH_MEMORY_BYTES:
        return Finding("memory", Grade.GOOD, detail)
    fix = f"free some: a daemon takes {show_gb(ENOUGH_MEMORY_BYTES)} with the smallest stage"
    return Finding("memory", Grade.BAD, detail, fix, ExitCode.HARDWARE)


def disk(state_dir: Path) -> Finding:
    """Check that the state directory can be written, and its free space."""
    try:
        with _made(state_dir), tempfile.NamedTemporaryFile(dir=state_dir, prefix=".doctor-") as file:
            file.write(bytes(4096))
            file.flush()
            free = shutil.disk_usage(state_dir).free
    except OSError as error:
        fix = "free some space, check owner and mode, or choose another --state-dir"
        return Finding("disk", Grade.BAD, f"cannot write to {state_dir}: {error.strerror}", fix, ExitCode.STORAGE)
    detail = f"{show_gb(free)} free in {state_dir}"
    if free >= ENOUGH_DISK_BYTES:
        return Finding("disk", Grade.GOOD, detail)
    return Finding(
        "disk", Grade.ODD, detail, f"free some space: logs and events take up to {show_gb(ENOUGH_DISK_BYTES)}"
    )


@contextmanager
def _made(path: Path) -> Iterator[None]:
    """Create a directory for the duration of the block, with its parents; those that existed before stay."""
    missing = [place for place in (path, *path.parents) if not place.exists()]
    path.mkdir(parents=True, exist_ok=True)
    try:
        yield
    finally:
        with suppress(OSError):  # another process uses it by now
            for place in missing:
                place.rmdir()


@asynccontextmanager
async def _host(patient: Patient) -> AsyncIterator[Host | HostError]:
    """A host as a daemon would start it, or the error."""
    with tempfile.TemporaryDirectory(prefix="st-doctor-") as place:
        options = HostOptions(
            state_dir=Path(place),
            listen=patient.listen,
            bootstrap=patient.invite.bootstrap if patient.invite is not None else (),  # the directory starts from them
            require_bootstrap=False,
            p2pd_binary=patient.p2pd_binary,
        )
        try:
            host = await Host.start(options)
        except HostError as error:
            yield error
            return
        try:
            yield host
        finally:
            await host.close()


def _bootstrap(results: list[DialResult], tell: Tell) -> bool:
    """Report each bootstrap peer. True if at least one was reached, which is enough to take part."""
    has_one = any(result.error is None for result in results)
    for result in results:
        if result.error is None:
            tell(Finding("bootstrap", Grade.GOOD, str(result)))
        elif has_one:
            tell(Finding("bootstrap", Grade.ODD, str(result), "nothing: another one was reached"))
        else:
            fix = "check this machine's network and firewall, that the run is going, and that the invite is the newest"
            tell(Finding("bootstrap", Grade.BAD, str(result), fix, ExitCode.UNREACHABLE))
    return has_one


async def _run(host: Host, invite: Invite, look_s: float, tell: Tell) -> None:
    """Check the clock and the coordinator by the run's directory."""
    membership = Membership(invite)
    membership.peer_id = host.peer_id
    options = DirectoryOptions(rules=directory_rules(invite), client_mode=True, gate=membership)
    directory = await Directory.start(host, invite.run_id, options)
    line: Line | None = None
    try:
        coordinator = await _coordinator(host, directory, look_s)
        status = directory.status()
        if coordinator:
            line = await _line(host, membership, coordinator, invite.run_id)
    finally:
        await directory.close()
    if status.num_neighbours:
        tell(clock(status.clock_offset_s))
    else:
        _skip(tell, ("clock",), "no peer has told its time")
    if coordinator:
        tell(Finding("run", Grade.GOOD, f"run {invite.run_id} is coordinated by {coordinator[-8:]}"))
        for finding in line_findings(line or Line("there was no time")):
            tell(finding)
    else:
        fix = "is the coordinator running, and is this its newest invite?"
        detail = f"no coordinator of run {invite.run_id} within {look_s:.0f} s"
        tell(Finding("run", Grade.BAD, detail, fix, ExitCode.UNREACHABLE))


async def _line(host: Host, membership: Membership, coordinator: str, run: str) -> Line:
    """Whether the run can dial this machine, and how fast the line to it is."""
    node = Node(host, MESSAGES, _answer_nothing, gate=membership)
    try:
        return await try_line(node, coordinator, run, listening_port(host.addresses()))
    finally:
        await node.close()


async def _answer_nothing(message: Message, exchange: Exchange) -> Message:
    raise Refusal(Code.NOT_SERVING, "this is a doctor, no peer")


def line_findings(line: Line) -> Iterator[Finding]:
    """Whether others can dial this machine, the line's speed, and which options that asks for."""
    if line.problem:
        for name in ("dial", "line"):
            yield Finding(name, Grade.SKIPPED, f"the coordinator did not try: {line.problem}")
        return
    if line.error:
        detail = f"others cannot dial this machine{f' at {line.address}' if line.address else ''}: {line.error}"
        fix = "join with --behind-nat; or forward a port, and name it with --listen and --announce"
        yield Finding("dial", Grade.ODD, detail, fix)
    else:
        yield Finding("dial", Grade.GOOD, f"the coordinator can dial this machine at {line.address}")
    if not line.up_bytes_per_s:
        yield Finding("line", Grade.SKIPPED, "the coordinator permits no measurement now")
        return
    is_slow = "--max-up" in line.advice
    fix = f"join with {line.advice}, which leaves a fifth of the upload to others here" if is_slow else ""
    yield Finding("line", Grade.ODD if is_slow else Grade.GOOD, line.speeds(), fix)
    if line.advice == "fine":
        yield Finding("advice", Grade.GOOD, "fine: no option is needed for this line")


async def _coordinator(host: Host, directory: Directory, look_s: float) -> str:
    """The peer that announces itself as coordinator with the run's signature; empty if none is found in time."""
    ends_at = asyncio.get_running_loop().time() + look_s
    while True:
        try:
            found = await directory.lookup(COORDINATOR_TOPIC)
        except SwarmtrainError:
            found = {}
        for peer_id, record in found.items():
            if (said := parse_record(CoordinatorRecord, record.value)) is not None:
                host.learn(said.addresses, of=peer_id)
        if found or asyncio.get_running_loop().time() >= ends_at:
            return next(iter(found), "")
        await asyncio.sleep(0.5)  # the directory has no notifications


def clock(others_ahead_s: float) -> Finding:
    """Check this clock against those of the run: signed records expire within seconds."""
    off = abs(others_ahead_s)
    detail = (
        "as the others'" if off < 0.5 else f"{off:.1f} s {'behind' if others_ahead_s > 0 else 'ahead of'} the others'"
    )
    if off <= MAX_CLOCK_OFFSET_S:
        return Finding("clock", Grade.GOOD, detail)
    fix = "set it by NTP: signed records would be refused"
    return Finding("clock", Grade.BAD, detail, fix, ExitCode.UNREACHABLE)


def _bad(name: str, error: SwarmtrainError) -> Finding:
    return Finding(name, Grade.BAD, str(error), error.fix or "see docs/errors.md", error.exit_code)


def _skip(tell: Tell, names: tuple[str, ...], why: str) -> None:
    for name in names:
        tell(Finding(name, Grade.SKIPPED, why))
