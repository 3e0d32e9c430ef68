"""A real swarm of unequal machines on unequal links, against what is possible, the published router and the simulator.

Seven peers in three stages, real daemons. A peer's speed is set by SWARMTRAIN_PACE (its passes last at least so long;
the true computing is small beside it, so that the peers do not slow one another down on one machine), its link by
`--max-up` and `--max-down`, from 10 to 200 Mbit/s. Peers stay in their stages. In turn:
  ours / bound        tokens/s by predicted finish time, of the bound: the linear program of `swarmtrain sim` for peers
                      that stay where they are, steps and their ends left out
  ours / latency      against `--route swarm-latency`, the published wiring
  simulator / ours    the simulator with these machines, and with the steps that the real run has

A link that falls (--only falling): three stages, two equal peers in the middle, each behind a relay; the rate of one
falls to a tenth while a step is under way, so that it carries 0.57 of what its peer could compute.
  share after ten     of the microbatches from the tenth after the fall on, how many still went there, relative to its
                      share of what is left
  after / possible    microbatches/s of the following steps, of what the remaining links and machines allow
"""

from __future__ import annotations

import asyncio
import contextlib
import sqlite3
import statistics
import tempfile
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from common import Figure, figure, parser, progress, report
from shaped import LOOPBACK, Daemon, Relay, free_port

from swarmtrain.audit import audit
from swarmtrain.run.manifest import Manifest
from swarmtrain.run.presets import preset
from swarmtrain.sim.bound import Machine, StageKind, throughput_bound
from swarmtrain.sim.run import simulate
from swarmtrain.sim.scenario import PeerSpec, Scenario
from swarmtrain.units import MBIT

SHAPE = (
    "model.hidden_size=64",
    "model.num_layers=3",
    "model.num_heads=2",
    "model.num_kv_heads=2",
    "model.ffn_size=64",
    "model.sequence_length=256",
    "stages.count=3",
    "boundary.kind=dense",
    "batch.sequences_per_microbatch=4",
    "validation.every=0",
    "checkpoint.every=0",
)
NUM_STAGES = 3
BOUNDARY_BYTES = 4 * 256 * 64 * 4  # sequences, tokens, numbers, bytes


@dataclass(frozen=True)
class Peer:
    """`service_s`: both passes of one microbatch."""

    stage: int
    service_s: float
    mbit: float = 0.0
    relay_mbit: float = 0.0

    @property
    def pace(self) -> str:
        """As SWARMTRAIN_PACE; the last stage does both passes in one."""
        if self.stage == NUM_STAGES - 1:
            return f"{self.service_s}:0"
        return f"{self.service_s / 3}:{2 * self.service_s / 3}"

    @property
    def machine(self) -> Machine:
        rate = (self.mbit or self.relay_mbit or 1e4) * MBIT
        return Machine(1.0 / self.service_s, rate, rate)


MIXED = (
    Peer(0, 0.20, 200.0),
    Peer(0, 0.30, 50.0),
    Peer(1, 0.24, 100.0),
    Peer(1, 0.24, 10.0),  # its link carries 2.4 microbatches/s, its processor 4.2
    Peer(1, 0.48, 50.0),
    Peer(2, 0.20, 200.0),
    Peer(2, 0.30, 20.0),
)
FALLING = (
    Peer(0, 0.10),
    Peer(1, 0.30, relay_mbit=80.0),  # 19 microbatches/s, after the fall 1.9; its processor 3.3
    Peer(1, 0.30, relay_mbit=80.0),
    Peer(2, 0.10),
)


def bound(peers: Sequence[Peer]) -> float:
    """Microbatches/s: the weakest stage, each solved for its own peers."""
    rates = []
    for stage in range(NUM_STAGES):
        num_bytes = BOUNDARY_BYTES * ((stage > 0) + (stage < NUM_STAGES - 1))
        rates.append(
            throughput_bound([p.machine for p in peers if p.stage == stage], [StageKind(1.0, num_bytes, num_bytes)])
        )
    return min(rates)


class Swarm:
    """Coordinator and peers of one turn."""

    def __init__(self, place: Path, peers: Sequence[Peer], manifest: Manifest, route: str) -> None:
        self._place, self._peers, self._manifest, self._route = place, peers, manifest, route
        self._daemons: list[Daemon] = []
        self.relays: dict[int, Relay] = {}
        self.ids: list[str] = []

    async def start(self) -> Daemon:
        """Returns the coordinator."""
        place = self._place
        (place / "run.toml").write_text(self._manifest.canonical())
        head = await Daemon.start(
            *("coordinator", str(place / "run.toml"), "--state-dir", str(place / "c"), "--listen", f"{LOOPBACK}/0"),
            *("--min-peers", str(len(self._peers)), "--rebalance", "none"),
        )
        self._daemons.append(head)
        await head.until("phase_reached", phase="invite")
        invite = (place / "c" / "invite").read_text().strip()
        # libp2p uses a connection both ways: peers behind a relay are there first, so that all others
        # dial them through it.
        ids = {}
        for number in sorted(range(len(self._peers)), key=lambda number: not self._peers[number].relay_mbit):
            ids[number] = await self._start_peer(number, invite)
        self.ids = [ids[number] for number in range(len(self._peers))]
        return head

    async def _start_peer(self, number: int, invite: str) -> str:
        """Returns its id."""
        peer, port = self._peers[number], free_port()
        arguments = ["join", invite, "--stage", str(peer.stage), "--state-dir", str(self._place / f"p{number}")]
        arguments += ["--listen", f"{LOOPBACK}/{port}", "--threads", "1", "--route", self._route]
        if peer.mbit:
            arguments += ["--max-up", f"{peer.mbit:g}mbit", "--max-down", f"{peer.mbit:g}mbit"]
        if peer.relay_mbit:
            self.relays[number] = Relay(port, 0.0, peer.relay_mbit * MBIT)
            arguments += ["--announce", f"{LOOPBACK}/{await self.relays[number].start()}"]
        daemon = await Daemon.start(*arguments, "--enable-test-faults", SWARMTRAIN_PACE=peer.pace)
        self._daemons.append(daemon)
        peer_id: str = (await daemon.until("phase_reached", phase="identity"))["detail"]
        if peer.relay_mbit:
            await daemon.until("phase_reached", phase="fit")
        daemon.drop_events()
        return peer_id

    async def close(self) -> None:
        """End everything."""
        for daemon in self._daemons:
            await daemon.end()
        for relay in self.relays.values():
            await relay.close()


def mixed_manifest(microbatches: int, steps: int) -> Manifest:
    """`steps` that count, and one before them in which peers connect."""
    return preset("nano", [*SHAPE, f"batch.microbatches_per_step={microbatches}", f"schedule.steps={steps + 1}"])


async def microbatches_per_s(route: str, microbatches: int, steps: int) -> float:
    """One turn of the mixed swarm."""
    with tempfile.TemporaryDirectory(prefix="st-") as text:
        swarm = Swarm(Path(text), MIXED, mixed_manifest(microbatches, steps), route)
        try:
            head = await swarm.start()
            first = await head.until("step_applied", step=1)
            last = await head.until("step_applied", step=steps + 1)
            return microbatches * steps / float(last["at"] - first["at"])
        finally:
            await swarm.close()


def simulated(route: str, microbatches: int, seed: int) -> float:
    """The same machines, links and steps in the simulator."""
    layout = tuple(
        PeerSpec(m.speed, m.up_rate, m.down_rate, latency_s=0.0005, stage=p.stage) for p in MIXED for m in (p.machine,)
    )
    scenario = Scenario(
        num_peers=len(MIXED),
        num_stages=NUM_STAGES,
        minutes=6.0,
        warmup_minutes=1.0,
        seed=seed,
        layout=layout,
        compute_jitter=0.0,
        backbone_latency_s=0.0,
        boundary_bytes=BOUNDARY_BYTES,
        batch=microbatches,
        churn="none",
        routing=route,
        rebalance="none",
        job_order="backward-first",
        directory_period_s=15.0,
        record_life_s=50.0,
    )
    return simulate(scenario).throughput


async def mixed(rounds: int, microbatches: int, steps: int) -> tuple[list[Figure], list[str]]:
    """Ours and the published router in turn; the simulator of each once."""
    policies = ["finish-time", "swarm-latency"]
    rates: dict[str, list[float]] = {policy: [] for policy in policies}
    for number in range(rounds):
        for policy in policies if number % 2 == 0 else policies[::-1]:
            progress(f"mixed, round {number + 1} of {rounds}: {policy}")
            rates[policy].append(await microbatches_per_s(policy, microbatches, steps))
    possible = bound(MIXED)
    ours, theirs = rates["finish-time"], rates["swarm-latency"]
    models = {policy: statistics.median(simulated(policy, microbatches, seed) for seed in range(3)) for policy in rates}
    figures = [
        figure("ours / bound", [rate / possible for rate in ours], 0.85),
        figure("ours / latency-only", [a / b for a, b in zip(ours, theirs, strict=True)], 1.0),
        figure("simulator / ours, off by", [abs(models["finish-time"] / r - 1.0) for r in ours], 0.15, at_least=False),
        figure(
            "simulator / latency-only, off by",
            [abs(models["swarm-latency"] / rate - 1.0) for rate in theirs],
            0.15,
            at_least=False,
        ),
    ]
    notes = [f"bound: {possible:.2f} microbatches/s"]
    for policy, found in rates.items():
        notes.append(f"{policy}: {statistics.median(found):.2f} microbatches/s; simulated {models[policy]:.2f}")
    return figures, notes


def shares(journal: Path, step: int, peer: str, first: int) -> tuple[int, int]:
    """(of `peer`, of all) microbatches of a step in the middle stage, from `first` on."""
    with contextlib.closing(sqlite3.connect(f"file:{journal}?mode=ro", uri=True)) as database:
        rows = database.execute(
            "SELECT peer FROM entries WHERE step = ? AND stage = 1 AND microbatch >= ?", (step, first)
        ).fetchall()
    return sum(row[0] == peer for row in rows), len(rows)


async def fall(microbatches: int) -> tuple[float, float, str]:
    """One turn: (share after ten microbatches / fair share, throughput after / possible, a note)."""
    manifest = mixed_manifest(microbatches, 5)
    slow = Peer(1, 0.30, relay_mbit=FALLING[1].relay_mbit / 10)
    after = (FALLING[0], slow, *FALLING[2:])
    fair = min(1 / 0.30, slow.relay_mbit * MBIT / (2 * BOUNDARY_BYTES)) / bound(after)
    with tempfile.TemporaryDirectory(prefix="st-") as text:
        place = Path(text)
        swarm = Swarm(place, FALLING, manifest, "finish-time")
        try:
            head = await swarm.start()
            begun = await head.until("step_applied", step=1)
            second = await head.until("step_applied", step=2)
            await asyncio.sleep((second["at"] - begun["at"]) * 0.3)
            fallen_at = time.time()
            swarm.relays[1].bytes_per_s /= 10
            third = await head.until("step_applied", step=3)
            progress_at_fall = (fallen_at - second["at"]) / (second["at"] - begun["at"])
            first = round(progress_at_fall * microbatches) + 10
            last = await head.until("step_applied", step=6)
            rate = 3 * microbatches / float(last["at"] - third["at"])
            carried = swarm.relays[1].num_bytes
            # Microbatches of the third step (number 2), in the order in which they were leased.
            own, total = shares(place / "c" / "journal.sqlite", 2, swarm.ids[1], first)
        finally:
            await swarm.close()
        served = sum(shares(place / "c" / "journal.sqlite", step, swarm.ids[1], 0)[0] for step in range(6))
        books = audit(place / "c")  # lost or counted twice: neither is worth a figure
        assert books.passed, books.faults
    through = carried / (4 * BOUNDARY_BYTES * served)
    note = f"after the fall it got {own} of {total} (fair: {fair * total:.1f}); {through:.0%} of its bytes took it"
    note += f"; books: {books.num_entries} entries of {books.num_steps} steps balance"
    return (own / total) / fair, rate / bound(after), note


async def falling(rounds: int, microbatches: int) -> tuple[list[Figure], list[str]]:
    """Several falls."""
    found = []
    for number in range(rounds):
        progress(f"falling link, round {number + 1} of {rounds}")
        found.append(await fall(microbatches))
    return [
        figure("share after ten / fair share", [share for share, _, _ in found], 1.5, at_least=False),
        figure("after the fall / possible", [rate for _, rate, _ in found], 0.9),
    ], [note for _, _, note in found]


async def run(options: Any) -> tuple[list[Figure], list[str]]:
    """The chosen parts."""
    figures: list[Figure] = []
    notes: list[str] = []
    if options.only != "falling":
        figures, notes = await mixed(options.rounds, options.microbatches, options.steps)
    if options.only != "mixed":
        more, said = await falling(options.rounds, options.microbatches)
        figures, notes = figures + more, notes + said
    progress("")
    return figures, notes


def main() -> None:
    options = parser(__doc__)
    options.add_argument("--rounds", type=int, default=3)
    options.add_argument("--steps", type=int, default=2, help="steps of a turn that count")
    options.add_argument("--microbatches", type=int, default=160, help="per step")
    options.add_argument("--only", choices=["mixed", "falling"])
    chosen = options.parse_args()
    figures, notes = asyncio.run(run(chosen))
    report(figures, as_json=chosen.json, notes=notes)


if __name__ == "__main__":
    main()
