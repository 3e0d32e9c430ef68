"""What the coordinator shows of the run: one snapshot for status, API, page and metrics."""

from __future__ import annotations

import asyncio
import os
from collections.abc import Callable, Mapping
from dataclasses import asdict, dataclass
from typing import Any

import psutil

from swarmtrain import world
from swarmtrain.coordinator.checkpointing import Checkpoints
from swarmtrain.coordinator.context import RunContext
from swarmtrain.coordinator.members import Member
from swarmtrain.observe.events import PeerDoubted
from swarmtrain.observe.keeper import RerouteNews, StatusKeeper
from swarmtrain.observe.lately import PARTS, Lately
from swarmtrain.rpc.errors import LinkClosed

WATCH_S = 1.0
MAX_CONTRIBUTORS = 200
MAX_EXCLUDED_SHOWN = 100


@dataclass(frozen=True)
class Doubt:
    """A peer's link broke: it may be gone, or come back."""

    at: float  # loop time
    reason: str


class RunObserver:
    """Watches one run at its coordinator."""

    def __init__(
        self,
        context: RunContext,
        checkpoints: Checkpoints,
        keeper: StatusKeeper,
        *,
        invite: str,
        refused: Mapping[str, int],
        admission: Callable[[], dict[str, Any]],
    ) -> None:
        self.context, self.keeper, self._refused = context, keeper, refused
        self._admission = admission
        self._checkpoints, self._invite = checkpoints, invite
        self._news = RerouteNews(0)
        self._doubts: dict[str, Doubt] = {}
        self._process = psutil.Process(os.getpid())
        self._lately = Lately()
        self.page_url = ""

    async def watch(self) -> None:
        """Emit events for what only counters show, until cancelled."""
        while True:
            await asyncio.sleep(WATCH_S)
            self._note_spent(world.wall())
            for event in self._news.since_last(self.context.dispatcher.counters.rerouted):
                self.context.events.emit(event)

    def _note_spent(self, now: float) -> None:
        members = self.context.members.all()
        self._lately.keep(member.peer_id for member in members)
        for member in members:
            self._lately.note(member.peer_id, now, member.spent)

    def link_closed(self, peer_id: str, error: LinkClosed) -> None:
        """A link ended. A peer whose link breaks is probably gone: shown at once, lost only when it stays silent."""
        members = self.context.members
        for gone in [peer for peer in self._doubts if members.get(peer) is None]:
            del self._doubts[gone]
        member = members.get(peer_id)
        if member is not None:
            self._doubts[peer_id] = Doubt(asyncio.get_running_loop().time(), str(error))
            self.context.events.emit(PeerDoubted(peer_id, member.stage, str(error), member.name))

    def snapshot(self) -> dict[str, Any]:
        """Everything, as plain data."""
        context, status = self.context, self.keeper.status
        up, down = context.node.transfers()
        links = context.node.links()
        members = context.members.all()
        with self._process.oneshot():
            memory_bytes, cpu = self._process.memory_info().rss, self._process.cpu_times()
        return {
            "kind": "coordinator",
            **status.headline(),
            "now": world.wall(),
            "run": context.run_id,
            "name": context.manifest.run.name,
            "homepage": context.manifest.run.homepage,
            "peer": context.node.peer_id,
            "term": context.term,
            "step": context.step,
            "steps": context.manifest.schedule.steps,
            "tokens": context.step * context.manifest.tokens_per_step,
            "tokens_per_step": context.manifest.tokens_per_step,
            "last": status.last.as_dict() if status.last is not None else None,
            "val_loss": status.val_loss,
            "split": status.split.as_dict() if status.split is not None else None,
            "last_applied_at": status.last_applied_at or None,
            "seconds_left": status.seconds_left(),
            "stages": [
                [self._member(member) for member in members if member.stage == stage]
                for stage in range(context.manifest.stages.count)
            ],
            "routes": context.tally.links(),
            "contributors": self._contributors(members),
            "checkpoint_step": self._checkpoints.step,
            "invite": self._invite,
            "page": self.page_url,
            "rerouted": context.dispatcher.counters.rerouted,
            "refused": dict(self._refused),
            "diverged": status.diverged,
            **self._admission(),
            "excluded": self._excluded(),
            "num_excluded": len(context.bans),
            "checks": asdict(context.checks),
            "transfers": {
                "sent": {"bytes": up[0], "seconds": up[1]},
                "received": {"bytes": down[0], "seconds": down[1]},
            },
            "links": len(links),
            "backlog_bytes": sum(link.backlog_bytes for link in links),
            "rtt_s": max((link.estimate.rtt_s or 0.0 for link in links), default=0.0),
            "memory_bytes": memory_bytes,
            "cpu_s": cpu.user + cpu.system,
            "observe_s": context.events.cost.seconds,
            "events": dict(status.counts),
            "traffic": context.node.traffic().summary(),
        }

    def targets(self) -> list[dict[str, Any]]:
        """Prometheus's HTTP service discovery: every peer that says where its metrics are."""
        return [
            {
                "targets": [member.metrics],
                "labels": {"stage": str(member.stage), "peer": member.peer_id, "name": member.name},
            }
            for member in self.context.members.all()
            if member.metrics
        ]

    def _member(self, member: Member) -> dict[str, Any]:
        silent_s = max(0.0, asyncio.get_running_loop().time() - member.seen_at)
        busy_ms = member.report.forward_ms + member.report.backward_ms
        doubt = self._doubts.get(member.peer_id)
        if doubt is not None and member.seen_at > doubt.at:
            self._doubts.pop(member.peer_id, None)
            doubt = None
        return {
            "peer": member.peer_id,
            "name": member.name,
            "stage": member.stage,
            "state": member.state,
            "step": member.step,
            "silent_s": silent_s,
            "doubt": doubt.reason if doubt is not None else "",
            "microbatches": self.context.tally.contributed[member.peer_id],
            "forward_ms": member.report.forward_ms,
            "backward_ms": member.report.backward_ms,
            "capacity": 1000 / busy_ms if busy_ms and member.state == "serving" else 0.0,
            "spent": dict(zip(PARTS, member.spent, strict=False)),
            "lately": self._lately.shares(member.peer_id, world.wall()),
            "metrics": member.metrics,
        }

    def _excluded(self) -> list[dict[str, Any]]:
        """The peers that were excluded last, newest first."""
        rows = self.context.bans.newest(MAX_EXCLUDED_SHOWN)
        return [
            {"peer": row.peer, "name": row.name, "step": row.step + 1, "at": row.at, "reason": row.reason}
            for row in rows
        ]

    def _contributors(self, members: list[Member]) -> list[dict[str, Any]]:
        """The peers that have done most, those that have left included; the figures are those of their receipts."""
        tally, manifest = self.context.tally, self.context.manifest
        whole = tally.step * manifest.batch.microbatches_per_step * manifest.stages.count
        names = {**tally.names, **{member.peer_id: member.name for member in members if member.name}}
        here = {member.peer_id for member in members}
        ranked = enumerate(tally.contributed.most_common(MAX_CONTRIBUTORS), start=1)
        return [
            {
                "rank": rank,
                "peer": peer,
                "name": names.get(peer, ""),
                "microbatches": count,
                "tokens": count * manifest.tokens_per_microbatch,
                "seconds": tally.contributions[peer].seconds,
                "share": count / whole if whole else 0.0,
                "here": peer in here,
            }
            for rank, (peer, count) in ranked
        ]
