"""A peer's record in the directory, under its stage: callers of that stage find it there."""

from __future__ import annotations

import contextlib
import logging

from swarmtrain.chain.neighbours import RECORD_LIFE_S, stage_topic
from swarmtrain.directory.directory import Directory
from swarmtrain.errors import SwarmtrainError
from swarmtrain.p2p.network import NetworkHost
from swarmtrain.peer.assignment import Assignment
from swarmtrain.peer.contacts import CoordinatorLink
from swarmtrain.peer.options import PeerOptions
from swarmtrain.peer.report import peer_report
from swarmtrain.waiting import wait_event
from swarmtrain.wire.peer_report import STALLED
from swarmtrain.wire.records import pack_record

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
                await self._directory.announce(self._topic, self._record(), RECORD_LIFE_S)
            except SwarmtrainError as error:
                log.info("cannot announce this peer: %s", error)
            await wait_event(assignment.announce_now, min(ANNOUNCE_S, self._link.rules.look_s))

    async def withdraw(self, *, moves: bool) -> None:
        """This peer does not host the stage any more. Of one that moves, a record says so, and soon expires."""
        self._directory.withdraw(self._topic)
        if not moves:
            return
        with contextlib.suppress(SwarmtrainError):
            await self._directory.announce(self._topic, self._record(), GONE_LIFE_S)
        self._directory.withdraw(self._topic)

    def _record(self) -> bytes:
        assignment = self._assignment
        state = STALLED if assignment.stage.device.hangs else assignment.peer.state.value
        return pack_record(peer_report(assignment, self._options, state, addresses=self._host.addresses()))
