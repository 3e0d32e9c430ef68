"""What p2pd may take of this machine: it is an old program that reads strangers' bytes (docs/security.md).

Pure but for a look at who owns the state directory; `p2pd_launcher.py` carries it out.
"""

from __future__ import annotations

import json
import os
import sys
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path

from swarmtrain.p2p.addresses import Address

MIB = 2**20
CAP_DAC_OVERRIDE, CAP_NET_BIND_SERVICE = 1, 10
FIRST_PORT_FOR_ALL = 1024
CANNOT_RUN = 126  # the launcher's exit status when the system refuses to run p2pd (a shell's, too)
LAUNCHER = Path(__file__).with_name("p2pd_launcher.py")


@dataclass(frozen=True, slots=True)
class P2pdLimits:
    """p2pd's limits; when it needs more memory than it may have it ends, and the host starts another.

    `memory_bytes` bounds what p2pd maps writable (RLIMIT_DATA): Go reserves 700 MiB of addresses without using them, so
    RLIMIT_AS would say little. Above `collect_above_bytes` Go collects garbage before it takes more (GOMEMLIMIT).
    `open_files` covers a connection and its streams; libp2p lets half of them be connections.
    `capabilities` are kept beyond those that p2pd needs: for a test whose p2pd is a script that enters a namespace.
    There is no limit on processes: the kernel counts all those of the user together.
    """

    memory_bytes: int = 2048 * MIB
    collect_above_bytes: int = 1024 * MIB
    open_files: int = 16384
    capabilities: frozenset[int] = frozenset()

    def by_name(self) -> dict[str, int]:
        """The limits under their names in Python's `resource`. No core dumps: one holds the identity's key."""
        return {"RLIMIT_DATA": self.memory_bytes, "RLIMIT_NOFILE": self.open_files, "RLIMIT_CORE": 0}

    def environment(self) -> dict[str, str]:
        """What Go's runtime is told."""
        return {"GOMEMLIMIT": str(self.collect_above_bytes)}


def needed_capabilities(listen: Iterable[Address], state_dir: Path) -> set[int]:
    """The capabilities that a p2pd needs when root starts it: usually none.

    A low port needs one, and so does a state directory below one of another user's, which root would else not enter.
    """
    needed = {CAP_NET_BIND_SERVICE for address in listen if 0 < address.port < FIRST_PORT_FOR_ALL}
    whole = state_dir.absolute()
    if any(directory.exists() and directory.stat().st_uid != 0 for directory in (whole, *whole.parents)):
        needed.add(CAP_DAC_OVERRIDE)
    return needed


def confined(command: list[str], limits: P2pdLimits, kept_capabilities: Iterable[int]) -> list[str]:
    """The command line that starts `command` under `limits` as a child of this process."""
    confinement = {
        "limits": limits.by_name(),
        "kept_capabilities": sorted({*kept_capabilities, *limits.capabilities}),
        "parent": os.getpid(),
        "cannot_run": CANNOT_RUN,
    }
    return [sys.executable, "-I", "-S", str(LAUNCHER), json.dumps(confinement), *command]
