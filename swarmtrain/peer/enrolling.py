"""How a newcomer gets its certificate: by its invite's token, by work, or by waiting for the operator."""

from __future__ import annotations

import asyncio
import hashlib
import hmac
from functools import partial

from swarmtrain import world
from swarmtrain.chain.membership import Membership
from swarmtrain.chain.puzzle import solve
from swarmtrain.peer.contacts import CoordinatorLink, NotAdmitted, RunUnreachable
from swarmtrain.rpc.node import Node
from swarmtrain.run.invite import Invite
from swarmtrain.wire.messages import Enrol, Enrolled

MAX_DIFFICULTY = 24  # two minutes on a core; a coordinator that asks for more is refused


class Enrolling:
    """Asks the coordinator until it has a certificate."""

    def __init__(self, invite: Invite, membership: Membership, node: Node, link: CoordinatorLink, name: str) -> None:
        self._invite, self._membership, self._node, self._link = invite, membership, node, link
        self._name = name[:64]

    async def enrol(self, timeout_s: float) -> None:
        """Return with a certificate. NotAdmitted if the run wants none of this peer, RunUnreachable if it does not
        answer within `timeout_s`, or if its operator has not decided yet."""
        request = Enrol(self._invite.run_id, self._name, token_number=self._invite.token_number)
        if self._invite.token:
            proof = hmac.digest(self._invite.token, self._node.peer_id.encode(), hashlib.sha256)
            request = Enrol(self._invite.run_id, self._name, token_number=self._invite.token_number, token_proof=proof)
        answer = await self._link.ask(request, Enrolled, timeout_s)
        if answer.challenge and not answer.certificate:
            answer = await self._link.ask(await self._solved(answer), Enrolled, timeout_s)
        if answer.retry_after_s and not answer.certificate:
            await asyncio.sleep(min(answer.retry_after_s, timeout_s))
            raise RunUnreachable(
                f"this run's operator decides who takes part, and has not admitted {self._node.peer_id} yet",
                fix="tell the operator: `swarmtrain members admit` with this id",
            )
        if self._membership.hold(answer.certificate) is None:
            raise NotAdmitted("the coordinator's certificate is not one of this run", fix="ask for a new invite")
        self._node.show_certificate()

    async def _solved(self, asked: Enrolled) -> Enrol:
        if asked.difficulty > MAX_DIFFICULTY:
            raise NotAdmitted("the coordinator asks for more work than any run needs", fix="ask the run's operator why")
        work = await world.in_thread(partial(solve, asked.challenge, self._node.peer_id, asked.difficulty))
        return Enrol(self._invite.run_id, self._name, challenge=asked.challenge, work=work)
