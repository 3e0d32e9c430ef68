"""What a peer shows of itself: it watches why it is idle, and answers with one snapshot for status, API and metrics."""

from __future__ import annotations

import asyncio
import os
from collections import Counter
from typing import Any

import psutil
import torch

from swarmtrain import world
from swarmtrain.observe.activity import Activity, Cause, PeerFacts, explain
from swarmtrain.observe.events import ActivityChanged, Events, StepFollowed
from swarmtrain.observe.keeper import RerouteNews, StatusKeeper
from swarmtrain.observe.split import Part
from swarmtrain.peer.compute import Kind
from swarmtrain.peer.context import CONTACT_S, PeerContext
from swarmtrain.peer.steps import Steps
from swarmtrain.rpc.limits import RateLimiter
from swarmtrain.units import show_rate, show_size
from swarmtrain.wire.messages import Verdict

WATCH_S = 0.25
SETTLE_S = 2.0  # short gaps belong to every pipeline: these causes are told when they have held for so long
_GAPS = (Cause.NO_LEASE, Cause.STEP_END, Cause.CAPPED)
NEWS_S = 1.0


class PeerObserver:
    """Watches one peer."""

    def __init__(
        self, context: PeerContext, steps: Steps, keeper: StatusKeeper, events: Events, limiter: RateLimiter
    ) -> None:
        self._context, self._steps, self._keeper = context, steps, keeper
        self._events, self._limiter = events, limiter
        self._news = RerouteNews(context.stage + 1)
        self._news_at = 0.0
        self._seen, self._seen_at = Cause.JOINING, world.wall()
        self._told = (Cause.JOINING, "")
        self._step, self._num_done = context.step, 0
        self._heard, self._answered = context.verdict, 0
        self._ratios: dict[str, float] = {}
        self._process = psutil.Process(os.getpid())

    async def watch(self) -> None:
        """Look again and again until cancelled."""
        while True:
            with self._events.cost:
                self.look()
            await asyncio.sleep(WATCH_S)

    def look(self) -> None:
        """Notice what has changed."""
        context, now = self._context, world.wall()
        facts = self.facts()
        activity = explain(facts)
        context.compute.split.explain_idle(activity.cause)
        self._tell(activity, facts, now)
        self._note_ratios()
        if context.step != self._step:
            done, self._num_done = context.counters.microbatches - self._num_done, context.counters.microbatches
            self._step = context.step
            self._events.emit(StepFollowed(context.step, done))
        if context.dispatcher is not None and now - self._news_at >= NEWS_S:
            self._news_at = now
            for event in self._news.since_last(context.dispatcher.counters.rerouted):
                self._events.emit(event)

    def facts(self) -> PeerFacts:
        """What is known now."""
        context, split = self._context, self._context.compute.split
        status, verdict = self._keeper.status, self._verdict()
        silent_s = asyncio.get_running_loop().time() - context.contact_at if context.contact_at else 0.0
        return PeerFacts(
            state=context.state.value,
            stage=context.stage,
            step=context.step,
            coordinator_silent_s=silent_s,
            contact_limit_s=CONTACT_S,
            coordinator_says=verdict.reason if verdict else "",
            is_banned=verdict.is_banned if verdict else False,
            empty_stages=verdict.empty_stages if verdict else (),
            sync_text=status.reason if status.sync_percent is not None else "",
            is_computing=split.is_going_on(Part.COMPUTE),
            num_open=sum(entry.answer is None for entry in context.ledger),
            num_waiting_jobs=context.compute.backlog(),
            is_reducing=split.is_going_on(Part.REDUCE),
            is_prepared=self._steps.is_prepared,
            has_next=context.dispatcher is not None,
            next_stage_peers=_num_serving(context),
            capped_by=self._capped_by(),
        )

    def snapshot(self) -> dict[str, Any]:
        """Everything, as plain data."""
        context, times = self._context, self._context.compute.times
        read, now = context.compute.split.read(), world.wall()
        status = self._keeper.status
        up, down = context.node.transfers()
        links = context.node.links()
        with self._process.oneshot():
            memory_bytes, cpu = self._process.memory_info().rss, self._process.cpu_times()
        return {
            "kind": "peer",
            **status.headline(),
            "now": now,
            "run": context.run_id,
            "peer": context.node.peer_id,
            "stage": context.stage,
            "state": context.state.value,
            "step": context.step,
            "microbatches": context.counters.microbatches,
            "from_ledger": context.counters.from_ledger,
            "coalesced": context.counters.joined,
            "evaluated": context.counters.evaluated,
            "replayed": context.counters.replayed,
            "refused": context.counters.refused,
            "gradients": _by_wait(context.counters.critical),
            "forwards": context.jobs.num_forwards,
            "recomputed": context.jobs.num_recomputed,
            "rerouted": context.dispatcher.counters.rerouted if context.dispatcher else {},
            "next_stage_peers": _num_serving(context) if context.dispatcher else None,
            "ledger_bytes": context.ledger.num_bytes(),
            "open_microbatches": sum(entry.answer is None for entry in context.ledger),
            "jobs_waiting": context.compute.backlog(),
            "compute_s": {kind.name.lower(): round(times.total_s[kind], 3) for kind in Kind},
            "idle_s": round(times.idle_s, 3),
            "seconds": {**read.parts, "idle": read.idle},
            "wall_s": read.total_s,
            "microbatch_s": {
                "queue": context.counters.times.queue_s,
                "compute": context.counters.times.compute_s,
                "downstream": context.counters.times.downstream_s,
            },
            "sync_percent": status.sync_percent,
            "codec_ratio": dict(self._ratios),
            "codec_error": dict(context.jobs.codecs.fidelity.errors),
            "sticky": context.jobs.codecs.sticky_messages,
            "residual_cosine": context.jobs.codecs.residuals.cosine,
            "transfers": {
                "sent": {"bytes": up[0], "seconds": up[1]},
                "received": {"bytes": down[0], "seconds": down[1]},
            },
            "links": len(links),
            "backlog_bytes": sum(link.backlog_bytes for link in links),
            "rtt_s": max((link.estimate.rtt_s or 0.0 for link in links), default=0.0),
            "memory_bytes": memory_bytes,
            "cpu_s": cpu.user + cpu.system,
            "gpu_bytes": _gpu_bytes(context.jobs.worker.state.device),
            "observe_s": self._events.cost.seconds,
            "events": dict(status.counts),
            "traffic": context.node.traffic().summary(),
        }

    def spent(self) -> tuple[float, ...]:
        """Compute, reduce, queue, wire, idle: for the coordinator's overview."""
        read = self._context.compute.split.read()
        return (*(read.parts[part.value] for part in Part if part is not Part.IDLE), sum(read.idle.values()))

    def _tell(self, activity: Activity, facts: PeerFacts, now: float) -> None:
        """An event when there is another answer, and it is no mere gap."""
        if activity.cause is not self._seen:
            silent_s = facts.coordinator_silent_s if activity.cause is Cause.COORDINATOR_AWAY else 0.0
            self._seen, self._seen_at = activity.cause, now - silent_s
        is_settled = now - self._seen_at >= SETTLE_S or activity.cause not in _GAPS
        if self._told != (activity.cause, activity.reason) and is_settled:
            self._told = (activity.cause, activity.reason)
            self._events.emit(ActivityChanged(activity.cause, activity.reason, activity.next, self._seen_at))

    def _verdict(self) -> Verdict | None:
        """The coordinator's last one, unless an answer of the next stage has come since: then it is outdated."""
        context = self._context
        answered = context.dispatcher.counters.answered if context.dispatcher is not None else 0
        verdict = context.verdict
        if verdict is not self._heard:
            self._heard, self._answered = verdict, answered
        is_outdated = answered > self._answered and not (verdict is not None and verdict.is_banned)
        return None if is_outdated else verdict

    def _capped_by(self) -> str:
        context = self._context
        if self._limiter.up.num_waiting:
            return f"the upload cap of {show_rate(self._limiter.max_up_bytes_per_s or 0.0)} holds messages back"
        if context.ledger.num_bytes() > context.max_ledger_bytes:
            return f"the ledger is full: {show_size(context.max_ledger_bytes)}"
        return ""

    def _note_ratios(self) -> None:
        """How much smaller the codec makes a boundary tensor than its fp32 numbers."""
        raw = self._context.jobs.codecs.boundary_bytes
        entry = next(iter(self._context.ledger), None)
        if entry is None or not raw:
            return
        if entry.output:
            self._ratios["forward"] = raw / len(entry.output)
        if entry.answer is not None and entry.answer.gradient:
            self._ratios["backward"] = raw / len(entry.answer.gradient)


def _gpu_bytes(device: torch.device | str) -> int:
    return torch.cuda.memory_allocated(device) if str(device).startswith("cuda") else 0


def _by_wait(critical: Counter[bool | None]) -> dict[str, int]:
    """Gradients that were compressed, and those that went exactly: behind other work, or on a line of unknown rate."""
    return {"waited_for": critical[True], "hidden": critical[False], "unmeasured": critical[None]}


def _num_serving(context: PeerContext) -> int:
    if context.dispatcher is None:
        return 0
    return sum(record.state == "serving" for record in context.dispatcher.neighbours.records.values())
