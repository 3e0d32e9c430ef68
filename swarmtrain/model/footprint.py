"""The memory of one peer on one stage, its device and its host apart: arithmetic on the layout, nothing is allocated.

One model for `presets`, `plan`, `join` and `doctor`. Tests hold it against bytes that are counted while a stage runs.

    what                        bytes                                where
    parameters, moments, U      the state's buffers                  device; host with offload
    weights of open steps       one copy each, in model.precision    device
    exact sums                  8 per number and open step           device; host with Offload.SUMS
    token table                 4 per entry, or a bit                device
    microbatch                  activations.py                       device
    optimizer                   what one matrix takes                where the parameters are
    all-reduce                  sum, result, what factors are of     host
    error feedback              4 per number that is compressed      host
    copy for newcomers          the state's buffers                  host

On a CPU device and host are one memory.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from enum import IntEnum

from swarmtrain.model.activations import activations
from swarmtrain.model.buffers import NEXT_WEIGHTS, WEIGHTS, BufferSpec, StateLayout
from swarmtrain.model.layout import Role, StagePlan, plan_stages, table_bytes
from swarmtrain.model.sizes import accumulator_bytes, muon_working_bytes
from swarmtrain.run.manifest import Manifest

PROCESS_BYTES = 400 << 20  # interpreter, torch and the network daemon
DRIVER_BYTES = 400 << 20  # of a graphics card: context, kernels and workspaces of its libraries
ORDINARY_CARD = 12 * 10**9
_FP32, _FP64 = 4, 8
_REPLICAS = 2  # of a stage at least: each of them adds up so much of an all-reduce
_OWNED_BYTES = _FP64 + _FP32  # per number: total, answer
MICROBATCH = ("a microbatch", "another one between its passes")
STEP = ("optimizer at work", "all-reduce", "sums of others")
_CHUNKS_BYTES = 2 << 20  # scratch of sums and of element-wise updates


class Offload(IntEnum):
    """What lies on the host while the device computes: the least that makes a stage fit is the fastest."""

    NOTHING = 0
    STATE = 1  # parameters and moments; the optimizer runs there
    SUMS = 2  # the sums of gradients too


@dataclass(frozen=True, slots=True)
class Need:
    """One item."""

    what: str
    device_bytes: int = 0
    host_bytes: int = 0


@dataclass(frozen=True, slots=True)
class Footprint:
    """All items, at the moment at which they are most."""

    offload: Offload
    recomputes: bool  # layers, in backward
    kept_bytes: int  # of a microbatch between its passes, on the device
    needs: tuple[Need, ...]

    @property
    def device_bytes(self) -> int:
        """Of a graphics card; 0 on a CPU."""
        return sum(need.device_bytes for need in self.needs)

    @property
    def host_bytes(self) -> int:
        """Of the machine's own memory."""
        return sum(need.host_bytes for need in self.needs)

    def fits(self, device_bytes: int, host_bytes: int) -> bool:
        """Whether so much memory is enough."""
        return self.device_bytes <= device_bytes and self.host_bytes <= host_bytes

    def as_dict(self) -> dict[str, object]:
        """For --json."""
        return {
            "offload": self.offload.name.lower(),
            "recomputes": self.recomputes,
            "device_bytes": self.device_bytes,
            "host_bytes": self.host_bytes,
            "needs": {need.what: [need.device_bytes, need.host_bytes] for need in self.needs},
        }


def on_cpu(
    manifest: Manifest, plan: StagePlan, *, offload: Offload = Offload.NOTHING, recomputes: bool = True
) -> Footprint:
    """Of a peer that computes on its CPU: all of it is host memory, so that `offload` saves none."""
    return _Count(manifest, plan, recomputes).on_cpu(offload)


def on_device(
    manifest: Manifest, plan: StagePlan, *, offload: Offload = Offload.NOTHING, recomputes: bool = True
) -> Footprint:
    """Of a peer that computes on a graphics card."""
    return _Count(manifest, plan, recomputes).on_device(offload)


def cpu_choices(manifest: Manifest, plan: StagePlan, offload: Offload = Offload.NOTHING) -> list[Footprint]:
    """The ways to host a stage on a CPU, the fastest first."""
    return [on_cpu(manifest, plan, offload=offload, recomputes=recomputes) for recomputes in (False, True)]


def choices(manifest: Manifest, plan: StagePlan) -> list[Footprint]:
    """The ways to host a stage on a graphics card, from the fastest to the smallest on the device."""
    counts = [_Count(manifest, plan, recomputes) for recomputes in (False, True)]
    return [count.on_device(offload) for offload in Offload for count in counts]


def of_microbatch(manifest: Manifest, plan: StagePlan, *, is_cpu: bool) -> list[Footprint]:
    """Of a stage that computes microbatches and applies no step, as in a trial: moments are never touched."""
    counts = [_Count(manifest, plan, recomputes) for recomputes in (False, True)]
    offloads = (Offload.NOTHING,) if is_cpu else tuple(Offload)
    return [count.of_microbatch(offload, is_cpu=is_cpu) for offload in offloads for count in counts]


def best(ways: Iterable[Footprint], device_bytes: int, host_bytes: int) -> Footprint | None:
    """The first way that fits; None if none does."""
    return next((way for way in ways if way.fits(device_bytes, host_bytes)), None)


def largest(manifest: Manifest, device_bytes: int = ORDINARY_CARD) -> Footprint:
    """Of the stage that needs most, each hosted in the fastest way that fits such a card, whatever the host."""
    found = []
    for plan in plan_stages(manifest):
        ways = choices(manifest, plan)
        found.append(next((way for way in ways if way.device_bytes <= device_bytes), ways[-1]))
    return max(found, key=lambda item: item.device_bytes + item.host_bytes)


def of_reference(manifest: Manifest) -> int:
    """Bytes of the reference trainer: all stages in one process, without a network."""
    counts = [_Count(manifest, plan, recomputes=False) for plan in plan_stages(manifest)]
    return PROCESS_BYTES + sum(count.kept_in_reference() for count in counts)


class _Count:
    """`numbers`: parameters with what aligns them, and the Gram matrix."""

    def __init__(self, manifest: Manifest, plan: StagePlan, recomputes: bool) -> None:
        self._manifest, self._plan, self._recomputes = manifest, plan, recomputes
        self._layout = StateLayout(manifest, plan.index)
        self._numbers = self._layout.gradient_size
        self._sum_bytes = self._numbers * accumulator_bytes(manifest)
        self._microbatch = activations(manifest, plan, recomputes=recomputes)

    def on_cpu(self, offload: Offload) -> Footprint:
        """All of it is host memory."""
        needs = [Need(need.what, 0, need.device_bytes + need.host_bytes) for need in self._needs(offload)]
        if not self._layout.is_delayed:  # a step is reduced and applied when its microbatches are over
            needs = _without_the_smaller(needs, MICROBATCH, STEP)
        return self._footprint(offload, [*needs, Need("process", 0, PROCESS_BYTES)])

    def on_device(self, offload: Offload) -> Footprint:
        """With a graphics card. An all-reduce reads a sum on the host."""
        lent = 0 if offload is Offload.SUMS else self._sum_bytes
        more = [Need("sum on its way", 0, lent), Need("process", DRIVER_BYTES, PROCESS_BYTES)]
        return self._footprint(offload, [*self._needs(offload), *more])

    def of_microbatch(self, offload: Offload, *, is_cpu: bool) -> Footprint:
        """See the function of the same name."""
        needs = [need for need in self._needs(offload) if need.what in ("weights of open steps", "token table")]
        needs.append(_placed("parameters", self._parameters * _FP32, on_host=offload >= Offload.STATE))
        needs.append(_placed("sum of gradients", self._sum_bytes + _CHUNKS_BYTES, on_host=offload >= Offload.SUMS))
        needs.append(Need("a microbatch", self._microbatch.peak_bytes))
        needs.append(Need("process", 0 if is_cpu else DRIVER_BYTES, PROCESS_BYTES))
        if is_cpu:
            needs = [Need(need.what, 0, need.device_bytes + need.host_bytes) for need in needs]
        return self._footprint(offload, needs)

    def kept_in_reference(self) -> int:
        """With one sum, one microbatch, and the result of a step."""
        left_out = ("sums of gradients", "all-reduce", "copy for newcomers", "another one between its passes")
        needs = [need for need in self._needs(Offload.NOTHING) if need.what not in left_out]
        return sum(need.device_bytes + need.host_bytes for need in needs) + self._sum_bytes + self._numbers * _FP32

    def _footprint(self, offload: Offload, needs: list[Need]) -> Footprint:
        kept = tuple(need for need in needs if need.device_bytes or need.host_bytes)
        return Footprint(offload, self._recomputes, self._microbatch.kept_bytes, kept)

    def _needs(self, offload: Offload) -> Iterator[Need]:
        """Every item but those of the process."""
        manifest, layout = self._manifest, self._layout
        state = [buffer for buffer in layout.buffers if buffer.name not in (WEIGHTS, NEXT_WEIGHTS)]
        yield _placed("parameters and moments", _bytes(state), on_host=offload >= Offload.STATE)
        yield Need("weights of open steps", self._weights(offload))
        has_copies = manifest.is_rounded or offload >= Offload.STATE
        if manifest.schedule.predict and layout.is_delayed and has_copies:
            before = self._parameters * _FP32
            yield _placed("parameters before an update", before, on_host=offload >= Offload.STATE)
        sums = self._sum_bytes * (1 + manifest.schedule.delay) + _CHUNKS_BYTES
        yield _placed("sums of gradients", sums, on_host=offload >= Offload.SUMS)
        yield Need("token table", table_bytes(manifest))
        yield Need("a microbatch", self._microbatch.peak_bytes)
        yield Need("another one between its passes", 0 if self._plan.is_last else self._microbatch.kept_bytes)
        yield _placed("optimizer at work", self._optimizer(), on_host=offload >= Offload.STATE)
        yield Need("all-reduce", 0, self._all_reduce())
        yield Need("sums of others", 0, self._owned())
        yield Need("error feedback", 0, self._errors())
        yield Need("copy for newcomers", 0, layout.num_bytes)

    @property
    def _parameters(self) -> int:
        return self._layout.buffers[0].num_elements

    def _weights(self, offload: Offload) -> int:
        """A copy for each open step; where it would have the parameters' own bits, these are it."""
        if self._layout.is_delayed:
            return 2 * self._parameters * self._layout.weights_dtype.itemsize
        is_own = not self._manifest.is_rounded and offload is Offload.NOTHING
        return 0 if is_own else self._parameters * self._layout.weights_dtype.itemsize

    def _optimizer(self) -> int:
        """Muon's products; AdamW's of the largest dense tensor in S, of whose columns it takes means."""
        dense = [spec.num_elements for spec in self._plan.tensors if spec.role in (Role.COLUMNS_IN_S, Role.ROWS_IN_S)]
        return max(muon_working_bytes(self._plan), 4 * _FP32 * max(dense, default=0))

    def _all_reduce(self) -> int:
        """The reduced gradient; of matrices in factors what they are the factors of."""
        return self._numbers * _FP32 + self._factored * _FP32

    def _owned(self) -> int:
        """What this peer adds up for the others."""
        return (self._numbers - self._factored) * _OWNED_BYTES // _REPLICAS

    @property
    def _factored(self) -> int:
        return sum(slot.spec.num_elements for slot in self._layout.factored)

    def _errors(self) -> int:
        """What compression leaves out is kept for the next step, by codecs that leave something out."""
        if self._manifest.reduce.codec.startswith("topk"):
            return (self._numbers - self._layout.num_fused) * 2 * _FP32  # and what it would become
        return self._factored * _FP32


def _without_the_smaller(needs: list[Need], *groups: tuple[str, ...]) -> list[Need]:
    """Of groups of needs that are never there at the same time, the largest stays."""
    most = max(groups, key=lambda group: sum(need.host_bytes for need in needs if need.what in group))
    return [need for need in needs if need.what in most or not any(need.what in group for group in groups)]


def _placed(what: str, num_bytes: int, *, on_host: bool) -> Need:
    return Need(what, 0, num_bytes) if on_host else Need(what, num_bytes)


def _bytes(buffers: list[BufferSpec]) -> int:
    return sum(buffer.num_bytes for buffer in buffers)
