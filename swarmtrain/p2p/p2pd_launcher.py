"""Becomes p2pd, with limits that p2pd cannot lift. A script: its arguments are those that `confined` writes.

It runs between fork and exec, in a process of its own: there it may do what the daemon, with its threads, may not do
after a fork. It imports only what Python brings, so it costs p2pd's start some hundredths of a second.
"""

from __future__ import annotations

import ctypes
import json
import os
import resource
import signal
import sys

_PR_SET_PDEATHSIG, _PR_CAPBSET_DROP, _PR_SET_NO_NEW_PRIVS = 1, 24, 38
_CAPABILITY_VERSION_3 = 0x20080522
_NUM_CAPABILITIES = 64  # all that the kernel's interface can name


def limit_resources(limits: dict[str, int]) -> None:
    """Set soft and hard limits by their names in `resource`, never above those that are there."""
    for name, wanted in limits.items():
        kind = getattr(resource, name)
        _, highest = resource.getrlimit(kind)
        value = wanted if highest == resource.RLIM_INFINITY else min(wanted, highest)
        resource.setrlimit(kind, (value, value))


def give_up_privileges(kept: list[int]) -> None:
    """Never gain privileges by running a program; as root, have no capabilities after exec but those in `kept`.

    A system that refuses (a container without CAP_SETPCAP) leaves them as they are.
    """
    library = ctypes.CDLL(None, use_errno=True)
    library.prctl(_PR_SET_NO_NEW_PRIVS, 1, 0, 0, 0)
    if os.geteuid() != 0:
        return
    for capability in set(range(_NUM_CAPABILITIES)) - set(kept):
        library.prctl(_PR_CAPBSET_DROP, capability, 0, 0, 0)
    header = (ctypes.c_uint32 * 2)(_CAPABILITY_VERSION_3, 0)
    sets = (ctypes.c_uint32 * 6)()  # effective, permitted, inheritable; twice
    if library.capget(header, sets) == 0:
        sets[2] = sets[5] = 0  # what is inheritable would come back at exec
        library.capset(header, sets)


def die_with(parent: int) -> None:
    """Have the kernel end this process with the daemon, which may have ended already."""
    ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)
    if os.getppid() != parent:
        os._exit(1)


def main() -> None:
    """Confine this process, then replace it by the program."""
    confinement, command = json.loads(sys.argv[1]), sys.argv[2:]
    limit_resources(confinement["limits"])
    if sys.platform == "linux":
        give_up_privileges(confinement["kept_capabilities"])
        die_with(confinement["parent"])
    try:
        os.execv(command[0], command)
    except OSError as error:
        print(error.strerror)
        sys.stdout.flush()
        os._exit(confinement["cannot_run"])


if __name__ == "__main__":
    main()
