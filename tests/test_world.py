"""Nothing in daemon code reaches clocks, randomness, threads, sockets or subprocesses around `world` and `machine`."""

from __future__ import annotations

import ast
from pathlib import Path

import pytest

PACKAGE = Path(__file__).parents[1] / "swarmtrain"
ROOMS = (
    "peer",
    "coordinator",
    "chain",
    "reduce",
    "route",
    "p2p",
    "rpc",
    "directory",
    "wire",
    "codec",
    "model",
    "observe",
    "courtesy",
    "run",
)

# What only the world may be asked for.
FORBIDDEN = {
    "time": {"time", "monotonic", "perf_counter", "sleep", "thread_time", "process_time", "time_ns", "monotonic_ns"},
    "random": {"random", "choice", "choices", "shuffle", "sample", "uniform", "randrange", "randint", "getrandbits"},
    "secrets": {"*"},
    "uuid": {"uuid1", "uuid4"},
    "threading": {"Thread", "Timer", "Condition", "Event", "Semaphore"},
    "concurrent.futures": {"*"},
    "multiprocessing": {"*"},
    "subprocess": {"*"},
    "socket": {"*"},
    "select": {"*"},
    "datetime": {"now", "utcnow", "today"},
    "os": {"urandom", "fork", "system", "kill", "fsync", "fdatasync", "sync"},
    "sqlite3": {"connect"},
    "asyncio": {
        "to_thread",
        "create_subprocess_exec",
        "create_subprocess_shell",
        "open_connection",
        "open_unix_connection",
        "start_server",
        "start_unix_server",
    },
}
# The world's own edge: the libp2p host and the doors of a real machine, which a simulated one replaces as a whole
# (`Machine`, `NetworkHost`); and faults that strike a real process.
EDGE = {
    "p2p/host.py",
    "p2p/p2pd.py",
    "p2p/p2pd_calls.py",
    "p2p/p2pd_stream.py",
    "p2p/dialing.py",
    "p2p/relay.py",
    "p2p/state_dir.py",
    "observe/control.py",
    "observe/http.py",
    "observe/faults.py",
    "model/peak.py",  # measures the device: simulated time would say nothing
    "observe/logs.py",  # shows an event's time; asks for none
}


def reached(source: str) -> list[str]:
    """What a module takes from the operating system that only the world should give."""
    tree = ast.parse(source)
    modules: dict[str, str] = {}  # local name -> module
    found = []
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            for alias in node.names:
                if alias.name in FORBIDDEN:
                    modules[alias.asname or alias.name.split(".")[0]] = alias.name
                    if "*" in FORBIDDEN[alias.name]:
                        found.append(f"line {node.lineno}: import {alias.name}")
        elif isinstance(node, ast.ImportFrom) and node.module in FORBIDDEN:
            names = FORBIDDEN[node.module]
            found += [
                f"line {node.lineno}: from {node.module} import {alias.name}"
                for alias in node.names
                if "*" in names or alias.name in names or alias.name == "*"
            ]
    for node in ast.walk(tree):
        if isinstance(node, ast.Attribute) and isinstance(node.value, ast.Name) and node.value.id in modules:
            names = FORBIDDEN[modules[node.value.id]]
            if node.attr in names:
                found.append(f"line {node.lineno}: {modules[node.value.id]}.{node.attr}")
        elif isinstance(node, ast.Attribute) and node.attr in ("run_in_executor", "create_connection", "create_server"):
            found.append(f"line {node.lineno}: {node.attr}")
        elif (
            isinstance(node, ast.Call)
            and isinstance(node.func, ast.Attribute)
            and node.func.attr == "Random"
            and isinstance(node.func.value, ast.Name)
            and modules.get(node.func.value.id) == "random"
            and not node.args
        ):
            found.append(f"line {node.lineno}: random.Random() without a seed")
    return found


def test_daemon_code_reaches_the_world_only_through_the_world() -> None:
    around = [
        f"{path.relative_to(PACKAGE)} {what}"
        for room in ROOMS
        for path in sorted((PACKAGE / room).rglob("*.py"))
        if str(path.relative_to(PACKAGE)) not in EDGE
        for what in reached(path.read_text())
    ]
    assert not around, "\n".join(around)


def test_only_the_world_syncs_files() -> None:
    """Everywhere in the package: what goes around it, a simulated loss of power would not know of."""
    around = [
        f"{path.relative_to(PACKAGE)} {what}"
        for path in sorted(PACKAGE.rglob("*.py"))
        if path != PACKAGE / "world.py"
        for what in reached(path.read_text())
        if "sync" in what.rpartition("os.")[2] and "os." in what
    ]
    assert not around, "\n".join(around)


def test_the_edge_is_no_larger_than_it_must_be() -> None:
    for name in sorted(EDGE - {"observe/logs.py"}):
        assert reached((PACKAGE / name).read_text()) or "asyncio." in (PACKAGE / name).read_text(), name


@pytest.mark.parametrize(
    "source",
    [
        "import time\nx = time.monotonic()",
        "import time as t\nt.sleep(1)",
        "from time import perf_counter",
        "import random\nrandom.shuffle([])",
        "import random\nrandom.Random()",
        "import secrets",
        "from threading import Thread",
        "import threading\nthreading.Thread()",
        "import asyncio\nasyncio.to_thread(print)",
        "import socket",
        "loop.run_in_executor(None, print)",
        "import os\nos.urandom(8)",
        "import os\nos.fsync(3)",
        "import sqlite3\nsqlite3.connect('x')",
    ],
)
def test_the_check_sees_each_way_around(source: str) -> None:
    assert reached(source)


@pytest.mark.parametrize(
    "source",
    [
        "from threading import Lock",
        "import random\nrandom.Random(7)",
        "import asyncio\nasyncio.sleep(1)",
        "import time",
    ],
)
def test_the_check_lets_pass_what_does_no_harm(source: str) -> None:
    assert not reached(source)
