"""The run's gradient codec in a stage's all-reduce: what travels in which lane, and what error feedback remembers.

    none                shares are exact
    bf16 int8 topkK     every piece goes through a GradientEncoder (codec/gradient.py)
    powersgdR lowrankB  lane LEFT: the left factors of all matrices that are worth it; then lane STAGE: their right
                        factors, followed by the rest of the gradient, which is exact

The gradient of a tied embedding, which two stages share, goes through lane FUSED, exactly. Memory changes only when the
step is applied: a failed attempt leaves no trace. `alone` does the same for a stage with one peer.
"""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from itertools import accumulate, pairwise

import torch
from torch import Tensor

from swarmtrain.codec.errors import CodecSpecError
from swarmtrain.codec.gradient import GradientEncoder, GradientSpec, is_outdated, parse_gradient_spec
from swarmtrain.codec.powersgd import PowerSGDRound, PowerSGDState
from swarmtrain.errors import ManifestError
from swarmtrain.model.buffers import Slot, StateLayout
from swarmtrain.model.state import StageState
from swarmtrain.reduce.lowrank import LowRankRound, LowRankShares
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
    """Pieces of lane STAGE: none holds both right factors and other numbers, which travel differently.

    lowrank's scales belong to the columns of a matrix, so there each right factor is one piece.
    """
    pieces: list[Piece] = []
    in_factors = layout.right_elements
    if layout.manifest.lowrank_budget:
        ends = list(accumulate(owned))
        for start, stop in _factor_spans(layout, axis=1):
            pieces.append(Piece(len(pieces), bisect_right(ends, start), start, stop))
    for piece in cut(owned):
        bounds = {piece.start, min(max(piece.start, in_factors), piece.stop), piece.stop}
        for start, stop in pairwise(sorted(bounds)):
            if start >= in_factors or not layout.manifest.lowrank_budget:
                pieces.append(Piece(len(pieces), piece.owner, start, stop))
    return pieces


def left_pieces(layout: StateLayout, owned: list[int]) -> list[Piece]:
    """One piece per matrix, round-robin among the owners that own anything."""
    owners = [position for position, elements in enumerate(owned) if elements] or [0]
    return [
        Piece(index, owners[index % len(owners)], start, stop)
        for index, (start, stop) in enumerate(_factor_spans(layout, axis=0))
    ]


def _factor_spans(layout: StateLayout, *, axis: int) -> list[tuple[int, int]]:
    """Where the left (axis 0) or right (axis 1) factor of every matrix lies, one after the other."""
    sizes = [slot.spec.shape[axis] * layout.rank_of(slot) for slot in layout.factored]
    return list(pairwise(accumulate(sizes, initial=0)))


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
        """The format of shares, and a function to call when the step is applied. Not for factors."""
        if not compress or self._encoder is None:
            return EXACT, _nothing
        self._encoder.begin(self._state.step)
        return CodedShares(self._encoder), self._encoder.commit

    def factors(self, share: Tensor | None) -> FactorRound:
        """One attempt in factors; `share` is this peer's own gradient, None if it has no work."""
        step = self._state.step
        if is_outdated(self._used_at, step):
            self.reset()
        return FactorRound(self.layout, self._state, self._error, share, lambda: self._use(step))

    def _use(self, step: int) -> None:
        self._used_at = step

    def alone(self, total: Tensor) -> Reduced:
        """The result for a stage whose only peer this is; `total` is the whole flat sum."""
        return together([self], [total])


class FactorRound:
    """One attempt of PowerSGD, or of lowrank, at one peer: `left`, `vector`, `reduced`, in this order."""

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
        # A peer without a share sends nothing: its error feedback waits for a step in which it has work.
        errors = error if share is not None else {name: torch.zeros_like(item) for name, item in error.items()}
        self._powersgd = PowerSGDState(self._right_factors(), dict(errors))
        gradients = {slot.spec.name: self._matrix(slot) for slot in layout.factored}
        self._round: PowerSGDRound
        self.left_form: ShareFormat
        self.form: ShareFormat
        if layout.manifest.lowrank_budget:
            ranks = [layout.rank_of(slot) for slot in layout.factored]
            starts = [[start for start, _ in _factor_spans(layout, axis=axis)] for axis in (0, 1)]
            self._round = LowRankRound(self._powersgd, gradients)
            self.left_form = LowRankShares(dict(zip(starts[0], ranks, strict=True)), is_left=True)
            self.form = LowRankShares(dict(zip(starts[1], ranks, strict=True)), is_left=False)
        else:
            self._round = PowerSGDRound(self._powersgd, gradients)
            self.left_form = OrthonormalShares(layout.manifest.powersgd_rank)
            self.form = FactorShares(layout.right_elements)

    def left(self) -> Tensor | None:
        """This peer's left factors, flat; lane LEFT sums and orthonormalizes them matrix by matrix."""
        if self._share is None:
            return None
        return _flat([self._round.left()[slot.spec.name] for slot in self._layout.factored])

    def vector(self, left: Tensor) -> Tensor | None:
        """This peer's share in lane STAGE (fp64): right factors (fp32 numbers), then the rest."""
        right = self._round.right(self._by_name(left, axis=0))
        if self._share is None:
            return None
        rest = [self._share[span].double() for span in self._rest()]
        return torch.cat([_flat([right[slot.spec.name] for slot in self._layout.factored]).double(), *rest])

    def reduced(self, left: Tensor, vector: Tensor) -> Reduced:
        """The stage's own part of the gradient from the sum of all vectors (fp32)."""
        layout, start = self._layout, self._layout.right_elements
        gradient = torch.zeros(layout.gradient_size - layout.num_fused)
        begins = {slot.spec.name: slot.offset - layout.num_fused for slot in layout.factored}
        for name, matrix in self._round.results(self._by_name(vector, axis=1)):
            gradient[begins[name] : begins[name] + matrix.numel()] = matrix.reshape(-1)
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
        self._keep_left_out()
        right = self._state.right_factors
        assert right is not None
        right.copy_(_flat([self._powersgd.right[slot.spec.name] for slot in self._layout.factored]))

    def _keep_left_out(self) -> None:
        """What this owner's answers lack of the sums joins its error feedback, with or without a share."""
        if not isinstance(self.form, LowRankShares) or not isinstance(self._round, LowRankRound):
            return
        for slot, (start, _) in zip(self._layout.factored, _factor_spans(self._layout, axis=1), strict=True):
            if (left_out := self.form.left_out.get(start)) is not None:
                self._kept[slot.spec.name] += self._round.lack(slot.spec.name, left_out)

    def _right_factors(self) -> dict[str, Tensor]:
        right = self._state.right_factors
        assert right is not None
        found = self._by_name(right.detach().to("cpu", torch.float32), axis=1)
        return {name: item.clone() for name, item in found.items()}

    def _by_name(self, factors: Tensor, *, axis: int) -> dict[str, Tensor]:
        """The left (axis 0) or right (axis 1) factors by name, as views of a flat tensor that begins with them."""
        spans = _factor_spans(self._layout, axis=axis)
        return {
            slot.spec.name: factors[start:stop].view(slot.spec.shape[axis], -1)
            for slot, (start, stop) in zip(self._layout.factored, spans, strict=True)
        }

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


def together(coders: Sequence[StageCoder], totals: Sequence[Tensor]) -> Reduced:
    """The result for a stage of these peers, without a network; the first owns every piece. `totals`: their flat sums.

    What the first stage and the last have in common is added up exactly.
    """
    layout, spec = coders[0].layout, coders[0].spec
    start = layout.num_fused
    gradient = torch.stack(list(totals)).sum(dim=0).to(torch.float32)
    own = [total[start:] for total in totals]
    if not spec.in_factors:
        forms = [coder.sliced(compress=spec.lossy) for coder in coders]
        _add_up([form for form, _ in forms], cut([own[0].numel()]), own, out=gradient[start:])
        return Reduced(gradient, partial(_call_all, [commit for _, commit in forms]))
    rounds = [coder.factors(share) for coder, share in zip(coders, own, strict=True)]
    pieces = left_pieces(layout, [1])
    left = torch.empty(pieces[-1].stop)
    _add_up([item.left_form for item in rounds], pieces, [item.left() for item in rounds], out=left)
    vectors = [item.vector(left) for item in rounds]
    vector = torch.empty(stage_elements(layout, compress=True))
    _add_up([item.form for item in rounds], factor_pieces(layout, [vector.numel()]), vectors, out=vector)
    found = [item.reduced(left, vector) for item in rounds]
    gradient[start:] = found[0].gradient
    return Reduced(gradient, partial(_call_all, [item.commit for item in found]))


def _add_up(forms: Sequence[ShareFormat], pieces: list[Piece], shares: Sequence[Tensor | None], out: Tensor) -> None:
    """An all-reduce among peers that are all here."""
    for piece in pieces:
        total = Total(piece.stop - piece.start)
        for index, (form, share) in enumerate(zip(forms, shares, strict=True)):
            assert share is not None
            numbers = share[piece.start : piece.stop].numpy()
            if index == 0:
                total.add(form.own(numbers, piece.start))
            else:
                total.add(forms[0].unpack(form.pack(numbers, piece.start), total.size))
        reduced = forms[0].result(forms[0].answer(total, piece.start), total.size)
        out[piece.start : piece.stop] = torch.from_numpy(reduced.copy())
        for form in forms:
            form.settle(reduced, piece.start)


def _call_all(commits: Sequence[Callable[[], None]]) -> None:
    for commit in commits:
        commit()


def _flat(tensors: list[Tensor]) -> Tensor:
    return torch.cat([tensor.reshape(-1) for tensor in tensors]) if tensors else torch.zeros(0)


def _nothing() -> None:
    """A codec without memory."""
