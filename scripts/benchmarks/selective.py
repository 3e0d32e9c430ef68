"""Does selective stage compression shorten a step whose all-reduce is slow, and what does it cost?

Two stages with two peers each; the upload of the first stage's peers is capped, so that their all-reduce ends last. The
same run with exact gradients, with all stages compressed, and with only the stages compressed that hold up the step.

Without options: the ratio of the median step times, exact against the other. For a quiet machine.

With --loss: the validation loss at the end of longer runs, by seed. A seed changes the weights and the order of the
samples, so what differs between the seeds of exact runs is noise. The ratio is the distance to the
exact run of the same seed over that noise (the standard deviation between exact runs). For any machine: times do not
matter.
"""

from __future__ import annotations

import argparse
import asyncio
import statistics
import tempfile
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from common import figure, parser, progress, report

from swarmtrain.local import LocalOptions, LocalSwarm
from swarmtrain.run.manifest import Manifest
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
    "validation.microbatches=32",
    "checkpoint.every=0",
    "schedule.warmup_steps=5",
)
WARM_STEPS = 3  # the policy measures first
EXACT = "exact"


@dataclass
class Run:
    """What a run has said of itself."""

    seconds: list[float] = field(default_factory=list)  # of each step
    losses: list[float] = field(default_factory=list)
    validation: float = 0.0
    all_reduces: Counter[tuple[int, bool]] = field(default_factory=Counter)  # by stage, and whether compressed

    def take(self, manifest: Manifest, event: dict[str, Any]) -> None:
        """Note an event."""
        match event["event"]:
            case "step_applied":
                self.seconds.append(manifest.tokens_per_step / event["tokens_per_s"])
                self.losses.append(event["loss"])
            case "stage_prepared":
                self.all_reduces[event["stage"], event["compressed"]] += 1
            case "run_ended":
                self.validation = event["val_loss"]

    def compressed(self) -> str:
        """Compressed all-reduces of each stage."""
        totals = [self.all_reduces[stage, True] + self.all_reduces[stage, False] for stage in (0, 1)]
        return " and ".join(f"{self.all_reduces[stage, True]} of {totals[stage]}" for stage in (0, 1))


def run(folder: Path, cap: str, *overrides: str) -> Run:
    """Train once."""
    manifest, found = preset("nano", [*SETTINGS, *overrides]), Run()

    async def train() -> None:
        swarm = LocalSwarm(LocalOptions(manifest, folder, num_peers=4), lambda event: found.take(manifest, event))
        start_peer = swarm.start_peer

        async def capped(stage: int, *extra: str) -> Any:
            return await start_peer(stage, *extra, *(["--max-up", cap] if stage == 0 else []))

        swarm.start_peer = capped  # type: ignore[method-assign]
        await swarm.run()

    asyncio.run(train())
    return found


def rounds(arguments: argparse.Namespace, num_steps: int) -> dict[str, list[Run]]:
    """Runs by kind, one of each per round; a round has its own seed."""
    codec = f"reduce.codec={arguments.codec}"
    kinds = {EXACT: (), "all stages": (codec,), "selective": (codec, "reduce.selective=true")}
    runs: dict[str, list[Run]] = {name: [] for name in kinds}
    for number in range(arguments.rounds):
        for name, overrides in kinds.items():
            progress(f"round {number + 1} of {arguments.rounds}: {name}")
            with tempfile.TemporaryDirectory(prefix="st-") as folder:
                seeded = (*overrides, f"run.seed={number}", f"schedule.steps={num_steps}")
                runs[name].append(run(Path(folder), arguments.cap, *seeded))
    progress("")
    return runs


def ratios(runs: dict[str, list[Run]], name: str, one: Callable[[Run, Run], float]) -> list[float]:
    """`one` of the exact run and of the other, in each round."""
    return [one(exact, other) for exact, other in zip(runs[EXACT], runs[name], strict=True)]


def median_step(found: Run) -> float:
    """Seconds, without the first steps."""
    return statistics.median(found.seconds[WARM_STEPS:])


def listed(values: Sequence[float]) -> str:
    """For a note."""
    return ", ".join(f"{value:.4f}" for value in values)


def report_times(runs: dict[str, list[Run]], *, as_json: bool) -> None:
    """How much shorter a step is."""
    others = [name for name in runs if name != EXACT]
    steps = {name: ratios(runs, name, lambda e, o: median_step(e) / median_step(o)) for name in others}
    figures = [figure(f"{name}: step, exact / this", found, 1.0) for name, found in steps.items()]
    notes = [f"{name}: median step {statistics.median(map(median_step, found)):.2f} s" for name, found in runs.items()]
    report(figures, as_json=as_json, notes=notes)


def report_losses(runs: dict[str, list[Run]], *, as_json: bool) -> None:
    """How much worse the model is, against the noise between seeds."""
    exact = [found.validation for found in runs[EXACT]]
    noise = statistics.stdev(exact)
    learned = statistics.mean(found.losses[0] - found.validation for found in runs[EXACT])
    figures, notes = [], [f"exact: validation {listed(exact)}; noise between seeds {noise:.4f}; learned {learned:.2f}"]
    for name, found in runs.items():
        if name == EXACT:
            continue
        paired = ratios(runs, name, lambda e, o: o.validation - e.validation)
        figures.append(
            figure(f"{name}: distance to exact / noise", [abs(d) / noise for d in paired], 1, at_least=False)
        )
        error = statistics.stdev(paired) / len(paired) ** 0.5
        mean = f"{statistics.mean(paired):+.5f} +- {error:.5f}"
        notes.append(f"{name}: validation {listed([one.validation for one in found])}; paired difference {mean}")
        notes.append(
            f"{name}: compressed all-reduces of stages 0 and 1: {'; '.join(one.compressed() for one in found)}"
        )
    report(figures, as_json=as_json, notes=notes)


def main() -> None:
    options = parser(__doc__)
    options.add_argument("--loss", action="store_true", help="compare validation losses of longer runs, not times")
    options.add_argument("--steps", type=int, help="default: 12, with --loss 100")
    options.add_argument("--rounds", type=int, help="each with its own seed; default: 3, with --loss 5")
    options.add_argument("--cap", default="4mbit", help="upload of each peer of the first stage")
    options.add_argument("--codec", default="int8")
    arguments = options.parse_args()
    arguments.rounds = arguments.rounds or (5 if arguments.loss else 3)
    runs = rounds(arguments, arguments.steps or (100 if arguments.loss else 12))
    (report_losses if arguments.loss else report_times)(runs, as_json=arguments.json)


if __name__ == "__main__":
    main()
