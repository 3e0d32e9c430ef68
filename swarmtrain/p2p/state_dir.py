"""The host's files in a daemon's state directory: the lock, the identity, the sockets, the listen ports.

host.lock      held (flock) while a daemon runs; contains its process id
identity.key   the daemon's private key; mode 600
listen.ports   the ports that the system chose last time, so that addresses stay valid across restarts
sockets/       p2pd's control socket and ours, while the daemon runs
sockets.path   where the sockets are instead, if this directory's path is too long for a unix socket
"""

from __future__ import annotations

import asyncio
import errno
import fcntl
import logging
import os
import socket
import stat
import tempfile
from pathlib import Path

from swarmtrain import world
from swarmtrain.p2p.addresses import Address
from swarmtrain.p2p.errors import (
    AddressError,
    AddressInUseError,
    CannotListenError,
    StateDirectoryError,
    StateDirectoryInUseError,
)

logger = logging.getLogger(__name__)

MAX_SOCKET_PATH_BYTES = 107  # sun_path is 108 bytes with its final zero
SOCKET_NAMES = ("p2pd.sock", "streams.sock", "guest.sock")
_TEMPORARY_PREFIX = "swarmtrain-"


class StateDirectory:
    """The host's part of a state directory, locked for this process until `release`."""

    def __init__(self, path: Path, lock: int) -> None:
        self.path = path
        self._lock = lock
        self._sockets = path / "sockets"

    @classmethod
    def acquire(cls, path: Path) -> StateDirectory:
        """Create the directory if needed and lock it. Raises StateDirectoryError, StateDirectoryInUseError."""
        path = path.absolute()
        try:
            world.make_directory(path)
            lock = os.open(path / "host.lock", os.O_RDWR | os.O_CREAT, 0o600)
        except OSError as error:
            raise StateDirectoryError(
                f"the state directory {path} cannot be used: {error.strerror}",
                fix="choose a directory that this user may write to",
            ) from error
        try:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError:
            holder = os.pread(lock, 32, 0).decode(errors="replace").strip()
            os.close(lock)
            raise StateDirectoryInUseError(path, f" (process {holder})" if holder.isdigit() else "") from None
        self = cls(path, lock)
        try:
            os.ftruncate(lock, 0)
            os.pwrite(lock, f"{os.getpid()}\n".encode(), 0)
            self._prepare_sockets()
        except OSError as error:
            self.release()
            raise StateDirectoryError(
                f"cannot write to {path}: {error.strerror}", fix="check mode and space"
            ) from error
        return self

    @property
    def identity_file(self) -> Path:
        """The private key that p2pd reads."""
        return self.path / "identity.key"

    @property
    def control_socket(self) -> Path:
        """The socket on which p2pd takes our requests."""
        return self._sockets / SOCKET_NAMES[0]

    @property
    def stream_socket(self) -> Path:
        """The socket on which p2pd hands us incoming streams."""
        return self._sockets / SOCKET_NAMES[1]

    @property
    def guest_socket(self) -> Path:
        """The control socket of the short-lived second p2pd (see relay.py)."""
        return self._sockets / SOCKET_NAMES[2]

    def release(self) -> None:
        """Remove the sockets and unlock. The identity and the ports are kept."""
        _remove_sockets(self._sockets)
        (self.path / "sockets.path").unlink(missing_ok=True)
        os.close(self._lock)

    def clear_sockets(self) -> None:
        """Remove stale socket files: p2pd and asyncio refuse to bind over them."""
        for name in SOCKET_NAMES:
            (self._sockets / name).unlink(missing_ok=True)

    def remembered_ports(self) -> list[int]:
        """The ports of the last start; empty if there are none or the file is damaged."""
        try:
            words = (self.path / "listen.ports").read_text()[:200].split()
        except (OSError, UnicodeDecodeError):
            return []
        return [int(word) for word in words if word.isascii() and word.isdigit() and 0 < int(word) < 65536]

    def remember_ports(self, ports: list[int]) -> None:
        """Save the ports for the next start. A failure is logged and ignored."""
        try:
            (self.path / "listen.ports").write_text(" ".join(map(str, ports)) + "\n")
        except OSError as error:
            logger.warning("cannot save the listen ports: %s", error)

    def _prepare_sockets(self) -> None:
        self._remove_stale()
        longest = max(len(os.fsencode(self._sockets / name)) for name in SOCKET_NAMES)
        if longest > MAX_SOCKET_PATH_BYTES or "," in str(self._sockets):
            self._sockets = Path(tempfile.mkdtemp(prefix=_TEMPORARY_PREFIX))
            (self.path / "sockets.path").write_text(str(self._sockets))
        self._sockets.mkdir(mode=0o700, exist_ok=True)
        self._sockets.chmod(0o700)

    def _remove_stale(self) -> None:
        """Remove the sockets of a killed daemon. We hold the lock, so no process uses them."""
        _remove_sockets(self._sockets)
        record = self.path / "sockets.path"
        try:
            elsewhere = Path(record.read_text()[:4096])
        except (OSError, UnicodeDecodeError):
            return
        # Do not trust the file's contents: remove only a directory of ours in the temporary directory.
        if elsewhere.parent == Path(tempfile.gettempdir()) and elsewhere.name.startswith(_TEMPORARY_PREFIX):
            _remove_sockets(elsewhere)
        record.unlink(missing_ok=True)


def _remove_sockets(directory: Path) -> None:
    """Remove our sockets, and the directory if it is empty then."""
    try:
        status = directory.lstat()
    except OSError:
        return
    if not stat.S_ISDIR(status.st_mode) or status.st_uid != os.getuid():
        return
    for name in SOCKET_NAMES:
        (directory / name).unlink(missing_ok=True)
    try:
        directory.rmdir()
    except OSError as error:
        logger.debug("%s stays: %s", directory, error)


async def fix_ports(listen: tuple[str, ...], preferred: list[int], *, wait_s: float) -> tuple[Address, ...]:
    """The listen addresses with every port 0 replaced by a free port: the one in `preferred`, if it is free.

    p2pd binds with SO_REUSEPORT: two of them would silently share a port, each getting half of the other's connections.
    So every port is tried here first. A requested or preferred port may take `wait_s` to become free, because its last
    user may have just been killed. Raises AddressError, AddressInUseError, CannotListenError.
    """
    fixed = []
    for index, text in enumerate(listen):
        address = Address.parse(text)
        if not _can_listen(address):
            raise AddressError(f"cannot listen on {text}", fix="use an address such as /ip4/0.0.0.0/tcp/4001")
        wanted = address
        if address.port == 0 and index < len(preferred):
            wanted = address.with_port(preferred[index])
        try:
            fixed.append(await _bind_soon(wanted, wait_s))
        except AddressInUseError:
            if wanted is address:
                raise
            logger.info("port %d of the last start is taken; another one is used", preferred[index])
            fixed.append(_bind(address))
    return tuple(fixed)


def _can_listen(address: Address) -> bool:
    return address.parts[0][0] in ("ip4", "ip6") and [name for name, _ in address.parts[1:]] == ["tcp"]


async def _bind_soon(address: Address, wait_s: float) -> Address:
    """`_bind`, retried for `wait_s`: the system has no event for a port that becomes free."""
    loop = asyncio.get_running_loop()
    deadline = loop.time() + wait_s
    while True:
        try:
            return _bind(address)
        except AddressInUseError:
            if loop.time() >= deadline:
                raise
        await asyncio.sleep(0.05)


def _bind(address: Address) -> Address:
    """Bind and listen for a moment; returns the address with the port that was bound."""
    family = socket.AF_INET6 if address.parts[0][0] == "ip6" else socket.AF_INET
    with socket.socket(family, socket.SOCK_STREAM) as probe:
        probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)  # as p2pd does: ignores connections in TIME_WAIT
        if family == socket.AF_INET6:
            probe.setsockopt(socket.IPPROTO_IPV6, socket.IPV6_V6ONLY, 1)
        try:
            probe.bind((address.parts[0][1], address.port))
            probe.listen(1)
        except OSError as error:
            if error.errno == errno.EADDRINUSE:
                raise AddressInUseError(str(address)) from None
            raise CannotListenError(str(address), os.strerror(error.errno or 0)) from None
        return address.with_port(int(probe.getsockname()[1]))
