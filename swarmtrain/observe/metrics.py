"""Prometheus metrics, made from the snapshots that the status verb and the API show. Pure: nothing is counted here.

The cardinality of labels is bounded: stages, states, causes and codes come from fixed sets, and any code that another
machine made up is counted as `other`. Only the coordinator has a `peer` label, for at most `MAX_PEERS` peers
and `MAX_CONTRIBUTORS` contributors.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping
from typing import Any

from prometheus_client import CollectorRegistry
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, Metric
from prometheus_client.exposition import CONTENT_TYPE_PLAIN_0_0_4, generate_latest
from prometheus_client.openmetrics import exposition as openmetrics
from prometheus_client.registry import Collector

from swarmtrain import __version__
from swarmtrain.observe.activity import Cause
from swarmtrain.wire.messages import Code

OPEN_METRICS = "application/openmetrics-text"
MAX_PEERS = 500
MAX_CONTRIBUTORS = 50  # labels that stay for the whole run
PEER_STATES = ("joining", "syncing", "serving", "paused", "draining", "gone", "stalled", "unknown")
RUN_STATES = ("starting", "waiting", "training", "complete")
_CODES = frozenset(code.value for code in Code) | {"closing", "failed", "timeout", "unreachable", "other"}

Snapshot = Mapping[str, Any]


def gauge(name: str, text: str, *samples: tuple[Mapping[str, str], float | None]) -> GaugeMetricFamily:
    """A gauge; samples that are None are left out."""
    labels = list(samples[0][0]) if samples else []
    family = GaugeMetricFamily(f"swarmtrain_{name}", text, labels=labels)
    for values, value in samples:
        if value is not None:
            family.add_metric([values[label] for label in labels], float(value))
    return family


def counter(name: str, text: str, *samples: tuple[Mapping[str, str], float]) -> CounterMetricFamily:
    """A counter."""
    labels = list(samples[0][0]) if samples else []
    family = CounterMetricFamily(f"swarmtrain_{name}", text, labels=labels)
    for values, value in samples:
        family.add_metric([values[label] for label in labels], float(value))
    return family


def by(label: str, counts: Mapping[str, float]) -> list[tuple[Mapping[str, str], float]]:
    """Samples with one label."""
    return [({label: key}, value) for key, value in counts.items()]


def bounded(counts: Mapping[str, int], known: frozenset[str] = _CODES) -> dict[str, int]:
    """Counts by known code; all unknown ones together are `other`."""
    result = dict.fromkeys(sorted(known), 0)  # a counter that begins at 0 shows its first increase
    for code, count in counts.items():
        key = code if code in known else "other"
        result[key] = result.get(key, 0) + count
    return result


def daemon_families(snapshot: Snapshot) -> Iterator[Metric]:
    """The metrics of every daemon."""
    states = PEER_STATES if snapshot["kind"] == "peer" else RUN_STATES
    yield gauge(
        "build_info", "Version and kind of the daemon.", ({"version": __version__, "kind": snapshot["kind"]}, 1)
    )
    yield gauge("daemon_state", "1 for the state that the daemon is in.", *_one_hot("state", states, snapshot["state"]))
    yield gauge("daemon_start_time_seconds", "Start time of the daemon.", ({}, snapshot["started_at"]))
    yield gauge("daemon_time_seconds", "Clock of the daemon at this scrape.", ({}, snapshot["now"]))
    yield gauge("daemon_state_since_seconds", "Start of the current state.", ({}, snapshot["since"]))
    yield counter("events", "Events, by type.", *by("event", snapshot["events"]))
    yield gauge("process_resident_memory_bytes", "Resident memory.", ({}, snapshot["memory_bytes"]))
    yield counter("process_cpu_seconds", "Processor time.", ({}, snapshot["cpu_s"]))
    yield counter("observe_seconds", "Processor time spent on events, status and metrics.", ({}, snapshot["observe_s"]))
    yield counter(
        "calls_rerouted", "Calls that had to go to another peer, by cause.", *by("cause", bounded(snapshot["rerouted"]))
    )
    yield from _wire(snapshot)


def _wire(snapshot: Snapshot) -> Iterator[Metric]:
    traffic = snapshot["traffic"]
    sides = [(name, traffic[name]["kinds"]) for name in ("sent", "received")]
    rows = [({"direction": side, "kind": kind}, item) for side, kinds in sides for kind, item in kinds.items()]
    control = [({"direction": side, "kind": "control"}, traffic[side]["control_bytes"]) for side, _ in sides]
    sizes = [(labels, item["body_bytes"] + item["frame_bytes"]) for labels, item in rows]
    yield counter("wire_bytes", "Bytes on the links, by direction and message kind.", *sizes, *control)
    yield counter(
        "wire_messages", "Messages, by direction and kind.", *((labels, item["num_messages"]) for labels, item in rows)
    )
    moved = snapshot["transfers"]
    yield counter("wire_transfer_seconds", "Time in transit of measured messages, as seen by receivers.",
                  *(({"direction": side}, moved[side]["seconds"]) for side in moved))  # fmt: skip
    yield counter("wire_transfer_bytes", "Bytes of measured messages.",
                  *(({"direction": side}, moved[side]["bytes"]) for side in moved))  # fmt: skip
    yield gauge("wire_links", "Open links.", ({}, snapshot["links"]))
    yield gauge("wire_backlog_bytes", "Bytes waiting to be written.", ({}, snapshot["backlog_bytes"]))
    yield gauge("wire_round_trip_seconds", "Longest smoothed round-trip time of all links.", ({}, snapshot["rtt_s"]))
    yield counter(
        "wire_violations",
        "Links closed because the other side broke the protocol.",
        ({}, sum(traffic["violations"].values())),
    )


def peer_families(snapshot: Snapshot) -> Iterator[Metric]:
    """The metrics of a peer."""
    yield from daemon_families(snapshot)
    seconds = snapshot["seconds"]
    busy = {part: value for part, value in seconds.items() if part != "idle"}
    idle = {cause.value: seconds["idle"].get(cause.value, 0.0) for cause in Cause if cause is not Cause.WORKING}
    done = {key: key for key in ("from_ledger", "coalesced", "replayed", "evaluated")} | {"finished": "microbatches"}
    yield gauge("peer_stage", "The stage that this peer hosts.", ({}, snapshot["stage"]))
    yield gauge("peer_step", "Steps applied by this peer.", ({}, snapshot["step"]))
    yield counter(
        "peer_seconds", "Wall-clock time, by part; with peer_idle_seconds it adds up to all time.", *by("part", busy)
    )
    yield counter("peer_idle_seconds", "Idle time, by cause.", *by("cause", idle))
    yield gauge(
        "peer_activity",
        "1 for the current activity, or the cause of being idle.",
        *_one_hot("cause", tuple(Cause), snapshot["cause"]),
    )
    yield counter("peer_microbatches", "Microbatches, by result.",
                  *(({"result": name}, snapshot[key]) for name, key in done.items()))  # fmt: skip
    yield counter(
        "peer_microbatch_seconds", "Time of finished microbatches, by part.", *by("part", snapshot["microbatch_s"])
    )
    yield counter(
        "peer_compute_seconds", "Time of the compute thread, by kind of job.", *by("kind", snapshot["compute_s"])
    )
    yield counter("peer_recomputed", "Forwards recomputed because of the memory limit.", ({}, snapshot["recomputed"]))
    yield counter(
        "peer_refused", "Requests that this peer refused, by code.", *by("code", bounded(snapshot["refused"]))
    )
    yield gauge("peer_jobs_waiting", "Jobs waiting for the compute thread.", ({}, snapshot["jobs_waiting"]))
    yield gauge(
        "peer_open_microbatches", "Microbatches accepted and not answered yet.", ({}, snapshot["open_microbatches"])
    )
    yield gauge(
        "peer_next_stage_peers",
        "Serving peers of the next stage that this peer knows.",
        ({}, snapshot["next_stage_peers"]),
    )
    yield gauge("peer_ledger_bytes", "Bytes in the ledger.", ({}, snapshot["ledger_bytes"]))
    percent = snapshot["sync_percent"]
    synced = 1.0 if snapshot["state"] == "serving" else None if percent is None else percent / 100
    yield gauge("peer_sync_ratio", "Share of the stage's state that has arrived.", ({}, synced))
    yield gauge(
        "peer_codec_ratio",
        "Size of a boundary tensor in fp32, divided by its encoded size.",
        *by("direction", snapshot["codec_ratio"]),
    )
    yield gauge(
        "peer_codec_error_ratio",
        "Relative error of the codec, in norm; measured on every 64th boundary tensor.",
        *by("direction", snapshot["codec_error"]),
    )
    yield gauge(
        "peer_residual_cosine",
        "Cosine between a gradient's residual and the change of the activation; near 0 if error feedback is unbiased.",
        ({}, snapshot["residual_cosine"] or 0.0),  # without error feedback there is no bias
    )
    credit = snapshot["credit"]  # gauges: what a roll-back takes back counts no more
    yield gauge("peer_credit_microbatches", "Microbatches that count as this peer's.", ({}, credit["microbatches"]))
    yield gauge("peer_credit_tokens", "Tokens of the microbatches that count as this peer's.", ({}, credit["tokens"]))
    yield gauge("peer_credit_seconds", "Duration of the steps in which this peer had a part.", ({}, credit["seconds"]))
    courtesy = snapshot["courtesy"]
    pause, month = courtesy["pause"] or {}, courtesy["month"] or {}
    yield gauge(
        "peer_pause_end_time_seconds",
        "When the peer works again; 0: that is not known.",
        ({}, pause.get("ends_at") or 0.0),
    )
    yield gauge("peer_month_traffic_bytes", "Traffic of this month, if it has a cap.", ({}, month.get("bytes", 0.0)))
    yield gauge("peer_month_traffic_limit_bytes", "The cap of a month's traffic; 0: none.", ({}, month.get("limit", 0)))
    yield gauge("peer_gpu_memory_bytes", "GPU memory in use by tensors.", ({}, snapshot["gpu_bytes"]))
    yield counter(
        "peer_copied_bytes_total",
        "Bytes of weights and gradients copied to the device, and to its host.",
        *by("to", snapshot["copied_bytes"]),
    )
    yield counter(
        "peer_computed_tflop_total",
        "Operations of microbatches, in 10^12; what is computed again is left out.",
        ({}, snapshot["computed_tflop"]),
    )
    yield gauge(
        "peer_peak_tflops",
        "What a plain product of matrices reaches on this peer's GPU; 0 without one.",
        ({}, snapshot["peak_tflops"]),
    )
    yield gauge(
        "peer_flops_utilisation_ratio",
        "Model FLOPs utilisation: of that peak, while microbatches are computed; 0 without a GPU.",
        ({}, snapshot["flops_utilisation"]),
    )


def run_families(snapshot: Snapshot) -> Iterator[Metric]:
    """The metrics of the run, from its coordinator."""
    yield from daemon_families(snapshot)
    last, split = snapshot["last"] or {}, snapshot["split"] or {}
    yield gauge("run_step", "Applied steps.", ({}, snapshot["step"]))
    yield gauge("run_planned_steps", "Steps of the whole run.", ({}, snapshot["steps"]))
    yield gauge("run_loss", "Training loss of the last step.", ({}, last.get("loss")))
    yield gauge("run_validation_loss", "The last validation loss.", ({}, snapshot["val_loss"]))
    yield gauge("run_learning_rate", "Learning rate of the last step.", ({}, last.get("lr")))
    yield gauge("run_gradient_norm", "Gradient norm of the last step, before clipping.", ({}, last.get("grad_norm")))
    yield gauge("run_tokens_per_second", "Tokens per second over the last step.", ({}, last.get("tokens_per_s")))
    yield counter("run_tokens", "Tokens of all applied steps.", ({}, snapshot["tokens"]))
    yield gauge("run_step_seconds", "Duration of the last step, by part.",
                *(({"part": part}, split.get(f"{part}_s")) for part in ("lease", "reduce", "apply")))  # fmt: skip
    yield gauge(
        "run_last_applied_time_seconds", "Time at which the last step was applied.", ({}, snapshot["last_applied_at"])
    )
    yield gauge("run_checkpoint_step", "Step of the newest checkpoint.", ({}, snapshot["checkpoint_step"]))
    yield counter(
        "run_diverged_peers", "Peers whose state differed from that of their replicas.", ({}, snapshot["diverged"])
    )
    yield gauge("run_members", "Peers that were admitted to the run.", ({}, snapshot["num_members"]))
    yield gauge("run_pending_peers", "Peers that wait for the operator.", ({}, snapshot["num_pending"]))
    yield gauge("run_excluded_peers", "Peers that are excluded from the run.", ({}, snapshot["num_excluded"]))
    yield counter("run_checks", "Checks of peers' work, by result.", *by("result", snapshot["checks"]))
    yield counter(
        "run_refused", "Requests that the coordinator refused, by code.", *by("code", bounded(snapshot["refused"]))
    )
    yield from _stages(snapshot)
    yield from _contributors(snapshot)


def _contributors(snapshot: Snapshot) -> Iterator[Metric]:
    """Gauges: what a roll-back takes back counts no more."""
    first = snapshot["contributors"][:MAX_CONTRIBUTORS]
    known = [({"peer": item["peer"], "name": item["name"]}, item) for item in first]
    yield gauge("run_contributor_microbatches", "Microbatches that count as a contributor's; also after it has left.",
                *((labels, item["microbatches"]) for labels, item in known))  # fmt: skip
    yield gauge("run_contributor_seconds", "Duration of the steps in which a contributor had a part.",
                *((labels, item["seconds"]) for labels, item in known))  # fmt: skip


def _stages(snapshot: Snapshot) -> Iterator[Metric]:
    stages = list(enumerate(snapshot["stages"]))
    counts = [
        ({"stage": str(stage), "state": state}, sum(peer["state"] == state for peer in peers))
        for stage, peers in stages
        for state in PEER_STATES
    ]
    yield gauge("run_peers", "Peers, by stage and state.", *counts)
    capacities = [({"stage": str(stage)}, sum(peer["capacity"] for peer in peers)) for stage, peers in stages]
    yield gauge(
        "run_stage_capacity",
        "Microbatches per second that a stage can process, from the compute times of its peers.",
        *capacities,
    )
    known = [peer for _, peers in stages for peer in peers][:MAX_PEERS]
    labels = [({"peer": peer["peer"], "stage": str(peer["stage"])}, peer) for peer in known]
    yield counter("run_peer_microbatches", "Microbatches counted for a connected peer.",
                  *((names, peer["microbatches"]) for names, peer in labels))  # fmt: skip
    yield gauge("run_peer_heartbeat_age_seconds", "Time since the last heartbeat.",
                *((names, peer["silent_s"]) for names, peer in labels))  # fmt: skip


def _one_hot(label: str, known: Iterable[str], current: str) -> list[tuple[Mapping[str, str], float]]:
    return [({label: str(name)}, float(name == current)) for name in known]


class _FromSnapshot(Collector):
    def __init__(self, families: Callable[[Snapshot], Iterator[Metric]], snapshot: Snapshot) -> None:
        self._families, self._snapshot = families, snapshot

    def collect(self) -> Iterable[Metric]:
        return self._families(self._snapshot)

    def describe(self) -> Iterable[Metric]:
        return ()


def exposition(
    families: Callable[[Snapshot], Iterator[Metric]], snapshot: Snapshot, accept: str = ""
) -> tuple[bytes, str]:
    """What Prometheus reads, and its content type: OpenMetrics for a client that names it in its Accept header, else
    the text format 0.0.4."""
    registry = CollectorRegistry()
    registry.register(_FromSnapshot(families, snapshot))
    if OPEN_METRICS in accept:
        text: bytes = openmetrics.generate_latest(registry)  # type: ignore[no-untyped-call]
        return text, openmetrics.CONTENT_TYPE_LATEST
    return generate_latest(registry), CONTENT_TYPE_PLAIN_0_0_4
