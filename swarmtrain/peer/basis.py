"""Subspace tracking at a peer: the last stage proposes the next basis, the others fetch it before they apply.

A basis is named by its digest, which the decision holds. So no peer can move elsewhere than all others do.
"""

from __future__ import annotations

import asyncio
from collections.abc import Sequence

import numpy as np
import torch
from torch import Tensor

from swarmtrain.model.buffers import as_bytes
from swarmtrain.model.subspace import tensor_digest
from swarmtrain.p2p.errors import NetError
from swarmtrain.peer.identity import PeerIdentity
from swarmtrain.peer.stage import Stage
from swarmtrain.peer.step_clock import StepClock
from swarmtrain.rpc.exchange import Exchange
from swarmtrain.wire.messages import Apply, Basis, Code, FetchBasis

FETCH_S = 30.0
STAGGER_S = 2.0  # a donor that has not answered by then is not waited for: the next one is asked as well
MAX_KEPT = 4  # a newcomer may apply several moves one after the other


class BasisMissing(Exception):
    """No donor that was named has the basis."""


class Bases:
    """The bases of the last moves, by the step that moves to them."""

    def __init__(self, peer: PeerIdentity, clock: StepClock, stage: Stage) -> None:
        self._peer, self._clock, self._stage = peer, clock, stage
        self._known: dict[int, Tensor] = {}

    async def propose(self, step: int, reduced: Tensor) -> str:
        """On the last stage, at a step that moves the subspace: the digest of the new basis. Else empty."""
        if not self._stage.manifest.moves_basis(step) or self._stage.state.gram is None:
            return ""
        if self._clock.step != step:  # a newcomer: its own statistics are not those of this step yet
            return ""
        proposed = await self._stage.propose_basis(reduced)
        self._keep(step, proposed.cpu())
        return tensor_digest(proposed)

    def known(self, apply: Apply) -> Tensor | None:
        """The basis that a decision names, if it is here."""
        known = self._known.get(apply.step)
        return known if known is not None and tensor_digest(known) == apply.basis else None

    async def learn(self, apply: Apply) -> Tensor:
        """The basis that a decision names: the own proposal if it is that one, else from a donor that has it."""
        if (known := self.known(apply)) is not None:
            return known
        found = await self._fetch_first([donor for donor in apply.basis_donors if donor != self._peer.peer_id], apply)
        self._keep(apply.step, found)
        return found

    async def _fetch_first(self, donors: Sequence[str], apply: Apply) -> Tensor:
        """From the donor that is first to deliver it: the next one is asked when one fails or is slow."""
        waiting: set[asyncio.Task[Tensor]] = set()
        left, reason = list(donors), "no donor was named"
        try:
            while left or waiting:
                if left:
                    waiting.add(asyncio.create_task(self._fetch_from(left.pop(0), apply)))
                done, waiting = await asyncio.wait(
                    waiting, timeout=STAGGER_S if left else None, return_when=asyncio.FIRST_COMPLETED
                )
                for task in done:
                    if (error := task.exception()) is None:
                        return task.result()
                    if not isinstance(error, NetError | ValueError):
                        raise error
                    reason = str(error)
        finally:
            for task in waiting:
                task.cancel()
            await asyncio.gather(*waiting, return_exceptions=True)
        raise BasisMissing(f"the basis of step {apply.step} could not be had: {reason}")

    async def _fetch_from(self, donor: str, apply: Apply) -> Tensor:
        request = FetchBasis(self._peer.run_id, apply.step)
        answer = await self._peer.node.call(donor, request, deadline_s=FETCH_S, expect=Basis)
        found = self._read(bytes(answer.values))
        if tensor_digest(found) != apply.basis:
            raise ValueError(f"{donor[-8:]} has another one")
        return found

    async def fetch(self, fetch: FetchBasis, exchange: Exchange) -> Basis:
        """Answer `FetchBasis`: a kept one, or the current one if the subspace has not moved again since."""
        peer, manifest = self._peer, self._stage.manifest
        if fetch.run != peer.run_id:
            raise peer.refuse(Code.WRONG_RUN, f"this peer serves run {peer.run_id}")
        known, state = self._known.get(fetch.step), self._stage.state
        if known is None and state.basis is not None and state.basis_epoch == manifest.basis_epoch(fetch.step + 1):
            known = state.basis.detach().to("cpu", copy=True)
        if known is None:
            raise peer.refuse(Code.UNKNOWN, f"the basis of step {fetch.step} is not known here")
        return Basis(bytes(as_bytes(known.reshape(-1))))

    def _read(self, raw: bytes) -> Tensor:
        model, boundary = self._stage.manifest.model, self._stage.manifest.boundary
        shape = (model.hidden_size, boundary.k)
        if len(raw) != 4 * shape[0] * shape[1]:
            raise ValueError("not a basis of this run")
        return torch.from_numpy(np.frombuffer(raw, dtype="<f4").reshape(shape).copy())

    def _keep(self, step: int, basis: Tensor) -> None:
        self._known[step] = basis
        for old in sorted(self._known)[:-MAX_KEPT]:
            del self._known[old]
