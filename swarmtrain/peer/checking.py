"""A peer's part in checks (docs/checks.md): it seals what it did, shows its neighbours' checkers what it keeps, and
computes again what another peer of its stage has computed."""

from __future__ import annotations

import asyncio

import numpy as np

from swarmtrain import world
from swarmtrain.chain.seals import ABSENT, Seal, digest_of, packed, seal
from swarmtrain.errors import DivergedError
from swarmtrain.p2p.errors import NetError
from swarmtrain.peer.codecs import BadTensor
from swarmtrain.peer.identity import PeerIdentity, PeerState
from swarmtrain.peer.jobs import StaleWork, share_digest
from swarmtrain.peer.ledger import Entry, Raw
from swarmtrain.peer.stage import Stage
from swarmtrain.peer.step_clock import StepClock
from swarmtrain.rpc.exchange import Exchange
from swarmtrain.wire.messages import (
    Case,
    Check,
    Checked,
    Code,
    FetchKept,
    FetchProof,
    FetchSeals,
    Kept,
    KeptTensor,
    Proof,
    Seals,
    Way,
)

FETCH_S = 20.0  # a tensor of a neighbour's ledger
MAX_CASES = 2  # whose tensors are here at once, and not computed yet


class Checking:
    """Answers `FetchSeals`, `FetchKept` and `Check`."""

    def __init__(self, peer: PeerIdentity, clock: StepClock, stage: Stage) -> None:
        self._peer, self._clock, self._stage = peer, clock, stage
        self.num_checked = 0  # microbatches of other peers

    async def fetch_seals(self, request: FetchSeals, exchange: Exchange) -> Seals:
        """What this peer has received and sent. It does not know which of it will be checked."""
        peer = self._peer
        await peer.check_coordinator(exchange.peer_id, request.run, request.term, request.stage)
        if len(request.microbatches) % 4:
            raise peer.refuse(Code.UNKNOWN, "a list of microbatches that is cut off")
        wanted = np.frombuffer(request.microbatches, dtype="<u4").tolist()
        ledger = self._clock.known_ledger(request.step)
        if ledger is None:
            raise peer.refuse(Code.UNKNOWN, f"step {request.step} is not open here")
        entries = [ledger.get(microbatch) for microbatch in wanted]
        losses = b""
        if self._stage.state.plan.is_last:
            answers = [entry.answer if entry is not None else None for entry in entries]
            losses = np.array([answer.loss if answer else 0.0 for answer in answers], dtype="<f8").tobytes()
        return Seals(packed(await world.in_thread(lambda: [self._seal(entry) for entry in entries])), losses)

    def _seal(self, entry: Entry | None) -> Seal:
        if entry is None or entry.answer is None:
            return ABSENT
        loss = entry.answer.loss if self._stage.state.plan.is_last else None
        return seal(entry.tokens, entry.boundary, entry.output, loss, entry.gradient, entry.answer.gradient)

    async def fetch_proof(self, request: FetchProof, exchange: Exchange) -> Proof:
        """Who has signed what this peer received."""
        peer = self._peer
        await peer.check_coordinator(exchange.peer_id, request.run, request.term, request.stage)
        ledger = self._clock.known_ledger(request.step)
        entry = ledger.get(request.microbatch) if ledger is not None else None
        if entry is None:
            raise peer.refuse(Code.UNKNOWN, f"({request.step}, {request.microbatch}) is not kept here")
        if request.way is Way.FORWARD:
            return Proof(entry.caller, entry.signature)
        return Proof(entry.callee, entry.callee_signature)

    async def fetch_kept(self, request: FetchKept, exchange: Exchange) -> KeptTensor:
        """A tensor that passed between this peer and one that is checked, for the peer that checks it."""
        peer = self._peer
        await peer.check_neighbour(request.run, request.term, request.stage)
        ledger = self._clock.known_ledger(request.step)
        entry = ledger.get(request.microbatch) if ledger is not None else None
        if entry is None or entry.answer is None or entry.round != request.round:
            raise peer.refuse(Code.UNKNOWN, f"({request.step}, {request.microbatch}) is not kept here")
        return KeptTensor(entry.output if request.kept is Kept.OUTPUT else entry.answer.gradient)

    async def check(self, check: Check, exchange: Exchange) -> Checked:
        """Compute what another peer of this stage has computed, from what its neighbours have kept."""
        peer, stage = self._peer, self._stage
        await peer.check_coordinator(exchange.peer_id, check.run, check.term, check.stage)
        if peer.state is not PeerState.SERVING or not self._clock.is_open(check.step):
            raise peer.refuse(Code.NOT_SERVING, f"this peer is {peer.state}, at step {self._clock.step}")
        stage.device.check()
        tokens = self._tokens(check)
        total = stage.state.new_accumulator() if check.adds_up else None
        places = asyncio.Semaphore(MAX_CASES)

        async def one(case: Case, ids: Raw) -> Seal:
            async with places:
                boundary, gradient = await asyncio.gather(
                    self._kept(check, case, Kept.OUTPUT, ids), self._kept(check, case, Kept.SENT_GRADIENT, ids)
                )
                made = await stage.checked(ids, boundary, gradient, (check.step, case.microbatch), total)
                loss = made.loss if stage.state.plan.is_last else None
                return seal(ids, boundary, made.output, loss, gradient, made.gradient)

        try:
            found = await asyncio.gather(*(one(case, ids) for case, ids in zip(check.cases, tokens, strict=True)))
        except (NetError, BadTensor, StaleWork, DivergedError) as error:
            raise peer.refuse(Code.UNKNOWN, f"cannot be checked here: {error}"[:1000]) from error
        self.num_checked += len(found)
        share = await world.in_thread(lambda: share_digest(total.total)) if total is not None else ""
        return Checked(packed(found), share)

    def _tokens(self, check: Check) -> list[Raw]:
        """The token ids of every case."""
        peer = self._peer
        if not check.cases or len(check.tokens) % len(check.cases):
            raise peer.refuse(
                Code.BAD_TENSOR, f"{len(check.tokens)} bytes of tokens for {len(check.cases)} microbatches"
            )
        size = len(check.tokens) // len(check.cases)
        found = [check.tokens[start : start + size] for start in range(0, len(check.tokens), size)]
        for ids in found:
            try:
                self._stage.codecs.check_tokens(ids)
            except BadTensor as error:
                raise peer.refuse(Code.BAD_TENSOR, str(error)) from error
        return found

    async def _kept(self, check: Check, case: Case, kept: Kept, ids: Raw) -> Raw:
        """What the checked peer's neighbour has sent to it, as that neighbour has sealed it."""
        is_input = kept is Kept.OUTPUT
        source, sealed = (case.before, case.input) if is_input else (case.after, case.gradient)
        is_unused = not is_input and self._stage.state.plan.is_first and not check.adds_up
        if not source or is_unused:
            return b""
        stage = check.stage - 1 if is_input else check.stage + 1
        request = FetchKept(check.run, check.term, stage, check.step, case.microbatch, case.round, kept)
        values = (await self._peer.node.call(source, request, FETCH_S, expect=KeptTensor)).values
        if (digest_of(ids, values) if is_input else digest_of(values)) != sealed:
            raise BadTensor(f"{source[-8:]} has sealed another tensor than the one that it shows")
        return values
