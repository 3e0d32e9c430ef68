"""The peer's receipt of this run: asked of the coordinator now and then and at the end, checked, kept as a file."""

from __future__ import annotations

import asyncio
import logging
from functools import partial
from pathlib import Path

from swarmtrain import world
from swarmtrain.chain.receipt import Receipt, ReceiptError, check_receipt, read_receipt
from swarmtrain.errors import StorageError
from swarmtrain.p2p.errors import NetError
from swarmtrain.peer.contacts import CoordinatorLink
from swarmtrain.peer.identity import PeerIdentity
from swarmtrain.run.invite import Invite
from swarmtrain.wire.messages import FetchReceipt, ReceiptIssued

log = logging.getLogger(__name__)

RENEW_S = 60.0  # a peer that is lost in between has a receipt that is so old
FETCH_S = 5.0
LAST_S = 2.0  # when it leaves: its owner waits


def receipt_path(state_dir: Path, run: str) -> Path:
    """Where a peer keeps its receipt of a run. The run's id has been checked against the run's key."""
    return state_dir / f"receipt-{run}.json"


class ReceiptKeeper:
    """Keeps the newest receipt of one peer. Whatever goes wrong with it does not disturb the work."""

    def __init__(self, peer: PeerIdentity, link: CoordinatorLink, invite: Invite, state_dir: Path) -> None:
        self._peer, self._link, self._invite = peer, link, invite
        self.path = receipt_path(state_dir, invite.run_id)
        self.held: Receipt | None = None
        try:
            self.held = read_receipt(self.path, invite.run_id, invite.run_key).receipt
        except ReceiptError as error:
            if self.path.exists():
                log.warning("%s does not count: %s", self.path, error)

    async def run(self) -> None:
        """Renew the receipt whenever something new counts, until cancelled."""
        while True:
            await asyncio.sleep(RENEW_S)
            verdict = self._peer.verdict
            known = self.held.microbatches if self.held is not None else 0
            if verdict is not None and verdict.credit != known:
                await self.fetch()

    async def fetch_last(self) -> None:
        """The last one, when this peer leaves; nothing if it has done nothing."""
        verdict = self._peer.verdict
        if self._peer.counters.microbatches or (verdict is not None and verdict.credit):
            await self.fetch(LAST_S)

    async def fetch(self, deadline_s: float = FETCH_S) -> None:
        """Ask the coordinator, and keep its receipt unless the one that is held is newer."""
        if self._link.peer_id is None:
            return
        try:
            request = FetchReceipt(self._invite.run_id)
            answer = await self._peer.node.call(self._link.peer_id, request, deadline_s, expect=ReceiptIssued)
            found = check_receipt(answer.body, answer.signature, self._invite.run_id, self._invite.run_key)
            if found.receipt.peer != self._peer.peer_id:
                raise ReceiptError("the coordinator has sent the receipt of another peer")
            if self.held is None or found.receipt.age >= self.held.age:
                await world.in_thread(partial(found.save, self.path))
                self.held = found.receipt
        except (NetError, ReceiptError, StorageError) as error:
            log.info("no new receipt: %s", error)
