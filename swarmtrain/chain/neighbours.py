"""The peers of one stage, as the directory lists them, kept fresh for the callers of that stage."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Mapping

from swarmtrain import world
from swarmtrain.directory.directory import Directory, Record
from swarmtrain.errors import SwarmtrainError
from swarmtrain.model.workload import workload_of
from swarmtrain.p2p.network import NetworkHost
from swarmtrain.route.policies import RouterOptions
from swarmtrain.route.router import Router
from swarmtrain.route.views import LinkView, PeerView
from swarmtrain.rpc.node import Node
from swarmtrain.run.manifest import Manifest
from swarmtrain.waiting import wait_event
from swarmtrain.wire.peer_report import PeerReport
from swarmtrain.wire.records import parse_record

log = logging.getLogger(__name__)

FRESH_S = 3.0  # how often the directory is read while the stage has peers
EAGER_S = 0.5  # and while it has none
RECORD_LIFE_S = 50.0


def stage_topic(stage: int) -> str:
    """Where the peers of a stage announce themselves."""
    return f"stage.{stage}"


async def stage_reports(directory: Directory, stage: int) -> dict[str, PeerReport]:
    """What the peers of a stage publish of themselves, by peer id; without records that are none."""
    records = await directory.lookup(stage_topic(stage))
    found = {peer_id: report_in(record, stage) for peer_id, record in records.items()}
    return {peer_id: report for peer_id, report in found.items() if report is not None}


def report_in(record: Record, stage: int) -> PeerReport | None:
    """The report of a peer of `stage`; None for any other value."""
    report = parse_record(PeerReport, record.value)
    return report if report is not None and report.stage == stage else None


class Neighbours:
    """The peers of `stage`, and the router that chooses among them. `start` keeps both fresh until `close`."""

    def __init__(
        self,
        stage: int,
        host: NetworkHost,
        node: Node,
        directory: Directory,
        *,
        policy: str = "finish-time",
        options: RouterOptions | None = None,
    ) -> None:
        self.stage = stage
        self._host, self._node, self._directory = host, node, directory
        loop = asyncio.get_running_loop()
        self.router = Router(policy, clock=loop.time, rng=world.random(), options=options)
        self._task: asyncio.Task[None] | None = None
        self._wanted = asyncio.Event()
        self._changed = asyncio.Event()
        self._incarnations: dict[str, str] = {}
        self.reports: dict[str, PeerReport] = {}

    def start(self) -> None:
        """Begin to read the directory."""
        self._task = asyncio.create_task(self._keep_fresh(), name=f"neighbours of stage {self.stage}")

    async def close(self) -> None:
        """Stop reading."""
        if self._task is not None:
            self._task.cancel()
            await asyncio.gather(self._task, return_exceptions=True)

    async def wait_for_news(self, timeout_s: float) -> None:
        """Until the list changed, or `timeout_s`; asks for a fresh look at the directory."""
        self._changed.clear()
        self._wanted.set()
        await wait_event(self._changed, timeout_s)

    def observe_link(self, peer_id: str) -> None:
        """Give the router what the link meter knows."""
        estimate = self._node.estimate(peer_id)
        self.router.update_link(
            peer_id,
            LinkView(
                goodput_bytes_per_s=estimate.up_bytes_per_s or 0.0,
                rtt_s=estimate.rtt_s or 0.0,
                backlog_bytes=estimate.backlog_bytes,
                samples=1 if estimate.up_bytes_per_s else 0,
            ),
        )

    async def _keep_fresh(self) -> None:
        while True:
            try:
                self._take(await self._directory.lookup(stage_topic(self.stage)))
            except SwarmtrainError as error:
                log.debug("cannot read the directory: %s", error)
            self._wanted.clear()
            pause_s = FRESH_S if self.reports else EAGER_S
            if await wait_event(self._wanted, pause_s):
                await asyncio.sleep(EAGER_S / 2)  # many may want news at once

    def _take(self, found: Mapping[str, Record]) -> None:
        reports: dict[str, PeerReport] = {}
        views: list[PeerView] = []
        # Records expire by the swarm's time, which may be corrected; the router knows the loop's.
        ahead_s = self._directory.now() - asyncio.get_running_loop().time()
        for peer_id, record in found.items():
            report = report_in(record, self.stage)
            if report is None:
                continue
            reports[peer_id] = report
            if peer_id != self._host.peer_id:
                self._host.learn(report.addresses, of=peer_id)
            views.append(PeerView(peer_id, report, expires_at=record.expires_at - ahead_s))
        self.router.update_peers(views)
        incarnations = {peer_id: f"{item.incarnation}:{item.state}" for peer_id, item in reports.items()}
        for peer_id, incarnation in incarnations.items():
            if self._incarnations.get(peer_id) != incarnation:
                self._node.forgive(peer_id)  # it is back, or another process: what failed before says nothing
        if incarnations != self._incarnations:
            self._incarnations = incarnations
            self._changed.set()
        self.reports = reports


def router_options(manifest: Manifest, stage: int, up_bytes_per_s: float = 0.0) -> RouterOptions:
    """For callers of `stage`: what a peer of it receives and sends per microbatch, and the caller's own uplink.

    A peer whose announced links cannot carry that as fast as it computes is rated by them. How long a lossy
    codec's messages are is not known beforehand; then only what is measured counts.
    """
    wire = manifest.wire
    num_neighbours = (stage > 0) + (stage < manifest.stages.count - 1)
    is_plain = wire.forward == wire.backward == "fp32"
    num_bytes = num_neighbours * workload_of(manifest).boundary_bytes if is_plain else 0.0
    return RouterOptions(my_up_bytes_per_s=up_bytes_per_s, bytes_in=num_bytes, bytes_out=num_bytes)
