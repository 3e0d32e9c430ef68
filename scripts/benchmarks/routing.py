"""Ordinary internet links against none: tokens/s of a real swarm on 80 Mbit/s and 20 ms, and without any limit.

Three stages, one peer each, real daemons. A shaped peer is capped by its own `--max-up` and `--max-down`, and whoever
dials it goes through a relay of this program that hands every byte on 20 ms later, in both directions.

Three machines do not share two cores in reality: a pass lasts at least as long as SWARMTRAIN_PACE says, about twice
what it takes here alone, so that there is processor left for the others.

The model is chosen so that the balance resembles the published one (8B parameters, one layer per stage, 4096 tokens,
a consumer card on 80 Mbit/s): what a middle stage sends for a microbatch takes more than twice as long on the wire as
its computing if dense (two tensors of 4096 x 256 numbers, 0.84 s against 0.36 s), and a small part of it with k = 4.
That is 64 times fewer bytes; published are 100.
"""

from __future__ import annotations

import asyncio
import statistics
import tempfile
from pathlib import Path
from typing import Any

from common import Figure, figure, parser, progress, report
from shaped import LOOPBACK, Daemon, Relay, free_port

from swarmtrain.run.presets import preset

SHAPE = (
    "model.hidden_size=256",
    "model.num_layers=3",
    "model.num_heads=4",
    "model.num_kv_heads=4",
    "model.ffn_size=128",
    "model.sequence_length=128",
    "stages.count=3",
    "boundary.k=4",
    "batch.sequences_per_microbatch=32",
    "batch.microbatches_per_step=24",
    "validation.every=0",
    "checkpoint.every=0",
)
NUM_STAGES = 3
FORWARD_S, BACKWARD_S = 0.12, 0.24


async def tokens_per_s(kind: str, steps: int, *, mbit: float = 0.0, delay_s: float = 0.0) -> float:
    """Start a swarm, train, and divide; the first step, in which peers connect, does not count."""
    manifest = preset("nano", [*SHAPE, f"boundary.kind={kind}", f"schedule.steps={steps + 1}"])
    daemons: list[Daemon] = []
    relays: list[Relay] = []
    with tempfile.TemporaryDirectory(prefix="st-") as text:
        place = Path(text)
        (place / "run.toml").write_text(manifest.canonical())
        try:
            head = await Daemon.start(
                *("coordinator", str(place / "run.toml"), "--state-dir", str(place / "c")),
                *("--listen", f"{LOOPBACK}/0", "--min-peers", "3"),
            )
            daemons.append(head)
            await head.until("phase_reached", phase="invite")
            invite = (place / "c" / "invite").read_text().strip()
            for stage in range(NUM_STAGES):
                port = free_port()
                arguments = ["join", invite, "--stage", str(stage), "--state-dir", str(place / f"p{stage}")]
                arguments += ["--listen", f"{LOOPBACK}/{port}", "--threads", "1"]
                if mbit:
                    relay = Relay(port, delay_s)
                    relays.append(relay)
                    arguments += ["--announce", f"{LOOPBACK}/{await relay.start()}"]
                    arguments += ["--max-up", f"{mbit:g}mbit", "--max-down", f"{mbit:g}mbit"]
                is_last = stage == NUM_STAGES - 1  # it does both passes in one
                pace = f"{FORWARD_S + BACKWARD_S}:0" if is_last else f"{FORWARD_S}:{BACKWARD_S}"
                daemons.append(await Daemon.start(*arguments, "--enable-test-faults", SWARMTRAIN_PACE=pace))
            first = await head.until("step_applied", step=1)
            last = await head.until("step_applied", step=steps + 1)
            return steps * manifest.tokens_per_step / float(last["at"] - first["at"])
        finally:
            for daemon in daemons:
                await daemon.end()
            for relay in relays:
                await relay.close()


async def headline(options: Any) -> tuple[list[Figure], list[str]]:
    """Subspace on shaped links against open ones, and dense on shaped ones, in turn."""
    shaped = {"mbit": options.mbit, "delay_s": options.delay_ms / 1000.0}
    turns = {
        "subspace, open": ("subspace", options.steps, {}),
        "subspace, shaped": ("subspace", options.steps, shaped),
        "dense, shaped": ("dense", max(1, options.steps // 4), shaped),
    }
    rates: dict[str, list[float]] = {name: [] for name in turns}
    names = list(turns)
    for number in range(options.rounds):
        shift = number % len(names)
        for name in names[shift:] + names[:shift]:
            progress(f"round {number + 1} of {options.rounds}: {name}")
            kind, steps, links = turns[name]
            rates[name].append(await tokens_per_s(kind, steps, **links))
    progress("")
    open_rates = rates["subspace, open"]
    figures = [
        figure(
            "subspace shaped / open",
            [a / b for a, b in zip(rates["subspace, shaped"], open_rates, strict=True)],
            0.95,
        ),
        figure(
            "dense shaped / subspace open",
            [a / b for a, b in zip(rates["dense, shaped"], open_rates, strict=True)],
            0.95,
            at_least=False,
        ),
    ]
    notes = [f"{name}: {statistics.median(found):,.0f} tokens/s" for name, found in rates.items()]
    if options.plot is not None:
        draw(rates, options)
    return figures, notes


def draw(rates: dict[str, list[float]], options: Any) -> None:
    """One bar for each kind of swarm, and a dot for each of its turns."""
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    plot, axes = pyplot.subplots(figsize=(6, 2.6), layout="constrained")
    for row, found in enumerate(rates.values()):
        axes.barh(row, statistics.median(found), color=("#7a9cc6", "#3d6fb0", "#c98a4b")[row])
        axes.plot(found, [row] * len(found), "k.", markersize=4)
    axes.set_yticks(range(len(rates)), list(rates))
    axes.invert_yaxis()
    axes.set_xlabel(f"tokens per second; shaped: {options.mbit:g} Mbit/s and {options.delay_ms:g} ms")
    axes.spines[["top", "right"]].set_visible(False)
    plot.savefig(options.plot)


def main() -> None:
    options = parser(__doc__)
    options.add_argument("--rounds", type=int, default=3)
    options.add_argument("--steps", type=int, default=4, help="steps of a turn that count")
    options.add_argument("--mbit", type=float, default=80.0, help="up and down, of every peer")
    options.add_argument("--delay-ms", type=float, default=20.0, help="one way")
    options.add_argument("--plot", type=Path, help="draw the rates into this file")
    chosen = options.parse_args()
    figures, notes = asyncio.run(headline(chosen))
    report(figures, as_json=chosen.json, notes=notes)


if __name__ == "__main__":
    main()
