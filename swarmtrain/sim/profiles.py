"""Peer profiles: TOML files that describe a kind of machine and its connection. `sim/peers/` has some, known by name.

name = "gaming GPU at home"
[hardware]  tflops                        what training really reaches, not the data sheet
            memory_gb, host_gb            of the graphics card, and beside it; without host_gb all is the machine's own
[network]   up_mbit, down_mbit, latency_ms, relayed
[presence]  hours_online, hours_away      means; how long such a machine stays, and stays away
role = "coordinator"                      for a machine that hosts no stage
"""

from __future__ import annotations

import math
import tomllib
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from swarmtrain.errors import UsageError
from swarmtrain.model.workload import StageWork
from swarmtrain.sim.scenario import ChurnEvent, PeerSpec
from swarmtrain.units import MBIT

OWN_PROFILES = Path(__file__).with_name("peers")
MAX_PROFILE_BYTES = 1 << 16
MAX_MACHINES = 1_000_000
ROLES = ("peer", "coordinator")
_OPTIONAL = ("host_gb",)
_RANGES: dict[str, dict[str, tuple[float, float]]] = {
    "hardware": {"tflops": (1e-6, 1e6), "memory_gb": (1e-3, 1e6), "host_gb": (1e-3, 1e6)},
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
    role: str = "peer"
    host_gb: float = 0.0  # beside a graphics card's own memory; 0: it computes on its CPU

    def way(self, work: StageWork) -> tuple[int, int] | None:
        """(bytes of the device, bytes of the host) that a stage takes of it; None if it does not fit."""
        return work.way(self.memory_gb * 1e9, self.host_gb * 1e9)

    def spec(self, stage_tflop: float, weight: float = 1.0) -> PeerSpec:
        """This machine in a pipeline whose stages of cost 1 take `stage_tflop` per microbatch."""
        return PeerSpec(
            speed=self.tflops / stage_tflop,
            up_bytes_per_s=self.up_mbit * MBIT,
            down_bytes_per_s=self.down_mbit * MBIT,
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
        if section not in {"name", "role", *_RANGES}:
            raise UsageError(f"{where}: unknown section {section[:80]!r}")
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
            if key in _OPTIONAL and key not in table:
                continue
            values[key] = _number(table.get(key), low, high, f"{where}: {section}.{key}")
    relayed = raw["network"].get("relayed", False)
    if not isinstance(relayed, bool):
        raise UsageError(f"{where}: network.relayed must be true or false")
    role = raw.get("role", "peer")
    if role not in ROLES:
        raise UsageError(f"{where}: role must be one of {', '.join(ROLES)}")
    return PeerProfile(name=raw["name"][:80], relayed=relayed, role=role, **values)


def _number(value: object, low: float, high: float, where: str) -> float:
    if isinstance(value, bool) or not isinstance(value, int | float) or not math.isfinite(value):
        raise UsageError(f"{where} must be a number")
    if not low <= value <= high:
        raise UsageError(f"{where} must be from {low:g} to {high:g}")
    return float(value)


def load_profiles(items: list[str]) -> list[tuple[PeerProfile, float]]:
    """Profiles with a number each, as on the command line: a file or a name, and `=NUMBER` (a count, or a weight)."""
    profiles = []
    for item in items:
        name, separator, text = item.rpartition("=")
        if not separator:
            name, text = item, "1"
        try:
            number = float(text)
        except ValueError as error:
            raise UsageError(f"{item!r}: after = comes a number, as in {name}=2") from error
        if not 0.0 < number <= MAX_MACHINES:
            raise UsageError(f"{item!r}: the number must be above 0 and at most {MAX_MACHINES}")
        profiles.append((load_profile(find_profile(name)), number))
    return profiles


def find_profile(text: str) -> Path:
    """The file that was named, or the profile of that name that comes with swarmtrain, as `gaming-gpu`."""
    path = Path(text)
    if path.exists() or path.name != text or path.suffix:
        return path
    known = {file.stem: file for file in sorted(OWN_PROFILES.glob("*.toml"))}
    if text not in known:
        raise UsageError(f"no peer profile {text[:80]!r}", fix=f"name a file, or one of: {', '.join(known)}")
    return known[text]


def load_mix(items: list[str], stage_tflop: float) -> tuple[PeerSpec, ...]:
    """The peers among the profiles as kinds of machines that a simulation draws from, by weight."""
    profiles = load_profiles(items)
    specs = tuple(profile.spec(stage_tflop, weight) for profile, weight in profiles if profile.role == "peer")
    if items and not specs:
        raise UsageError("none of the profiles is of a peer", fix="add one, as gaming-gpu")
    return specs


def load_trace(path: Path) -> tuple[ChurnEvent, ...]:
    """A churn trace: a CSV file with lines `seconds,change` (change: +3 joined, -2 vanished); `#` begins a comment."""
    try:
        text = path.read_text()
    except (OSError, ValueError) as error:
        raise UsageError(f"cannot read the trace {path}: {error}") from error
    events: list[ChurnEvent] = []
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
        events.append(ChurnEvent(moment, change))
    return tuple(sorted(events, key=lambda event: event.time_s))


# What `plan` assumes when it is told nothing; the same as gaming-gpu and gaming-gpu-24gb.
GAMING_GPU = PeerProfile(
    name="gaming GPU at home",
    tflops=30.0,
    memory_gb=12.0,
    host_gb=32.0,
    up_mbit=40.0,
    down_mbit=200.0,
    latency_ms=15.0,
    relayed=False,
    hours_online=6.0,
    hours_away=18.0,
)
LARGE_GAMING_GPU = replace(GAMING_GPU, name="gaming GPU, 24 GB", tflops=60.0, memory_gb=24.0, host_gb=64.0)
AT_HOME = (GAMING_GPU, LARGE_GAMING_GPU)
