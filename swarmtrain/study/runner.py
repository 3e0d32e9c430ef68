"""Trains the methods of a study, one after the other, with every seed. Finished trainings are not repeated."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from pathlib import Path

from swarmtrain.codec import Direction
from swarmtrain.codec.errors import NonFiniteTensor
from swarmtrain.errors import DivergedError, UsageError
from swarmtrain.model.sizes import describe
from swarmtrain.reference import ReferenceTrainer
from swarmtrain.run.manifest import Manifest
from swarmtrain.study.critical import SeldomCriticalBoundary
from swarmtrain.study.links import TokenCosts
from swarmtrain.study.methods import Method
from swarmtrain.study.replicas import ReplicatedTrainer
from swarmtrain.study.results import Point, RunResult, finite, load_result

OnStep = Callable[["Progress"], None]


@dataclass(frozen=True)
class Progress:
    """The progress of a study."""

    method: str
    seed: int
    run: int  # from 1
    num_runs: int
    step: int
    num_steps: int
    loss: float
    left_s: float  # of the whole study, estimated


@dataclass(frozen=True)
class Study:
    """A comparison: every method with every seed, on `manifest` with the method's boundary and codecs."""

    manifest: Manifest
    methods: tuple[Method, ...]
    num_seeds: int
    out: Path

    def runs(self) -> list[tuple[Method, int, Manifest]]:
        """All trainings, ordered by seed, so that a study that is stopped early has every method."""
        first = self.manifest.run.seed
        return [
            (method, seed, method.applied_to(self.manifest, seed=seed))
            for seed in range(first, first + self.num_seeds)
            for method in self.methods
        ]

    def path(self, method: Method, seed: int) -> Path:
        """The file of a result."""
        return self.out / "runs" / f"{method.file_name}-seed{seed}.json"

    def results(self) -> list[RunResult]:
        """The finished results, in the order of methods and seeds."""
        found = [self._known(method, seed, manifest) for method, seed, manifest in self.runs()]
        order = {method.name: number for number, method in enumerate(self.methods)}
        return sorted((item for item in found if item), key=lambda item: (order[item.method], item.seed))

    def train(self, on_step: OnStep) -> Iterator[RunResult]:
        """Train the missing ones; yields each result once it is on disk."""
        missing = [run for run in self.runs() if self._known(*run) is None]
        started = time.monotonic()
        for number, (method, seed, manifest) in enumerate(missing):

            def tell(
                step: int,
                loss: float,
                number: int = number,
                name: str = method.name,
                seed: int = seed,
                steps: int = manifest.schedule.steps,
            ) -> None:
                done = number + step / steps
                left_s = (time.monotonic() - started) / done * (len(missing) - done)
                on_step(Progress(name, seed, number + 1, len(missing), step, steps, loss, left_s))

            result = train_one(method, seed, manifest, tell)
            result.save(self.path(method, seed))
            yield result

    def _known(self, method: Method, seed: int, manifest: Manifest) -> RunResult | None:
        path = self.path(method, seed)
        if not path.exists():
            return None
        result = load_result(path)
        if result.manifest_digest != manifest.digest():
            raise UsageError(
                f"{path} is of another manifest, model or number of steps than this study's",
                fix="choose another --out, or remove the file",
            )
        return result


def train_one(method: Method, seed: int, manifest: Manifest, tell: Callable[[int, float], None]) -> RunResult:
    """One training. A run that diverges is a result as well."""
    trainer = (
        ReferenceTrainer(manifest) if method.num_replicas == 1 else ReplicatedTrainer(manifest, method.num_replicas)
    )
    if method.critical_every > 1:
        trainer.boundaries = [
            SeldomCriticalBoundary(trainer.codecs, boundary.index, method.critical_every)
            for boundary in trainer.boundaries
        ]
    points: list[Point] = []
    loss, problem, compute_s = float("nan"), "", 0.0
    every = manifest.validation.every
    while not problem and trainer.steps_done < manifest.schedule.steps:
        started = time.thread_time()
        try:
            loss, _, _ = trainer.step()
        except (DivergedError, NonFiniteTensor) as error:
            problem = str(error)
            break
        compute_s += time.thread_time() - started
        done = trainer.steps_done
        if every and done % every == 0 and done < manifest.schedule.steps:
            points.append(Point(done, done * manifest.tokens_per_step, _loss(trainer, use_codec=True)))
        tell(done, loss)
    final = None if problem else _loss(trainer, use_codec=True)
    done = trainer.steps_done
    points.append(Point(done, done * manifest.tokens_per_step, final))
    return RunResult(
        method=method.name,
        seed=seed,
        manifest_digest=manifest.digest(),
        num_trained=describe(manifest).num_trained,
        steps=done,
        tokens=done * manifest.tokens_per_step,
        train_loss=finite(loss),
        val_loss=final,
        val_loss_codec_off=None if problem else _loss(trainer, use_codec=False),
        points=tuple(points),
        costs=_costs(trainer, compute_s),
        diverged=problem,
    )


def _loss(trainer: ReferenceTrainer, *, use_codec: bool) -> float | None:
    """The validation loss; None if it is not a number."""
    try:
        return finite(trainer.validate(use_codec=use_codec))
    except NonFiniteTensor:
        return None


def _costs(trainer: ReferenceTrainer, compute_s: float) -> TokenCosts:
    """Means over the run, per token, stage and boundary. A run may have ended in the middle of a step."""
    manifest = trainer.manifest
    tokens_per_message = manifest.model.sequence_length * manifest.batch.sequences_per_microbatch
    tokens = max(1, trainer.steps_done) * manifest.tokens_per_step
    ways = {way: [boundary.traffic[way] for boundary in trainer.boundaries] for way in Direction}
    sent = {way: max(1, sum(item.num_messages for item in items)) * tokens_per_message for way, items in ways.items()}
    codec_s = {way: sum(item.encode_s + item.decode_s for item in items) for way, items in ways.items()}
    num_bytes = {way: sum(item.num_bytes for item in items) / sent[way] for way, items in ways.items()}
    # A stage encodes and decodes once per direction; the rest of the time is the stages' own compute.
    return TokenCosts(
        stage_s=max(0.0, compute_s - sum(codec_s.values())) / tokens / manifest.stages.count,
        codec_s=sum(codec_s[way] / sent[way] for way in Direction),
        forward_bytes=num_bytes[Direction.FORWARD],
        backward_bytes=num_bytes[Direction.BACKWARD],
    )


def study_manifest(manifest: Manifest) -> Manifest:
    """The manifest, with validation points for a curve if it has none."""
    if manifest.validation.every:
        return manifest
    every = max(1, manifest.schedule.steps // 10)
    return replace(manifest, validation=replace(manifest.validation, every=every))
