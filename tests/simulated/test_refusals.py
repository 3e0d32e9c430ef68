"""Messages that are not for a peer are refused with a code, at once or when they cannot become right any more.

A hostile client with bytes of its own is in tests/swarm/test_bad_input.py; here an honest peer is mistaken.
"""

from __future__ import annotations

from dataclasses import replace

import torch

from swarmtrain.codec import Direction, MessageContext, make_encoder, parse_spec
from swarmtrain.rpc.errors import CallRefused
from swarmtrain.simulated.judge import References
from swarmtrain.wire.messages import Code, FetchDigests, FetchRun, FetchState, ReduceShare, Work
from swarmtrain.wire.schema import Message

from .conftest import Make
from .scenes import assert_reference, tiny, wait_step


def test_messages_of_another_run_stage_step_or_term_are_refused(simulated: Make, references: References) -> None:
    """All at once: some wait for seconds whether they become right. The run goes on to the same bits."""
    swarm = simulated(tiny())
    swarm.start_coordinator(min_peers=3)
    for stage in range(3):
        swarm.start_peer(f"peer{stage}", stage, speed=0.02)  # steps of minutes: nothing becomes right
    wait_step(swarm, 1)
    sender, target = swarm.peers[:2]
    encoder = make_encoder(parse_spec("fp32"), boundary=0, direction=Direction.FORWARD)
    boundary = encoder.encode(torch.zeros(1, 16, 4), MessageContext(0, Direction.FORWARD)).payload
    status = swarm.coordinator.status()
    work = Work(status["run"], status["term"], 1, 0, 0, 0, False, (), bytes(17), boundary)
    wrong: list[tuple[Message, Code]] = [
        (replace(work, run="another"), Code.WRONG_RUN),
        (replace(work, stage=2), Code.WRONG_STAGE),
        (replace(work, term=0), Code.OLD_TERM),
        (replace(work, term=2**39), Code.BEHIND),
        (work, Code.AHEAD),
        (replace(work, step=10**9), Code.BEHIND),
        (ReduceShare(work.run, work.term, 1, 10**9, 10**9, 0, b""), Code.UNKNOWN),
        (ReduceShare(work.run, 2**39, 1, 10**9, 10**9, 0, b""), Code.BEHIND),
        (FetchState(work.run, 1, 10**9, 0), Code.UNKNOWN),
        (FetchState(work.run, 2, 0, 0), Code.WRONG_STAGE),
        (FetchDigests("another", 1, 0), Code.WRONG_STAGE),
        (FetchRun(work.run), Code.NOT_SERVING),
    ]
    found: dict[int, str] = {}

    async def ask(number: int, message: Message) -> None:
        try:
            answer = await sender.daemon.assignment.peer.node.call(target.peer_id, message, deadline_s=120.0)
            found[number] = f"answered {answer.wire.kind}"
        except CallRefused as refusal:
            found[number] = refusal.code

    for number, (message, _) in enumerate(wrong):
        sender.process.spawn(ask(number, message), f"a wrong message {number}")
    swarm.until(lambda: len(found) == len(wrong), "all are refused")
    assert [found[number] for number in range(len(wrong))] == [str(code) for _, code in wrong]
    refused = target.status()["refused"]
    for code in (Code.WRONG_RUN, Code.WRONG_STAGE, Code.OLD_TERM, Code.BEHIND, Code.AHEAD, Code.UNKNOWN):
        assert refused[code] > 0
    assert_reference(swarm, references)
