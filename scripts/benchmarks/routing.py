"""Ordinary internet links against none: tokens/s of a real swarm on 80 Mbit/s and 20 ms, and without any limit.

Three stages, one peer each, real daemons. A shaped peer is capped by its own `--max-up` and `--max-down`, and whoever
dials it goes through a relay of this program that hands every byte on 20 ms later, in both directions.

The model is chosen so that the balance resembles the published one (8B parameters, one layer per stage, 4096 tokens,
a consumer card on 80 Mbit/s): a dense boundary tensor takes several times as long on the wire as its stage computes, a
boundary of k numbers a small part of it. Here d = 256 and k = 4, which is 64 times fewer bytes; published are 100.
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
    "model.ffn_size=512",
    "model.sequence_length=512",
    "stages.count=3",
    "boundary.k=4",
    "batch.sequences_per_microbatch=8",
    "batch.microbatches_per_step=8",
    "validation.every=0",
    "checkpoint.every=0",
)


async def tokens_per_s(kind: str, steps: int, *, mbit: float = 0.0, delay_s: float = 0.0) -> float:
    """Start a swarm, train, and divide; the first step, in which everybody meets, does not count."""
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
            for stage in range(3):
                port = free_port()
                arguments = ["join", invite, "--stage", str(stage), "--state-dir", str(place / f"p{stage}")]
                arguments += ["--listen", f"{LOOPBACK}/{port}", "--threads", "1"]
                if mbit:
                    relay = Relay(port, delay_s)
                    relays.append(relay)
                    arguments += ["--announce", f"{LOOPBACK}/{await relay.start()}"]
                    arguments += ["--max-up", f"{mbit:g}mbit", "--max-down", f"{mbit:g}mbit"]
                daemons.append(await Daemon.start(*arguments))
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
    return figures, notes


def main() -> None:
    options = parser(__doc__)
    options.add_argument("--rounds", type=int, default=3)
    options.add_argument("--steps", type=int, default=4, help="steps of a turn that count")
    options.add_argument("--mbit", type=float, default=80.0, help="up and down, of every peer")
    options.add_argument("--delay-ms", type=float, default=20.0, help="one way")
    chosen = options.parse_args()
    figures, notes = asyncio.run(headline(chosen))
    report(figures, as_json=chosen.json, notes=notes)


if __name__ == "__main__":
    main()
