"""Defects to plant, one at a time, in the places that docs/architecture.md calls guarantees: do seeds find them?

    scripts/planted                     # all of them, each until a seed finds it; minutes for each
    scripts/planted NAME ... --seeds 200

Each is planted for real in a copy of the package, and `scripts/simulate` runs on that copy. `test_planted.py` holds the
list against the source: every text that is replaced must be there exactly once.
"""

from __future__ import annotations

import argparse
import os
import shutil
import subprocess
import sys
import tempfile
import time
from dataclasses import dataclass
from pathlib import Path

ROOT = Path(__file__).parents[2]


@dataclass(frozen=True)
class Defect:
    """`old` becomes `new` in a file of the package."""

    name: str
    what: str
    file: str
    old: str
    new: str


DEFECTS = (
    Defect(
        "unmarked",
        "an entry does not say that its gradient is in the sum",
        "peer/jobs.py",
        "        self.worker.accumulate(gradients)\n        entry.accumulated = True\n",
        "        self.worker.accumulate(gradients)\n",
    ),
    Defect(
        "answered-anew",
        "a finished microbatch that is asked for again is computed and added again",
        "peer/microbatch.py",
        "        if entry is not None and entry.answer is not None:\n",
        "        if entry is not None and entry.answer is not None and context.ledger._entries.pop(work.microbatch):\n"
        "            entry = None\n"
        "        if entry is not None and entry.answer is not None:\n",
    ),
    Defect(
        "extra-stays",
        "a microbatch that another peer answers for stays in this peer's sum as well",
        "peer/jobs.py",
        "            if entry.accumulated != (entry.microbatch in wanted):\n",
        "            if not entry.accumulated and entry.microbatch in wanted:\n",
    ),
    Defect(
        "missing-ignored",
        "a peer prepares without the microbatches that it does not have",
        "peer/steps.py",
        "            missing = sorted(wanted - ledger.finished())\n",
        "            missing = sorted(wanted - ledger.finished())[:0]\n",
    ),
    Defect(
        "told-before-journaled",
        "a decision is told before it is in the journal",
        "coordinator/steps.py",
        "        context.journal.decide(decision, context.tally.new_names(named))\n",
        "        names = context.tally.new_names(named)\n"
        "        asyncio.get_running_loop().call_later(0.05, context.journal.decide, decision, names)\n",
    ),
    Defect(
        "old-term-obeyed",
        "an off-by-one in a term: the coordinator before this one is still obeyed",
        "peer/context.py",
        "        if term < self.term:\n",
        "        if term + 1 < self.term:\n",
    ),
    Defect(
        "incarnation-ignored",
        "what a peer did before its restart is counted for its new life",
        "coordinator/members.py",
        "        if member is None or (member.incarnation, member.stage) != (hop.incarnation, hop.stage):\n",
        "        if member is None or member.stage != hop.stage:\n",
    ),
    Defect(
        "roster-of-a-former-life",
        "a peer answers for what its former life is named for",
        "peer/roster.py",
        "        if entry.peer_id == peer_id and entry.incarnation == incarnation:\n",
        "        if entry.peer_id == peer_id:\n",
    ),
    Defect(
        "claims-survive",
        "a lost peer's microbatches stay in the books",
        "coordinator/books.py",
        "            if member in claimants:\n                claimants.remove(member)\n                voided += 1\n",
        "            if member in claimants and len(claimants) > 1:\n"
        "                claimants.remove(member)\n                voided += 1\n",
    ),
    Defect(
        "any-sum-applied",
        "a peer applies the sum that it has, whatever the decision names",
        "peer/steps.py",
        "            if ready is None or ready.digest != apply.digest:\n"
        '                raise context.refuse(Code.UNPREPARED, f"no prepared',
        '            if ready is None:\n                raise context.refuse(Code.UNPREPARED, f"no prepared',
    ),
    Defect(
        "chunk-unchecked",
        "a newcomer takes chunks of a state as they come",
        "chain/state_transfer.py",
        " or hashlib.sha256(chunk.values).digest() != self._expected[number]",
        "",
    ),
    Defect(
        "roll-back-short",
        "the journal keeps one step too many when the run goes back",
        "coordinator/journal.py",
        'self._db.execute(f"DELETE FROM {table} WHERE step >= ?", (step,))',
        'self._db.execute(f"DELETE FROM {table} WHERE step > ?", (step,))',
    ),
    Defect(
        "members-keep-steps",
        "after a roll-back peers are still believed to have the steps that were taken back",
        "coordinator/run.py",
        "        context.members.forget_steps()\n",
        "",
    ),
    Defect(
        "stale-work",
        "work of a state that was replaced is added to the next sum",
        "peer/jobs.py",
        "        if entry.generation != self.generation:\n            raise StaleWork(",
        "        if entry.generation > self.generation:\n            raise StaleWork(",
    ),
    Defect(
        "work-while-applying",
        "work of the step that is being applied is still taken",
        "peer/context.py",
        "        if step > self.step or (step == self.step and self.is_applying):\n",
        "        if step > self.step:\n",
    ),
    Defect(
        "listener-starts-anywhere",
        "a newcomer follows decisions from before its state",
        "peer/steps.py",
        "            self._ready = {step: item for step, item in self._ready.items() if step >= source.step}\n",
        "",
    ),
    Defect(
        "lost-wake-up",
        "a lease that ends wakes nobody who waits for its place",
        "coordinator/lease.py",
        "        self._inside -= 1\n        self._changed.set()\n",
        "        self._inside -= 1\n",
    ),
    Defect(
        "one-stage-is-enough",
        "a step goes on when any stage has applied it",
        "coordinator/apply.py",
        "        await context.wait_for(lambda: all(self._answers))\n",
        "        await context.wait_for(lambda: any(self._answers))\n",
    ),
    Defect(
        "checksum-unchecked",
        "a frame whose checksum is wrong is taken as it is",
        "net/receiver.py",
        "        if crc != header.crc:\n",
        "        if crc != header.crc and header.length < 0:\n",
    ),
    Defect(
        "moments-forgotten",
        "a joiner's state comes without the optimizer's second moments",
        "peer/jobs.py",
        "        self.worker.state.load_buffers(source.buffers, step=source.step, basis_epoch=source.basis_epoch)\n",
        "        self.worker.state.load_buffers(source.buffers, step=source.step, basis_epoch=source.basis_epoch)\n"
        "        self.worker.state.buffers[-1].zero_()\n",
    ),
)


def plant(defect: Defect, place: Path) -> None:
    """Copy the package to `place` with the defect in it."""
    shutil.copytree(ROOT / "swarmtrain", place / "swarmtrain", ignore=shutil.ignore_patterns("__pycache__"))
    path = place / "swarmtrain" / defect.file
    text = path.read_text()
    assert text.count(defect.old) == 1, f"{defect.name}: {text.count(defect.old)} places in {defect.file}"
    path.write_text(text.replace(defect.old, defect.new))


def find(defect: Defect, *, first: int, num_seeds: int) -> tuple[int | None, str]:
    """The first seed that finds the defect, and what it said."""
    with tempfile.TemporaryDirectory(prefix="swarmtrain-planted-") as name:
        plant(defect, Path(name))
        found = subprocess.run(
            [
                *(sys.executable, "-m", "swarmtrain.simulated.command", "--no-shrink", "--first"),
                *("--seed", str(first), "--seeds", str(num_seeds)),
            ],
            cwd=name,
            env={**os.environ, "PYTHONPATH": name, "OMP_NUM_THREADS": "1"},
            capture_output=True,
            text=True,
            check=False,
        )
    lines = found.stdout.splitlines()
    for number, line in enumerate(lines):
        if line.startswith("seed ") and line.endswith("FAILED:"):
            return int(line.split()[1]), lines[number + 1].strip()
    return None, (lines or found.stderr.splitlines() or [""])[-1]


def main() -> int:
    """Plant and search."""
    parser = argparse.ArgumentParser(prog="scripts/planted", description=(__doc__ or "").splitlines()[0])
    parser.add_argument("names", nargs="*", help="which defects; default: all")
    parser.add_argument("--seed", type=int, default=0, help="the first seed")
    parser.add_argument("--seeds", type=int, default=2000, help="how many are tried for each")
    chosen = parser.parse_args()
    unknown = set(chosen.names) - {defect.name for defect in DEFECTS}
    if unknown:
        parser.error(f"no such defect: {', '.join(sorted(unknown))}")
    wanted = [defect for defect in DEFECTS if not chosen.names or defect.name in chosen.names]
    num_found = 0
    for defect in wanted:
        started = time.monotonic()
        seed, said = find(defect, first=chosen.seed, num_seeds=chosen.seeds)
        num_found += seed is not None
        verdict = f"seed {seed}" if seed is not None else "NOT FOUND"
        print(f"{defect.name:26} {verdict:10} {time.monotonic() - started:5.0f} s  {said[:100]}", flush=True)
    print(f"{num_found} of {len(wanted)} found")
    return 0 if num_found == len(wanted) else 1


if __name__ == "__main__":
    sys.exit(main())
