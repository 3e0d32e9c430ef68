"""The table of docs/simulator.md: what `plan` says of the large presets on machines of the shipped profiles."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

from swarmtrain.run.presets import preset
from swarmtrain.sim.advice import advice
from swarmtrain.sim.demand import demand_of
from swarmtrain.sim.plan import Forecast, forecast
from swarmtrain.sim.profiles import PeerProfile, load_profile

# Each preset on machines at home, in offices and in data centres; the last stage of llama-8b needs much memory.
SWARMS: dict[str, tuple[dict[str, int], ...]] = {
    "llama-125m": ({"gaming-gpu": 16}, {"office-workstation": 16}, {"cloud-spot-gpu": 16}),
    "llama-1b": ({"gaming-gpu": 128}, {"office-workstation": 64}, {"gaming-gpu": 64, "cloud-spot-gpu": 64}),
    "llama-8b": (
        {"gaming-gpu-24gb": 256, "cloud-large-gpu": 32},
        {"office-workstation": 256, "cloud-large-gpu": 16},
        {"cloud-spot-gpu": 256, "cloud-large-gpu": 32},
    ),
}
_EXACT, _SYNCHRONOUS, _DELAYED = "reduce.codec=none", "schedule.delay=0", "schedule.delay=1"
WAYS = (
    ("synchronous, exact", (_SYNCHRONOUS, _EXACT)),
    ("synchronous, {codec}", (_SYNCHRONOUS,)),
    ("delayed, exact", (_DELAYED, _EXACT)),
    ("delayed, {codec}", (_DELAYED,)),
)
HEADERS = ("machines", "all-reduce", "bound, tokens/s", "tokens/s", "of it", "days", "GB a day up, down", "what limits")


@dataclass(frozen=True, slots=True)
class Row:
    """One plan."""

    preset: str
    machines: str
    way: str
    found: Forecast
    limit: str

    def cells(self) -> tuple[str, ...]:
        """Under `HEADERS`. The bytes are those of a volunteer in the stage that has most."""
        found = self.found
        up, down = (
            max(stage.up_bytes_per_day for stage in found.stages),
            max(s.down_bytes_per_day for s in found.stages),
        )
        return (
            self.machines,
            self.way,
            f"{found.bound_tokens_per_s:,.0f}",
            f"{found.tokens_per_s:,.0f}",
            f"{found.share_of_bound:.2f}",
            f"{found.days:.1f}",
            f"{up / 1e9:.0f}, {down / 1e9:.0f}",
            self.limit,
        )


def rows(peers: Path) -> Iterator[Row]:
    """Of all presets, with the profiles in the directory `peers`."""
    for name, swarms in SWARMS.items():
        for swarm in swarms:
            profiles = [(load_profile(peers / f"{profile}.toml"), float(number)) for profile, number in swarm.items()]
            machines = ", ".join(f"{number} {profile}" for profile, number in swarm.items())
            for way, settings in WAYS:
                yield _row(name, machines, way, settings, profiles)


def _row(
    name: str, machines: str, way: str, settings: Sequence[str], profiles: Sequence[tuple[PeerProfile, float]]
) -> Row:
    manifest = preset(name, settings)
    found = forecast(demand_of(manifest), profiles)
    return Row(name, machines, way.format(codec=manifest.reduce.codec), found, advice(manifest, profiles, found))


def as_markdown(table: Sequence[Row]) -> str:
    """A table for each preset, in the order of `table`."""
    lines: list[str] = []
    for name in dict.fromkeys(row.preset for row in table):
        lines += ["", f"`{name}`:", "", _line(HEADERS), _line(["---"] * len(HEADERS))]
        lines += [_line(row.cells()) for row in table if row.preset == name]
    return "\n".join(lines[1:]) + "\n"


def _line(cells: Sequence[str]) -> str:
    return "| " + " | ".join(cells) + " |"
