"""Soak test: random faults hit a swarm, round after round, and every run must end in the bits of an undisturbed one.

    scripts/soak --minutes 20 --seed 7

In each round a local swarm trains the same small run while peers and coordinator are killed, stopped, cut off, drained
and joined, as drawn from the seed. After every round the final state is compared with the reference's, bit for bit, and
the journal is audited. A failure prints the seed and keeps the directory.
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import random
import shutil
import signal
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Awaitable, Callable
from pathlib import Path
from typing import Any

import torch

from swarmtrain.audit import audit
from swarmtrain.checkpoint import Checkpoint, latest, same_tensors
from swarmtrain.errors import SwarmtrainError
from swarmtrain.local import Child, LocalOptions, LocalSwarm, replaceable
from swarmtrain.observe.control import ControlError, ask
from swarmtrain.reference import ReferenceTrainer
from swarmtrain.run.manifest import Manifest
from swarmtrain.run.presets import preset
from swarmtrain.waiting import wait_event

ROUND_S = 900.0  # a round that takes longer has hung
NUM_STAGES = 3
MAX_PEERS = 8
PATIENT_SHARE = 0.8  # of the faults wait for a step after the previous fault; the others hit during recovery
RECOVERY_S = 90.0

SMALL = (
    "model.hidden_size=32",
    "model.num_layers=3",
    "model.num_heads=4",
    "model.num_kv_heads=2",
    "model.ffn_size=64",
    "model.sequence_length=32",
    "boundary.k=8",
    "batch.sequences_per_microbatch=2",
    "batch.microbatches_per_step=6",
    f"stages.count={NUM_STAGES}",
    "validation.every=0",
    "checkpoint.every=15",
)


class SoakFailed(SwarmtrainError):
    """A disturbed run did not end like an undisturbed one."""

    error_id = "ST-SOAK"


class FaultInjector:
    """Injects faults into one swarm until the run is over. The seed determines which."""

    def __init__(self, rng: random.Random, pause_s: tuple[float, float]) -> None:
        self._rng, self._pause_s = rng, pause_s
        self.counts: Counter[str] = Counter()
        self._step_applied = asyncio.Event()
        self._has_begun = False
        self._stopped: set[asyncio.Task[None]] = set()

    async def inject(self, swarm: LocalSwarm) -> None:
        """Inject one fault after the other, until cancelled."""
        choices: dict[str, tuple[float, Callable[[LocalSwarm], Awaitable[bool]]]] = {
            "kill": (4.0, self._kill),
            "stop": (2.0, self._stop),
            "cut": (3.0, self._cut),
            "drain": (1.0, self._drain),
            "join": (1.0, self._join),
            "coordinator": (2.0, self._kill_coordinator),
            "empty stage": (0.3, self._empty_stage),
            "everything": (0.2, self._kill_everything),
        }
        try:
            while True:
                await asyncio.sleep(self._rng.uniform(*self._pause_s))
                if self._rng.random() < PATIENT_SHARE:
                    await wait_event(self._step_applied, RECOVERY_S)
                self._step_applied.clear()
                await self._tend(swarm)
                kind = self._rng.choices(list(choices), [weight for weight, _ in choices.values()])[0]
                if await choices[kind][1](swarm):
                    self.counts[kind] += 1
        finally:
            for task in self._stopped:
                task.cancel()
            await asyncio.gather(*self._stopped, return_exceptions=True)
            for peer in swarm.peers:
                _signal(peer, signal.SIGCONT)

    def note(self, event: dict[str, Any]) -> None:
        """An event of the swarm."""
        if event["event"] == "step_applied":
            self._has_begun = True
            self._step_applied.set()

    async def _tend(self, swarm: LocalSwarm) -> None:
        """Start peers where a stage has too few.

        A peer that starts while the coordinator is away ends with an error, and its stage must not stay empty. Until
        the first step the run waits for as many peers as it was started with.
        """
        needed = 1 if self._has_begun else swarm.options.num_peers // NUM_STAGES
        for stage in range(NUM_STAGES):
            living = sum(peer.stage == stage and _lives(peer) for peer in swarm.peers)
            for _ in range(living, needed):
                swarm.peers.append(await swarm.start_peer(stage))

    async def _victim(self, swarm: LocalSwarm) -> Child | None:
        """A serving peer whose stage has another one, as the coordinator sees it; None if there is none."""
        serving = [peer for peer in await swarm.serving_peers() if peer.is_serving]  # not stopped, not drained
        candidates = replaceable(serving)
        return self._rng.choice(candidates) if candidates else None

    async def _kill(self, swarm: LocalSwarm) -> bool:
        victim = await self._victim(swarm)
        if victim is not None:
            await _replace(swarm, victim)
        return victim is not None

    async def _empty_stage(self, swarm: LocalSwarm) -> bool:
        stage = self._rng.randrange(NUM_STAGES)
        for peer in [peer for peer in swarm.peers if peer.stage == stage]:
            await _replace(swarm, peer)
        return True

    async def _kill_everything(self, swarm: LocalSwarm) -> bool:
        assert swarm.coordinator is not None
        former = list(swarm.peers)
        for peer in former:
            await swarm.kill(peer)
        await swarm.replace_coordinator()
        swarm.peers[:] = [await swarm.start_peer(peer.stage) for peer in former]
        return True

    async def _kill_coordinator(self, swarm: LocalSwarm) -> bool:
        await swarm.replace_coordinator()
        return True

    async def _stop(self, swarm: LocalSwarm) -> bool:
        victim = await self._victim(swarm)
        if victim is None:
            return False
        _signal(victim, signal.SIGSTOP)
        victim.is_serving = False  # no other peer of its stage may be hit meanwhile
        task = asyncio.create_task(self._wake_later(victim, self._rng.uniform(1.0, 14.0)))
        self._stopped.add(task)
        task.add_done_callback(self._stopped.discard)
        return True

    async def _wake_later(self, victim: Child, seconds: float) -> None:
        await asyncio.sleep(seconds)
        _signal(victim, signal.SIGCONT)
        victim.is_serving = True

    async def _cut(self, swarm: LocalSwarm) -> bool:
        living = [peer for peer in swarm.peers if peer.is_serving and _lives(peer)]
        if not living:
            return False
        victim = self._rng.choice(living)
        with contextlib.suppress(ControlError):
            await ask(swarm.options.state_dir / victim.name / "control.sock", "cut")
            return True
        return False

    async def _drain(self, swarm: LocalSwarm) -> bool:
        victim = await self._victim(swarm)
        if victim is None:
            return False
        _signal(victim, signal.SIGTERM)
        victim.is_serving = False
        if len([peer for peer in swarm.peers if _lives(peer)]) < MAX_PEERS:
            swarm.peers.append(await swarm.start_peer(victim.stage))
        return True

    async def _join(self, swarm: LocalSwarm) -> bool:
        if len([peer for peer in swarm.peers if _lives(peer)]) >= MAX_PEERS:
            return False
        swarm.peers.append(await swarm.start_peer(self._rng.randrange(NUM_STAGES)))
        return True


async def _replace(swarm: LocalSwarm, victim: Child) -> None:
    await swarm.kill(victim)
    swarm.peers.remove(victim)
    swarm.peers.append(await swarm.start_peer(victim.stage))


def _lives(peer: Child) -> bool:
    return peer.process.returncode is None


def _signal(peer: Child, number: int) -> None:
    if _lives(peer):
        with contextlib.suppress(ProcessLookupError):
            peer.process.send_signal(number)


def soak(
    manifest: Manifest,
    *,
    minutes: float,
    seed: int,
    pause_s: tuple[float, float],
    min_faults: int = 0,
    round_s: float = ROUND_S,
) -> Counter[str]:
    """Rounds until `minutes` are over and `min_faults` were survived, at least one. Returns the faults survived.

    SoakFailed, with the directory, if a round does not end like the reference or takes longer than `round_s`.
    """
    torch.set_num_threads(1)
    place = Path(tempfile.mkdtemp(prefix="soak-"))
    for _ in ReferenceTrainer(manifest, out=place / "reference").run():
        pass
    expected = latest(place / "reference")
    assert expected is not None
    rng, counts, number = random.Random(seed), Counter[str](), 0
    ends_at = time.monotonic() + 60.0 * minutes
    while number == 0 or time.monotonic() < ends_at or counts.total() < min_faults:
        number += 1
        directory = place / f"r{number}"
        started, round_seed = time.monotonic(), rng.random()
        try:
            injector = FaultInjector(random.Random(round_seed), pause_s)
            asyncio.run(_round(manifest, directory, injector, round_s))
            check(directory, expected)
        except (SwarmtrainError, TimeoutError) as error:
            raise SoakFailed(f"seed {seed}, round {number}: {error!r}", fix=f"see {directory}") from error
        counts += injector.counts
        took, total = time.monotonic() - started, injector.counts.total()
        print(f"round {number}: {total} faults survived in {took:.0f} s {dict(injector.counts)}", flush=True)
        shutil.rmtree(directory, ignore_errors=True)
    shutil.rmtree(place, ignore_errors=True)
    print(f"seed {seed}: {number} rounds, {counts.total()} faults survived {dict(counts)}", flush=True)
    return counts


async def _round(manifest: Manifest, directory: Path, injector: FaultInjector, round_s: float) -> None:
    options = LocalOptions(
        manifest=manifest,
        state_dir=directory,
        num_peers=2 * NUM_STAGES,
        peer_arguments=("--enable-test-faults",),
    )
    events = directory.with_suffix(".events")

    def note(event: dict[str, Any]) -> None:
        injector.note(event)
        with events.open("a") as file:
            print(event, file=file)

    async with asyncio.timeout(round_s):
        await LocalSwarm(options, note, injector.inject).run()
    events.unlink()


def check(directory: Path, expected: Checkpoint) -> None:
    """SoakFailed unless the run in `directory` ended like the reference and its journal passes the audit."""
    found = latest(directory / "coordinator" / "checkpoints")
    if found is None or found.step != expected.step:
        raise SoakFailed(f"the last checkpoint is {found.step if found else 'missing'}, not {expected.step}")
    for stage in range(NUM_STAGES):
        if not same_tensors(found.load_stage(stage), expected.load_stage(stage)):
            raise SoakFailed(f"stage {stage} differs from the reference")
    audited = audit(directory)
    if not audited.passed:
        raise SoakFailed(f"the audit found {'; '.join(audited.faults[:3])}")


def main() -> None:
    """The command line of `scripts/soak`."""
    parser = argparse.ArgumentParser(prog="scripts/soak", description=__doc__.splitlines()[0])
    parser.add_argument("--minutes", type=float, default=2.0)
    parser.add_argument("--seed", type=int, default=None, help="default: a fresh one, which is printed")
    parser.add_argument("--steps", type=int, default=60, help="steps of one round")
    parser.add_argument("--pause", type=float, nargs=2, default=(0.5, 4.0), metavar=("MIN", "MAX"), help="seconds")
    arguments = parser.parse_args()
    seed = arguments.seed if arguments.seed is not None else random.SystemRandom().randrange(10**6)
    print(f"seed {seed}", flush=True)
    manifest = preset("nano", [*SMALL, f"schedule.steps={arguments.steps}"])
    try:
        soak(manifest, minutes=arguments.minutes, seed=seed, pause_s=tuple(arguments.pause))
    except SoakFailed as error:
        sys.exit(f"FAILED {error}\n  {error.fix}")


if __name__ == "__main__":
    main()
