"""The run's gradient codec in a stage's all-reduce: what travels in which lane, and what error feedback remembers.

    none                shares are exact
    bf16 int8 topkK     every piece goes through a GradientEncoder (codec/gradient.py)
    powersgdR           lane LEFT: the left factors of all matrices that are worth it; then lane STAGE: their right
                        factors, followed by the rest of the gradient, which is exact

The gradient of a tied embedding, which two stages share, goes through lane FUSED, exactly. Memory changes only when the
step is applied: a failed attempt leaves no trace. `alone` does the same for a stage with one peer.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from itertools import pairwise

import torch
from torch import Tensor

from swarmtrain.codec.errors import CodecSpecError
from swarmtrain.codec.gradient import GradientEncoder, GradientSpec, is_outdated, parse_gradient_spec
from swarmtrain.codec.powersgd import PowerSGDRound, PowerSGDState
from swarmtrain.errors import ManifestError
from swarmtrain.model.buffers import Slot, StateLayout
from swarmtrain.model.state import StageState
from swarmtrain.reduce.partition import Piece, cut
from swarmtrain.reduce.shares import EXACT, CodedShares, FactorShares, OrthonormalShares, ShareFormat
from swarmtrain.reduce.totals import Total
from swarmtrain.run.manifest import Manifest


@dataclass(frozen=True)
class Reduced:
    """A reduced flat gradient (fp32). `commit` is called once it is applied, and updates the codec's memory."""

    gradient: Tensor
    commit: Callable[[], None]


def gradient_spec(manifest: Manifest) -> GradientSpec:
    """The run's gradient codec; an error names the manifest's key."""
    try:
        spec = parse_gradient_spec(manifest.reduce.codec)
    except CodecSpecError as error:
        raise ManifestError("reduce.codec", str(error), fix=error.fix) from error
    if spec.kind in ("bf16", "int8", "topk") and manifest.boundary.track_every:
        raise ManifestError("reduce.codec", f"{spec} would round the statistics that subspace tracking needs")
    return spec


def stage_elements(layout: StateLayout, *, compress: bool) -> int:
    """Size of the vector that lane STAGE reduces, which the coordinator divides among owners."""
    own = layout.gradient_size - layout.num_fused
    if not compress:
        return own
    return own - sum(slot.spec.num_elements for slot in layout.factored) + layout.right_elements


def factor_pieces(layout: StateLayout, owned: Sequence[int]) -> list[Piece]:
    """Pieces of powersgd's lane STAGE: none holds both right factors and other numbers, which travel differently."""
    pieces: list[Piece] = []
    for piece in cut(owned):
        for start, stop in pairwise(
            sorted({piece.start, min(max(piece.start, layout.right_elements), piece.stop), piece.stop})
        ):
            pieces.append(Piece(len(pieces), piece.owner, start, stop))
    return pieces


def left_pieces(layout: StateLayout, owned: list[int]) -> list[Piece]:
    """One piece per matrix, round-robin among the owners that own anything."""
    owners = [position for position, elements in enumerate(owned) if elements] or [0]
    pieces, start = [], 0
    for index, slot in enumerate(layout.factored):
        stop = start + slot.spec.shape[0] * layout.powersgd_rank
        pieces.append(Piece(index, owners[index % len(owners)], start, stop))
        start = stop
    return pieces


class StageCoder:
    """One peer's side of its stage's gradient codec."""

    def __init__(self, state: StageState) -> None:
        self._state, self.layout = state, state.layout
        self.spec = gradient_spec(state.manifest)
        own = self.layout.gradient_size - self.layout.num_fused
        is_sliced = self.spec.kind in ("bf16", "int8", "topk")
        self._encoder = GradientEncoder(self.spec, own) if is_sliced else None
        self._error = {slot.spec.name: torch.zeros(slot.spec.shape) for slot in self.layout.factored}
        self._used_at = 0  # step in which that error was last used

    def reset(self) -> None:
        """Clear the error feedback: the state was replaced."""
        if self._encoder is not None:
            self._encoder.reset()
        for error in self._error.values():
            error.zero_()

    def sliced(self, *, compress: bool) -> tuple[ShareFormat, Callable[[], None]]:
        """The format of shares, and a function to call when the step is applied. Not for powersgd."""
        if not compress or self._encoder is None:
            return EXACT, _nothing
        self._encoder.begin(self._state.step)
        return CodedShares(self._encoder), self._encoder.commit

    def factors(self, share: Tensor | None) -> FactorRound:
        """One attempt of powersgd; `share` is this peer's own gradient, None if it has no work."""
        step = self._state.step
        if is_outdated(self._used_at, step):
            self.reset()
        return FactorRound(self.layout, self._state, self._error, share, lambda: self._use(step))

    def _use(self, step: int) -> None:
        self._used_at = step

    def alone(self, total: Tensor) -> Reduced:
        """The result for a stage whose only peer this is; `total` is the whole flat sum."""
        start = self.layout.num_fused
        gradient = total.to(torch.float32)
        own = total[start:]
        if self.spec.kind == "powersgd":
            factors = self.factors(own)
            left = factors.left()
            assert left is not None
            for piece in left_pieces(self.layout, [1]):
                numbers = left[piece.start : piece.stop].numpy()
                left[piece.start : piece.stop] = _through(factors.left_form, piece, numbers)
            vector = factors.vector(left)
            assert vector is not None
            found = factors.reduced(left, vector.to(torch.float32))
            gradient[start:] = found.gradient
            return Reduced(gradient, found.commit)
        form, commit = self.sliced(compress=self.spec.lossy)
        for piece in cut([own.numel()]):
            numbers = own[piece.start : piece.stop].numpy()
            gradient[start + piece.start : start + piece.stop] = _through(form, piece, numbers)
        return Reduced(gradient, commit)


class FactorRound:
    """One attempt of PowerSGD at one peer: `left`, `vector`, `reduced`, in this order."""

    def __init__(
        self,
        layout: StateLayout,
        state: StageState,
        error: dict[str, Tensor],
        share: Tensor | None,
        on_use: Callable[[], None],
    ) -> None:
        """`error` is this peer's error feedback; `commit` updates it and calls `on_use`, if this peer has a share."""
        self._layout, self._state, self._share, self._kept = layout, state, share, error
        self._on_use = on_use
        self.left_form = OrthonormalShares(layout.powersgd_rank)
        self.form = FactorShares(layout.right_elements)
        # A peer without a share sends nothing: its error feedback waits for a step in which it has work.
        errors = error if share is not None else {name: torch.zeros_like(item) for name, item in error.items()}
        self._powersgd = PowerSGDState(layout.powersgd_rank, self._right_factors(), dict(errors))
        gradients = {slot.spec.name: self._matrix(slot) for slot in layout.factored}
        self._round = PowerSGDRound(self._powersgd, gradients)

    def left(self) -> Tensor | None:
        """This peer's left factors, flat; lane LEFT sums and orthonormalizes them matrix by matrix."""
        if self._share is None:
            return None
        return _flat([self._round.left()[slot.spec.name] for slot in self._layout.factored])

    def vector(self, left: Tensor) -> Tensor | None:
        """This peer's share in lane STAGE (fp64): right factors (fp32 numbers), then the rest."""
        rank, factors, start = self._layout.powersgd_rank, {}, 0
        for slot in self._layout.factored:
            stop = start + slot.spec.shape[0] * rank
            factors[slot.spec.name] = left[start:stop].view(-1, rank)
            start = stop
        right = self._round.right(factors)
        if self._share is None:
            return None
        rest = [self._share[span].double() for span in self._rest()]
        return torch.cat([_flat([right[slot.spec.name] for slot in self._layout.factored]).double(), *rest])

    def reduced(self, left: Tensor, vector: Tensor) -> Reduced:
        """The stage's own part of the gradient from the sum of all vectors (fp32)."""
        layout, right, start = self._layout, {}, 0
        for slot in layout.factored:
            stop = start + slot.spec.shape[1] * layout.powersgd_rank
            right[slot.spec.name] = vector[start:stop].view(slot.spec.shape[1], -1)
            start = stop
        found = self._round.result(right)
        gradient = torch.zeros(layout.gradient_size - layout.num_fused)
        for slot in layout.factored:
            begin = slot.offset - layout.num_fused
            gradient[begin : begin + slot.spec.num_elements] = found[slot.spec.name].reshape(-1)
        for span in self._rest():
            size = span.stop - span.start
            gradient[span] = vector[start : start + size]
            start += size
        return Reduced(gradient, self._commit)

    def _commit(self) -> None:
        self._round.commit()
        if self._share is not None:
            self._kept.update(self._powersgd.error)
            self._on_use()
        right = self._state.right_factors
        assert right is not None
        right.copy_(_flat([self._powersgd.right[slot.spec.name] for slot in self._layout.factored]))

    def _right_factors(self) -> dict[str, Tensor]:
        found, start = {}, 0
        right = self._state.right_factors
        assert right is not None
        for slot in self._layout.factored:
            stop = start + slot.spec.shape[1] * self._layout.powersgd_rank
            found[slot.spec.name] = right[start:stop].detach().to("cpu", torch.float32).view(slot.spec.shape[1], -1)
            start = stop
        return {name: item.clone() for name, item in found.items()}

    def _matrix(self, slot: Slot) -> Tensor:
        if self._share is None:
            return torch.zeros(slot.spec.shape)
        begin = slot.offset - self._layout.num_fused
        return self._share[begin : begin + slot.spec.num_elements].view(slot.spec.shape)

    def _rest(self) -> list[slice]:
        """The spans between the factored matrices, in the stage's own part of the flat gradient."""
        spans, start = [], 0
        for slot in self._layout.factored:
            begin = slot.offset - self._layout.num_fused
            spans.append(slice(start, begin))
            start = begin + slot.spec.num_elements
        spans.append(slice(start, self._layout.gradient_size - self._layout.num_fused))
        return [span for span in spans if span.stop > span.start]


def _through(form: ShareFormat, piece: Piece, numbers: object) -> Tensor:
    """The result for a piece of which only this peer has a share."""
    total = Total(piece.stop - piece.start)
    total.add(form.own(numbers, piece.start))  # type: ignore[arg-type]
    return torch.from_numpy(form.result(form.answer(total, piece.start), total.size).copy())


def _flat(tensors: list[Tensor]) -> Tensor:
    return torch.cat([tensor.reshape(-1) for tensor in tensors]) if tensors else torch.zeros(0)


def _nothing() -> None:
    """A codec without memory."""
