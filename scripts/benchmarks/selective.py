"""Does selective stage compression shorten a step whose reduction is slow?

Two stages with two peers each; the upload of the first stage's peers is capped, so that their reduction ends last. The
same run with exact gradients, with all stages compressed, and with only the stages compressed that hold up the step.
The ratio is that of the median step times, exact against the other; losses are of the last step.
"""

from __future__ import annotations

import asyncio
import statistics
import tempfile
from pathlib import Path
from typing import Any

from common import figure, parser, progress, report

from swarmtrain.local import LocalOptions, LocalSwarm
from swarmtrain.run.presets import preset

SETTINGS = (
    "model.hidden_size=64",
    "model.num_layers=4",
    "model.ffn_size=176",
    "model.sequence_length=32",
    "batch.sequences_per_microbatch=2",
    "batch.microbatches_per_step=4",
    "stages.count=2",
    "validation.every=0",
    "validation.microbatches=2",
    "checkpoint.every=0",
)
WARM_STEPS = 3  # the policy measures first


def step_times(folder: Path, steps: int, cap: str, *overrides: str) -> tuple[list[float], float]:
    """Seconds of each step after the first ones, and the last loss."""
    manifest = preset("nano", [*SETTINGS, f"schedule.steps={steps}", *overrides])
    seconds: list[float] = []
    losses: list[float] = []

    def take(event: dict[str, Any]) -> None:
        if event["event"] == "step_applied":
            seconds.append(manifest.tokens_per_step / event["tokens_per_s"])
            losses.append(event["loss"])

    async def run() -> None:
        swarm = LocalSwarm(LocalOptions(manifest, folder, num_peers=4), take)
        start_peer = swarm.start_peer

        async def capped(stage: int, *extra: str) -> Any:
            return await start_peer(stage, *extra, *(["--max-up", cap] if stage == 0 else []))

        swarm.start_peer = capped  # type: ignore[method-assign]
        await swarm.run()

    asyncio.run(run())
    return seconds[WARM_STEPS:], losses[-1]


def main() -> None:
    options = parser(__doc__)
    options.add_argument("--steps", type=int, default=12)
    options.add_argument("--rounds", type=int, default=3)
    options.add_argument("--cap", default="4mbit", help="upload of each peer of the first stage")
    options.add_argument("--codec", default="int8")
    arguments = options.parse_args()
    kinds = {
        "exact": ("reduce.codec=none",),
        "all stages": (f"reduce.codec={arguments.codec}",),
        "selective": (f"reduce.codec={arguments.codec}", "reduce.selective=true"),
    }
    times: dict[str, list[float]] = {name: [] for name in kinds}
    losses: dict[str, list[float]] = {name: [] for name in kinds}
    for number in range(arguments.rounds):
        for name, overrides in kinds.items():
            progress(f"round {number + 1} of {arguments.rounds}: {name}")
            with tempfile.TemporaryDirectory(prefix="st-") as folder:
                seeded = (*overrides, f"run.seed={number}")
                found, loss = step_times(Path(folder), arguments.steps, arguments.cap, *seeded)
            times[name].append(statistics.median(found))
            losses[name].append(loss)
    progress("")
    figures = [
        figure(f"{name}: step, exact / this", [e / t for e, t in zip(times["exact"], times[name], strict=True)], 1.0)
        for name in ("all stages", "selective")
    ]
    notes = [f"{name}: last losses {', '.join(f'{loss:.4f}' for loss in found)}" for name, found in losses.items()]
    notes += [f"{name}: median step {statistics.median(found):.2f} s" for name, found in times.items()]
    report(figures, as_json=arguments.json, notes=notes)


if __name__ == "__main__":
    main()
