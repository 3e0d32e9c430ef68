"""Network namespaces for tests: hosts with addresses of their own, a switch between them, and firewalls.

Needs root, `ip` and `iptables`; what is missing is installed by apt-get if that can be done, else the tests say why
they do not run. Everything has names with the process's id, and is removed in the end.
"""

from __future__ import annotations

import asyncio
import ctypes
import os
import shutil
import socket
import subprocess
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass

SUBNET = "10.91.0"
CLONE_NEWNET = 0x40000000
CAP_SYS_ADMIN = 21  # who enters a namespace needs it


def why_not() -> str | None:
    """None if namespaces can be used here, else the reason."""
    if os.geteuid() != 0:
        return "network namespaces need root"
    missing = [tool for tool in ("ip", "iptables") if shutil.which(tool) is None]
    if missing and not _install():
        return f"{', '.join(missing)} cannot be found or installed"
    probe = f"st{os.getpid()}probe"
    try:
        _run("ip", "netns", "add", probe)
        _run(
            "ip", "netns", "exec", probe, "iptables", "-A", "INPUT", "-m", "conntrack", "--ctstate", "NEW", "-j", "DROP"
        )
    except subprocess.CalledProcessError as error:
        return f"namespaces with a firewall do not work here: {error.stderr.decode(errors='replace').strip()[:200]}"
    finally:
        subprocess.run(["ip", "netns", "delete", probe], capture_output=True, timeout=20, check=False)
    return None


def _install() -> bool:
    if shutil.which("apt-get") is None:
        return False
    command = ["apt-get", "install", "-y", "--no-install-recommends", "iproute2", "iptables"]
    try:
        subprocess.run(command, capture_output=True, timeout=180, check=True, stdin=subprocess.DEVNULL)
    except (subprocess.SubprocessError, OSError):
        return False
    return all(shutil.which(tool) for tool in ("ip", "iptables"))


def _run(*command: str) -> None:
    subprocess.run(command, capture_output=True, timeout=20, check=True)


@dataclass(frozen=True)
class Lab:
    """Namespaces by short names, joined by a switch."""

    names: dict[str, str]
    switch: str

    def enter(self, name: str) -> list[str]:
        """Put this before a command to run it in a namespace."""
        return ["ip", "netns", "exec", self.names[name]]

    def address(self, name: str) -> str:
        """The only address by which others reach a namespace."""
        return f"{SUBNET}.{list(self.names).index(name) + 2}"

    def outgoing_only(self, name: str) -> None:
        """As behind a NAT: answers to own connections come in, nothing else does."""
        prefix = (*self.enter(name), "iptables")
        _run(*prefix, "-A", "INPUT", "-i", "lo", "-j", "ACCEPT")
        _run(*prefix, "-A", "INPUT", "-m", "conntrack", "--ctstate", "ESTABLISHED,RELATED", "-j", "ACCEPT")
        _run(*prefix, "-P", "INPUT", "DROP")

    def plug(self, name: str, *, in_: bool) -> None:
        """Pull a namespace's cable out of the switch, or put it back in."""
        _run("ip", "-n", self.switch, "link", "set", f"to-{name}", "up" if in_ else "down")

    def cut_one_way(self, source: str, target: str) -> None:
        """From now on nothing of `source` reaches `target`; the other direction stays open. Both are counted."""
        for here, there, directive in ((source, target, ()), (target, source, ("-j", "DROP"))):
            _run(*self.enter(here), "iptables", "-I", "INPUT", "1", "-s", self.address(there), *directive)

    def mend(self, source: str, target: str) -> None:
        """Undo `cut_one_way`."""
        for name in (source, target):
            _run(*self.enter(name), "iptables", "-D", "INPUT", "1")

    def counted_packets(self, name: str) -> int:
        """Packets that the rule of `cut_one_way` in this namespace has dropped, or let pass, since the cut."""
        command = [*self.enter(name), "iptables", "-nvxL", "INPUT", "1"]
        return int(subprocess.run(command, capture_output=True, timeout=20, check=True).stdout.split()[0])

    async def probe(self, name: str, host: str, port: int) -> None:
        """Make a TCP connection from within a namespace; raises OSError."""
        connection = await asyncio.to_thread(_socket_in, self.names[name])
        with connection:
            connection.setblocking(False)
            await asyncio.get_running_loop().sock_connect(connection, (host, port))

    def received_bytes(self, name: str) -> int:
        """What a namespace has received over the switch so far."""
        command = [*self.enter(name), "cat", "/sys/class/net/eth0/statistics/rx_bytes"]
        return int(subprocess.run(command, capture_output=True, timeout=20, check=True).stdout)


def _socket_in(namespace: str) -> socket.socket:
    """A TCP socket that belongs to a namespace. Only the thread that makes it goes there, and ends."""
    made: list[socket.socket] = []

    def make() -> None:
        with open(f"/run/netns/{namespace}") as file:
            if ctypes.CDLL(None, use_errno=True).setns(file.fileno(), CLONE_NEWNET) == 0:
                made.append(socket.socket(socket.AF_INET, socket.SOCK_STREAM))

    thread = threading.Thread(target=make)
    thread.start()
    thread.join()
    if not made:
        raise OSError(f"cannot enter {namespace}")
    return made[0]


@contextmanager
def lab(*names: str) -> Iterator[Lab]:
    """Namespaces that share nothing, not even a loopback, but a switch in a namespace of its own."""
    prefix = f"st{os.getpid()}"
    made = Lab({name: f"{prefix}{name}" for name in names}, f"{prefix}switch")
    try:
        _run("ip", "netns", "add", made.switch)
        _run("ip", "-n", made.switch, "link", "add", "br0", "type", "bridge")
        _run("ip", "-n", made.switch, "link", "set", "br0", "up")
        for name, namespace in made.names.items():
            _run("ip", "netns", "add", namespace)
            _run("ip", "-n", namespace, "link", "set", "lo", "up")
            port = f"to-{name}"
            _run("ip", "link", "add", port, "netns", made.switch, "type", "veth", "peer", "eth0", "netns", namespace)
            _run("ip", "-n", made.switch, "link", "set", port, "master", "br0", "up")
            _run("ip", "-n", namespace, "addr", "add", f"{made.address(name)}/24", "dev", "eth0")
            _run("ip", "-n", namespace, "link", "set", "eth0", "up")
        yield made
    finally:
        for namespace in (*made.names.values(), made.switch):
            subprocess.run(["ip", "netns", "delete", namespace], capture_output=True, timeout=20, check=False)
