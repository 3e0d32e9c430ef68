"""What a peer answers on its local control socket: status, drain, pause, resume; and under test, cut."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from swarmtrain.errors import UsageError
from swarmtrain.observe.control import Command
from swarmtrain.peer.compute import Kind
from swarmtrain.peer.context import PeerContext, PeerState

Change = Callable[[PeerState, str], None]


def control_commands(context: PeerContext, leave: Callable[[str], None], change: Change) -> dict[str, Command]:
    """The commands of a peer. `leave` drains it, `change` puts it into another state and says so."""

    async def status(request: dict[str, Any]) -> dict[str, Any]:
        return peer_status(context)

    async def drain(request: dict[str, Any]) -> dict[str, Any]:
        leave("asked to drain")
        return {"ok": True}

    async def pause(request: dict[str, Any]) -> dict[str, Any]:
        """Take no new work. What is in the ledger is answered for, and the step's reduction is taken part in."""
        if context.state not in (PeerState.SERVING, PeerState.PAUSED):
            raise UsageError(f"this peer is {context.state}; only a serving one can be paused")
        change(PeerState.PAUSED, "asked to pause")
        return {"ok": True}

    async def resume(request: dict[str, Any]) -> dict[str, Any]:
        """Offer itself again; the coordinator says whether the state is still the run's or must be fetched."""
        if context.state is PeerState.PAUSED:
            change(PeerState.JOINING, "asked to resume")
        return {"ok": True}

    async def cut(request: dict[str, Any]) -> dict[str, Any]:
        context.node.cut()
        return {"ok": True}

    commands: dict[str, Command] = {"status": status, "drain": drain, "pause": pause, "resume": resume}
    return {**commands, "cut": cut} if context.faults.is_enabled else commands


def peer_status(context: PeerContext) -> dict[str, Any]:
    """Where the peer stands and what it has done."""
    times = context.compute.times
    return {
        "kind": "peer",
        "run": context.run_id,
        "peer": context.node.peer_id,
        "stage": context.stage,
        "state": context.state.value,
        "step": context.step,
        "microbatches": context.counters.microbatches,
        "from_ledger": context.counters.from_ledger,
        "replayed": context.counters.replayed,
        "refused": context.counters.refused,
        "gradients": {"waited_for": context.counters.critical[True], "hidden": context.counters.critical[False]},
        "forwards": context.jobs.num_forwards,
        "recomputed": context.jobs.num_recomputed,
        "rerouted": context.dispatcher.counters.rerouted if context.dispatcher else {},
        "ledger_bytes": context.ledger.num_bytes(),
        "compute_s": {kind.name.lower(): round(times.total_s[kind], 3) for kind in Kind},
        "idle_s": round(times.idle_s, 3),
        "traffic": context.node.traffic().summary(),
    }
