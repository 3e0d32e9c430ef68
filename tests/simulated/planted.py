"""Defects to plant, one at a time, in the places that docs/architecture.md calls guarantees: do seeds find them?

    scripts/planted                          # all of them, each until a seed finds it
    scripts/planted NAME ... --seed 40 --seeds 200
    scripts/planted --seeds 2000 --table     # ... and print what FOUND below and the page in docs/ must say
    scripts/planted --known                  # only the seeds that are known to find them

Each is planted for real in a copy of the package, and `scripts/simulate` runs on that copy. Many a guard of this code
is doubled: where another layer would make up for a defect, both are taken away, and `what` says so. `test_planted.py`
holds the list against the source: every text that is replaced must be there exactly once.
"""

from __future__ import annotations

import argparse
import os
import shutil
import subprocess
import sys
import tempfile
import time
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path

ROOT = Path(__file__).parents[2]
PAGE = ROOT / "docs" / "simulated-swarm.md"


@dataclass(frozen=True)
class Change:
    """`old` becomes `new` in a file of the package."""

    file: str
    old: str
    new: str


@dataclass(frozen=True)
class Defect:
    """A mistake that a developer might make."""

    name: str
    what: str
    changes: tuple[Change, ...]

    @property
    def files(self) -> str:
        """Where it is planted."""
        return ", ".join(dict.fromkeys(f"`{change.file}`" for change in self.changes))


@dataclass(frozen=True)
class Found:
    """The first seed that finds a defect, and what the judge says of it."""

    seed: int | None
    said: str


DEFECTS = (
    Defect(
        "initial-by-chance",
        "the first values of a tensor do not follow from the seed and its name alone",
        (
            Change(
                "model/initial.py",
                'f"{seed}:{name}".encode()',
                'f"{seed}:{name}:{float(torch.rand(1))}".encode()',
            ),
        ),
    ),
    Defect(
        "unmarked",
        "an entry does not say that its gradient is in the sum",
        (
            Change(
                "peer/jobs.py",
                "        entry.accumulated = True\n        return payload\n",
                "        return payload\n",
            ),
        ),
    ),
    Defect(
        "answered-anew",
        "a finished microbatch that is asked for again is computed and added again",
        (
            Change(
                "peer/microbatch.py",
                "        if entry is not None and entry.answer is not None:\n",
                "        if entry is not None and entry.answer is not None and"
                " ledger._entries.pop(work.microbatch):\n"
                "            entry = None\n"
                "        if entry is not None and entry.answer is not None:\n",
            ),
        ),
    ),
    Defect(
        "extra-stays",
        "a microbatch that another peer answers for stays in this peer's sum as well",
        (
            Change(
                "peer/jobs.py",
                "            if entry.accumulated != (entry.microbatch in wanted):\n",
                "            if not entry.accumulated and entry.microbatch in wanted:\n",
            ),
        ),
    ),
    Defect(
        "unbalanced-books",
        "a stage is prepared although no peer has some of the microbatches there",
        (
            Change(
                "coordinator/books.py",
                "        return self._has_losses and all(self._claims[stage])\n",
                "        return self._has_losses and any(self._claims[stage])\n",
            ),
            Change(
                "coordinator/books.py",
                "            shares.setdefault(claimants[0], []).append(microbatch)\n",
                "            for claimant in claimants[:1]:\n"
                "                shares.setdefault(claimant, []).append(microbatch)\n",
            ),
        ),
    ),
    Defect(
        "claims-survive",
        "what only a lost peer has computed stays in the books",
        (
            Change(
                "coordinator/books.py",
                "                claimants.remove(member)\n                voided += 1\n",
                "                claimants[:] = [other for other in claimants if other != member] or claimants\n",
            ),
        ),
    ),
    Defect(
        "weights-of-another-step",
        "a microbatch is computed with the newest step's weights instead of its own step's",
        (
            Change(
                "model/worker.py",
                "        weights = self.state.weights(self.state.step if step is None else step)\n",
                "        weights = self.state.weights(self.state.step)\n",
            ),
        ),
    ),
    Defect(
        "sum-survives",
        "a peer whose state is replaced keeps the sum that it computed with the old one",
        (Change("peer/jobs.py", "        self.worker.drop_sums()\n        self.codecs.settle_all()\n", ""),),
    ),
    Defect(
        "step-not-awaited",
        "work of the next step is taken before this one is applied",
        (
            Change(
                "peer/step_clock.py",
                "        if not self.is_open(step) and self.manifest.weights_step(step) <= self.step + 1:\n",
                "        if step == self.step + 1:\n            return\n"
                "        if not self.is_open(step) and self.manifest.weights_step(step) <= self.step + 1:\n",
            ),
        ),
    ),
    Defect(
        "part-of-another-attempt",
        "an owner takes a share of an attempt that was given up for one of the attempt under way",
        (
            Change(
                "peer/attempt.py",
                "        if attempt is None or attempt.key != wanted:\n",
                "        if attempt is None or attempt.key[:2] != wanted[:2]:\n",
            ),
        ),
    ),
    Defect(
        "summed-in-fp32",
        "shares travel as fp32 numbers, and the sum depends on who had which microbatch",
        (
            Change(
                "reduce/shares.py",
                "        numbers = np.ascontiguousarray(numbers)\n",
                "        numbers = np.ascontiguousarray(numbers).astype(np.float32).astype(np.float64)\n",
            ),
        ),
    ),
    Defect(
        "told-before-journaled",
        "a decision is told before it is in the journal",
        (
            Change(
                "coordinator/steps.py",
                "        names = context.tally.new_names(named)\n"
                "        decided_at = context.journal.decide(decision, names, seconds=self.seconds)\n",
                "        names, decided_at = context.tally.new_names(named), world.wall()\n"
                "        asyncio.get_running_loop().call_later(0.05, context.journal.decide, decision, names)\n",
            ),
        ),
    ),
    Defect(
        "decided-step-done-again",
        "a coordinator that starts again begins with the step that its journal says is decided",
        (
            Change(
                "coordinator/daemon.py",
                "        context.step = self.journal.num_steps()\n",
                "        context.step = max(0, self.journal.num_steps() - 1)\n",
            ),
        ),
    ),
    Defect(
        "one-stage-is-enough",
        "a step goes on when any stage has applied it",
        (
            Change(
                "coordinator/apply.py",
                "        await context.wait_for(lambda: all(map(self._votes, range(len(prepared)))))\n",
                "        await context.wait_for(lambda: any(map(self._votes, range(len(prepared)))))\n",
            ),
        ),
    ),
    Defect(
        "roll-back-short",
        "the journal keeps one step too many when the run goes back",
        (
            Change(
                "coordinator/journal.py",
                'self._db.execute(f"DELETE FROM {table} WHERE step >= ?", (step,))',
                'self._db.execute(f"DELETE FROM {table} WHERE step > ?", (step,))',
            ),
        ),
    ),
    Defect(
        "same-term-after-roll-back",
        "the run goes back without a new term, so that what was taken back looks like news",
        (
            Change(
                "coordinator/run.py",
                "        context.term = context.valid_from = context.term + 1\n",
                "        context.valid_from = context.term\n",
            ),
        ),
    ),
    Defect(
        "chunk-unchecked",
        "a newcomer takes chunks of a state as they come, and says that it has what it was offered",
        (
            Change(
                "chain/state_transfer.py",
                " or hashlib.sha256(chunk.values).digest() != self._expected[number]",
                "",
            ),
            Change(
                "peer/step.py",
                "    async def load(self, source: StateSource, *, term: int) -> None:\n",
                '    async def load(self, source: StateSource, *, term: int, offered: str = "") -> None:\n',
            ),
            Change(
                "peer/step.py",
                "            self.last_applied = Applied(source.step, digest)\n",
                "            self.last_applied = Applied(source.step, offered or digest)\n",
            ),
            Change(
                "peer/join.py",
                "download.basis_epoch, download.buffers), term=order.term)\n",
                "download.basis_epoch, download.buffers), term=order.term, offered=order.sync_digest)\n",
            ),
        ),
    ),
    Defect(
        "moments-forgotten",
        "a joiner's state comes without the optimizer's second moments",
        (
            Change(
                "peer/jobs.py",
                "(source.buffers, step=source.step, basis_epoch=source.basis_epoch)\n",
                "(source.buffers, step=source.step, basis_epoch=source.basis_epoch)\n"
                "        self.worker.state.buffers[-1].zero_()\n",
            ),
        ),
    ),
    Defect(
        "checksum-unchecked",
        "a message whose checksum is wrong is taken as it is",
        (
            Change(
                "rpc/frames.py",
                "        if crc != header.crc:\n",
                "        if crc != header.crc and header.length < 0:\n",
            ),
        ),
    ),
    Defect(
        "lost-wake-up",
        "a lease that ends does not wake a caller that waits for its place",
        (
            Change(
                "coordinator/lease.py",
                "        self._inside -= 1\n        self._changed.set()\n",
                "        self._inside -= 1\n",
            ),
        ),
    ),
)

FOUND: dict[str, Found] = {
    "initial-by-chance": Found(0, "step 1, stage 0: QtDMudqT has another state than its replicas"),
    "unmarked": Found(1, "stage 0 does not end in the reference's bits"),
    "answered-anew": Found(1, "stage 0 does not end in the reference's bits"),
    "extra-stays": Found(4, "stage 0 does not end in the reference's bits"),
    "unbalanced-books": Found(2, "step 1, stage 2: microbatches [0, 3] do not balance"),
    "claims-survive": Found(10, "11.303 a daemon computes without end, in coordinator/books.py:75"),
    "sum-survives": Found(10, "stage 0 does not end in the reference's bits"),
    "step-not-awaited": Found(84, "stage 0 does not end in the reference's bits"),
}


def plant(defect: Defect, place: Path) -> None:
    """Copy the package to `place` with the defect in it."""
    shutil.copytree(ROOT / "swarmtrain", place / "swarmtrain", ignore=shutil.ignore_patterns("__pycache__"))
    for change in defect.changes:
        path = place / "swarmtrain" / change.file
        text = path.read_text()
        assert text.count(change.old) == 1, f"{defect.name}: {text.count(change.old)} places in {change.file}"
        path.write_text(text.replace(change.old, change.new))


def find(defect: Defect, *, first: int, num_seeds: int) -> Found:
    """The first seed that finds the defect, and what it said. Seeds are tried in order, in one process."""
    with tempfile.TemporaryDirectory(prefix="swarmtrain-planted-") as name:
        plant(defect, Path(name))
        found = subprocess.run(
            [
                *(sys.executable, "-m", "swarmtrain.simulated.command", "--no-shrink", "--first", "--processes", "1"),
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
            return Found(int(line.split()[1]), lines[number + 1].strip()[:100])
    return Found(None, (lines or found.stderr.splitlines() or [""])[-1])


def table_row(defect: Defect, found: Found) -> str:
    """As in the page about the simulated swarm."""
    seed = "none" if found.seed is None else found.seed
    return f"| `{defect.name}` | {defect.what} | {defect.files} | {seed} | {found.said.replace('|', '/')} |"


def main() -> int:
    """Plant and search."""
    parser = argparse.ArgumentParser(prog="scripts/planted", description=(__doc__ or "").splitlines()[0])
    parser.add_argument("names", nargs="*", help="which defects; default: all")
    parser.add_argument("--seed", type=int, default=0, help="the first seed")
    parser.add_argument("--seeds", type=int, default=2000, help="how many are tried for each")
    parser.add_argument(
        "--processes", type=int, default=os.cpu_count() or 1, help="defects at once (default: all cores)"
    )
    parser.add_argument("--known", action="store_true", help="only the seeds that are known to find them")
    parser.add_argument(
        "--table", action="store_true", help="in the end, print FOUND and the rows of the page in docs/"
    )
    chosen = parser.parse_args()
    unknown = set(chosen.names) - {defect.name for defect in DEFECTS}
    if unknown:
        parser.error(f"no such defect: {', '.join(sorted(unknown))}")
    wanted = [defect for defect in DEFECTS if not chosen.names or defect.name in chosen.names]

    def search(defect: Defect) -> Found:
        started = time.monotonic()
        known = FOUND[defect.name].seed if chosen.known else None
        found = (
            find(defect, first=known or 0, num_seeds=1)
            if chosen.known
            else find(defect, first=chosen.seed, num_seeds=chosen.seeds)
        )
        directive = f"seed {found.seed}" if found.seed is not None else "NOT FOUND"
        print(f"{defect.name:26} {directive:10} {time.monotonic() - started:5.0f} s  {found.said}", flush=True)
        return found

    with ThreadPoolExecutor(chosen.processes) as pool:
        results = dict(zip(wanted, pool.map(search, wanted), strict=True))
    num_found = sum(found.seed is not None for found in results.values())
    print(f"{num_found} of {len(wanted)} found")
    if chosen.table:
        print("\nFOUND = {")
        for defect, found in results.items():
            said = found.said.replace("\\", "\\\\").replace('"', '\\"')
            print(f'    "{defect.name}": Found({found.seed}, "{said}"),')
        print("}\n")
        for defect, found in results.items():
            print(table_row(defect, found))
    return 0 if num_found == len(wanted) else 1


if __name__ == "__main__":
    sys.exit(main())
