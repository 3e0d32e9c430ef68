"""Imports point downwards only, and the two daemons never import each other. FLOORS is the one list of floors:
docs/architecture.md shows it, and tests/test_map.py holds the page against it.
"""

from __future__ import annotations

import ast
from pathlib import Path

PACKAGE = Path(__file__).parents[1] / "swarmtrain"

# Lower floors first. A module may import its own room and every lower floor.
FLOORS = [
    {"errors", "__init__", "world", "waiting"},
    {"units"},
    {"native"},
    {"run"},
    {"model", "codec", "wire"},
    {"p2p", "route", "data", "boundary", "checkpoint_index"},
    {"rpc", "directory"},
    {"reduce", "observe"},
    {"courtesy"},
    {"checkpoint", "machine"},
    {"chain"},
    {"peer", "coordinator", "sim", "reference"},
    {"inference", "local", "audit", "doctor", "terminal", "trial"},
    {"evaluate", "generate", "export", "soak", "study", "simulated"},
    {"cli"},
    {"__main__"},
]


def room_of(module: str) -> str:
    return module.split(".")[1] if "." in module else "__init__"


def floor_of(room: str) -> int:
    for number, rooms in enumerate(FLOORS):
        if room in rooms:
            return number
    raise AssertionError(f"swarmtrain/{room} is on no floor: add it to FLOORS")


def imports(path: Path) -> set[str]:
    found: set[str] = set()
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.ImportFrom) and node.module is not None and node.module.split(".")[0] == "swarmtrain":
            found.add(node.module if node.module != "swarmtrain" else f"swarmtrain.{node.names[0].name}")
        elif isinstance(node, ast.Import):
            found |= {alias.name for alias in node.names if alias.name.split(".")[0] == "swarmtrain"}
    return {module for module in found if module != "swarmtrain.__version__"}


def edges() -> set[tuple[str, str, str]]:
    found = set()
    for path in PACKAGE.rglob("*.py"):
        room = path.relative_to(PACKAGE).parts[0].removesuffix(".py")
        found |= {(room, room_of(module), str(path.relative_to(PACKAGE))) for module in imports(path)}
    return found


def test_imports_point_downwards_only() -> None:
    wrong = [
        f"{path}: {room} -> {other}"
        for room, other, path in edges()
        if room != other and floor_of(other) >= floor_of(room)
    ]
    assert not wrong, "\n".join(sorted(wrong))


def test_the_check_sees_the_imports_that_exist() -> None:
    seen = {(room, other) for room, other, _ in edges()}
    assert {("peer", "chain"), ("coordinator", "chain"), ("chain", "rpc"), ("cli", "local")} <= seen
    assert ("peer", "coordinator") not in seen
    assert ("coordinator", "peer") not in seen
