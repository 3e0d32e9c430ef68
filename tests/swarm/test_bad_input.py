"""Bad input over the real network: typed refusals, counted, memory flat, and training goes on to the same bits."""

from __future__ import annotations

import asyncio
import random
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from swarmtrain.codec import Direction, MessageContext, make_encoder, parse_spec
from swarmtrain.codec.payload import Limits, seal, unseal
from swarmtrain.reference import ReferenceTrainer
from swarmtrain.wire import frames
from swarmtrain.wire.frames import FrameType
from swarmtrain.wire.messages import (
    Apply,
    Code,
    FetchDigests,
    FetchRun,
    FetchState,
    Heartbeat,
    Leave,
    Prepare,
    Replay,
    RosterEntry,
    Work,
)
from swarmtrain.wire.peer_report import PeerReport
from swarmtrain.wire.schema import Message

from .harness import PACE, Daemon, Swarm, tiny, until
from .intruder import Intruder, break_in, request

pytestmark = pytest.mark.swarm

# Ids of two bytes, so that there are ids beyond the vocabulary; checkpoints to compare at any time.
MANIFEST = tiny("model.vocab_size=300", "schedule.steps=100000", "checkpoint.every=5")
MIB = 1 << 20
ALLOWED_GROWTH = 64 * MIB  # a daemon's own ups and downs; the attacks claim terabytes
SHAPE = (2, 32, 8)  # sequences, tokens, k


@pytest.fixture(scope="module")
def swarm(shared_place: Path) -> Iterator[Swarm]:
    """A swarm that trains while it is being attacked, and leaves the attacks some of the processor."""
    with Swarm(MANIFEST, shared_place, num_peers=5, pace=PACE) as made:
        made.wait_step(2)
        yield made


def violations(daemon: Daemon) -> dict[str, int]:
    traffic = daemon.status()["traffic"]
    return {**traffic["violations"], "malformed": traffic["malformed"]}


def raw_attacks(hello: bytes = frames.pack_hello(b"", "")) -> dict[str, tuple[bytes, str]]:
    """Bytes, and under which name they must be counted."""
    big_chunk = frames.pack_header(FrameType.CHUNK, 1, 2**31, 0)
    damaged = bytearray(hello + request("fetch_run", 10, b"0123456789"))
    damaged[-1] ^= 1
    return {
        "random bytes": (random.Random(1).randbytes(100_000), "bad-magic"),
        "a web browser": (b"GET / HTTP/1.1\r\nHost: swarm\r\n\r\n" * 3, "bad-magic"),
        "no hello": (request("fetch_run", 10, b"0123456789"), "no-hello"),
        "a damaged header": (hello[:10] + b"\xff" + hello[11:], "bad-header"),
        "a huge chunk": (hello + big_chunk, "bad-header"),
        "a huge message": (hello + request("work", 2**62), "too-large"),
        "a message above its kind's limit": (hello + request("fetch_run", 300 * MIB), "too-large"),
        "an unknown kind": (hello + request("pickle", 10, b"0123456789"), "unknown-kind"),
        "a damaged payload": (bytes(damaged), "bad-checksum"),
    }


@pytest.mark.parametrize("name", raw_attacks())
def test_raw_bytes_close_the_stream_and_are_counted(swarm: Swarm, tmp_path: Path, name: str) -> None:
    violation = raw_attacks()[name][1]
    targets = [swarm.coordinator, swarm.peers[1]]
    before = [violations(target).get(violation, 0) for target in targets]

    async def attack(one: Intruder) -> None:
        for target in targets:
            await one.expect_end(target, raw_attacks(one.hello(target))[name][0])

    break_in(swarm, tmp_path, attack)
    for target, count in zip(targets, before, strict=True):
        until(lambda t=target, c=count: violations(t).get(violation, 0) > c, f"{violation} is counted")


def test_a_whole_message_of_garbage_is_refused_as_malformed(swarm: Swarm, tmp_path: Path) -> None:
    peer = swarm.peers[1]
    before = violations(peer)["malformed"]

    async def attack(one: Intruder) -> bytes:
        stream = await one.raw(peer)
        body = random.Random(2).randbytes(5000)
        stream.write(one.hello(peer) + request("work", len(body), body))
        while b"malformed" not in stream.received and not stream.ended.is_set():
            await one.host.connected_peers()  # a turn of the loop that takes a moment
        return bytes(stream.received)

    assert b"malformed" in break_in(swarm, tmp_path, attack)
    assert violations(peer)["malformed"] > before


def test_many_attacks_leave_memory_flat(swarm: Swarm, tmp_path: Path) -> None:
    targets = [swarm.coordinator, swarm.peers[1]]
    before = [target.rss_bytes() for target in targets]

    async def attack(one: Intruder) -> None:
        for number in range(18):
            for target in targets:
                stream = await one.raw(target)  # begun and cut off in the middle of a frame
                stream.write(one.hello(target) + request("work", 200 * MIB, bytes(200_000))[:-7])
                stream.abort()
                data, _ = list(raw_attacks(one.hello(target)).values())[number % 9]
                await one.expect_end(target, data)

    break_in(swarm, tmp_path, attack)
    for target, size in zip(targets, before, strict=True):
        until(lambda t=target, s=size: t.rss_bytes() < s + ALLOWED_GROWTH, "memory is back where it was", timeout_s=60)


def good_work(swarm: Swarm, stage: int, step: int) -> Work:
    """Work with which nothing is wrong but its sender."""
    encoder = make_encoder(parse_spec("fp32"), boundary=0, direction=Direction.FORWARD)
    encoded = encoder.encode(torch.zeros(SHAPE), MessageContext(0, Direction.FORWARD, step=step, microbatch=0))
    status = swarm.coordinator.status()
    return Work(
        run=status["run"],
        term=status["term"],
        stage=stage,
        step=step,
        microbatch=0,
        basis_epoch=0,
        evaluate=False,
        hints=(),
        tokens=np.zeros((2, 33), "<u2").tobytes(),
        boundary=encoded.payload,
    )


def roster(owned: int, count: int = 1) -> tuple[RosterEntry, ...]:
    return tuple(RosterEntry(f"peer{i}", "life", b"", owned) for i in range(count))


def test_only_the_coordinator_is_obeyed_whatever_term_is_claimed(swarm: Swarm, tmp_path: Path) -> None:
    run, term = swarm.coordinator.status()["run"], swarm.coordinator.status()["term"]
    before = swarm.coordinator.status()["step"]

    def orders(claimed: int) -> list[Message]:
        return [
            Leave(run, claimed, "go away"),
            Prepare(run, claimed, 0, before, 10**6, roster(100)),
            Prepare(run, claimed, 0, before, 10**6, roster(2**48, 4096)),
            Apply(run, claimed, before, "0" * 64, 1.0, 1.0, False),
            Replay(run, claimed, before, 0, ()),
            replace(good_work(swarm, 0, before + 1), term=claimed, boundary=b""),
        ]

    everything = [order for claimed in (term, 2**39) for order in orders(claimed)]

    async def attack(one: Intruder) -> list[str]:
        return [await one.refused(swarm.peers[0], order) for order in everything]

    assert set(break_in(swarm, tmp_path, attack)) == {Code.NOT_COORDINATOR}
    status = swarm.peers[0].status()
    assert status["refused"][Code.NOT_COORDINATOR] >= 12
    assert status["state"] == "serving"
    swarm.wait_step(swarm.coordinator.status()["step"] + 2)
    assert swarm.coordinator.status()["term"] == term


def changed_payloads() -> dict[str, bytes]:
    """Boundary tensors that are none of this run's."""

    def sealed(shape: tuple[int, ...]) -> bytes:
        encoder = make_encoder(parse_spec("fp32"), boundary=0, direction=Direction.FORWARD)
        context = MessageContext(0, Direction.FORWARD, step=0, microbatch=0)
        return bytes(encoder.encode(torch.zeros(shape), context).payload)

    good = sealed(SHAPE)
    header, body = unseal(good, Limits(max_elements=1 << 40))
    return {
        "nan": seal(header, np.full(len(body) // 4, np.nan, "<f4").tobytes()),
        "infinite": seal(header, np.full(len(body) // 4, np.inf, "<f4").tobytes()),
        "another shape": sealed((2, 31, 8)),
        "a huge shape": good[:24] + b"\xff" * 8 + good[32:],
        "cut off": good[:-1],
        "nothing": b"",
        "garbage": random.Random(3).randbytes(len(good)),
    }


def test_wrong_tensors_and_tokens_are_refused(swarm: Swarm, tmp_path: Path) -> None:
    peer, before = swarm.peers[1], swarm.peers[1].status()["refused"].get(Code.BAD_TENSOR, 0)
    beyond = np.full((2, 33), 300, "<u2").tobytes()
    changes: list[dict[str, Any]] = [{"boundary": payload} for payload in changed_payloads().values()]
    work = good_work(swarm, 1, 0)
    changes += [{"tokens": beyond}, {"tokens": b"\0" * 131}, {"tokens": b""}, {"microbatch": 1000}]

    async def attack(one: Intruder) -> list[str]:
        codes = []
        for change in changes:
            code: str = Code.AHEAD
            while code in (Code.AHEAD, Code.BEHIND) or code.startswith("answered"):  # the honest one was there first
                status = await asyncio.to_thread(peer.status)
                code = await one.refused(peer, replace(work, step=status["step"] + 1, **change))
            codes.append(code)
        return codes

    assert break_in(swarm, tmp_path, attack) == [Code.BAD_TENSOR] * len(changes)
    assert peer.status()["refused"][Code.BAD_TENSOR] >= before + len(changes)


def heartbeat(run: str, stage: int) -> Heartbeat:
    return Heartbeat(run, PeerReport(stage, "serving", "life"), "intruder")


def test_the_coordinator_refuses_what_is_not_for_it(swarm: Swarm, tmp_path: Path) -> None:
    run = swarm.coordinator.status()["run"]
    wrong: list[tuple[Message, Code]] = [
        (heartbeat("another", 0), Code.WRONG_RUN),
        (heartbeat(run, 4), Code.WRONG_STAGE),
        (FetchRun("another"), Code.WRONG_RUN),
        (good_work(swarm, 0, 0), Code.UNKNOWN),
        (Leave(run, 2**39, "stop"), Code.UNKNOWN),
        (FetchState(run, 0, 10**9, 0), Code.UNKNOWN),
        (FetchDigests(run, 1023, 10**9), Code.UNKNOWN),
    ]

    async def attack(one: Intruder) -> list[str]:
        return [await one.refused(swarm.coordinator, message) for message, _ in wrong]

    assert break_in(swarm, tmp_path, attack) == [str(code) for _, code in wrong]
    refused = swarm.coordinator.status()["refused"]
    assert refused[Code.WRONG_RUN] >= 2
    assert refused[Code.UNKNOWN] >= 4


def test_after_all_of_it_the_run_has_the_references_bits(swarm: Swarm) -> None:
    swarm.wait_step(swarm.coordinator.status()["step"] + 6)  # past another checkpoint
    for peer in swarm.peers:
        assert peer.is_running
        assert peer.phases()[-1] == "serving"
    assert swarm.coordinator.end() == 0
    checkpoint = swarm.checkpoint()
    trainer = ReferenceTrainer(MANIFEST)
    losses = [trainer.step()[0] for _ in range(checkpoint.step)]
    assert [worker.state.digest() for worker in trainer.workers] == [item.state_digest for item in checkpoint.stages]
    assert swarm.losses()[: checkpoint.step] == losses
    assert not swarm.events("run_rolled_back")
    found = swarm.audit()
    assert found.passed, found.faults
