"""Errors of this host and of reaching peers, each with an id and a fix.

Start-up errors name their cause precisely: a volunteer who reads one line knows what went wrong.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from swarmtrain.errors import ExitCode, SwarmtrainError


class NetError(SwarmtrainError):
    """Base of all network errors. The caller may try another peer, or the same peer later."""

    error_id = "ST-NET"
    exit_code = ExitCode.UNREACHABLE


class PeerUnreachable(NetError):
    """No stream to the peer could be opened, or the last attempt failed so recently that the back-off still lasts."""

    error_id = "ST-PEER-UNREACHABLE"

    def __init__(self, message: str, *, retry_after_s: float = 0.0, fix: str = "") -> None:
        super().__init__(message, fix=fix)
        self.retry_after_s = retry_after_s


class HostError(NetError):
    """Base of everything the libp2p host raises."""

    error_id = "ST-HOST"
    exit_code = ExitCode.UNREACHABLE


class AddressError(HostError):
    """A text or byte string is not a multiaddr or peer id that this program supports."""

    error_id = "ST-ADDRESS"
    exit_code = ExitCode.USAGE


class HostOptionsError(HostError):
    """Host options contradict each other."""

    error_id = "ST-HOST-OPTIONS"
    exit_code = ExitCode.USAGE


class AddressInUseError(HostError):
    """Another program listens on the requested address."""

    error_id = "ST-ADDRESS-IN-USE"
    exit_code = ExitCode.USAGE

    def __init__(self, address: str) -> None:
        super().__init__(
            f"the listen address {address} is already in use",
            fix="stop the program that uses it, or choose another port (port 0 lets the system choose)",
        )
        self.address = address


class CannotListenError(HostError):
    """The listen address does not belong to this machine, or this user may not use it."""

    error_id = "ST-CANNOT-LISTEN"
    exit_code = ExitCode.USAGE

    def __init__(self, address: str, reason: str) -> None:
        super().__init__(
            f"cannot listen on {address}: {reason}",
            fix="listen on an address of this machine (/ip4/0.0.0.0/tcp/0 means all of them) and a port above 1023",
        )
        self.address = address


class P2pdUnusableError(HostError):
    """The p2pd binary is missing or the system refuses to run it."""

    error_id = "ST-P2PD-UNUSABLE"
    exit_code = ExitCode.HARDWARE

    def __init__(self, path: Path, reason: str) -> None:
        super().__init__(
            f"p2pd cannot be run ({path}): {reason}",
            fix="reinstall hivemind for this platform (pip install --force-reinstall hivemind), and check that the "
            "file is executable and its file system is not mounted noexec",
        )


class P2pdFailedError(HostError):
    """p2pd ended during its start; the message has the last line that it printed."""

    error_id = "ST-P2PD-FAILED"
    exit_code = ExitCode.INTERNAL

    def __init__(self, reason: str) -> None:
        super().__init__(
            f"p2pd ended while starting: {reason}", fix="read the log: it has everything that p2pd printed"
        )


class P2pdTimeoutError(HostError):
    """p2pd runs but was not ready, or did not answer, in time."""

    error_id = "ST-P2PD-TIMEOUT"

    def __init__(self, what: str, timeout_s: float) -> None:
        super().__init__(
            f"p2pd: {what} took longer than {timeout_s:g} s",
            fix="the machine may be overloaded: try again, or raise the start timeout",
        )


class HostDownError(HostError):
    """This host's own p2pd has ended (a new one is being started), or the host is closed."""

    error_id = "ST-HOST-DOWN"


class StateDirectoryError(HostError):
    """The state directory cannot be used."""

    error_id = "ST-STATE-DIR"
    exit_code = ExitCode.STORAGE


class StateDirectoryInUseError(StateDirectoryError):
    """Another daemon uses the same state directory, and so the same identity."""

    error_id = "ST-STATE-DIR-IN-USE"
    exit_code = ExitCode.USAGE

    def __init__(self, path: Path, holder: str) -> None:
        super().__init__(
            f"the state directory {path} is used by another daemon{holder}",
            fix="stop that daemon, or give this one a state directory of its own",
        )


class IdentityError(StateDirectoryError):
    """A key file is damaged or of an unknown kind. It is never overwritten."""

    error_id = "ST-IDENTITY"
    exit_code = ExitCode.FILES


@dataclass(frozen=True, slots=True)
class DialResult:
    """The outcome of dialing one peer. `error` is None if it is connected, else one line."""

    peer_id: str
    addresses: tuple[str, ...]
    error: str | None

    def __str__(self) -> str:
        where = ", ".join(self.addresses)
        return f"{where}: {self.error or 'connected'}"


class BootstrapError(HostError):
    """A starting daemon could reach none of its bootstrap peers; the message lists each with its reason."""

    error_id = "ST-BOOTSTRAP"

    def __init__(self, results: Sequence[DialResult]) -> None:
        listed = "; ".join(str(result) for result in results)
        super().__init__(
            f"no bootstrap peer can be reached: {listed}",
            fix="check this machine's network, that the run is still active, and that the invite is not outdated",
        )
        self.results = tuple(results)
