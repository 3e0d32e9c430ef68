"""`scripts/detection`: how soon peers that begin to lie are found, by the share of the work that is checked.

Real daemons in simulated time: a stage of eight peers, one to three of which begin to lie in step 2, when all count as
old. Prints a table for docs/checks.md: precision, recall, and the steps and lies until the last of them is excluded.
"""

from __future__ import annotations

import argparse
import logging
import shutil
import statistics
import tempfile
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from torch import Tensor

from swarmtrain.run.presets import preset
from swarmtrain.simulated.liars import Change, changes, lie_backward, lie_forward
from swarmtrain.simulated.schedule import TINY
from swarmtrain.simulated.swarm import SimulatedSwarm

NUM_PEERS = 8  # of the stage with liars
NUM_STEPS = 200  # a run ends sooner if all liars are out
MICROBATCHES = 16
OLD = 1000  # decided microbatches


@dataclass(frozen=True)
class Outcome:
    """One run."""

    found: int
    liars: int
    wrong: int  # honest peers that were excluded
    steps: int  # from the first lie to the last exclusion
    lies: int


def run(share: float, num_liars: int, attack: str, seed: int) -> Outcome:
    """Until all liars are excluded, or the run is over."""
    usual = (
        "stages.count=3",
        "model.num_layers=3",
        f"batch.microbatches_per_step={MICROBATCHES}",
        "checkpoint.every=0",
    )
    manifest = preset("nano", [*TINY, *usual, f"schedule.steps={NUM_STEPS}", f"checks.share={share}"])
    root = Path(tempfile.mkdtemp(prefix="swarmtrain-detection-"))
    counted = [0]
    try:
        with SimulatedSwarm(manifest, seed=f"{attack} {num_liars} {share} {seed}", root=root) as swarm:
            stages = [0, 0, *[1] * NUM_PEERS, 2, 2]
            swarm.start_coordinator(min_peers=len(stages))
            for index, stage in enumerate(stages):
                swarm.start_peer(f"peer{index}", stage)
            swarm.until(lambda: swarm.step >= 1, "one step")
            contributed = swarm.coordinator.daemon.context.tally.contributed
            contributed.update({life.peer_id: OLD for life in swarm.peers})
            liars = {f"peer{2 + number}" for number in range(num_liars)}
            begun = swarm.step
            for name in liars:
                change = _counting(changes()[attack], counted)
                (lie_forward if seed % 2 else lie_backward)(swarm.lives[name], change)

            def excluded() -> list[str]:
                return [event.peer_name for _, event in swarm.happened("peer_excluded")]  # type: ignore[attr-defined]

            swarm.until(lambda: swarm.is_over or liars <= set(excluded()), "all are found", limit_s=100_000.0)
            names = set(excluded())
            return Outcome(len(names & liars), num_liars, len(names - liars), swarm.step - begun + 1, counted[0])
    finally:
        shutil.rmtree(root, ignore_errors=True)


def _counting(change: Change, counted: list[int]) -> Change:
    def counting(tensor: Tensor) -> Tensor:
        counted[0] += 1
        return change(tensor)

    return counting


def row(share: float, num_liars: int, outcomes: Sequence[Outcome]) -> str:
    """Of the table."""
    found, liars = sum(item.found for item in outcomes), sum(item.liars for item in outcomes)
    wrong = sum(item.wrong for item in outcomes)
    precision, recall = found / max(1, found + wrong), found / liars
    steps, lies = (statistics.mean(getattr(item, name) for item in outcomes) for name in ("steps", "lies"))
    return (
        f"| {share:.0%} | {num_liars} | {len(outcomes)} | {precision:.2f} | {recall:.2f} | {steps:.1f} | {lies:.0f} |"
    )


def main() -> None:
    """See the module."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--shares", default="0.1,0.05,0.02,0.01", help="of the work that is checked")
    parser.add_argument("--liars", default="1,2,3", help="of the eight peers of a stage")
    parser.add_argument("--seeds", type=int, default=6, help="runs of each row; their attacks differ")
    options = parser.parse_args()
    logging.disable(logging.WARNING)
    attacks = list(changes())
    print("| share | liars of 8 | runs | precision | recall | steps until the last is out | lies |")
    print("|---|---|---|---|---|---|---|")
    for share in map(float, options.shares.split(",")):
        for num_liars in map(int, options.liars.split(",")):
            outcomes = [run(share, num_liars, attacks[seed % len(attacks)], seed) for seed in range(options.seeds)]
            print(row(share, num_liars, outcomes), flush=True)


if __name__ == "__main__":
    main()
