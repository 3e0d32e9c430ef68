"""Writes the Grafana dashboards: `python docker/dashboards.py` (`--check` only compares).

The JSON files in grafana/dashboards are its output, committed so that Grafana can load them without running anything.
"""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).parent))
from grafana_model import Dashboard, Panel, Query

HERE = Path(__file__).parent / "grafana" / "dashboards"
RATE = "$__rate_interval"


def rate(metric: str, by: str, where: str = "") -> str:
    """The summed rate of a counter."""
    return f"sum by ({by}) (rate({metric}{where}[{RATE}]))"


def stat(title: str, expr: str, about: str, unit: str = "short", **more: Any) -> Panel:
    """One big number."""
    return Panel(title, [Query(expr)], about, unit, "stat", width=4, height=4, **more)


EMPTY = ((None, "red"), (1.0, "green"))

SWARM = Dashboard(
    "swarm",
    "swarmtrain: Swarm",
    "The run as its coordinator sees it.",
    [
        stat("Step", "swarmtrain_run_step", "Applied steps."),
        stat("Loss", "swarmtrain_run_loss", "Training loss of the last step.", "none"),
        stat("Tokens per second", "swarmtrain_run_tokens_per_second", "Over the last step.", "none"),
        stat("Serving peers", 'sum(swarmtrain_run_peers{state="serving"})', "Over all stages.", thresholds=EMPTY),
        stat(
            "Thinnest stage",
            'min(swarmtrain_run_peers{state="serving"})',
            "Peers of the stage that has fewest.",
            thresholds=((None, "red"), (1.0, "orange"), (2.0, "green")),
        ),
        stat(
            "Since the last step",
            "time() - swarmtrain_run_last_applied_time_seconds",
            "Grows while the run waits.",
            "s",
            thresholds=((None, "green"), (60.0, "orange"), (300.0, "red")),
        ),
        Panel(
            "Loss",
            [Query("swarmtrain_run_loss", "training"), Query("swarmtrain_run_validation_loss", "validation")],
            "By time.",
            "none",
            width=12,
        ),
        Panel(
            "Tokens per second",
            [
                Query("swarmtrain_run_tokens_per_second", "last step"),
                Query(f"rate(swarmtrain_run_tokens_total[{RATE}])", "with all pauses"),
            ],
            "The second curve includes the time between steps.",
            "none",
            width=12,
        ),
        Panel(
            "Where a step's time goes",
            [Query("swarmtrain_run_step_seconds", "{{part}}")],
            "lease: all microbatches through all stages; reduce: the all-reduce of every stage; apply: the optimizer.",
            "s",
            stacked=True,
        ),
        Panel(
            "Serving peers by stage",
            [Query('sum by (stage) (swarmtrain_run_peers{state="serving"})', "stage {{stage}}")],
            "A stage without peers stops the run.",
        ),
        Panel("Peers by state", [Query("sum by (state) (swarmtrain_run_peers) > 0", "{{state}}")], "Over all stages."),
        Panel("Gradient norm", [Query("swarmtrain_run_gradient_norm", "before clipping")], "Of the last step.", "none"),
        Panel(
            "Learning rate",
            [Query("swarmtrain_run_learning_rate", "learning rate")],
            "Of the last step.",
            "none",
            decimals=7,
        ),
        Panel(
            "Events",
            [Query(f"sum by (event) (increase(swarmtrain_events_total[{RATE}])) > 0", "{{event}}")],
            "Events per interval, of all scraped daemons.",
        ),
        Panel(
            "Contributors",
            [Query("topk(15, swarmtrain_run_contributor_microbatches)", "{{name}} {{peer}}")],
            "Microbatches that count as a contributor's; also of those that have left.",
            kind="bargauge",
            width=12,
        ),
        Panel(
            "Steps since the last checkpoint",
            [Query("swarmtrain_run_step - swarmtrain_run_checkpoint_step", "steps")],
            "Steps that would be repeated if a stage lost its state.",
            width=12,
        ),
    ],
)

OF_STAGE = '{stage=~"$stage"}'
STAGE = Dashboard(
    "stage",
    "swarmtrain: Stage",
    "One or more pipeline stages: their peers, their capacity, their throughput.",
    [
        Panel(
            "Peers by state",
            [Query(f"sum by (stage, state) (swarmtrain_run_peers{OF_STAGE}) > 0", "{{stage}} {{state}}")],
            "As the coordinator sees them.",
        ),
        Panel(
            "Capacity",
            [Query(f"swarmtrain_run_stage_capacity{OF_STAGE}", "stage {{stage}}")],
            "Microbatches per second, by the compute times that peers report. The lowest stage is the bottleneck.",
        ),
        Panel(
            "Microbatches per second",
            [Query(rate("swarmtrain_run_peer_microbatches_total", "stage", OF_STAGE), "stage {{stage}}")],
            "Counted by the coordinator.",
        ),
        Panel(
            "Where the peers' time goes",
            [
                Query(rate("swarmtrain_peer_seconds_total", "part", OF_STAGE), "{{part}}"),
                Query(f"sum(rate(swarmtrain_peer_idle_seconds_total{OF_STAGE}[{RATE}]))", "idle"),
            ],
            "Seconds per second, summed over the peers: the total is the number of peers.",
            "none",
            width=12,
            stacked=True,
        ),
        Panel(
            "Idle time by cause",
            [Query(rate("swarmtrain_peer_idle_seconds_total", "cause", OF_STAGE) + " > 0", "{{cause}}")],
            "Why the peers wait.",
            "none",
            width=12,
            stacked=True,
        ),
        Panel(
            "Time of a microbatch on its stage",
            [
                Query(
                    rate("swarmtrain_peer_microbatch_seconds_total", "part", OF_STAGE) + " / ignoring(part) group_left "
                    f'sum(rate(swarmtrain_peer_microbatches_total{{stage=~"$stage",result="finished"}}[{RATE}]))',
                    "{{part}}",
                )
            ],
            "queue: waiting for the compute thread; compute: forward and backward; downstream: at later stages.",
            "s",
            stacked=True,
        ),
        Panel(
            "Jobs waiting",
            [Query(f"sum by (name) (swarmtrain_peer_jobs_waiting{OF_STAGE})", "{{name}}")],
            "Waiting for the compute thread.",
        ),
        Panel(
            "Time since the last heartbeat",
            [Query(f"max by (peer) (swarmtrain_run_peer_heartbeat_age_seconds{OF_STAGE})", "{{peer}}")],
            "After ten seconds without a heartbeat a peer is lost.",
            "s",
        ),
    ],
    [("stage", "label_values(swarmtrain_run_peers, stage)")],
)

OF_PEER = '{name=~"$name"}'
PEER = Dashboard(
    "peer",
    "swarmtrain: Peer",
    "One or more peers: activity, causes of idle time, resources.",
    [
        Panel(
            "Activity",
            [Query(f"max by (name, cause) (swarmtrain_peer_activity{OF_PEER}) > 0", "{{name}}: {{cause}}")],
            "What each peer does, or why it is idle.",
            kind="stat",
            width=12,
            height=4,
        ),
        Panel(
            "Time accounted for",
            [
                Query(
                    f"(sum(rate(swarmtrain_peer_seconds_total{OF_PEER}[{RATE}])) + "
                    f"sum(rate(swarmtrain_peer_idle_seconds_total{OF_PEER}[{RATE}]))) / "
                    f"count(swarmtrain_peer_stage{OF_PEER})",
                    "",
                )
            ],
            "Sum of all parts per peer: 1 if no time is missing.",
            "percentunit",
            "stat",
            width=6,
            height=4,
        ),
        Panel(
            "Step",
            [Query(f"max by (name) (swarmtrain_peer_step{OF_PEER})", "{{name}}")],
            "Applied steps.",
            kind="stat",
            width=6,
            height=4,
        ),
        Panel(
            "Where the time goes",
            [
                Query(rate("swarmtrain_peer_seconds_total", "part", OF_PEER), "{{part}}"),
                Query(f"sum(rate(swarmtrain_peer_idle_seconds_total{OF_PEER}[{RATE}]))", "idle"),
            ],
            "Seconds per second.",
            "none",
            width=12,
            stacked=True,
        ),
        Panel(
            "Idle time by cause",
            [Query(rate("swarmtrain_peer_idle_seconds_total", "cause", OF_PEER) + " > 0", "{{cause}}")],
            "Why the peer waits.",
            "none",
            width=12,
            stacked=True,
        ),
        Panel(
            "Microbatches per second",
            [Query(rate("swarmtrain_peer_microbatches_total", "result", OF_PEER), "{{result}}")],
            "from_ledger: answered from the ledger; coalesced: repeated while the first request was open.",
        ),
        Panel(
            "Compute thread",
            [Query(rate("swarmtrain_peer_compute_seconds_total", "kind", OF_PEER), "{{kind}}")],
            "Seconds per second by kind of job.",
            "none",
            stacked=True,
        ),
        Panel(
            "Refused",
            [Query(f"topk(5, {rate('swarmtrain_peer_refused_total', 'code', OF_PEER)})", "{{code}}")],
            "Requests, by code.",
        ),
        Panel(
            "Memory",
            [
                Query(f"swarmtrain_process_resident_memory_bytes{OF_PEER}", "{{name}}"),
                Query(f"swarmtrain_peer_ledger_bytes{OF_PEER}", "{{name}}: ledger"),
                Query(f"swarmtrain_peer_gpu_memory_bytes{OF_PEER} > 0", "{{name}}: GPU"),
            ],
            "In use.",
            "bytes",
        ),
        Panel(
            "Operations",
            [
                Query(f"rate(swarmtrain_peer_computed_tflop_total{OF_PEER}[{RATE}])", "{{name}}"),
                Query(f"swarmtrain_peer_peak_tflops{OF_PEER}", "{{name}}: peak of its GPU"),
            ],
            "Of microbatches, 10^12 per second; what is computed again is left out.",
            "none",
        ),
        Panel(
            "Share of the peak",
            [Query(f"swarmtrain_peer_flops_utilisation_ratio{OF_PEER}", "{{name}}")],
            "Model FLOPs utilisation of its GPU, while it computes.",
            "percentunit",
        ),
        Panel(
            "Copies between device and host",
            [Query(rate("swarmtrain_peer_copied_bytes_total", "to", OF_PEER), "to the {{to}}")],
            "Weights to the device, gradients to the host, with --offload.",
            "Bps",
        ),
        Panel(
            "Processor",
            [Query(f"rate(swarmtrain_process_cpu_seconds_total{OF_PEER}[{RATE}])", "{{name}}")],
            "Cores in use.",
            "none",
        ),
        Panel(
            "Cost of observing",
            [Query(rate("swarmtrain_observe_seconds_total", "name", OF_PEER), "{{name}}")],
            "Processor time of events, status and metrics, as a share of wall-clock time.",
            "percentunit",
        ),
        Panel(
            "Open microbatches",
            [Query(f"swarmtrain_peer_open_microbatches{OF_PEER}", "{{name}}")],
            "Accepted and not answered yet.",
        ),
        Panel(
            "State fetched",
            [Query(f"swarmtrain_peer_sync_ratio{OF_PEER}", "{{name}}")],
            "Share of the stage's state that has arrived; 1 for a serving peer.",
            "percentunit",
        ),
        Panel(
            "Peers of the next stage",
            [Query(f"swarmtrain_peer_next_stage_peers{OF_PEER}", "{{name}}")],
            "Serving peers of the next stage that this peer knows.",
        ),
        Panel(
            "Recomputed forwards",
            [Query(rate("swarmtrain_peer_recomputed_total", "name", OF_PEER), "{{name}}")],
            "Forwards recomputed because their activations did not fit the memory limit.",
        ),
    ],
    [("name", "label_values(swarmtrain_peer_stage, name)")],
)

SENT = '{direction="sent"}'
WIRE = Dashboard(
    "wire",
    "swarmtrain: Wire",
    "Traffic on the links: bytes, rates, refusals and violations.",
    [
        Panel(
            "Bytes per second by direction",
            [Query(rate("swarmtrain_wire_bytes_total", "direction"), "{{direction}}")],
            "Over all scraped daemons.",
            "Bps",
        ),
        Panel(
            "Bytes sent per second by kind",
            [Query(rate("swarmtrain_wire_bytes_total", "kind", SENT), "{{kind}}")],
            "work and done carry boundary tensors; part and reduced_part are the all-reduce.",
            "Bps",
            stacked=True,
        ),
        Panel(
            "Messages per second",
            [Query(rate("swarmtrain_wire_messages_total", "kind", SENT), "{{kind}}")],
            "Sent, by kind.",
        ),
        Panel(
            "Goodput while sending",
            [
                Query(
                    rate("swarmtrain_wire_transfer_bytes_total", "name", SENT)
                    + " / "
                    + rate("swarmtrain_wire_transfer_seconds_total", "name", SENT)
                    + " > 0",
                    "{{name}}",
                )
            ],
            "Of messages above 4 kB, as measured by their receivers.",
            "Bps",
        ),
        Panel(
            "Transfer time",
            [Query(rate("swarmtrain_wire_transfer_seconds_total", "direction"), "{{direction}}")],
            "Seconds per second that measured messages were in transit; transfers overlap.",
            "none",
        ),
        Panel(
            "Round trip",
            [Query("max by (name) (swarmtrain_wire_round_trip_seconds)", "{{name}}")],
            "The longest of a daemon's links, smoothed.",
            "s",
        ),
        Panel(
            "Backlog",
            [Query("sum by (name) (swarmtrain_wire_backlog_bytes)", "{{name}}")],
            "Bytes waiting to be written.",
            "bytes",
        ),
        Panel("Links", [Query("sum by (name) (swarmtrain_wire_links)", "{{name}}")], "Open links."),
        Panel(
            "Codec ratio",
            [Query("max by (direction) (swarmtrain_peer_codec_ratio)", "{{direction}}")],
            "Size of a boundary tensor in fp32, divided by its encoded size.",
            "none",
        ),
        Panel(
            "Codec error",
            [Query("max by (direction) (swarmtrain_peer_codec_error_ratio)", "{{direction}}")],
            "Relative error of the codec in norm, measured on every 64th boundary tensor. 0 for fp32.",
            "percentunit",
        ),
        Panel(
            "Rerouted calls",
            [Query(f"topk(5, {rate('swarmtrain_calls_rerouted_total', 'cause')})", "{{cause}}")],
            "Calls that went to another peer, by cause. busy is normal.",
        ),
        Panel(
            "Refused by the coordinator",
            [Query(f"topk(5, {rate('swarmtrain_run_refused_total', 'code')})", "{{code}}")],
            "By code.",
        ),
        Panel(
            "Protocol violations",
            [Query(f"sum(rate(swarmtrain_wire_violations_total[{RATE}]))", "violations")],
            "Links closed because the other side broke the protocol.",
        ),
    ],
)

DASHBOARDS = (SWARM, STAGE, PEER, WIRE)


def files() -> dict[Path, str]:
    """What belongs where."""
    return {HERE / f"{item.uid}.json": json.dumps(item.as_json(), indent=1) + "\n" for item in DASHBOARDS}


def main() -> int:
    """Write, or with --check compare."""
    wanted = files()
    if "--check" in sys.argv[1:]:
        stale = [path.name for path, text in wanted.items() if not path.exists() or path.read_text() != text]
        print(f"stale: {', '.join(stale)}; run python docker/dashboards.py" if stale else "all dashboards are current")
        return int(bool(stale))
    HERE.mkdir(parents=True, exist_ok=True)
    for path, text in wanted.items():
        path.write_text(text)
    return 0


if __name__ == "__main__":
    sys.exit(main())
