"""A peer's record in the directory, under its stage: callers of that stage find it there."""

from __future__ import annotations

import contextlib
import logging

from swarmtrain.chain.neighbours import RECORD_LIFE_S, PeerRecord, stage_topic
from swarmtrain.directory.directory import Directory
from swarmtrain.errors import SwarmtrainError
from swarmtrain.p2p.network import NetworkHost
from swarmtrain.peer.assignment import Assignment
from swarmtrain.peer.contacts import CoordinatorLink
from swarmtrain.peer.options import PeerOptions
from swarmtrain.waiting import wait_event
from swarmtrain.wire.messages import STALLED

log = logging.getLogger(__name__)

ANNOUNCE_S = 15.0
GONE_LIFE_S = 5.0


class Announcing:
    """Keeps the record of one assignment fresh."""

    def __init__(
        self,
        assignment: Assignment,
        options: PeerOptions,
        directory: Directory,
        host: NetworkHost,
        link: CoordinatorLink,
    ) -> None:
        self._assignment, self._options = assignment, options
        self._directory, self._host, self._link = directory, host, link
        self._topic = stage_topic(assignment.peer.stage)

    async def run(self) -> None:
        """Announce now and then, and whenever something has changed, until it is cancelled."""
        assignment = self._assignment
        while True:
            assignment.announce_now.clear()
            try:
                await self._directory.announce(self._topic, self._record().as_value(), RECORD_LIFE_S)
            except SwarmtrainError as error:
                log.info("cannot announce this peer: %s", error)
            await wait_event(assignment.announce_now, min(ANNOUNCE_S, self._link.rules.look_s))

    async def withdraw(self, *, moves: bool) -> None:
        """This peer does not host the stage any more. Of one that moves, a record says so, and soon expires."""
        self._directory.withdraw(self._topic)
        if not moves:
            return
        with contextlib.suppress(SwarmtrainError):
            await self._directory.announce(self._topic, self._record().as_value(), GONE_LIFE_S)
        self._directory.withdraw(self._topic)

    def _record(self) -> PeerRecord:
        assignment, options = self._assignment, self._options
        peer, stage = assignment.peer, assignment.stage
        return PeerRecord(
            state=STALLED if stage.device.hangs else peer.state.value,
            step=assignment.clock.step,
            incarnation=peer.incarnation,
            forward_ms=1000 * stage.forward_s,
            backward_ms=1000 * stage.backward_s,
            queue_ms=1000 * stage.compute.backlog_s(),
            up_bytes_per_s=options.max_up_bytes_per_s,
            relayed=options.behind_nat,
            addresses=self._host.addresses()[:4],
            pinned=not options.may_move,
            assignment=assignment.number,
            served_s=assignment.served_s,
            download_s=assignment.download_s,
            down_bytes_per_s=options.max_down_bytes_per_s,
            state_term=peer.state_term,
        )
