"""What the operator may do with members and invites, through the coordinator's control socket on its own machine."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import asdict
from typing import Any

from swarmtrain.chain.membership import revoked
from swarmtrain.coordinator.context import RunContext
from swarmtrain.coordinator.enrolment import Enrolment
from swarmtrain.coordinator.roll import InviteRow
from swarmtrain.errors import UsageError
from swarmtrain.observe.control import Command
from swarmtrain.observe.events import PeerForgotten
from swarmtrain.p2p.addresses import key_of_peer_id
from swarmtrain.p2p.errors import AddressError

MAX_LISTED = 1000  # of each sort; an answer on the control socket is bounded
MIN_ENDING = 8  # characters of a peer id that may stand for it


class Operator:
    """The commands behind `swarmtrain members` and `swarmtrain invite`."""

    def __init__(self, context: RunContext, enrolment: Enrolment, addresses: Callable[[], tuple[str, ...]]) -> None:
        self._context, self._enrolment, self._addresses = context, enrolment, addresses

    @property
    def commands(self) -> Mapping[str, Command]:
        """By name, as the control socket answers them."""
        return {
            "members": self._list,
            "members.admit": self._admit,
            "members.ban": self._ban,
            "members.unban": self._unban,
            "members.forget": self._forget,
            "invites": self._invites,
            "invites.make": self._make,
            "invites.revoke": self._revoke,
        }

    def summary(self) -> dict[str, Any]:
        """For the status: how many there are, and who waits."""
        enrolment = self._enrolment
        waiting = list(enrolment.pending.values())
        return {
            "admission": str(enrolment.rules.mode),
            "num_members": len(enrolment.members()),
            "num_pending": len(waiting),
            "pending": [{"peer": each.peer_id, "name": each.name, "at": each.asked_at} for each in waiting[-20:]],
        }

    async def _list(self, request: dict[str, Any]) -> dict[str, Any]:
        context, enrolment = self._context, self._enrolment
        rows = enrolment.members()
        return {
            **self.summary(),
            "pending": [asdict(each) for each in list(enrolment.pending.values())[-MAX_LISTED:]],
            "members": [self._member(row.peer, asdict(row)) for row in rows[-MAX_LISTED:]],
            "excluded": [asdict(row) for row in context.bans.newest(MAX_LISTED)],
            "num_excluded": len(context.bans),
        }

    def _member(self, peer_id: str, row: dict[str, Any]) -> dict[str, Any]:
        context = self._context
        here = context.members.get(peer_id)
        return {
            **row,
            "stage": here.stage if here is not None else None,
            "state": here.state if here is not None else "away",
            "microbatches": context.tally.contributed[peer_id],
            "on_probation": context.is_on_probation(peer_id),
        }

    async def _admit(self, request: dict[str, Any]) -> dict[str, Any]:
        peer_id = self._named(request, self._enrolment.pending, by_name=False)
        if peer_id in self._context.bans:
            raise UsageError(f"{peer_id} is excluded", fix="first: `swarmtrain members unban`")
        self._enrolment.admit(peer_id)
        return {"peer": peer_id}

    async def _ban(self, request: dict[str, Any]) -> dict[str, Any]:
        peer_id = self._named(request, self._known())
        if peer_id == self._context.node.peer_id:
            raise UsageError("this is the coordinator itself")
        await self._context.ban(peer_id, str(request.get("reason") or "by its operator"))
        self._enrolment.pending.pop(peer_id, None)
        return {"peer": peer_id}

    async def _unban(self, request: dict[str, Any]) -> dict[str, Any]:
        peer_id = self._named(request, {row.peer: row.name for row in self._context.bans.newest(MAX_LISTED)})
        await self._context.unban(peer_id)
        return {"peer": peer_id}

    async def _forget(self, request: dict[str, Any]) -> dict[str, Any]:
        """Take an admission back: the certificate counts no more, and to come back the peer needs an invite again."""
        context = self._context
        peer_id = self._named(request, self._known())
        name = self._known().get(peer_id, "")
        serial = self._enrolment.serial_of(peer_id)
        context.bans.note(context.journal.exclude(context.step, revoked(serial), name, "its admission was taken back"))
        context.events.emit(PeerForgotten(peer_id, name))
        member = context.members.get(peer_id)
        if member is not None:
            await context.lose(member, "its admission was taken back")
        return {"peer": peer_id}

    async def _invites(self, request: dict[str, Any]) -> dict[str, Any]:
        rows = self._enrolment.invites()[-MAX_LISTED:]
        return {"invites": [{**asdict(row), "used": used, "why_not": why_not} for row, used, why_not in rows]}

    async def _make(self, request: dict[str, Any]) -> dict[str, Any]:
        uses, lasts_s = int(request.get("uses", 1)), float(request.get("lasts_s", 0.0))
        row = self._enrolment.make_invite(str(request.get("name", ""))[:64], max(0, uses), max(0.0, lasts_s))
        return self._shown(row)

    async def _revoke(self, request: dict[str, Any]) -> dict[str, Any]:
        return self._shown(self._enrolment.revoke_invite(int(request.get("number", -1))))

    def _shown(self, row: InviteRow) -> dict[str, Any]:
        return {**asdict(row), "invite": self._enrolment.invite(row, self._addresses()).text()}

    def _known(self) -> dict[str, str]:
        """The names of all peers that the operator may mean, by peer id."""
        here = {member.peer_id: member.name for member in self._context.members.all()}
        waiting = {each.peer_id: each.name for each in self._enrolment.pending.values()}
        return {**waiting, **{row.peer: row.name for row in self._enrolment.members()}, **here}

    def _named(self, request: dict[str, Any], known: Mapping[str, Any], *, by_name: bool = True) -> str:
        """The peer that is meant: by its id, the end of it, or a name that only one peer has."""
        text = str(request.get("peer", ""))
        if text in known:
            return text
        found = [peer_id for peer_id in known if len(text) >= MIN_ENDING and peer_id.endswith(text)]
        if by_name and not found:
            found = [peer_id for peer_id, name in known.items() if text and name == text]
        if len(found) == 1:
            return found[0]
        if found:
            raise UsageError(f"{len(found)} peers are called {text[:64]!r}", fix="name one by its id")
        try:
            key_of_peer_id(text)
        except AddressError:
            raise UsageError(f"there is no peer {text[:64]!r}", fix="see `swarmtrain members list`") from None
        return text
