"""Peer profiles: TOML files that describe a kind of machine and its connection. `peers/` has some to start from.

name = "gaming GPU at home"
[hardware]  tflops, memory_gb             what training really reaches, not the data sheet
[network]   up_mbit, down_mbit, latency_ms, relayed
[presence]  hours_online, hours_away      means; how long such a machine stays, and stays away
[join]      options of `swarmtrain join`  not read here
"""

from __future__ import annotations

import math
import tomllib
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from swarmtrain.errors import UsageError
from swarmtrain.sim.scenario import MEBIT, PeerSpec

MAX_PROFILE_BYTES = 1 << 16
_RANGES: dict[str, dict[str, tuple[float, float]]] = {
    "hardware": {"tflops": (1e-6, 1e6), "memory_gb": (1e-3, 1e6)},
    "network": {"up_mbit": (1e-3, 1e6), "down_mbit": (1e-3, 1e6), "latency_ms": (0.0, 10_000.0)},
    "presence": {"hours_online": (1e-3, 1e6), "hours_away": (1e-3, 1e6)},
}


@dataclass(frozen=True, slots=True)
class PeerProfile:
    """One kind of machine."""

    name: str
    tflops: float
    memory_gb: float
    up_mbit: float
    down_mbit: float
    latency_ms: float
    relayed: bool
    hours_online: float
    hours_away: float

    def spec(self, stage_tflop: float, weight: float = 1.0) -> PeerSpec:
        """This machine in a pipeline whose stages of cost 1 take `stage_tflop` per microbatch."""
        return PeerSpec(
            speed=self.tflops / stage_tflop,
            up_bytes_per_s=self.up_mbit * MEBIT,
            down_bytes_per_s=self.down_mbit * MEBIT,
            latency_s=self.latency_ms / 1000.0,
            relayed=self.relayed,
            weight=weight,
        )


def load_profile(path: Path) -> PeerProfile:
    """Read one profile; anything missing, unknown or out of range is named."""
    try:
        data = path.read_bytes()
    except OSError as error:
        raise UsageError(f"cannot read the peer profile {path}: {error.strerror}") from error
    if len(data) > MAX_PROFILE_BYTES:
        raise UsageError(f"{path}: a peer profile has at most {MAX_PROFILE_BYTES} bytes")
    try:
        return parse_profile(tomllib.loads(data.decode()), str(path))
    except (ValueError, RecursionError) as error:
        raise UsageError(f"{path} is not valid TOML: {error}") from error


def parse_profile(raw: dict[str, Any], where: str = "peer profile") -> PeerProfile:
    """A profile from its TOML content."""
    for section in raw:
        if section not in {"name", "join", *_RANGES}:
            raise UsageError(f"{where}: unknown section {section!r}")
    if not isinstance(raw.get("name"), str):
        raise UsageError(f"{where}: needs a name")
    values: dict[str, float] = {}
    for section, ranges in _RANGES.items():
        table = raw.get(section)
        if not isinstance(table, dict):
            raise UsageError(f"{where}: needs a section [{section}]")
        allowed = {*ranges, "relayed"} if section == "network" else set(ranges)
        for key in table:
            if key not in allowed:
                raise UsageError(f"{where}: unknown key {section}.{key}")
        for key, (low, high) in ranges.items():
            values[key] = _number(table.get(key), low, high, f"{where}: {section}.{key}")
    relayed = raw["network"].get("relayed", False)
    if not isinstance(relayed, bool):
        raise UsageError(f"{where}: network.relayed must be true or false")
    return PeerProfile(name=raw["name"][:80], relayed=relayed, **values)


def _number(value: object, low: float, high: float, where: str) -> float:
    if isinstance(value, bool) or not isinstance(value, int | float) or not math.isfinite(value):
        raise UsageError(f"{where} must be a number")
    if not low <= value <= high:
        raise UsageError(f"{where} must be from {low:g} to {high:g}")
    return float(value)


def load_mix(items: list[str], stage_tflop: float) -> tuple[PeerSpec, ...]:
    """Profiles with weights, as given on the command line: `FILE` or `FILE=WEIGHT`."""
    specs = []
    for item in items:
        name, separator, text = item.rpartition("=")
        if not separator:
            name, text = item, "1"
        try:
            weight = float(text)
        except ValueError as error:
            raise UsageError(f"{item!r}: a weight is a number, as in {name}=2") from error
        if not 0.0 < weight < math.inf:
            raise UsageError(f"{item!r}: a weight is positive")
        specs.append(load_profile(Path(name)).spec(stage_tflop, weight))
    return tuple(specs)


def load_trace(path: Path) -> tuple[tuple[float, int], ...]:
    """A churn trace: a CSV file with lines `seconds,change` (change: +3 joined, -2 vanished); `#` begins a comment."""
    try:
        text = path.read_text()
    except (OSError, ValueError) as error:
        raise UsageError(f"cannot read the trace {path}: {error}") from error
    events: list[tuple[float, int]] = []
    for number, line in enumerate(text.splitlines(), start=1):
        content = line.partition("#")[0].strip()
        if not content or content == "seconds,change":
            continue
        try:
            first, second = content.split(",")
            moment, change = float(first), int(second)
        except ValueError as error:
            raise UsageError(f"{path}, line {number}: expected `seconds,change`, as in 300,-2") from error
        if not 0.0 <= moment < math.inf or abs(change) > 1_000_000:
            raise UsageError(f"{path}, line {number}: out of range")
        events.append((moment, change))
    return tuple(sorted(events))
