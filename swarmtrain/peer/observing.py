"""What a peer shows of itself: it watches why it is idle, and answers with one snapshot for status, API and metrics."""

from __future__ import annotations

import asyncio
import os
from collections import Counter
from typing import Any

import psutil
import torch

from swarmtrain import world
from swarmtrain.chain.dispatch import Dispatcher
from swarmtrain.observe.activity import Activity, Cause, PeerFacts, explain
from swarmtrain.observe.events import ActivityChanged, Events, PeerEnded, StepFollowed
from swarmtrain.observe.keeper import RerouteNews, StatusKeeper
from swarmtrain.observe.lately import Lately
from swarmtrain.observe.split import Part
from swarmtrain.peer.compute import Kind
from swarmtrain.peer.courtesy import BY_OWNER, Courtesy
from swarmtrain.peer.identity import CONTACT_S, PeerIdentity
from swarmtrain.peer.stage import Stage
from swarmtrain.peer.step import StepProtocol
from swarmtrain.peer.step_clock import StepClock
from swarmtrain.rpc.limits import RateLimiter
from swarmtrain.units import show_rate, show_size
from swarmtrain.wire.messages import RunProgress, Verdict

WATCH_S = 0.25
SETTLE_S = 2.0  # short gaps belong to every pipeline: these causes are told when they have held for so long
_GAPS = (Cause.NO_LEASE, Cause.STEP_END, Cause.CAPPED)
NEWS_S = 1.0


class PeerObserver:
    """Watches one peer."""

    def __init__(
        self,
        peer: PeerIdentity,
        clock: StepClock,
        stage: Stage,
        steps: StepProtocol,
        dispatcher: Dispatcher | None,
        keeper: StatusKeeper,
        events: Events,
        limiter: RateLimiter,
        courtesy: Courtesy,
        *,
        name: str = "",
    ) -> None:
        """`name` is what its owner calls the peer."""
        self._name = name
        self._peer, self._clock, self._stage = peer, clock, stage
        self._steps, self._dispatcher, self._keeper = steps, dispatcher, keeper
        self._events, self._limiter, self._courtesy = events, limiter, courtesy
        self._news = RerouteNews(peer.stage + 1)
        self._news_at = 0.0
        self._seen, self._seen_at = Cause.JOINING, world.wall()
        self._told = (Cause.JOINING, "")
        self._step, self._num_done = clock.step, 0
        self._heard, self._answered = peer.verdict, 0
        self._ratios: dict[str, float] = {}
        self._lately = Lately()
        self._process = psutil.Process(os.getpid())

    async def watch(self) -> None:
        """Look again and again until cancelled."""
        while True:
            with self._events.cost:
                self.look()
            await asyncio.sleep(WATCH_S)

    def look(self) -> None:
        """Notice what has changed."""
        peer, dispatcher, now = self._peer, self._dispatcher, world.wall()
        facts = self.facts()
        activity = explain(facts)
        self._stage.split.explain_idle(activity.cause)
        self._tell(activity, facts, now)
        self._note_ratios()
        self._lately.note("", now, self.spent())
        step = self._clock.step
        if step != self._step:
            done, self._num_done = peer.counters.microbatches - self._num_done, peer.counters.microbatches
            self._step = step
            self._events.emit(StepFollowed(step, done))
        if dispatcher is not None and now - self._news_at >= NEWS_S:
            self._news_at = now
            for event in self._news.since_last(dispatcher.counters.rerouted):
                self._events.emit(event)

    def facts(self) -> PeerFacts:
        """What is known now."""
        peer, split = self._peer, self._stage.split
        status, verdict = self._keeper.status, self._verdict()
        silent_s = asyncio.get_running_loop().time() - peer.contact_at if peer.contact_at else 0.0
        pause = self._courtesy.pause or BY_OWNER
        return PeerFacts(
            state=peer.state.value,
            stage=peer.stage,
            step=self._clock.step,
            coordinator_silent_s=silent_s,
            contact_limit_s=CONTACT_S,
            coordinator_says=verdict.reason if verdict else "",
            is_banned=verdict.is_banned if verdict else False,
            empty_stages=verdict.empty_stages if verdict else (),
            sync_text=status.reason if status.sync_percent is not None else "",
            is_computing=split.is_going_on(Part.COMPUTE),
            num_open=self._clock.num_open,
            num_waiting_jobs=self._stage.compute.backlog(),
            is_reducing=split.is_going_on(Part.REDUCE),
            is_prepared=self._steps.is_prepared,
            has_next=self._dispatcher is not None,
            next_stage_peers=self._num_serving(),
            paused_by=pause.cause,
            pause_reason=pause.reason,
            pause_next=pause.next,
            is_only=peer.verdict.is_only if peer.verdict is not None else False,
            capped_by=self._capped_by(),
        )

    def snapshot(self) -> dict[str, Any]:
        """Everything, as plain data."""
        peer, clock, stage = self._peer, self._clock, self._stage
        read, now, times = stage.split.read(), world.wall(), stage.times
        status = self._keeper.status
        up, down = peer.node.transfers()
        links = peer.node.links()
        with self._process.oneshot():
            memory_bytes, cpu = self._process.memory_info().rss, self._process.cpu_times()
        return {
            "kind": "peer",
            **status.headline(),
            "now": now,
            "run": peer.run_id,
            "peer": peer.peer_id,
            "name": self._name,
            "stage": peer.stage,
            **self._run(),
            "state": peer.state.value,
            "step": clock.step,
            "courtesy": self._courtesy.snapshot(),
            "microbatches": peer.counters.microbatches,
            "from_ledger": peer.counters.from_ledger,
            "coalesced": peer.counters.joined,
            "evaluated": peer.counters.evaluated,
            "replayed": peer.counters.replayed,
            "refused": peer.counters.refused,
            "gradients": _by_wait(peer.counters.critical),
            "forwards": stage.jobs.num_forwards,
            "recomputed": stage.jobs.num_recomputed,
            "rerouted": self._dispatcher.counters.rerouted if self._dispatcher else {},
            "next_stage_peers": self._num_serving() if self._dispatcher else None,
            "ledger_bytes": clock.ledger_bytes,
            "open_microbatches": clock.num_open,
            "jobs_waiting": stage.compute.backlog(),
            "compute_s": {kind.name.lower(): round(stage.total_s(kind), 3) for kind in Kind},
            "idle_s": round(times.idle_s, 3),
            "seconds": {**read.parts, "idle": read.idle},
            "lately": self._lately.shares("", now),
            "wall_s": read.total_s,
            "microbatch_s": {
                "queue": peer.counters.times.queue_s,
                "compute": peer.counters.times.compute_s,
                "downstream": peer.counters.times.downstream_s,
            },
            "sync_percent": status.sync_percent,
            "codec_ratio": dict(self._ratios),
            "codec_error": dict(stage.codecs.fidelity.errors),
            "sticky": stage.codecs.sticky_messages,
            "residual_cosine": stage.codecs.residuals.cosine,
            "transfers": {
                "sent": {"bytes": up[0], "seconds": up[1]},
                "received": {"bytes": down[0], "seconds": down[1]},
            },
            "links": len(links),
            "backlog_bytes": sum(link.backlog_bytes for link in links),
            "rtt_s": max((link.estimate.rtt_s or 0.0 for link in links), default=0.0),
            "memory_bytes": memory_bytes,
            "cpu_s": cpu.user + cpu.system,
            "gpu_bytes": _gpu_bytes(stage.state.device),
            "copied_bytes": {"device": stage.state.room.bytes_to_device, "host": stage.state.room.bytes_to_host},
            "computed_tflop": stage.computed_tflop,
            "peak_tflops": stage.peak_tflops,
            "flops_utilisation": stage.flops_utilisation,
            "observe_s": self._events.cost.seconds,
            "events": dict(status.counts),
            "traffic": peer.node.traffic().summary(),
        }

    def ended(self) -> PeerEnded:
        """What this peer has given, when it leaves its stage."""
        peer, jobs, credit = self._peer, self._stage.jobs, self.credit()
        sent, received = (peer.node.traffic().summary()[side]["total_bytes"] for side in ("sent", "received"))
        return PeerEnded(
            peer.counters.microbatches,
            jobs.num_forwards,
            jobs.num_recomputed,
            peer.counters.from_ledger,
            peer.counters.replayed,
            credit=credit["microbatches"],
            credit_tokens=credit["tokens"],
            credit_share=credit["share"],
            seconds=world.wall() - self._keeper.status.started_at,
            sent_bytes=sent,
            received_bytes=received,
            peer_name=self._name,
        )

    def credit(self) -> dict[str, Any]:
        """What the coordinator has counted as this peer's: microbatches, their tokens, the share of the run's work, and
        how long the steps took in which it had a part."""
        manifest, verdict = self._stage.manifest, self._peer.verdict
        count, step = (verdict.credit, verdict.step) if verdict is not None else (0, 0)
        whole = step * manifest.batch.microbatches_per_step * manifest.stages.count
        return {
            "microbatches": count,
            "tokens": count * manifest.tokens_per_microbatch,
            "share": min(1.0, count / whole) if whole else 0.0,
            "seconds": verdict.credit_s if verdict is not None else 0.0,
        }

    def _run(self) -> dict[str, Any]:
        """The run as the coordinator has told it, and how long ago."""
        manifest, verdict = self._stage.manifest, self._peer.verdict
        told = verdict.progress if verdict is not None else RunProgress()
        heard_at = self._peer.contact_at
        return {
            "run_name": manifest.run.name,
            "stages": manifest.stages.count,
            "steps": manifest.schedule.steps,
            "run_step": verdict.step if verdict is not None else None,
            "run_loss": told.loss or None,
            "run_tokens_per_s": told.tokens_per_s or None,
            "seconds_left": told.left_s or None,
            "silent_s": asyncio.get_running_loop().time() - heard_at if heard_at else None,
            "credit": self.credit(),
        }

    def spent(self) -> tuple[float, ...]:
        """Compute, reduce, queue, wire, idle: for the coordinator's overview."""
        read = self._stage.split.read()
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
        answered = self._dispatcher.counters.answered if self._dispatcher is not None else 0
        verdict = self._peer.verdict
        if verdict is not self._heard:
            self._heard, self._answered = verdict, answered
        is_outdated = answered > self._answered and not (verdict is not None and verdict.is_banned)
        return None if is_outdated else verdict

    def _capped_by(self) -> str:
        if self._limiter.up.num_waiting:
            return f"the upload cap of {show_rate(self._limiter.max_up_bytes_per_s or 0.0)} holds messages back"
        if self._clock.is_full(self._clock.step):
            return f"the ledger is full: {show_size(self._clock.max_ledger_bytes)}"
        return ""

    def _num_serving(self) -> int:
        """Peers of the next stage that serve."""
        if self._dispatcher is None:
            return 0
        return sum(record.state == "serving" for record in self._dispatcher.neighbours.reports.values())

    def _note_ratios(self) -> None:
        """How much smaller the codec makes a boundary tensor than its fp32 numbers."""
        raw = self._stage.codecs.boundary_bytes
        entry = next((entry for ledger in self._clock.ledgers for entry in ledger), None)
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
