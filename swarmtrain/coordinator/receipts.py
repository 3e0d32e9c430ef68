"""Receipts at the coordinator: it signs for each caller what the journal says of that caller, and for nobody else."""

from __future__ import annotations

from swarmtrain import world
from swarmtrain.chain.receipt import Receipt, SignedReceipt, bounded_days, sign_receipt
from swarmtrain.coordinator.context import RunContext
from swarmtrain.p2p.identity import RunKey
from swarmtrain.rpc.errors import Refusal
from swarmtrain.wire.messages import Code, FetchReceipt, ReceiptIssued


class Receipts:
    """Answers `FetchReceipt`. A peer gets the same receipt again until another step is decided."""

    def __init__(self, context: RunContext, key: RunKey) -> None:
        self._context, self._key = context, key
        self._standing = (-1, -1)
        self._issued: dict[str, SignedReceipt] = {}

    def fetch(self, message: FetchReceipt, peer_id: str) -> ReceiptIssued:
        """The caller's receipt; UNKNOWN if nothing of the run counts as its own."""
        context = self._context
        if message.run != context.run_id:
            raise Refusal(Code.WRONG_RUN, f"this is run {context.run_id}")
        if not context.tally.contributed[peer_id]:
            raise Refusal(Code.UNKNOWN, "no applied step has work of this peer")
        issued = self.issue(peer_id)
        return ReceiptIssued(issued.body, issued.signature)

    def issue(self, peer_id: str) -> SignedReceipt:
        """The receipt of a peer of which something counts."""
        standing = self._context.term, self._context.tally.step
        if standing != self._standing:
            self._issued.clear()
            self._standing = standing
        if peer_id not in self._issued:
            self._issued[peer_id] = sign_receipt(self.receipt(peer_id), self._key)
        return self._issued[peer_id]

    def receipt(self, peer_id: str) -> Receipt:
        """What the journal says of a peer now."""
        context, tally = self._context, self._context.tally
        manifest, known = context.manifest, tally.contributions[peer_id]
        return Receipt(
            run=context.run_id,
            run_name=manifest.run.name,
            peer=peer_id,
            name=tally.names.get(peer_id, ""),
            term=context.term,
            step=tally.step,
            chain=context.journal.chain_after(tally.step),
            issued_at=round(world.wall(), 3),
            microbatches=known.microbatches,
            tokens=known.microbatches * manifest.tokens_per_microbatch,
            seconds=round(known.seconds, 3),
            whole=tally.step * manifest.batch.microbatches_per_step * manifest.stages.count,
            stages={str(stage): count for stage, count in sorted(known.stages.items())},
            days=bounded_days(known.days),
        )
