"""The systemd unit of a peer. Pure: text in, text out.

A user's unit has only those restrictions that need no namespaces, because many kernels refuse those to users.
"""

from __future__ import annotations

import re
from dataclasses import dataclass

from swarmtrain.errors import ExitCode, UsageError

NAME = "swarmtrain"
LINGER = "# Installing this has switched lingering on for its user."
_NAMES = re.compile(r"[a-z][a-z0-9-]{0,40}")
_STOP_SPARE_S = 30.0  # beyond the drain: saying goodbye, ending p2pd
# Nothing that a second start would mend: a wrong option, a run that refuses, a machine that is too small or too old.
_FINAL = (ExitCode.USAGE, ExitCode.REFUSED, ExitCode.HARDWARE, ExitCode.TOO_OLD)

_HARDENED = """\
NoNewPrivileges=yes
RestrictAddressFamilies=AF_UNIX AF_INET AF_INET6 AF_NETLINK
RestrictNamespaces=yes
RestrictRealtime=yes
RestrictSUIDSGID=yes
LockPersonality=yes
SystemCallArchitectures=native
SystemCallFilter=@system-service
SystemCallErrorNumber=EPERM
UMask=0077
LimitCORE=0
"""
_OF_A_SYSTEM = """\
DynamicUser=yes
StateDirectory={name}
StateDirectoryMode=0700
CacheDirectory={name}
Environment=XDG_STATE_HOME=/var/lib/{name} XDG_CACHE_HOME=/var/cache/{name} HOME=/var/lib/{name}
WorkingDirectory=/var/lib/{name}
ProtectSystem=strict
ProtectHome=yes
PrivateTmp=yes
ProtectProc=invisible
ProtectHostname=yes
ProtectControlGroups=yes
ProtectKernelLogs=yes
ProtectKernelModules=yes
ProtectKernelTunables=yes
CapabilityBoundingSet=
AmbientCapabilities=
"""
_WITHOUT_GPU = """\
PrivateDevices=yes
ProtectClock=yes
"""
_COURTEOUS = """\
Nice=10
CPUWeight=20
IOSchedulingClass=idle
IOWeight=20
OOMScoreAdjust=500
"""


@dataclass(frozen=True)
class Service:
    """One peer as a service."""

    command: tuple[str, ...]  # the program and its arguments
    run: str  # the run's id, for people
    is_system: bool
    drain_s: float
    with_gpu: bool = False
    environment: tuple[str, ...] = ()  # NAME=VALUE
    lingers: bool = False  # the installation had a user's services start with the machine
    name: str = NAME

    @property
    def file(self) -> str:
        """The unit's name with its ending."""
        return f"{self.name}.service"

    @property
    def target(self) -> str:
        """What starts it."""
        return "multi-user.target" if self.is_system else "default.target"

    def unit(self) -> str:
        """The unit's text."""
        parts = [
            "[Unit]",
            f"Description=swarmtrain: a peer of run {_plain(self.run)}",
            *(["Wants=network-online.target", "After=network-online.target"] if self.is_system else []),
            "StartLimitIntervalSec=0",
            "",
            "[Service]",
            "Type=exec",
            f"ExecStart={' '.join(map(quoted, self.command))}",
            *(f"Environment={quoted(item)}" for item in self.environment),
            "# A crash is mended by a start; a run that is complete, and `swarmtrain drain`, end the service.",
            "Restart=on-failure",
            "RestartSec=10",
            f"RestartPreventExitStatus={' '.join(str(int(code)) for code in _FINAL)}",
            "# SIGTERM drains: the step that the peer has work in is finished first.",
            "KillMode=mixed",
            f"TimeoutStopSec={self.drain_s + _STOP_SPARE_S:.0f}",
            _COURTEOUS + _HARDENED.rstrip(),
            *([_OF_A_SYSTEM.format(name=self.name).rstrip()] if self.is_system else []),
            *([_WITHOUT_GPU.rstrip()] if self.is_system and not self.with_gpu else []),
            "",
            "[Install]",
            f"WantedBy={self.target}",
            *([LINGER] if self.lingers else []),
        ]
        return "\n".join(parts) + "\n"


def checked_name(name: str) -> str:
    """The name of a unit; `UsageError` for what systemd or a file system might read otherwise."""
    if not _NAMES.fullmatch(name):
        raise UsageError(f"{name[:60]!r} is not a name for a service", fix="use small letters, digits and hyphens")
    return name


def quoted(word: str) -> str:
    """A word of a command line as systemd reads it: no specifier, no variable, no second word."""
    if not word.isprintable():
        raise UsageError("an option has characters that cannot be printed", fix="write it without them")
    escaped = word.replace("\\", "\\\\").replace('"', '\\"').replace("%", "%%").replace("$", "$$")
    return escaped if re.fullmatch(r"[\w@%+=:,./~-]+", escaped, re.ASCII) else f'"{escaped}"'


def _plain(text: str) -> str:
    return re.sub(r"[^A-Za-z0-9-]", "", text)
