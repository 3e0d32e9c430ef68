"""What this peer says of itself, in its heartbeats and in its directory record."""

from __future__ import annotations

from swarmtrain.peer.assignment import Assignment
from swarmtrain.peer.compute import Kind
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
    context = assignment.context
    times = context.compute.times
    return PeerReport(
        stage=context.stage,
        state=state,
        incarnation=context.incarnation,
        step=context.step,
        state_digest=state_digest,
        state_term=context.state_term,
        assignment=assignment.version,
        forward_ms=1000 * times.typical_s(Kind.FORWARD),
        backward_ms=1000 * times.typical_s(Kind.BACKWARD),
        queue_ms=1000 * context.compute.backlog_s(),
        up_bytes_per_s=options.max_up_bytes_per_s,
        down_bytes_per_s=options.max_down_bytes_per_s,
        relayed=options.behind_nat,
        pinned=not options.may_move,
        served_s=assignment.served_s,
        download_s=assignment.download_s,
        addresses=published(addresses),
    )
