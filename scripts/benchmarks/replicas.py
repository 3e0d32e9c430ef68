"""Replicas on home links: tokens/s of a real swarm whose stages have several peers, capped against uncapped.

Preset `micro` in two stages of two peers each, real daemons, each capped by its own `--max-up` and `--max-down`: an
all-reduce of exact sums moves 22 MB per peer and step in each direction. With `schedule.delay = 1` it goes on behind
the next step; without, everybody waits for it. One turn of each kind in every round, in another order each time.

Four machines do not share two cores in reality: a pass lasts at least as long as SWARMTRAIN_PACE says, so that there is
processor left for the others. What counts are the steps in the middle: not the first, in which peers connect, and not
the last, behind which there is no other one.
"""

from __future__ import annotations

import asyncio
import statistics
import tempfile
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from common import Figure, figure, parser, progress, quartiles, report
from shaped import LOOPBACK, Daemon

from swarmtrain.observe.control import ask
from swarmtrain.run.presets import preset

NUM_STAGES = 2
SHAPE = ("stages.count=2", "batch.sequences_per_microbatch=2", "validation.every=0", "checkpoint.every=0")
FORWARD_S, BACKWARD_S = 0.25, 0.5
WARM_STEPS = 2  # until links are measured
OPEN: tuple[float, ...] = (0.0, 0.0)


@dataclass(frozen=True)
class Kind:
    """What takes turns: the caps of a stage's peers in Mbit/s, 0 for none, and what differs in the manifest."""

    caps: tuple[float, ...]
    changes: tuple[str, ...]
    goal: float | None = None  # of its ratio
    against: str = ""
    pace: float = 1.0  # how much slower its machines are


@dataclass
class Found:
    """Of one kind, by turn."""

    tokens_per_s: list[float] = field(default_factory=list)
    idle: list[float] = field(default_factory=list)  # the share of its time in which a peer waited for a step's end


def kinds(codec: str) -> dict[str, Kind]:
    """All of them."""
    delayed, coded = ("schedule.delay=1",), ("schedule.delay=1", f"reduce.codec={codec}")
    three = (0.0, 0.0, 0.0)
    more = len(three) / len(OPEN)  # machines on the same processor
    return {
        "open": Kind(OPEN, delayed),
        "80 Mbit/s": Kind((80.0, 80.0), delayed, 0.95, "open"),
        "80 Mbit/s, no delay": Kind((80.0, 80.0), (), None, "open"),
        f"20 Mbit/s, {codec}": Kind((20.0, 20.0), coded, 0.90, "open"),
        "20 Mbit/s": Kind((20.0, 20.0), delayed, None, "open"),
        "three, open": Kind(three, coded, pace=more),
        f"three of 10, 20, 80 Mbit/s, {codec}": Kind((10.0, 20.0, 80.0), coded, None, "three, open", more),
    }


async def turn(kind: Kind, steps: int, found: Found) -> None:
    """Start a swarm, train, and divide."""
    last = WARM_STEPS + steps
    manifest = preset("micro", [*SHAPE, *kind.changes, f"schedule.steps={last + 2}"])
    daemons: list[Daemon] = []
    with tempfile.TemporaryDirectory(prefix="st-") as text:
        place = Path(text)
        (place / "run.toml").write_text(manifest.canonical())
        num_peers = NUM_STAGES * len(kind.caps)
        try:
            head = await Daemon.start(
                *("coordinator", str(place / "run.toml"), "--state-dir", str(place / "c")),
                *("--listen", f"{LOOPBACK}/0", "--min-peers", str(num_peers)),
            )
            daemons.append(head)
            await head.until("phase_reached", phase="invite")
            invite = (place / "c" / "invite").read_text().strip()
            states = []
            for number in range(num_peers):
                stage, cap = number % NUM_STAGES, kind.caps[number // NUM_STAGES]
                states.append(place / f"p{number}")
                arguments = ["join", invite, "--stage", str(stage), "--state-dir", str(states[-1])]
                arguments += ["--listen", f"{LOOPBACK}/0", "--threads", "1"]
                arguments += ["--max-up", f"{cap:g}mbit", "--max-down", f"{cap:g}mbit"] if cap else []
                is_last = stage == NUM_STAGES - 1  # it does both passes in one
                forward_s, backward_s = kind.pace * FORWARD_S, kind.pace * BACKWARD_S
                pace = f"{forward_s + backward_s}:0" if is_last else f"{forward_s}:{backward_s}"
                daemons.append(await Daemon.start(*arguments, "--enable-test-faults", SWARMTRAIN_PACE=pace))
                daemons[-1].drop_events()
            began = await head.until("step_applied", step=WARM_STEPS)
            before = await asyncio.gather(*(waited(state) for state in states))
            ended = await head.until("step_applied", step=last)
            after = await asyncio.gather(*(waited(state) for state in states))
        finally:
            for daemon in daemons:
                await daemon.end()
    seconds = float(ended["at"] - began["at"])
    found.tokens_per_s.append(steps * manifest.tokens_per_step / seconds)
    found.idle.append(max(late - early for early, late in zip(before, after, strict=True)) / seconds)


async def waited(state_dir: Path) -> float:
    """Seconds that a peer has waited for the end of a step, its all-reduce included."""
    status = await ask(state_dir / "control.sock", "status")
    seconds: dict[str, Any] = status["seconds"]
    return float(seconds["reduce"]) + float(seconds["idle"].get("step_end", 0.0))


async def measure(options: Any) -> tuple[list[Figure], list[str]]:
    """All kinds, in turns."""
    chosen = {name: kind for name, kind in kinds(options.codec).items() if not options.two or "three" not in name}
    found = {name: Found() for name in chosen}
    names = list(chosen)
    for number in range(options.rounds):
        shift = number % len(names)
        for name in names[shift:] + names[:shift]:
            progress(f"round {number + 1} of {options.rounds}: {name}")
            await turn(chosen[name], options.steps, found[name])
    progress("")
    figures, notes = [], []
    for name, kind in chosen.items():
        rates = found[name].tokens_per_s
        notes.append(
            f"{name}: {statistics.median(rates):,.0f} tokens/s; "
            f"waits for steps {statistics.median(found[name].idle):.1%} of the time (the peer that waits longest)"
        )
        if kind.against:
            ratios = [own / other for own, other in zip(rates, found[kind.against].tokens_per_s, strict=True)]
            if kind.goal is not None:
                figures.append(figure(f"{name} / {kind.against}", ratios, kind.goal))
            else:
                low, middle, high = quartiles(ratios)
                notes.append(f"{name} / {kind.against}: {middle:.3f} ({low:.3f} - {high:.3f}), without a goal")
    return figures, notes


def main() -> None:
    options = parser(__doc__)
    options.add_argument("--rounds", type=int, default=3)
    options.add_argument("--steps", type=int, default=6, help="steps of a turn that count")
    options.add_argument("--codec", default="lowrank40", help="reduce.codec on the narrowest lines")
    options.add_argument("--two", action="store_true", help="only stages of two peers")
    chosen = options.parse_args()
    figures, notes = asyncio.run(measure(chosen))
    report(figures, as_json=chosen.json, notes=notes)


if __name__ == "__main__":
    main()
