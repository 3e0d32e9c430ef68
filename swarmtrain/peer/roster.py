"""What a peer checks of a roster before it allocates anything for it. Pure."""

from __future__ import annotations

from swarmtrain.model.buffers import StateLayout
from swarmtrain.reduce.coding import stage_elements
from swarmtrain.wire.messages import Prepare, RosterEntry


def fault_of(prepare: Prepare, layout: StateLayout, peer_id: str) -> str:
    """Why the rosters cannot be those of this stage and peer; empty if they can."""
    if sum(entry.owned for entry in prepare.roster) != stage_elements(layout, compress=prepare.compress):
        return "the owned parts do not make up this stage's gradient"
    if sum(entry.owned for entry in prepare.fused) != layout.num_fused:
        return "the owned parts do not make up what two stages have in common"
    if layout.num_fused and peer_id not in {entry.peer_id for entry in prepare.fused}:
        return "this peer is missing among those of both stages"
    for roster in (prepare.roster, prepare.fused):
        if any(len(entry.microbatches) % 4 for entry in roster):
            return "a list of microbatches that is cut off"
        if len({entry.peer_id for entry in roster}) != len(roster):
            return "a peer is named twice"
    return ""


def entry_of(prepare: Prepare, peer_id: str, incarnation: str) -> RosterEntry | None:
    """What the roster says of one incarnation of a peer."""
    for entry in prepare.roster:
        if entry.peer_id == peer_id and entry.incarnation == incarnation:
            return entry
    return None
