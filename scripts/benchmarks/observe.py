"""What does it cost to be seen?

share of the wall-clock, share of the processor time: a real swarm on this machine, every peer's metrics scraped every
five seconds, as the compose file does it. Each daemon counts the processor time that it spends on events, status and
metrics; a ratio is that over all time, or over all its processor time, of one peer in one window of some seconds.
time split on / off: a forward and backward of one stage, with and without the notes that the time split takes of a
microbatch; processor time of one thread.
"""

from __future__ import annotations

import asyncio
import tempfile
import time
import urllib.request
from collections.abc import Callable
from pathlib import Path

import torch
from common import figure, parser, progress, report, speed_ratios, take_turns
from prometheus_client.parser import text_string_to_metric_families

from swarmtrain.local import LocalOptions, LocalSwarm
from swarmtrain.model.state import StageState
from swarmtrain.model.worker import StageWorker
from swarmtrain.observe.split import Part, TimeSplit
from swarmtrain.run.presets import preset

NAMES = ("swarmtrain_observe_seconds_total", "swarmtrain_process_cpu_seconds_total")


def scrape(url: str) -> tuple[float, ...]:
    """When, seconds of watching, processor seconds."""
    text = urllib.request.urlopen(url, timeout=20).read().decode()
    found = {sample.name: sample.value for family in text_string_to_metric_families(text) for sample in family.samples}
    return (time.monotonic(), *(found[name] for name in NAMES))


async def watch_swarm(seconds: float, window_s: float, every_s: float) -> tuple[list[float], list[float]]:
    """(shares of the wall-clock, shares of the processor time), one per peer and window."""
    urls: list[str] = []
    stepped = asyncio.Event()

    def on_event(event: dict[str, object]) -> None:
        if event["event"] == "phase_reached" and event["phase"] == "metrics":
            urls.append(str(event["detail"]))
        if event["event"] == "step_applied":
            stepped.set()

    manifest = preset("nano", ["stages.count=2", "schedule.steps=1000000", "checkpoint.every=0"])
    wall: list[float] = []
    processor: list[float] = []
    with tempfile.TemporaryDirectory(prefix="st-") as directory:
        swarm = LocalSwarm(LocalOptions(manifest, Path(directory), num_peers=2), on_event)
        try:
            await swarm.start()
            await stepped.wait()
            before = [await asyncio.to_thread(scrape, url) for url in urls]
            ends_at = time.monotonic() + seconds
            while time.monotonic() < ends_at:
                for _ in range(max(1, round(window_s / every_s))):
                    await asyncio.sleep(every_s)
                    after = [await asyncio.to_thread(scrape, url) for url in urls]
                for old, new in zip(before, after, strict=True):
                    wall.append((new[1] - old[1]) / (new[0] - old[0]))
                    processor.append((new[1] - old[1]) / max(1e-9, new[2] - old[2]))
                before = after
                progress(f"{ends_at - time.monotonic():.0f} s left")
        finally:
            await swarm.stop()
    progress("")
    return wall, processor


def microbatch(watched: bool) -> Callable[[], None]:
    """Forward and backward of the first stage, with as many notes as a real microbatch makes, or without."""
    manifest = preset("nano", ["stages.count=2"])
    worker = StageWorker(StageState(manifest, 0))
    shape = (manifest.batch.sequences_per_microbatch, manifest.model.sequence_length + 1)
    tokens = torch.zeros(shape, dtype=torch.int64)
    split = TimeSplit()

    def work() -> None:
        for _ in range(2):
            if watched:  # forward and backward: queued, taken, ended; one call of the next stage
                for _ in range(2):
                    split.begin(Part.QUEUE)
                    split.take()
                    split.end(Part.COMPUTE)
                with split.during(Part.WIRE):
                    pass
            done = worker.forward(tokens, None)
            worker.backward(done, torch.ones_like(done.result))

    return work


def main() -> None:
    options = parser(__doc__)
    options.add_argument("--seconds", type=float, default=60.0, help="how long the swarm is watched")
    options.add_argument("--window", type=float, default=5.0)
    options.add_argument("--every", type=float, default=5.0, help="seconds between two scrapes of a peer")
    options.add_argument("--rounds", type=int, default=15)
    arguments = options.parse_args()
    torch.set_num_threads(1)
    wall, processor = asyncio.run(watch_swarm(arguments.seconds, arguments.window, arguments.every))
    contestants = {"on": microbatch(True), "off": microbatch(False)}
    seconds = take_turns(contestants, arguments.rounds, time.process_time)
    figures = [
        figure("share of a peer's wall-clock", wall, 0.01, at_least=False),
        figure("share of a peer's processor time", processor, 0.01, at_least=False),
        figure("time split: speed on / off", speed_ratios(seconds, "on", "off"), 0.99),
    ]
    note = f"{len(wall)} windows of {arguments.window:g} s, metrics scraped every {arguments.every:g} s"
    report(figures, as_json=arguments.json, notes=[note])


if __name__ == "__main__":
    main()
