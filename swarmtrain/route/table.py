"""The peers of the next stage: the shared snapshot of their records, and this sender's own estimates on top of it."""

from __future__ import annotations

from collections.abc import Set as AbstractSet
from itertools import islice

from swarmtrain.route.estimate import PeerEstimate, Trouble
from swarmtrain.route.views import Offer, StageSnapshot


class PeerTable:
    """The peers that may be picked now.

    Estimates exist only for peers this sender has dealt with, troubles while they last.
    """

    __slots__ = ("estimates", "snapshot", "troubles")

    def __init__(self) -> None:
        self.snapshot = StageSnapshot(())
        self.estimates: dict[str, PeerEstimate] = {}
        self.troubles: dict[str, Trouble] = {}

    def replace_snapshot(self, snapshot: StageSnapshot) -> None:
        """Take over new records. What is known of peers that are not listed is forgotten in time: memory is bounded."""
        self.snapshot = snapshot
        most, listed = 2 * len(snapshot.offers) + 16, snapshot.index
        if len(self.estimates) > most:
            self.estimates = {peer_id: known for peer_id, known in self.estimates.items() if peer_id in listed}
        if len(self.troubles) > most:
            self.troubles = {peer_id: trouble for peer_id, trouble in self.troubles.items() if peer_id in listed}

    def forget_oldest(self, most: int) -> None:
        """Make room for one more estimate: what was measured so long ago says no more than the record."""
        if len(self.estimates) >= most:
            self.estimates = dict(islice(self.estimates.items(), 1 + most // 4, None))

    def offer(self, peer_id: str) -> Offer | None:
        """The record of a listed peer."""
        position = self.snapshot.index.get(peer_id)
        return None if position is None else self.snapshot.offers[position]

    def trouble(self, peer_id: str) -> Trouble:
        """To write something down that keeps this sender away from the peer."""
        return self.troubles.setdefault(peer_id, Trouble())

    def succeeded(self, peer_id: str) -> None:
        """The peer answered: whatever kept this sender away from it is over."""
        trouble = self.troubles.get(peer_id)
        if trouble is not None and trouble.succeeded():
            del self.troubles[peer_id]

    def is_usable(self, offer: Offer, now: float, exclude: AbstractSet[str]) -> bool:
        """Listed, not excluded, its record still valid, neither banned nor BUSY."""
        if offer.expires_at <= now or (exclude and offer.peer_id in exclude):
            return False
        if not self.troubles:
            return True
        trouble = self.troubles.get(offer.peer_id)
        return trouble is None or not trouble.keeps_away(offer, now)

    def usable_positions(self, now: float, exclude: AbstractSet[str]) -> list[int]:
        """All that may be picked now."""
        return [i for i, offer in enumerate(self.snapshot.offers) if self.is_usable(offer, now, exclude)]

    def lift_bans_if_all_banned(self, now: float, exclude: AbstractSet[str]) -> bool:
        """When all peers are banned, all bans are lifted: a wrong ban must not stop the run."""
        banned: list[Trouble] = []
        for offer in self.snapshot.offers:
            if offer.expires_at <= now or offer.peer_id in exclude:
                continue
            trouble = self.troubles.get(offer.peer_id)
            if trouble is None or not trouble.is_banned(offer, now):
                return False
            banned.append(trouble)
        for trouble in banned:
            trouble.banned_until = now
        return bool(banned)

    def soonest_busy(self, now: float, exclude: AbstractSet[str]) -> tuple[int, float] | None:
        """(position, seconds to wait) of the peer that will take work again first, when all that are left said BUSY."""
        best: tuple[int, float] | None = None
        for position, offer in enumerate(self.snapshot.offers):
            trouble = self.troubles.get(offer.peer_id)
            if trouble is None or offer.expires_at <= now or offer.peer_id in exclude or trouble.is_banned(offer, now):
                continue
            wait_s = trouble.busy_until - now
            if wait_s > 0.0 and (best is None or wait_s < best[1]):
                best = (position, wait_s)
        return best
