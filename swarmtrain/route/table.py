"""The peers of the next stage: the shared snapshot of their records, and this sender's own estimates on top of it."""

from __future__ import annotations

from collections.abc import Set as AbstractSet

from swarmtrain.route.estimate import PeerEstimate
from swarmtrain.route.views import Offer, StageSnapshot


class PeerTable:
    """Who may be picked now. Estimates exist only for peers this sender has dealt with."""

    def __init__(self) -> None:
        self.snapshot = StageSnapshot(())
        self.estimates: dict[str, PeerEstimate] = {}

    def replace_snapshot(self, snapshot: StageSnapshot) -> None:
        """Take over new records. Estimates of peers that are listed no longer are forgotten: memory stays bounded."""
        self.snapshot = snapshot
        if len(self.estimates) > 2 * len(snapshot.offers) + 16:
            listed = snapshot.index
            self.estimates = {peer_id: known for peer_id, known in self.estimates.items() if peer_id in listed}

    def offer(self, peer_id: str) -> Offer | None:
        """The record of a listed peer."""
        position = self.snapshot.index.get(peer_id)
        return None if position is None else self.snapshot.offers[position]

    def is_usable(self, offer: Offer, now: float, exclude: AbstractSet[str]) -> bool:
        """Listed, not excluded, its record still valid, neither banned nor BUSY."""
        if offer.expires_at <= now or offer.peer_id in exclude:
            return False
        known = self.estimates.get(offer.peer_id)
        return known is None or not (now < known.busy_until or known.is_banned(offer, now))

    def usable_positions(self, now: float, exclude: AbstractSet[str]) -> list[int]:
        """All that may be picked now."""
        return [i for i, offer in enumerate(self.snapshot.offers) if self.is_usable(offer, now, exclude)]

    def lift_bans_if_all_banned(self, now: float, exclude: AbstractSet[str]) -> bool:
        """When nobody is left who is not banned, everybody gets another chance: a wrong ban must not stop the run."""
        banned: list[PeerEstimate] = []
        for offer in self.snapshot.offers:
            if offer.expires_at <= now or offer.peer_id in exclude:
                continue
            known = self.estimates.get(offer.peer_id)
            if known is None or not known.is_banned(offer, now):
                return False
            banned.append(known)
        for known in banned:
            known.banned_until = now
        return bool(banned)

    def soonest_busy(self, now: float, exclude: AbstractSet[str]) -> tuple[int, float] | None:
        """(position, seconds to wait) of the peer that will take work again first, when all that are left said BUSY."""
        best: tuple[int, float] | None = None
        for position, offer in enumerate(self.snapshot.offers):
            known = self.estimates.get(offer.peer_id)
            if known is None or offer.expires_at <= now or offer.peer_id in exclude or known.is_banned(offer, now):
                continue
            wait_s = known.busy_until - now
            if wait_s > 0.0 and (best is None or wait_s < best[1]):
                best = (position, wait_s)
        return best
