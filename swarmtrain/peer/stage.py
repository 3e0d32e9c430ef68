"""One stage on this machine, as the event loop sees it: every method waits for its turn on a thread.

    outcome = (await stage.forward(entry, step)).value

With `schedule.delay` there are two: what a step needs after its microbatches (norm, digest, optimizer, copies) runs
beside the microbatches of the next one, which see other weights. Without, both are the same thread.

What the thread does is in `jobs.py`, in which order in `compute.py`. A method returns `Timed` where its caller tells
others how long the work took. `Snapshots` are copies of the state that newcomers and checkpoints fetch from, while the
state itself goes on.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Collection, Sequence
from functools import partial
from typing import TypeVar

from torch import Tensor

from swarmtrain.chain.state_transfer import StateSource
from swarmtrain.codec import Direction, Ticket
from swarmtrain.codec.samples import SampleStore
from swarmtrain.model.buffers import StateLayout
from swarmtrain.model.exact import Accumulator
from swarmtrain.model.footprint import Offload
from swarmtrain.model.numeric_class import numeric_class
from swarmtrain.model.peak import measured_peak
from swarmtrain.model.state import StageState
from swarmtrain.model.worker import StageWorker
from swarmtrain.model.workload import BACKWARD_FACTOR, workload_of
from swarmtrain.observe.split import TimeSplit
from swarmtrain.peer.codecs import StageCodecs
from swarmtrain.peer.compute import ComputeThread, ComputeTimes, DeviceWatch, Key, Kind, Timed
from swarmtrain.peer.jobs import Made, Outcome, StageJobs, range_digests, share_digest
from swarmtrain.peer.ledger import Entry, Ledger, Raw
from swarmtrain.reduce.coding import FactorRound, Reduced, StageCoder
from swarmtrain.run.manifest import Manifest

T = TypeVar("T")

MAX_SNAPSHOTS = 2  # one for newcomers, one for a checkpoint
SNAPSHOT_LIFE_S = 30.0  # a copy of the state that no peer has fetched from for so long is dropped
_NO_MICROBATCH = (-1, -1)  # of step work and messages: within a kind they run as they come


class Stage:
    """See the module. Everything here is touched on the event loop only."""

    def __init__(self, manifest: Manifest, compute: ComputeThread, steps: ComputeThread, jobs: StageJobs) -> None:
        self.manifest, self.compute, self.jobs = manifest, compute, jobs
        self._steps = steps  # the thread on which steps are applied
        self.device = DeviceWatch(compute, steps)
        self.numeric_class = ""  # known where peers check each other
        self.snapshots = Snapshots(self)
        self.peak_tflops = 0.0  # of a graphics card, measured when the stage is built
        self._tflop = workload_of(manifest).stages[jobs.plan.index].tflop

    @classmethod
    async def build(
        cls,
        manifest: Manifest,
        compute: ComputeThread,
        steps: ComputeThread,
        index: int,
        device: str,
        offload: Offload = Offload.NOTHING,
        *,
        graph_budget_bytes: int,
        make_store: Callable[[], SampleStore],
    ) -> Stage:
        """The stage's tensors are made on the thread that will use them."""
        built = await compute.run(
            Kind.STEP, _NO_MICROBATCH, lambda: StageWorker(StageState(manifest, index, device=device, offload=offload))
        )
        jobs = StageJobs(manifest, built.value, graph_budget_bytes=graph_budget_bytes, make_store=make_store)
        stage = cls(manifest, compute, steps, jobs)
        if manifest.checks.share:
            stage.numeric_class = await stage._step_work(lambda: numeric_class(manifest, device))
        if stage.state.device.type == "cuda":
            dtype = stage.layout.weights_dtype
            stage.peak_tflops = await stage._between_passes(lambda: measured_peak(device, dtype))
        return stage

    @property
    def state(self) -> StageState:
        """The stage's state: to be read, not computed with."""
        return self.jobs.worker.state

    @property
    def layout(self) -> StateLayout:
        """Where each tensor lies in the state."""
        return self.state.layout

    @property
    def codecs(self) -> StageCodecs:
        """The bytes on both sides."""
        return self.jobs.codecs

    @property
    def coder(self) -> StageCoder:
        """The gradient's codec."""
        return self.jobs.coder

    @property
    def split(self) -> TimeSplit:
        """What this peer's time goes into."""
        return self.compute.split

    @property
    def times(self) -> ComputeTimes:
        """How long jobs take here."""
        return self.compute.times

    def total_s(self, kind: Kind) -> float:
        """That jobs of a kind have taken so far."""
        threads = {self.compute, self._steps}
        return sum(thread.times.total_s[kind] for thread in threads)

    @property
    def computed_tflop(self) -> float:
        """Of microbatches so far; a backward counts twice a forward, and what is computed again not at all."""
        each = self._tflop / (1.0 + BACKWARD_FACTOR)
        return each * (self.jobs.num_forwards + BACKWARD_FACTOR * self.jobs.num_backwards)

    @property
    def flops_utilisation(self) -> float:
        """Of the device's peak while it computes; 0 where the peak is not known."""
        busy_s = self.total_s(Kind.FORWARD) + self.total_s(Kind.BACKWARD)
        return self.computed_tflop / busy_s / self.peak_tflops if busy_s and self.peak_tflops else 0.0

    @property
    def forward_s(self) -> float:
        """A forward, usually."""
        return self.times.typical_s(Kind.FORWARD)

    @property
    def backward_s(self) -> float:
        """A backward, usually."""
        return self.times.typical_s(Kind.BACKWARD)

    @property
    def service_s(self) -> float:
        """Both passes of one microbatch, usually."""
        return self.forward_s + self.backward_s

    def load_s(self, num_open: int) -> float:
        """Both passes of so many microbatches."""
        return self.service_s * num_open

    # -- one microbatch

    async def forward(self, entry: Entry, step: int, partner: str = "") -> Timed[Outcome]:
        """See `StageJobs.forward`."""
        return await self.compute.run(Kind.FORWARD, entry.key, lambda: self.jobs.forward(entry, step, partner))

    async def backward(self, entry: Entry, step: int, gradient: Raw) -> Timed[Outcome]:
        """See `StageJobs.backward`."""
        return await self.compute.run(Kind.BACKWARD, entry.key, lambda: self.jobs.backward(entry, step, gradient))

    async def evaluate(self, tokens: Raw, boundary: Raw, step: int, microbatch: int) -> Timed[Outcome]:
        """See `StageJobs.evaluate`."""
        return await self.compute.run(
            Kind.EVALUATE, (step, microbatch), lambda: self.jobs.evaluate(tokens, boundary, step, microbatch)
        )

    async def checked(self, tokens: Raw, boundary: Raw, gradient: Raw, key: Key, total: Accumulator | None) -> Made:
        """See `StageJobs.checked`. Of passes that wait, those of older steps come first."""
        job = partial(self.jobs.checked, tokens, boundary, gradient, *key, total)
        return (await self.compute.run(Kind.CHECK, key, job)).value

    def withdraw_forward(self, may_go: Callable[[Key], bool]) -> Key | None:
        """Take the forward that would run last out of the queue, of those that may go: whose it is, or None.

        Its caller gets `Withdrawn`.
        """
        return self.compute.withdraw(Kind.FORWARD, may_go)

    # -- messages with tensors

    async def check_gradient(self, entry: Entry, step: int, gradient: Raw, *, keep: bool) -> None:
        """See `StageJobs.check_gradient`."""
        await self._message(lambda: self.jobs.check_gradient(entry, step, gradient, keep=keep))

    async def with_mask(self, entry: Entry, step: int, gradient: Raw) -> Raw:
        """See `StageCodecs.with_mask`."""
        return await self._message(lambda: self.codecs.with_mask(entry, step, gradient))

    async def take_boundary(self, entry: Entry, step: int, sender: str) -> None:
        """See `StageCodecs.take_boundary`."""
        await self._message(lambda: self.codecs.take_boundary(entry, step, sender))

    async def take_gradient(self, entry: Entry, step: int, gradient: Raw, sender: str) -> Raw:
        """See `StageCodecs.take_gradient`."""
        return await self._message(lambda: self.codecs.take_gradient(entry, step, gradient, sender))

    async def settle(self, direction: Direction, ticket: Ticket, *, delivered: bool) -> None:
        """See `StageCodecs.settle`."""
        await self._message(lambda: self.codecs.settle(direction, ticket, delivered=delivered))

    # -- the step

    async def reconciled_share(self, ledger: Ledger, wanted: set[int]) -> Tensor:
        """See `StageJobs.reconciled_share`."""
        entries, discarded = list(ledger), list(ledger.discarded)
        return await self._between_passes(lambda: self.jobs.reconciled_share(entries, wanted, ledger.step, discarded))

    async def range_digests(self, reduced: Tensor, sizes: Sequence[int]) -> bytes:
        """See `range_digests`."""
        return await self._step_work(lambda: range_digests(reduced, sizes))

    async def share_digest(self, share: Tensor) -> str:
        """See `share_digest`."""
        return await self._step_work(lambda: share_digest(share))

    async def factors(self, share: Tensor | None) -> FactorRound:
        """See `StageCoder.factors`."""
        return await self._step_work(lambda: self.coder.factors(share))

    async def left_factors(self, factors: FactorRound) -> Tensor | None:
        """See `FactorRound.left`."""
        return await self._step_work(factors.left)

    async def factor_vector(self, factors: FactorRound, left: Tensor) -> Tensor | None:
        """See `FactorRound.vector`."""
        return await self._step_work(lambda: factors.vector(left))

    async def from_factors(self, factors: FactorRound, left: Tensor, vector: Tensor) -> Reduced:
        """See `FactorRound.reduced`."""
        return await self._step_work(lambda: factors.reduced(left, vector))

    async def finish(self, reduced: Tensor) -> tuple[float, str]:
        """See `StageJobs.finish`."""
        return await self._step_work(lambda: self.jobs.finish(reduced))

    async def propose_basis(self, reduced: Tensor) -> Tensor:
        """See `StageWorker.proposed_basis`."""
        return await self._step_work(lambda: self.jobs.worker.proposed_basis(reduced))

    async def apply(
        self,
        reduced: Reduced,
        scale: float,
        learning_rate: float,
        basis: Tensor | None,
        *,
        counted: Collection[int],
    ) -> str:
        """End this step: see `StageJobs.close_step`, and `StageJobs.apply`. Returns the digest of the new state."""
        jobs, step, has_moved = self.jobs, self.state.step, basis is not None

        def at_once() -> str:
            digest = jobs.apply(jobs.close_step(step, counted), reduced, scale, learning_rate, basis)
            jobs.forget_if_due(step + 1, has_moved=has_moved)
            return digest

        if self._steps is self.compute:
            return await self._step_work(at_once)
        total = await self._between_passes(lambda: jobs.close_step(step, counted))
        digest = await self._step_work(lambda: jobs.apply(total, reduced, scale, learning_rate, basis))
        if has_moved or self.manifest.is_checkpoint(step + 1):
            await self._between_passes(lambda: jobs.forget_if_due(step + 1, has_moved=has_moved))
        return digest

    # -- the state

    async def first_state(self) -> StateSource:
        """See `StageJobs.first_state`."""
        return await self._step_work(self.jobs.first_state)

    async def copy_state(self) -> StateSource:
        """See `StageJobs.copy_state`."""
        return await self._step_work(self.jobs.copy_state)

    async def load_state(self, source: StateSource) -> str:
        """Replace the state; returns the digest of what was loaded. See `StageJobs.load_state`."""
        jobs = self.jobs

        def at_once() -> None:
            jobs.load_state(source)
            jobs.begin_anew()

        if self._steps is self.compute:
            await self._step_work(at_once)
        else:
            await self.drop_work()
            await self._step_work(lambda: jobs.load_state(source))
            await self._between_passes(jobs.begin_anew)
        return await self._step_work(jobs.state_digest)

    async def drop_work(self) -> None:
        """See `StageJobs.drop_work`."""
        await self._between_passes(self.jobs.drop_work)

    async def damage_state(self) -> None:
        """See `StageJobs.damage_state`."""
        await self._step_work(self.jobs.damage_state)

    async def _step_work(self, job: Callable[[], T]) -> T:
        return (await self._steps.run(Kind.STEP, _NO_MICROBATCH, job)).value

    async def _between_passes(self, job: Callable[[], T]) -> T:
        """What must not happen during a pass, and is quickly done."""
        return (await self.compute.run(Kind.STEP, _NO_MICROBATCH, job)).value

    async def _message(self, job: Callable[[], T]) -> T:
        return (await self.compute.run(Kind.MESSAGE, _NO_MICROBATCH, job)).value


class Snapshots:
    """Copies of a stage's state, by step."""

    def __init__(self, stage: Stage) -> None:
        self._stage = stage
        self._copies: dict[int, StateSource] = {}
        self._fetched_at: dict[int, float] = {}

    def __contains__(self, step: int) -> bool:
        return step in self._copies

    def fetch(self, step: int) -> StateSource:
        """A copy that is there, for a peer that fetches from it now."""
        self._fetched_at[step] = asyncio.get_running_loop().time()
        return self._copies[step]

    async def keep(self) -> None:
        """Copy the state as it is now."""
        copied = await self._stage.copy_state()
        self._copies.pop(copied.step, None)  # of a history that was taken back
        self._copies[copied.step] = copied
        self._fetched_at[copied.step] = asyncio.get_running_loop().time()
        for old in list(self._copies)[:-MAX_SNAPSHOTS]:  # the first that were made: after a roll-back steps begin again
            self._drop(old)

    def drop_unused(self) -> None:
        """Copies that no peer has fetched from for a while."""
        now = asyncio.get_running_loop().time()
        for step in [step for step, at in self._fetched_at.items() if now - at > SNAPSHOT_LIFE_S]:
            self._drop(step)

    def _drop(self, step: int) -> None:
        del self._copies[step], self._fetched_at[step]
