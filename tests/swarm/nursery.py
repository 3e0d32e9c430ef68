"""Starts daemons quickly: one process loads torch once, and every daemon is a fork of it.

What is forked is a process like any other: own session, own environment and files, `swarmtrain.cli.main.main()` from
the beginning, ended by signals. Only the two seconds of imports are saved, which were most of a test's time.
Run as a program it is the nursery itself: it reads requests from the socket that is its stdin.
"""

from __future__ import annotations

import ctypes
import json
import os
import select
import signal
import socket
import subprocess
import sys
import threading
import traceback
from collections.abc import Mapping, Sequence
from typing import IO, Any

MAX_REQUEST_BYTES = 1 << 17
CLONE_NEWNET = 0x40000000
FORK_S = 60.0 * float(os.environ.get("SWARMTRAIN_TEST_PATIENCE", "4"))  # the first fork waits for torch


class Forked:
    """A daemon; as much of subprocess.Popen as the harness uses."""

    def __init__(self, pid: int, stdout: IO[str]) -> None:
        self.pid, self.stdout = pid, stdout
        self.returncode: int | None = None
        self.ended = threading.Event()

    def poll(self) -> int | None:
        """The exit code, or None while it runs; minus the signal's number if one ended it."""
        return self.returncode

    def wait(self, timeout: float | None = None) -> int:
        """As Popen's."""
        if not self.ended.wait(timeout):
            raise subprocess.TimeoutExpired(f"process {self.pid}", timeout or 0.0)
        assert self.returncode is not None
        return self.returncode

    def send_signal(self, number: int) -> None:
        """As Popen's; nothing for one that has ended."""
        if self.returncode is None:
            try:
                os.kill(self.pid, number)
            except ProcessLookupError:
                pass

    def kill(self) -> None:
        """SIGKILL."""
        self.send_signal(signal.SIGKILL)


class Nursery:
    """The client's side. Started with the first daemon; ends with this process."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._socket, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        environment = {key: value for key, value in os.environ.items() if not key.startswith("SWARMTRAIN_")}
        with theirs:
            self._process = subprocess.Popen(
                [sys.executable, __file__], stdin=theirs, env={**environment, "OMP_NUM_THREADS": "1"}
            )
        self._children: dict[int, Forked] = {}
        self._born: list[int] = []
        self._changed = threading.Condition()
        threading.Thread(target=self._read, name="nursery", daemon=True).start()

    def spawn(
        self, arguments: Sequence[str], stderr: IO[Any], environment: Mapping[str, str], cwd: str, namespace: str = ""
    ) -> Forked:
        """Start `swarmtrain ARGUMENTS`, in a network namespace if one is named.

        Its stdout is read by the caller, its stdin is empty.
        """
        environment = {**environment, "SWARMTRAIN_DIE_WITH_PARENT": str(self._process.pid)}
        wanted = {"arguments": list(arguments), "environment": environment, "cwd": cwd, "namespace": namespace}
        request = json.dumps(wanted).encode()
        assert len(request) < MAX_REQUEST_BYTES
        reading, writing = os.pipe()
        with self._lock, self._changed:
            socket.send_fds(self._socket, [request], [writing, stderr.fileno()])
            os.close(writing)
            assert self._changed.wait_for(lambda: bool(self._born) or not self._is_alive(), FORK_S), "no fork"
            assert self._born, "the nursery has ended"
            child = Forked(self._born.pop(), os.fdopen(reading, "r"))
            self._children[child.pid] = child
            self._changed.notify_all()
        return child

    def _is_alive(self) -> bool:
        return self._process.poll() is None

    def _read(self) -> None:
        while message := self._socket.recv(1024):
            news = json.loads(message)
            with self._changed:
                if "born" in news:
                    self._born.append(news["born"])
                    self._changed.notify_all()
                    self._changed.wait_for(lambda: not self._born)  # so that nobody ends before it is known
                else:
                    child = self._children.pop(news["gone"])
                    child.returncode = os.waitstatus_to_exitcode(news["status"])
                    child.ended.set()
        with self._changed:
            self._changed.notify_all()


def serve(channel: socket.socket) -> None:
    """The nursery's life: fork when asked, report who has ended, end with the client."""
    import torch.fx.experimental.symbolic_shapes  # noqa: F401  # torch loads it in the first backward

    import swarmtrain.coordinator.daemon
    import swarmtrain.peer.daemon  # noqa: F401  # all that a daemon loads

    wake_reading, wake_writing = os.pipe2(os.O_NONBLOCK | os.O_CLOEXEC)
    signal.set_wakeup_fd(wake_writing)
    signal.signal(signal.SIGCHLD, lambda *_: None)
    while True:
        ready, _, _ = select.select([channel, wake_reading], [], [])
        if wake_reading in ready:
            os.read(wake_reading, 4096)
            report_ended(channel)
        if channel in ready:
            request, fds, _, _ = socket.recv_fds(channel, MAX_REQUEST_BYTES, 2)
            if not request:
                return
            pid = os.fork()
            if pid == 0:
                channel.close()
                signal.set_wakeup_fd(-1)
                os.close(wake_reading)
                os.close(wake_writing)
                become(json.loads(request), *fds)
            for fd in fds:
                os.close(fd)
            channel.send(json.dumps({"born": pid}).encode())


def report_ended(channel: socket.socket) -> None:
    """Reap whoever has ended."""
    while True:
        try:
            pid, status = os.waitpid(-1, os.WNOHANG)
        except ChildProcessError:
            return
        if pid == 0:
            return
        channel.send(json.dumps({"gone": pid, "status": status}).encode())


def become(request: dict[str, Any], stdout: int, stderr: int) -> None:
    """In the fork: be a daemon that was just started; never returns."""
    import random

    from swarmtrain.cli.main import main

    code = 1
    try:
        os.setsid()
        signal.signal(signal.SIGCHLD, signal.SIG_DFL)
        nothing = os.open(os.devnull, os.O_RDONLY)
        for number, fd in enumerate((nothing, stdout, stderr)):
            os.dup2(fd, number)
        for fd in (nothing, stdout, stderr):
            os.close(fd)
        if request["namespace"]:
            enter_namespace(request["namespace"])
        os.environ.clear()
        os.environ.update(request["environment"])
        os.chdir(request["cwd"])
        random.seed()
        sys.argv = ["swarmtrain", *request["arguments"]]
        main()
        code = 0
    except SystemExit as end:
        code = end.code if isinstance(end.code, int) else int(end.code is not None)
    except BaseException:
        traceback.print_exc()
    finally:
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(code)


def enter_namespace(name: str) -> None:
    """The calling thread goes to a network namespace, and with it all that it starts; it is the only one so far."""
    with open(f"/run/netns/{name}") as file:
        if ctypes.CDLL(None, use_errno=True).setns(file.fileno(), CLONE_NEWNET) != 0:
            raise OSError(ctypes.get_errno(), f"cannot enter {name}")


if __name__ == "__main__":
    os.setsid()
    own = socket.socket(fileno=os.dup(0))
    os.dup2(os.open(os.devnull, os.O_RDONLY), 0)
    sys.path.insert(0, os.path.dirname(os.path.dirname(os.path.dirname(os.path.abspath(__file__)))))
    sys.path.remove(os.path.dirname(os.path.abspath(__file__)))
    serve(own)
