"""`swarmtrain service`: a peer that systemd starts with the machine and again after a crash."""

from __future__ import annotations

import asyncio
import contextlib
import getpass
import json
import os
import shutil
import subprocess
import sys
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Annotated, Any

import typer

from swarmtrain.cli.help import App
from swarmtrain.cli.join import join
from swarmtrain.cli.numbers import MAX_COUNT, number
from swarmtrain.cli.places import find_invite
from swarmtrain.cli.service_unit import LINGER, NAME, Service, checked_name
from swarmtrain.cli.status_text import status_lines
from swarmtrain.data.files import atomic_write
from swarmtrain.errors import ExitCode, StorageError, SwarmtrainError, UsageError
from swarmtrain.observe.events import clock_time, event_from
from swarmtrain.terminal import say

SystemOption = Annotated[bool, typer.Option("--system", help="The machine's service, not this user's; needs root.")]
UnitOption = Annotated[str, typer.Option(metavar="NAME", help="Name of the unit, where there are several.")]
RootOption = Annotated[
    Path | None,
    typer.Option(metavar="DIR", help="Work on files below this directory, as for an image, and leave systemd alone."),
]

app = App(no_args_is_help=True)


class ServiceError(SwarmtrainError):
    """systemd is not there, or did not do what it was asked to."""

    error_id = "ST-SERVICE"
    exit_code = ExitCode.HARDWARE


@app.callback()
def service() -> None:
    """Have systemd start a peer with the machine, and again after a crash."""


@app.command("install")
def install(
    invite: Annotated[
        str | None,
        typer.Argument(envvar="SWARMTRAIN_INVITE", help="The run to join; default: as for `swarmtrain join`."),
    ] = None,
    options: Annotated[
        list[str] | None, typer.Argument(metavar="-- OPTIONS", help="Options of `swarmtrain join`, as --gpu 0.")
    ] = None,
    system: SystemOption = False,
    unit: UnitOption = NAME,
    root: RootOption = None,
) -> None:
    """Install the service, start it, and have it start with the machine. Again, it changes the service."""
    from swarmtrain.run.invite import parse_invite

    given = list(options or [])
    if invite is not None and invite.startswith("-"):
        given.insert(0, invite)
        invite = None
    text = find_invite(invite)
    place = Place(checked_name(unit), system, root)
    chosen = _join_options(given)
    item = Service(
        command=(_python(is_system=system), "-P", "-m", "swarmtrain", "join", text, *_state_dir(place), *given),
        run=parse_invite(text).run_id,
        is_system=system,
        drain_s=chosen["drain_timeout"],
        with_gpu=chosen["gpu"] is not None,
        environment=() if system else _environment(),
        name=place.name,
    )
    place.check_own()
    if place.is_live and not system:
        item = replace(item, lingers=place.linger())
    is_new = not place.path.exists()
    place.write(item)
    try:
        place.systemctl("daemon-reload")
        place.systemctl("enable", item.file)
        place.systemctl("restart", item.file)
    except ServiceError:
        if is_new:
            place.remove(with_state=False)
            place.end_lingering(item.lingers)
        raise
    place.link(item)
    print(f"installed {place.path}" + ("" if not place.is_live else " and started it"))
    if place.is_live:
        print("see it with `swarmtrain service status` and `swarmtrain service logs`")


@app.command("start")
def start(system: SystemOption = False, unit: UnitOption = NAME) -> None:
    """Start the service now."""
    Place(checked_name(unit), system).known().systemctl("start", f"{unit}.service")
    print(f"started {unit}.service")


@app.command("stop")
def stop(system: SystemOption = False, unit: UnitOption = NAME) -> None:
    """Have the peer finish its step and leave, until the next start of the machine."""
    place = Place(checked_name(unit), system).known()
    print(f"{unit}.service finishes its step and leaves", flush=True)
    place.systemctl("stop", f"{unit}.service")
    print("stopped")


@app.command("status")
def status(system: SystemOption = False, unit: UnitOption = NAME) -> None:
    """Say what systemd knows of the service, and what its peer does and why."""
    place = Place(checked_name(unit), system).known()
    facts = place.facts()
    say(
        f"{unit}.service: {facts['ActiveState']} ({facts['SubState']}), "
        f"{'starts' if facts['UnitFileState'] == 'enabled' else 'does not start'} with the machine, "
        f"started again {facts['NRestarts']} times",
        indent="    ",
    )
    if facts["ActiveState"] == "failed":
        say(f"its last exit code was {facts['ExecMainStatus']}: see docs/errors.md, and `swarmtrain service logs`")
    for line in place.peer_lines(int(facts["MainPID"] or 0)):
        say(line, indent="    ")
    if facts["ActiveState"] != "active":
        raise typer.Exit(ExitCode.UNREACHABLE)


@app.command("logs")
def logs(
    follow: Annotated[bool, typer.Option("--follow", help="Go on as events come.")] = False,
    lines: Annotated[int, number(1, MAX_COUNT, help="How many of the last lines.")] = 100,
    system: SystemOption = False,
    unit: UnitOption = NAME,
) -> None:
    """Show what the peer has said, from systemd's journal."""
    place = Place(checked_name(unit), system).known()
    command = ["journalctl", *place.scope, "--unit" if system else "--user-unit", f"{unit}.service"]
    command += ["--output=cat", "--no-pager", f"--lines={lines}", *(["--follow"] if follow else [])]
    try:
        with subprocess.Popen(command, stdout=subprocess.PIPE, text=True, errors="replace") as journal:
            assert journal.stdout is not None
            for line in journal.stdout:
                say(readable(line.rstrip("\n")), indent=" " * 10)
    except FileNotFoundError as error:
        raise _no_systemd("journalctl") from error


@app.command("uninstall")
def uninstall(
    system: SystemOption = False,
    unit: UnitOption = NAME,
    keep_state: Annotated[
        bool, typer.Option("--keep-state", help="Keep the peer's identity, under which its work is counted.")
    ] = False,
    root: RootOption = None,
) -> None:
    """Have the peer leave, and remove the service with all that belongs to it."""
    place = Place(checked_name(unit), system, root).known()
    has_lingered = LINGER in place.path.read_text()
    place.systemctl("disable", "--now", f"{unit}.service")
    if system and not keep_state:
        place.systemctl("clean", "--what=state", "--what=cache", f"{unit}.service")
    place.remove(with_state=not keep_state)
    place.systemctl("daemon-reload")
    if place.is_live:
        with contextlib.suppress(ServiceError):  # it is an error if there is nothing to forget
            place.systemctl("reset-failed", f"{unit}.service")
        place.end_lingering(has_lingered)
    print(f"removed {place.path}")


@dataclass(frozen=True)
class Place:
    """Where a unit and its state are, below `root`, and the systemd that knows it, if there is no root."""

    name: str
    is_system: bool
    root: Path | None = None

    @property
    def is_live(self) -> bool:
        """Whether systemd is to be told."""
        return self.root is None

    @property
    def scope(self) -> list[str]:
        """Which systemd is meant."""
        return [] if self.is_system else ["--user"]

    @property
    def folder(self) -> Path:
        """Where units are."""
        if self.is_system:
            return self._below(Path("/etc/systemd/system"))
        return self._below(Path(os.environ.get("XDG_CONFIG_HOME") or Path.home() / ".config") / "systemd" / "user")

    @property
    def path(self) -> Path:
        """The unit's file."""
        return self.folder / f"{self.name}.service"

    @property
    def state(self) -> Path:
        """The state of the service."""
        from swarmtrain.cli.options import state_home

        return self._below(Path("/var/lib") / self.name if self.is_system else state_home() / "services" / self.name)

    def _below(self, path: Path) -> Path:
        return path if self.root is None else self.root / path.relative_to(path.anchor)

    def check_own(self) -> None:
        """A unit of this name that is somebody else's is not overwritten."""
        if self.path.exists() and "Description=swarmtrain: " not in self.path.read_text(errors="replace"):
            raise UsageError(f"{self.path} is not a service of swarmtrain", fix="choose another --unit")

    def known(self) -> Place:
        """This place; `UsageError` if nothing is installed there."""
        self.check_own()
        if not self.path.exists():
            raise UsageError(
                f"there is no {self.path}", fix="swarmtrain service install; --system for that of the machine"
            )
        return self

    def write(self, item: Service) -> None:
        """Write the unit."""
        try:
            self.folder.mkdir(parents=True, exist_ok=True)
            atomic_write(self.path, item.unit().encode())
        except OSError as error:
            fix = "run it as root" if self.is_system and self.is_live else "choose another --root"
            raise StorageError(f"cannot write {self.path}: {error.strerror}", fix=fix) from error

    def link(self, item: Service) -> None:
        """Without systemd: what `systemctl enable` does."""
        if self.is_live:
            return
        wants = self.folder / f"{item.target}.wants"
        wants.mkdir(exist_ok=True)
        link = wants / item.file
        link.unlink(missing_ok=True)
        link.symlink_to(Path("..") / item.file)

    def remove(self, *, with_state: bool) -> None:
        """Remove the unit, its links, empty folders of links, and its state."""
        for link in self.folder.glob(f"*.wants/{self.name}.service"):
            link.unlink()
            with contextlib.suppress(OSError):
                link.parent.rmdir()
        self.path.unlink()
        if with_state and (not self.is_system or not self.is_live):
            shutil.rmtree(self.state, ignore_errors=True)
            with contextlib.suppress(OSError):
                self.state.parent.rmdir()

    def systemctl(self, *arguments: str) -> str:
        """What systemctl prints; nothing is done where systemd is not to be told."""
        return _call(["systemctl", *self.scope, *arguments]) if self.is_live else ""

    def linger(self) -> bool:
        """Have this user's services run without a login; whether that was not so before."""
        user = getpass.getuser()
        if _call(["loginctl", "show-user", user, "--property=Linger", "--value"]).strip() == "yes":
            return self.path.exists() and LINGER in self.path.read_text()
        _call(["loginctl", "enable-linger", user])
        return True

    def end_lingering(self, is_ours: bool) -> None:
        """As it was before, if this service has changed it."""
        if is_ours:
            _call(["loginctl", "disable-linger", getpass.getuser()])

    def facts(self) -> dict[str, str]:
        """What systemd knows of the unit."""
        names = ("ActiveState", "SubState", "UnitFileState", "NRestarts", "ExecMainStatus", "MainPID")
        shown = self.systemctl("show", f"--property={','.join(names)}", f"{self.name}.service")
        found = dict(line.split("=", 1) for line in shown.splitlines() if "=" in line)
        return {name: found.get(name, "") for name in names}

    def peer_lines(self, process: int) -> list[str]:
        """What the peer with this process id says of itself."""
        from swarmtrain.cli.options import state_home
        from swarmtrain.observe.control import ControlError, ask

        home = self.state / "swarmtrain" if self.is_system else state_home()
        try:
            note = json.loads((home / "running" / f"{process}.json").read_text())
            return status_lines(asyncio.run(ask(Path(note["state_dir"]) / "control.sock", "status")))
        except (OSError, ValueError, KeyError, TypeError, ControlError):
            return []


def readable(line: str) -> str:
    """An event as a line for people; anything else as it is."""
    try:
        event = event_from(json.loads(line))
    except ValueError:
        return line
    return f"{clock_time(event.at)}  {event.line()}"


def _join_options(given: list[str]) -> dict[str, Any]:
    """What `swarmtrain join` would read from these options; its own error if it would not take them."""
    parser = typer.Typer(add_completion=False, context_settings={"auto_envvar_prefix": "SWARMTRAIN_JOIN"})
    parser.command("join")(join)
    context = typer.main.get_command(parser).make_context("join", ["INVITE", *given])
    if context.params["state_dir"] is not None:
        raise UsageError("--state-dir cannot be chosen: the service has a directory of its own")
    return dict(context.params)


def _python(*, is_system: bool) -> str:
    """The interpreter of this installation; a service of the machine cannot read homes."""
    if is_system and any(sys.prefix.startswith(f"{home}/") for home in ("/home", "/root", "/run/user")):
        raise UsageError(
            f"a service of the machine cannot read {sys.prefix}",
            fix="install swarmtrain outside the homes, as in /opt/swarmtrain, or leave out --system",
        )
    return sys.executable


def _state_dir(place: Place) -> tuple[str, ...]:
    """A directory of its own. The machine's service has one from systemd, which its environment names."""
    if place.is_system:
        return "--state-dir", f"/var/lib/{place.name}/peer"
    return "--state-dir", str(replace(place, root=None).state)


def _environment() -> tuple[str, ...]:
    """What places files: a user's systemd does not know it from the shell."""
    return tuple(f"{name}={os.environ[name]}" for name in ("XDG_STATE_HOME", "XDG_CACHE_HOME") if os.environ.get(name))


def _call(command: Sequence[str]) -> str:
    try:
        done = subprocess.run(command, capture_output=True, text=True, errors="replace", check=False)
    except FileNotFoundError as error:
        raise _no_systemd(command[0]) from error
    if done.returncode:
        said = (done.stderr.strip().splitlines() or [f"exit code {done.returncode}"])[0]
        raise ServiceError(f"{' '.join(command)}: {said}", fix="see `systemctl status`; is this a systemd machine?")
    return done.stdout


def _no_systemd(program: str) -> ServiceError:
    return ServiceError(
        f"there is no {program} on this machine", fix="start `swarmtrain join` from what starts programs here"
    )
