"""The peers of one stage, as the directory lists them, kept fresh for whoever calls that stage."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

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

log = logging.getLogger(__name__)

FRESH_S = 3.0  # how often the directory is read while the stage has peers
EAGER_S = 0.5  # and while it has none
RECORD_LIFE_S = 50.0
MAX_AMOUNT = 1e15  # of milliseconds, seconds, bytes per second
MAX_COUNT = 1 << 53  # of steps, and assignments, which begin at the clock's milliseconds


@dataclass(frozen=True, slots=True)
class PeerRecord:
    """What a serving peer announces under its stage's topic."""

    state: str
    step: int
    incarnation: str
    forward_ms: float
    backward_ms: float
    queue_ms: float
    up_bytes_per_s: float
    relayed: bool
    addresses: tuple[str, ...]
    pinned: bool = False  # never moves to another stage
    assignment: int = 0  # rises with every move: of two records of one peer the higher one counts
    served_s: float = 0.0  # for how long it has been serving this stage
    download_s: float = 0.0  # what fetching this stage's state took
    down_bytes_per_s: float = 0.0
    state_term: int = 0  # the coordinator's term in which it came to its state

    def as_value(self) -> dict[str, Any]:
        """The directory's form, short keys for small records."""
        return {
            "s": self.state,
            "t": self.step,
            "i": self.incarnation,
            "f": round(self.forward_ms, 3),
            "b": round(self.backward_ms, 3),
            "q": round(self.queue_ms, 3),
            "u": round(self.up_bytes_per_s),
            "r": self.relayed,
            "a": list(self.addresses),
            "p": self.pinned,
            "v": self.assignment,
            "n": round(self.served_s, 1),
            "d": round(self.download_s, 1),
            "w": round(self.down_bytes_per_s),
            "e": self.state_term,
        }

    @classmethod
    def from_value(cls, value: object) -> PeerRecord | None:
        """None for a record that is not of this form: it is then as good as absent."""
        if not isinstance(value, Mapping):
            return None
        try:
            return cls(
                state=_text(value["s"], 16),
                step=_count(value["t"]),
                incarnation=_text(value["i"], 32),
                forward_ms=_amount(value["f"]),
                backward_ms=_amount(value["b"]),
                queue_ms=_amount(value["q"]),
                up_bytes_per_s=_amount(value["u"]),
                relayed=_flag(value["r"]),
                addresses=tuple(_text(address, 256) for address in _sequence(value["a"])[:16]),
                pinned=_flag(value["p"]),
                assignment=_count(value["v"]),
                served_s=_amount(value["n"]),
                download_s=_amount(value["d"]),
                down_bytes_per_s=_amount(value["w"]),
                state_term=_count(value["e"]),
            )
        except (KeyError, ValueError):
            return None


def stage_topic(stage: int) -> str:
    """Where the peers of a stage announce themselves."""
    return f"stage.{stage}"


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
        self.records: dict[str, PeerRecord] = {}

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
            pause_s = FRESH_S if self.records else EAGER_S
            if await wait_event(self._wanted, pause_s):
                await asyncio.sleep(EAGER_S / 2)  # many may want news at once

    def _take(self, found: Mapping[str, Record]) -> None:
        records: dict[str, PeerRecord] = {}
        views: list[PeerView] = []
        # Records expire by the swarm's time, which may be corrected; the router knows the loop's.
        ahead_s = self._directory.now() - asyncio.get_running_loop().time()
        for peer_id, record in found.items():
            parsed = PeerRecord.from_value(record.value)
            if parsed is None:
                continue
            records[peer_id] = parsed
            if peer_id != self._host.peer_id:
                self._host.learn(parsed.addresses, of=peer_id)
            views.append(
                PeerView(
                    peer_id=peer_id,
                    stage=self.stage,
                    state=parsed.state,
                    step=parsed.step,
                    forward_ms=parsed.forward_ms,
                    backward_ms=parsed.backward_ms,
                    queue_ms=parsed.queue_ms,
                    up_bytes_per_s=parsed.up_bytes_per_s,
                    down_bytes_per_s=parsed.down_bytes_per_s,
                    relayed=parsed.relayed,
                    expires_at=record.expires_at - ahead_s,
                )
            )
        self.router.update_peers(views)
        incarnations = {peer_id: f"{item.incarnation}:{item.state}" for peer_id, item in records.items()}
        for peer_id, incarnation in incarnations.items():
            if self._incarnations.get(peer_id) != incarnation:
                self._node.forgive(peer_id)  # it is back, or another process: what failed before says nothing
        if incarnations != self._incarnations:
            self._incarnations = incarnations
            self._changed.set()
        self.records = records


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


def _amount(value: object) -> float:
    """A duration or a rate. Not-a-number compares as neither faster nor slower: the router must never see it."""
    if isinstance(value, bool) or not isinstance(value, int | float) or not 0.0 <= value < MAX_AMOUNT:
        raise ValueError("not an amount")
    return float(value)


def _count(value: object) -> int:
    if isinstance(value, bool) or not isinstance(value, int) or not 0 <= value < MAX_COUNT:
        raise ValueError("not a count")
    return value


def _flag(value: object) -> bool:
    if not isinstance(value, bool):
        raise ValueError("neither yes nor no")
    return value


def _sequence(value: object) -> Sequence[object]:
    if not isinstance(value, list | tuple):
        raise ValueError("not a list")
    return value


def _text(value: object, limit: int) -> str:
    if not isinstance(value, str) or len(value) > limit:
        raise ValueError("not a short text")
    return value
