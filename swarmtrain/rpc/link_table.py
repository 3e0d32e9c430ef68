"""The node's table of peers: one record per peer, with its links, its dialing state and its meter."""

from __future__ import annotations

import asyncio
from dataclasses import dataclass, field

from swarmtrain.rpc.link import Link
from swarmtrain.rpc.meter import LinkEstimate, LinkMeter

_MAX_RECORDS = 4096


@dataclass(frozen=True, slots=True)
class LinkSnapshot:
    """One link, for the status page."""

    peer_id: str
    outgoing: bool
    is_open: bool
    num_open_calls: int
    backlog_bytes: int
    sent_bytes: int
    received_bytes: int
    idle_s: float
    estimate: LinkEstimate


@dataclass(slots=True)
class LinkRecord:
    """The node's record of one peer."""

    meter: LinkMeter
    outgoing: Link | None = None
    incoming: list[Link] = field(default_factory=list)
    dialing: asyncio.Task[Link] | None = None
    num_failures: int = 0  # dials in a row
    failure: str = ""  # the reason of the last one
    retry_at: float = 0.0

    @property
    def links(self) -> tuple[Link, ...]:
        """All links with this peer, our own first."""
        return (*((self.outgoing,) if self.outgoing is not None else ()), *self.incoming)

    def usable(self) -> Link | None:
        """An open link for a call: our own, else one that the peer opened (the peer may not be dialable)."""
        return next((link for link in self.links if link.is_open), None)

    def remove(self, link: Link) -> None:
        """Forget a link that ended."""
        if self.outgoing is link:
            self.outgoing = None
        elif link in self.incoming:
            self.incoming.remove(link)


class LinkTable:
    """All records, bounded: the least recently used record without links is forgotten first."""

    def __init__(self) -> None:
        self._by_id: dict[str, LinkRecord] = {}

    def get(self, peer_id: str) -> LinkRecord:
        """The record of a peer, created if it does not exist."""
        neighbour = self._by_id.pop(peer_id, None)
        if neighbour is None:
            neighbour = LinkRecord(LinkMeter(peer_id))
            self._forget_some()
        self._by_id[peer_id] = neighbour  # at the end: the order is that of last use
        return neighbour

    def find(self, peer_id: str) -> LinkRecord | None:
        """The record of a peer, if there is one."""
        return self._by_id.get(peer_id)

    def links(self) -> list[Link]:
        """The links with all peers."""
        return [link for neighbour in self._by_id.values() for link in neighbour.links]

    def dials(self) -> list[asyncio.Task[Link]]:
        """Every dial in progress."""
        return [neighbour.dialing for neighbour in self._by_id.values() if neighbour.dialing is not None]

    def snapshot(self, now: float) -> tuple[LinkSnapshot, ...]:
        """Every link, for the status page."""
        return tuple(
            LinkSnapshot(
                peer_id=peer_id,
                outgoing=link is neighbour.outgoing,
                is_open=link.is_open,
                num_open_calls=link.num_open_calls,
                backlog_bytes=link.backlog_bytes,
                sent_bytes=link.traffic.sent.total_bytes,
                received_bytes=link.traffic.received.total_bytes,
                idle_s=max(0.0, now - link.used_at) if not link.num_open_calls else 0.0,
                estimate=neighbour.meter.estimate(link.backlog_bytes),
            )
            for peer_id, neighbour in self._by_id.items()
            for link in neighbour.links
        )

    def transfers(self) -> tuple[tuple[int, float], tuple[int, float]]:
        """(bytes, seconds) of all measured messages, sent and received, as their receivers measured them."""
        meters = [neighbour.meter for neighbour in self._by_id.values()]
        up = sum(meter.up.total_bytes for meter in meters), sum(meter.up.total_s for meter in meters)
        down = sum(meter.down.total_bytes for meter in meters), sum(meter.down.total_s for meter in meters)
        return up, down

    def _forget_some(self) -> None:
        if len(self._by_id) < _MAX_RECORDS:
            return
        for peer_id, neighbour in tuple(self._by_id.items()):
            if not neighbour.links and neighbour.dialing is None:
                del self._by_id[peer_id]
                return
