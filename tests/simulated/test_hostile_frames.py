"""Frames of the right form with a wrong content, from inside a running swarm: refused with a code, and the run goes on.

Bytes that are no frame at all are in tests/swarm/test_bad_input.py; honest peers that are mistaken in test_refusals.py.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import msgpack
import numpy as np
import pytest
import torch

from swarmtrain.chain.neighbours import stage_topic
from swarmtrain.chain.rebalancing import INTENT_TOPIC, MoveRules
from swarmtrain.codec import Direction, MessageContext, make_encoder, parse_spec
from swarmtrain.model.sizes import id_type
from swarmtrain.reduce.coding import stage_elements
from swarmtrain.rpc.errors import CallRefused
from swarmtrain.simulated.judge import References
from swarmtrain.simulated.swarm import Life, SimulatedSwarm
from swarmtrain.wire.messages import (
    Apply,
    AskMove,
    Code,
    FetchBasis,
    FetchDigests,
    FetchRun,
    FetchState,
    Heartbeat,
    Prepare,
    ReduceShare,
    Replay,
    RosterEntry,
    SeekStage,
    StealRequest,
    Work,
)
from swarmtrain.wire.peer_report import PeerReport
from swarmtrain.wire.records import pack_record
from swarmtrain.wire.schema import Message

from .conftest import Make
from .scenes import assert_reference, hold, release, tiny, wait_serving, wait_step

ANSWERED = "answered"


def outcomes(swarm: SimulatedSwarm, sender: Life, target: Life, messages: Sequence[Message]) -> list[str]:
    """What becomes of messages that one daemon's own host sends to another: the code of the refusal, or ANSWERED."""
    found: dict[int, str] = {}
    daemon = sender.daemon
    node = daemon.context.node if sender.stage < 0 else daemon.assignment.peer.node

    async def ask(number: int, message: Message) -> None:
        try:
            await node.call(target.peer_id, message, deadline_s=60.0)
            found[number] = ANSWERED
        except CallRefused as refusal:
            found[number] = refusal.code

    for number, message in enumerate(messages):
        sender.process.spawn(ask(number, message), f"a hostile message {number}")
    swarm.until(lambda: len(found) == len(messages), "all are answered")
    return [found[number] for number in range(len(messages))]


def assert_refused(swarm: SimulatedSwarm, sender: Life, target: Life, wrong: Sequence[tuple[Message, str]]) -> None:
    """Each with its code."""
    found = outcomes(swarm, sender, target, [message for message, _ in wrong])
    assert found == [str(code) for _, code in wrong]


def standing(simulated: Make, *overrides: str, held: int = 2) -> tuple[SimulatedSwarm, list[Life]]:
    """A run of three stages that stands still in step 1: one stage is paused, and takes nothing more."""
    swarm = simulated(tiny(*overrides))
    swarm.start_coordinator(min_peers=3)
    peers = [swarm.start_peer(f"peer{stage}", stage) for stage in range(3)]
    wait_serving(swarm, *peers)
    wait_step(swarm, 1)
    hold(peers[held])
    swarm.run_for(5.0)
    return swarm, peers


def go_on(swarm: SimulatedSwarm, references: References, held: Life) -> None:
    """The run ends as if nothing had been sent."""
    release(held)
    assert_reference(swarm, references)


def a_work(swarm: SimulatedSwarm, stage: int, boundary: torch.Tensor) -> Work:
    """Of the current step, for a microbatch that no peer has."""
    status, manifest = swarm.coordinator.status(), swarm.manifest
    encoder = make_encoder(parse_spec("fp32"), boundary=0, direction=Direction.FORWARD)
    payload = encoder.encode(boundary, MessageContext(0, Direction.FORWARD)).payload
    num_tokens = manifest.batch.sequences_per_microbatch * (manifest.model.sequence_length + 1)
    tokens = np.zeros(num_tokens, dtype=id_type(manifest.model.vocab_size)).tobytes()
    return Work(
        status["run"], status["term"], stage, status["step"], 5, manifest.basis_epoch(1), False, (), tokens, payload
    )


def test_work_that_is_no_microbatch_is_refused(simulated: Make, references: References) -> None:
    swarm, peers = standing(simulated, "model.vocab_size=300", held=0)
    zeros = torch.zeros(1, 16, 4)
    work = a_work(swarm, 1, zeros)
    beyond = np.full(len(work.tokens) // 2, 300, dtype=np.uint16).tobytes()
    broken = work.boundary[:-4] + np.array([np.nan], dtype="<f4").tobytes()
    wrong: list[tuple[Message, str]] = [
        (replace(work, microbatch=10**6), Code.BAD_TENSOR),
        (replace(work, tokens=work.tokens[:-1]), Code.BAD_TENSOR),
        (replace(work, tokens=beyond), Code.BAD_TENSOR),
        (replace(work, basis_epoch=10**6), Code.STALE_BASIS),
        (replace(work, boundary=b"no tensor"), Code.BAD_TENSOR),
        (replace(work, microbatch=4, boundary=broken), Code.BAD_TENSOR),
        (replace(work, boundary=b"no tensor", evaluate=True), Code.BAD_TENSOR),
    ]
    assert_refused(swarm, peers[0], peers[1], wrong)
    assert peers[1].status()["refused"][Code.BAD_TENSOR] == 6
    go_on(swarm, references, peers[0])


def test_questions_that_a_peer_cannot_answer_are_refused(simulated: Make, references: References) -> None:
    swarm, peers = standing(simulated, "boundary.track_every=2")
    status = swarm.coordinator.status()
    run, step = status["run"], status["step"]
    wrong: list[tuple[Message, str]] = [
        (FetchBasis("another", step), Code.WRONG_RUN),
        (FetchBasis(run, 10**6), Code.UNKNOWN),
        (FetchState(run, 1, step, 10**6), Code.UNKNOWN),
        (StealRequest("another", 1, 0.0, 1.0), ANSWERED),
        (StealRequest(run, 0, 0.0, 1.0), ANSWERED),
    ]
    found = outcomes(swarm, peers[0], peers[1], [message for message, _ in wrong])
    assert found[:3] == [str(code) for _, code in wrong[:3]]
    assert outcomes(swarm, peers[0], peers[1], [FetchBasis(run, step - 1)]) == [ANSWERED]
    go_on(swarm, references, peers[2])


def test_orders_that_do_not_fit_are_refused_even_from_the_coordinator(simulated: Make, references: References) -> None:
    """Only the coordinator may send them: from other peers they are refused before they are read."""
    swarm, peers = standing(simulated, "model.tie_embeddings=true")
    first, middle = peers[:2]
    status = swarm.coordinator.status()
    run, term, step = status["run"], status["term"], status["step"]
    layouts = [peer.daemon.assignment.stage.layout for peer in (first, middle)]
    sizes = [stage_elements(layout, compress=False) for layout in layouts]

    def entry(peer: Life, owned: int, incarnation: str = "", microbatches: bytes = b"") -> RosterEntry:
        return RosterEntry(peer.peer_id, incarnation or peer.daemon.assignment.peer.incarnation, microbatches, owned)

    attempt = 3  # of each of two groups, one was made in the first step
    fine = Prepare(run, term, 1, step, attempt, (entry(middle, sizes[1]),))
    twice = (entry(middle, sizes[1]), entry(middle, 0))
    middle_wrong: list[tuple[Message, str]] = [
        (replace(fine, roster=()), Code.BAD_ROSTER),
        (replace(fine, fused=(entry(middle, 1),)), Code.BAD_ROSTER),
        (replace(fine, roster=(entry(middle, sizes[1], microbatches=b"abc"),)), Code.BAD_ROSTER),
        (replace(fine, roster=twice), Code.BAD_ROSTER),
        (replace(fine, roster=(entry(middle, sizes[1], "another"),)), ANSWERED),  # Unprepared: it does not name it
        (replace(fine, attempt=0), Code.AHEAD),
        (Replay(run, term, step, 5, ()), Code.UNKNOWN),
        (Apply(run, term, step, "0" * 64, 1.0, 0.1, False), Code.UNPREPARED),
        (Apply(run, term, 0, "0" * 64, 1.0, 0.1, False), ANSWERED),  # as it did when it applied that step
        (Apply(run, term, step + 9, "0" * 64, 1.0, 0.1, False), Code.BEHIND),
    ]
    assert_refused(swarm, swarm.coordinator, middle, middle_wrong)
    fused = (entry(middle, layouts[0].num_fused),)
    missing = Prepare(run, term, 0, step, attempt, (entry(first, sizes[0]),), fused)
    assert_refused(swarm, swarm.coordinator, first, [(missing, Code.BAD_ROSTER)])
    assert outcomes(swarm, first, middle, [fine])[0] != ANSWERED  # not from another peer
    go_on(swarm, references, peers[2])


def test_questions_that_a_coordinator_cannot_answer_are_refused(simulated: Make, references: References) -> None:
    swarm, peers = standing(simulated, "checkpoint.every=1", "checkpoint.keep=2")
    coordinator = swarm.coordinator
    status = coordinator.status()
    run, saved = status["run"], status["checkpoint_step"]
    assert saved == 1
    sign = Heartbeat(run, PeerReport(0, "joining", "liar"), "liar")
    wrong: list[tuple[Message, str]] = [
        (FetchRun("another"), Code.WRONG_RUN),
        (replace(sign, run="another"), Code.WRONG_RUN),
        (replace(sign, report=replace(sign.report, stage=9)), Code.WRONG_STAGE),
        (SeekStage("another", (0,)), Code.WRONG_RUN),
        (SeekStage(run, (9,)), Code.WRONG_STAGE),
        (AskMove(run, 0, 0, 1), ANSWERED),  # "no": this run does not rebalance
        (FetchDigests(run, 0, 10**6), Code.UNKNOWN),
        (FetchDigests(run, 9, saved), Code.WRONG_STAGE),
        (FetchState(run, 0, saved, 10**6), Code.UNKNOWN),
        (FetchBasis(run, 0), Code.UNKNOWN),
    ]
    assert_refused(swarm, peers[0], coordinator, wrong)
    go_on(swarm, references, peers[2])


@pytest.mark.parametrize("broken", ["share", "answer"])
def test_a_share_that_is_none_costs_its_sender_the_attempt(
    simulated: Make, references: References, broken: str
) -> None:
    """Once: then the sender has mended itself, and the same step is prepared again."""
    swarm = simulated(tiny())
    swarm.start_coordinator(min_peers=4)
    peers = [swarm.start_peer(f"peer{number}", number % 3) for number in range(4)]
    wait_step(swarm, 1)
    node = peers[0].daemon.assignment.peer.node
    spoilt: list[str] = []
    call, handler = node.call, peers[0].daemon._handlers[ReduceShare]

    async def call_badly(peer_id: str, message: Message, *rest: Any, **options: Any) -> Message:
        if isinstance(message, ReduceShare) and len(message.values) and len(spoilt) < 2:
            values = b"abc" if not spoilt else np.full(len(message.values) // 5, np.nan).tobytes()
            spoilt.append("share")
            message = replace(message, values=values)
        return await call(peer_id, message, *rest, **options)

    async def answer_badly(part: ReduceShare, exchange: Any) -> Any:
        found = await handler(part, exchange)
        if spoilt:
            return found
        spoilt.append("answer")
        return replace(found, values=b"abc")

    if broken == "share":
        node.call = call_badly
    else:
        peers[0].daemon._handlers[ReduceShare] = answer_badly
    swarm.until(lambda: bool(spoilt), "something was spoilt")
    assert_reference(swarm, references)
    assert any(life.has("prepare_failed") for life in swarm.lives.values())


def test_records_that_say_nothing_are_as_good_as_absent(simulated: Make, references: References) -> None:
    """A peer of the first stage says that it is of the last one, in records that are none."""
    swarm = simulated(tiny("schedule.steps=12"))
    swarm.start_coordinator(min_peers=3, moves=MoveRules(look_s=0.5))
    peers = [swarm.start_peer(f"peer{stage}", stage, may_move=True) for stage in range(3)]
    wait_step(swarm, 1)
    liar, reader = peers[:2]
    directory = liar.daemon.assignment.dispatcher.neighbours._directory
    neighbours = reader.daemon.assignment.dispatcher.neighbours
    good = neighbours.reports[peers[2].peer_id]
    packed = pack_record(good)
    served = msgpack.packb(good.served_s)
    assert served in packed
    lies: list[Any] = [b"no record", b"", pack_record(replace(good, stage=1)), packed[:-1]]
    lies += [packed.replace(served, msgpack.packb(value)) for value in (-1.0, float("nan"), float("inf"))]
    read: list[Any] = []
    lookup = neighbours._directory.lookup

    async def note(topic: str) -> Any:
        found = await lookup(topic)
        if topic == stage_topic(2) and liar.peer_id in found:
            read.append(found[liar.peer_id].value)
        return found

    neighbours._directory.lookup = note
    for lie in lies:

        async def tell(value: Any = lie) -> None:
            await directory.announce(stage_topic(2), value, 10.0)
            await directory.announce(INTENT_TOPIC, b"no record", 10.0)

        hold(peers[2])
        liar.process.spawn(tell(), "a lie")
        swarm.until(lambda lie=lie: lie in read, f"{lie} was read")  # type: ignore[misc]
        assert liar.peer_id not in neighbours.reports
    release(peers[2])
    assert_reference(swarm, references)
