"""`scripts/simulate`: schedules from seeds, on all cores; a failure is shrunk to the faults that it needs."""

from __future__ import annotations

import argparse
import hashlib
import json
import logging
import multiprocessing
import os
import shutil
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from dataclasses import asdict, dataclass, replace
from pathlib import Path

from swarmtrain.simulated.director import Director
from swarmtrain.simulated.judge import References, judge
from swarmtrain.simulated.schedule import Schedule, draw
from swarmtrain.terminal import ProgressBar


@dataclass(frozen=True)
class Result:
    """The outcome of one schedule."""

    seed: int
    failures: tuple[str, ...]
    trace_hash: str
    virtual_s: float
    real_s: float
    num_faults: int  # that were really injected
    happened: tuple[str, ...]


_references = References()


def run_schedule(schedule: Schedule, *, trace: Callable[[str], None] | None = None) -> Result:
    """Run one schedule and judge it."""
    memory = Path("/dev/shm")
    root = Path(tempfile.mkdtemp(prefix="swarmtrain-simulated-", dir=memory if memory.is_dir() else None))
    started = time.perf_counter()
    try:
        director = Director(schedule, root, trace)
        with director.swarm as swarm:
            director.run()
            reference = _references(schedule.manifest())
            failures = judge(swarm, reference, is_exact=schedule.is_exact)
            failures += [f"an honest peer: {event.line()}" for _, event in swarm.happened("peer_excluded")]
            virtual_s = swarm.now
        real_s = time.perf_counter() - started
        happened = tuple(director.happened)
        return Result(schedule.seed, tuple(failures), swarm.trace_hash, virtual_s, real_s, len(happened), happened)
    finally:
        shutil.rmtree(root, ignore_errors=True)


def shrink(schedule: Schedule, *, tell: Callable[[str], None] = lambda text: None) -> Schedule:
    """The shortest prefix of the faults that still fails, without those that are not needed."""
    low, high = 0, len(schedule.faults)
    while low < high:  # the shortest prefix, by bisection
        middle = (low + high) // 2
        tell(f"the first {middle} of {len(schedule.faults)} faults ...")
        if run_schedule(replace(schedule, faults=schedule.faults[:middle])).failures:
            high = middle
        else:
            low = middle + 1
    faults = list(schedule.faults[:high])
    if not run_schedule(replace(schedule, faults=tuple(faults))).failures:
        return schedule  # it fails only as a whole
    for fault in list(faults):
        without = [other for other in faults if other is not fault]
        tell(f"without {fault} ...")
        if run_schedule(replace(schedule, faults=tuple(without))).failures:
            faults = without
    return replace(schedule, faults=tuple(faults))


def _work(job: tuple[int, bool]) -> Result:
    seed, standard = job
    return run_schedule(draw(seed, standard=standard))


def _quiet() -> None:
    logging.disable(logging.WARNING)
    os.environ["OMP_NUM_THREADS"] = "1"


def _results(seeds: list[int], standard: bool, num_processes: int) -> Iterator[Result]:
    jobs = [(seed, standard) for seed in seeds]
    if num_processes == 1 or len(jobs) == 1:
        _quiet()
        yield from map(_work, jobs)
        return
    context = multiprocessing.get_context("spawn")
    with context.Pool(num_processes, initializer=_quiet, maxtasksperchild=200) as pool:
        yield from pool.imap_unordered(_work, jobs)


def source_digest() -> str:
    """A digest of the simulated code: results of other code do not count."""
    package = Path(__file__).parents[1]
    total = hashlib.sha256()
    for path in sorted(package.rglob("*.py")):
        total.update(str(path.relative_to(package)).encode())
        total.update(path.read_bytes())
    return total.hexdigest()[:16]


def main(arguments: list[str] | None = None) -> int:
    """See `--help`."""
    parser = argparse.ArgumentParser(
        prog="scripts/simulate",
        description="Run the real daemons in a simulated world, on schedules of faults drawn from seeds.",
        epilog="Without --seed, fresh seeds are drawn and printed. Exit code 1: a schedule failed.",
    )
    parser.add_argument("--seed", type=int, help="run this one (with --seeds: the first)")
    parser.add_argument("--seeds", type=int, default=1, help="how many schedules (default 1)")
    parser.add_argument("--minutes", type=float, default=0.0, help="stop after this time, and say how far it came")
    parser.add_argument("--trace", action="store_true", help="print every event and every delivery of one schedule")
    parser.add_argument("--events", action="store_true", help="print the events of one schedule, not the deliveries")
    parser.add_argument("--json", action="store_true", help="one JSON object per schedule")
    parser.add_argument("--standard", action="store_true", help="4 stages, 8 peers, 6 steps, 10 faults: for measuring")
    parser.add_argument("--processes", type=int, default=os.cpu_count() or 1, help="at once (default: all cores)")
    parser.add_argument("--first", action="store_true", help="stop at the first failure")
    parser.add_argument("--no-shrink", action="store_true", help="show a failure as it is")
    parser.add_argument("--state", type=Path, help="a file that remembers what was done: continues where it stopped")
    chosen = parser.parse_args(arguments)
    first = chosen.seed if chosen.seed is not None else int.from_bytes(os.urandom(5), "big")
    if chosen.trace or chosen.events:
        return _show(first, standard=chosen.standard, deliveries=chosen.trace)
    return _run_many(first, chosen)


def _show(seed: int, *, standard: bool, deliveries: bool) -> int:
    _quiet()

    def trace(line: str) -> None:
        if deliveries or " > " not in line:
            print(line)

    schedule = draw(seed, standard=standard)
    print("schedule:", *schedule.overrides, f"{schedule.num_peers} peers", f"delay {schedule.delay_s:g} s")
    result = run_schedule(schedule, trace=trace)
    _print(result)
    return 1 if result.failures else 0


def _run_many(first: int, chosen: argparse.Namespace) -> int:
    seeds = list(range(first, first + chosen.seeds))
    code = source_digest()
    done: dict[str, list[str]] = {}
    if chosen.state is not None and chosen.state.exists():
        known = json.loads(chosen.state.read_text())
        if known.get("code") == code and known.get("standard") == chosen.standard:
            done = known["done"]
            seeds = [seed for seed in seeds if str(seed) not in done]
    started, num_failed, num_faults, num_done = time.monotonic(), 0, 0, 0
    if chosen.seed is None and not chosen.json:
        print(f"seeds {first} to {first + chosen.seeds - 1}")
    with ProgressBar() as bar:
        for result in _results(seeds, chosen.standard, chosen.processes):
            num_done += 1
            num_faults += result.num_faults
            done[str(result.seed)] = list(result.failures)
            if chosen.json:
                print(json.dumps(asdict(result)), flush=True)
            else:
                bar.update(num_done, len(seeds), f"{num_done:,} of {len(seeds):,} schedules, {num_failed} failed")
            if result.failures:
                num_failed += 1
                if not chosen.json:
                    bar.close()
                    _print_failure(result, chosen)
            if chosen.state is not None and (num_done % 20 == 0 or num_done == len(seeds)):
                chosen.state.write_text(json.dumps({"code": code, "standard": chosen.standard, "done": done}))
            if result.failures and chosen.first:
                break
            if chosen.minutes and time.monotonic() - started > 60 * chosen.minutes:
                break
    seconds = time.monotonic() - started
    rate = 60 * num_done / seconds / max(1, min(chosen.processes, len(seeds) or 1)) if seconds else 0.0
    if not chosen.json:
        print(
            f"{num_done} schedules with {num_faults} faults in {seconds:.0f} s"
            f" ({rate:.0f} per core-minute): {num_done - num_failed} passed, {num_failed} failed"
        )
    if chosen.state is not None:
        chosen.state.write_text(json.dumps({"code": code, "standard": chosen.standard, "done": done}))
    return 1 if num_failed else 0


def _print(result: Result) -> None:
    for line in result.happened:
        print("  fault", line)
    for line in result.failures:
        print("  FAILED", line)
    print(
        f"seed {result.seed}: {'failed' if result.failures else 'passed'}, {result.virtual_s:.1f} virtual seconds,"
        f" {result.real_s:.1f} s, trace {result.trace_hash[:16]}"
    )


def _print_failure(result: Result, chosen: argparse.Namespace) -> None:
    print(f"\nseed {result.seed} FAILED:")
    for line in result.failures:
        print("  ", line)
    if not chosen.no_shrink:
        small = shrink(draw(result.seed, standard=chosen.standard))
        print("   with these faults alone:")
        for fault in small.faults:
            print("     ", fault)
    print(f"   again: scripts/simulate --seed {result.seed} --trace", flush=True)


if __name__ == "__main__":
    sys.exit(main())
