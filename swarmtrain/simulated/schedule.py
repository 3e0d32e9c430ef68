"""Schedules: a swarm and its faults, drawn from a seed. Plain data; executed by director.py."""

from __future__ import annotations

import random
from dataclasses import dataclass, field
from typing import Any

from swarmtrain.native.bf16 import has_bf16
from swarmtrain.run.manifest import Manifest
from swarmtrain.run.presets import preset

# A model whose step takes milliseconds of real time: a schedule costs mainly the daemons' own work.
TINY = (
    "model.vocab_size=256",
    "model.hidden_size=16",
    "model.num_heads=2",
    "model.num_kv_heads=1",
    "model.ffn_size=32",
    "model.sequence_length=16",
    "boundary.k=4",
    "batch.sequences_per_microbatch=1",
    "validation.every=0",
    "validation.microbatches=2",
    "schedule.warmup_steps=2",
)

# Stateless codecs: a swarm that uses them ends in the reference's bits. (forward, backward, boundary kind)
FORGETFUL = (
    ("fp32", "fp32", "subspace"),
    ("fp32", "fp32", "subspace"),
    ("fp32", "fp32", "dense"),
    ("bf16", "fp16", "subspace"),
    ("quant8", "quant4", "subspace"),
    ("topk20", "topk20", "dense"),
    ("raw", "raw", "projected"),
    ("fp32", "fp32", "learned"),
)
# Stateful codecs: another peer has other state, so only the books and the replicas must agree.
REMEMBERING = (
    ("ef-topk25", "topk25", "subspace"),
    ("ef21-quant4", "ef21-quant6", "dense"),
    ("aqsgd-quant4", "quant8", "subspace"),
    ("quant8", "lowrank2-lep", "subspace"),
)


@dataclass(frozen=True)
class Fault:
    """One fault: it strikes `target` `delay_s` after the run has reached `step`, and is undone after `length_s`."""

    kind: str
    step: int
    delay_s: float
    target: str = ""  # the name of a machine
    other: str = ""  # the name of another machine
    length_s: float = 0.0
    amount: float = 0.0
    point: str = ""
    nth: int = 1
    action: str = ""

    def __str__(self) -> str:
        words = [self.kind, self.target]
        words += [self.other] if self.other else []
        words += [f"{self.action} at {self.point} {self.nth}"] if self.point else []
        words += [f"by {self.amount:g}"] if self.amount else []
        words += [f"for {self.length_s:.2f} s"] if self.length_s else []
        return f"step {self.step} + {self.delay_s:.3f} s: {' '.join(words)}"


@dataclass(frozen=True)
class Schedule:
    """One simulated run."""

    seed: int
    overrides: tuple[str, ...]  # of the tiny manifest
    num_peers: int
    faults: tuple[Fault, ...]
    speeds: tuple[float, ...]  # of the peers' machines
    delay_s: float  # of lines
    moves: bool = False  # peers may move to other stages
    is_exact: bool = True  # ends in the reference's bits
    extra: dict[str, Any] = field(default_factory=dict)

    def manifest(self) -> Manifest:
        """The manifest that is trained."""
        return preset("nano", [*TINY, *self.overrides])


PEER_POINTS = (
    "before-forward",
    "after-forward",
    "before-backward",
    "before-answer",
    "in-steal",
    "stolen-work",
    "in-prepare",
    "before-apply",
    "after-apply",
    "state-chunk",
)
COORDINATOR_POINTS = ("before-decision", "after-decision", "after-step", "checkpoint-write")
# How often each kind is drawn.
KINDS = {
    "kill": 5,
    "restart": 2,
    "point": 8,
    "power-loss": 2,
    "stop": 3,
    "drain": 2,
    "pause": 2,
    "join": 3,
    "cut": 3,
    "cut-pair": 2,
    "flip": 3,
    "corrupt": 2,
    "partition": 2,
    "one-way": 2,
    "slow-line": 2,
    "transport": 2,
    "clock": 2,
    "hang": 1,
    "empty-stage": 1,
    "coordinator-kill": 2,
    "coordinator-restart": 1,
    "coordinator-point": 3,
    "coordinator-power-loss": 2,
    "coordinator-stop": 1,
    "coordinator-transport": 1,
    "disk-full": 1,
    "disk-slow": 1,
}


def draw(seed: int, *, standard: bool = False) -> Schedule:
    """The schedule of a seed. `standard`: always four stages, eight peers, six steps and ten faults."""
    rng = random.Random(f"schedule:{seed}")
    num_stages = 4 if standard else rng.choice((2, 2, 3, 3, 4, 4, 4, 5, 6))
    num_peers = 8 if standard else rng.randint(num_stages, min(12, 3 * num_stages))
    num_steps = 6 if standard else rng.randint(3, 7)
    remembers = not standard and rng.random() < 0.12
    forward, backward, kind = rng.choice(REMEMBERING if remembers else FORGETFUL)
    reduce = "none" if standard else rng.choice(("none", "none", "none", "none", "bf16", "int8"))
    tied = not standard and kind == "dense" and rng.random() < 0.4
    overrides = [
        f"stages.count={num_stages}",
        f"model.num_layers={num_stages}",
        f"batch.microbatches_per_step={rng.choice((3, 4, 6, 6))}",
        f"schedule.steps={num_steps}",
        f"checkpoint.every={rng.choice((0, 1, 2, 3))}",
        f"wire.forward={forward}",
        f"wire.backward={backward}",
        f"boundary.kind={kind}",
        f"reduce.codec={reduce}",
    ]
    overrides += ["model.tie_embeddings=true"] if tied else []
    may_track = kind == "subspace" and reduce == "none" and not remembers
    overrides += ["boundary.track_every=2"] if may_track and rng.random() < 0.2 else []
    # Drawn separately, so that a seed still means the same faults.
    is_muon = not standard and random.Random(f"optimizer:{seed}").random() < 0.3
    overrides += ["optimizer.kind=muon", "optimizer.learning_rate=0.02"] if is_muon else []
    overrides += [] if standard else _delay(random.Random(f"delay:{seed}"))
    overrides += [] if standard else _arithmetic(random.Random(f"arithmetic:{seed}"), kind)
    overrides += [] if standard or remembers else _checks(random.Random(f"checks:{seed}"))
    num_faults = 10 if standard else rng.choice((0, 1, 2, 3, 5, 8, 10, 12))
    peers = [f"peer{index}" for index in range(num_peers)]
    faults = sorted(
        (_fault(rng, peers, num_stages, num_steps) for _ in range(num_faults)),
        key=lambda item: (item.step, item.delay_s),
    )
    return Schedule(
        seed=seed,
        overrides=tuple(overrides),
        num_peers=num_peers,
        faults=tuple(sorted(faults, key=lambda item: (item.step, item.delay_s))),
        speeds=tuple(rng.choice((1.0, 1.0, 0.5, 0.25, 2.0, 0.1)) for _ in peers),
        delay_s=rng.choice((0.001, 0.005, 0.02, 0.08)),
        moves=not standard and num_peers > num_stages + 1 and rng.random() < 0.15,
        is_exact=not remembers and reduce == "none",
    )


def _delay(rng: random.Random) -> list[str]:
    """Half of all schedules have two steps open."""
    if rng.random() < 0.5:
        return []
    found = ["schedule.delay=1", f"schedule.predict={str(rng.random() < 0.4).lower()}"]
    return [*found, f"schedule.delay_from={rng.choice((0, 0, 0, 2))}"]


def _arithmetic(rng: random.Random, kind: str) -> list[str]:
    """A token table of signs, and where this machine has it and the boundary allows it, bf16."""
    has_signs, is_rounded = rng.random() < 0.3, rng.random() < 0.25
    found = ["boundary.table=signs"] if has_signs else []
    return [*found, "model.precision=bf16"] if is_rounded and kind != "projected" and has_bf16() else found


def _checks(rng: random.Random) -> list[str]:
    """In a third of all schedules peers check each other, more than in any real run."""
    return [f"checks.share={rng.choice((0.1, 0.4, 1.0))}"] if rng.random() < 0.34 else []


def _fault(rng: random.Random, peers: list[str], num_stages: int, num_steps: int) -> Fault:
    (kind,) = rng.choices(list(KINDS), weights=list(KINDS.values()))
    daemons = ["coordinator", *peers]
    target, other = rng.choice(peers), ""
    fault = Fault(kind, rng.randrange(num_steps), rng.choice((0.0, rng.random() * 0.1, rng.random(), 3 * rng.random())))
    length_s = rng.choice((0.2, 1.0, 4.0, 7.0, 12.0, 25.0)) * rng.uniform(0.5, 1.5)
    changes: dict[str, Any] = {"target": target, "length_s": length_s}
    if kind in ("point", "coordinator-point"):
        is_peer = kind == "point"
        changes |= {"target": target if is_peer else "coordinator", "nth": rng.randint(1, 4)}
        changes["point"] = rng.choice(PEER_POINTS if is_peer else COORDINATOR_POINTS)
        changes["action"] = rng.choice(("kill", "kill", "stop", "cut", "cut") if is_peer else ("kill", "kill", "cut"))
    elif kind == "corrupt":  # must be visible in a digest: a case that needs a majority of replicas is not promised
        changes |= {"point": "state-chunk", "nth": rng.randint(1, 3), "action": "corrupt"}
    elif kind == "join":
        changes |= {"target": f"stage{rng.randrange(num_stages)}", "length_s": 0.0}
    elif kind == "empty-stage":
        changes["target"] = f"stage{rng.randrange(num_stages)}"
    elif kind in ("cut-pair", "one-way", "slow-line"):
        target, other = rng.sample(daemons, 2)
        changes |= {"target": target, "other": other}
        changes |= {"amount": rng.choice((20e3, 100e3))} if kind == "slow-line" else {}
    elif kind in ("cut", "flip", "transport"):
        changes["target"] = rng.choice(daemons)
        changes |= {"amount": float(rng.choice((1, 4, 12)))} if kind == "flip" else {}
    elif kind == "partition":
        changes |= {"amount": float(rng.getrandbits(len(daemons)))}
    elif kind == "clock":
        changes |= {"target": rng.choice(daemons), "amount": rng.choice((-3600.0, -30.0, -2.0, 2.0, 30.0, 3600.0))}
    elif kind == "coordinator-power-loss":
        changes |= {
            "target": "coordinator",
            "amount": float(rng.random() < 0.5),
        }  # do unsynced changes survive in part
        changes |= {"point": "sync", "nth": rng.randint(0, 9), "action": "power-loss"} if rng.random() < 0.6 else {}
    elif kind.startswith("coordinator") or kind.startswith("disk"):
        changes["target"] = "coordinator"
    return Fault(**{**vars(fault), **changes})
