"""Peers' records: they are refreshed periodically, and outlive a machine that vanished."""

from __future__ import annotations

from swarmtrain.route.rebalance import PeerCapacity, stage_capacities
from swarmtrain.route.views import PeerView, StageSnapshot
from swarmtrain.sim.peer import SimPeer
from swarmtrain.sim.scenario import Scenario
from swarmtrain.wire.peer_report import PeerReport


class SimDirectory:
    """Snapshots of all stages as of the last refresh. All peers read the same (stale) one."""

    def __init__(self, scenario: Scenario, peers: list[SimPeer]) -> None:
        self._scenario = scenario
        self._peers = peers
        self._by_id = {peer.peer_id: peer for peer in peers}
        self._views: dict[int, PeerView] = {}
        self.snapshots: list[StageSnapshot] = [StageSnapshot(()) for _ in range(scenario.num_stages)]
        self.serving: list[list[SimPeer]] = [[] for _ in range(scenario.num_stages)]  # the peers in each snapshot
        self.members: list[PeerCapacity] = []
        self.capacities = [0.0] * scenario.num_stages

    def refresh(self, now: float) -> None:
        """All live machines renew their records; records of vanished machines stay until they expire."""
        by_stage: list[list[PeerView]] = [[] for _ in range(self._scenario.num_stages)]
        self.members = []
        for peer in self._peers:
            if peer.state != "gone":
                peer.record_until = now + self._scenario.record_life_s
                self._views[peer.number] = self._view(peer)
                self.members.append(self._member(peer))
            elif peer.record_until <= now:
                self._views.pop(peer.number, None)
                continue
            view = self._views[peer.number]
            by_stage[view.report.stage].append(view)
        for stage, views in enumerate(by_stage):
            bytes_in, bytes_out = stage_bytes(self._scenario, stage)
            self.snapshots[stage] = snapshot = StageSnapshot(views, bytes_in=bytes_in, bytes_out=bytes_out)
            self.serving[stage] = [self._by_id[offer.peer_id] for offer in snapshot.offers]
        self.capacities = stage_capacities(self.members, self._scenario.costs)

    def announce_arrival(self, peer: SimPeer) -> None:
        """The next newcomer sees a newcomer's first record at once; routers see it at the next refresh."""
        rate = min(peer.speed / self._scenario.costs[peer.stage], link_rate(self._scenario, peer))
        self.capacities[peer.stage] += rate

    def _view(self, peer: SimPeer) -> PeerView:
        cost = self._scenario.costs[peer.stage]
        service_ms = 1000.0 * cost / peer.speed
        report = PeerReport(
            stage=peer.stage,
            state=peer.state,
            forward_ms=service_ms / 3.0,
            backward_ms=service_ms * 2.0 / 3.0,
            queue_ms=1000.0 * peer.queue_s(cost),
            up_bytes_per_s=peer.up_rate,
            down_bytes_per_s=peer.down_rate,
            relayed=peer.relayed,
        )
        return PeerView(peer.peer_id, report, expires_at=peer.record_until, load_s=peer.load_s(cost))

    def _member(self, peer: SimPeer) -> PeerCapacity:
        """A peer that is about to move is listed in its new stage, so that no other peer follows it."""
        moving = peer.target >= 0
        return PeerCapacity(
            peer_id=peer.peer_id,
            stage=peer.target if moving else peer.stage,
            speed=peer.speed,
            link_rate=link_rate(self._scenario, peer),
            state="syncing" if moving else peer.state,
            pinned=peer.spec.stage is not None,
            since=peer.serving_since,
            last_download_s=self._scenario.download_s if peer.serving_since > 0.0 else 0.0,
            queue_length=len(peer.jobs),
        )


def stage_bytes(scenario: Scenario, stage: int) -> tuple[float, float]:
    """(received, sent) per microbatch by a peer of this stage: one boundary tensor per neighbour and direction."""
    has_below, has_above = stage > 0, stage < scenario.num_stages - 1
    forward, back = scenario.boundary_bytes, scenario.bytes_back
    return has_below * forward + has_above * back, has_above * forward + has_below * back


def link_rate(scenario: Scenario, peer: SimPeer) -> float:
    """Microbatches per second that the machine's links can carry in an inner stage."""
    num_bytes = scenario.boundary_bytes + scenario.bytes_back
    return min(peer.up_rate, peer.down_rate) / num_bytes if num_bytes else float("inf")
