"""A peer's record in the directory, under its stage: callers of that stage find it there."""

from __future__ import annotations

import contextlib
import logging

from swarmtrain.chain.neighbours import RECORD_LIFE_S, PeerRecord, stage_topic
from swarmtrain.errors import SwarmtrainError
from swarmtrain.net.directory import Directory
from swarmtrain.net.network import NetworkHost
from swarmtrain.net.waiting import wait_event
from swarmtrain.peer.compute import Kind
from swarmtrain.peer.coordinator_link import CoordinatorLink
from swarmtrain.peer.options import PeerOptions
from swarmtrain.peer.seat import Seat
from swarmtrain.wire.messages import STALLED

log = logging.getLogger(__name__)

ANNOUNCE_S = 15.0
GONE_LIFE_S = 5.0


class Announcing:
    """Keeps the record of one seat fresh."""

    def __init__(
        self, seat: Seat, options: PeerOptions, directory: Directory, host: NetworkHost, link: CoordinatorLink
    ) -> None:
        self._seat, self._options = seat, options
        self._directory, self._host, self._link = directory, host, link
        self._topic = stage_topic(seat.context.stage)

    async def run(self) -> None:
        """Announce now and then, and whenever something has changed, until it is cancelled."""
        seat = self._seat
        while True:
            seat.announce_now.clear()
            try:
                await self._directory.announce(self._topic, self._record().as_value(), RECORD_LIFE_S)
            except SwarmtrainError as error:
                log.info("cannot announce this peer: %s", error)
            await wait_event(seat.announce_now, min(ANNOUNCE_S, self._link.rules.look_s))

    async def withdraw(self, *, moves: bool) -> None:
        """This peer does not host the stage any more. Of one that moves, a record says so, and soon expires."""
        self._directory.withdraw(self._topic)
        if not moves:
            return
        with contextlib.suppress(SwarmtrainError):
            await self._directory.announce(self._topic, self._record().as_value(), GONE_LIFE_S)
        self._directory.withdraw(self._topic)

    def _record(self) -> PeerRecord:
        seat, context, options = self._seat, self._seat.context, self._options
        times = context.compute.times
        return PeerRecord(
            state=STALLED if context.device.hangs else context.state.value,
            step=context.step,
            incarnation=context.incarnation,
            forward_ms=1000 * times.typical_s(Kind.FORWARD),
            backward_ms=1000 * times.typical_s(Kind.BACKWARD),
            queue_ms=1000 * context.compute.backlog_s(),
            up_bytes_per_s=options.max_up_bytes_per_s,
            relayed=options.behind_nat,
            addresses=self._host.addresses()[:4],
            pinned=not options.may_move,
            seat=seat.number,
            served_s=seat.served_s,
            download_s=seat.download_s,
            down_bytes_per_s=options.max_down_bytes_per_s,
            state_term=context.state_term,
        )
