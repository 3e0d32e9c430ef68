"""What this peer says of itself, in its heartbeats and in its directory record."""

from __future__ import annotations

from swarmtrain.peer.assignment import Assignment
from swarmtrain.peer.options import PeerOptions
from swarmtrain.wire.peer_report import PeerReport, published


def peer_report(
    assignment: Assignment,
    options: PeerOptions,
    state: str,
    *,
    state_digest: str = "",
    addresses: tuple[str, ...] = (),
) -> PeerReport:
    """How things stand now."""
    peer, stage = assignment.peer, assignment.stage
    return PeerReport(
        stage=peer.stage,
        state=state,
        incarnation=peer.incarnation,
        step=assignment.clock.step,
        state_digest=state_digest,
        state_term=peer.state_term,
        assignment=assignment.version,
        forward_ms=1000 * stage.forward_s,
        backward_ms=1000 * stage.backward_s,
        queue_ms=1000 * stage.compute.backlog_s(),
        up_bytes_per_s=options.max_up_bytes_per_s,
        down_bytes_per_s=options.max_down_bytes_per_s,
        relayed=options.behind_nat,
        pinned=not options.may_move,
        served_s=assignment.served_s,
        download_s=assignment.download_s,
        addresses=published(addresses),
    )
