"""Numbers and accusations from a member that lies: none ends a daemon, none stops the run, and the liar is left out.

Mallory enrols with the public invite, does no work, and answers what it is asked as each test says. Every run
ends in the reference's bits.
"""

from __future__ import annotations

import asyncio
import math
from typing import Annotated

import numpy as np
import pytest

from swarmtrain.rpc.exchange import Exchange
from swarmtrain.simulated.judge import References
from swarmtrain.simulated.stranger import Answer, Stranger
from swarmtrain.simulated.swarm import SimulatedSwarm
from swarmtrain.wire.field_types import Digest
from swarmtrain.wire.messages import Acknowledged, Prepare, Prepared, Preparing, Unprepared
from swarmtrain.wire.schema import AllowNonFinite, Message, Priority, message

from .conftest import Make
from .scenes import (
    assert_reference,
    every_third,
    hold,
    release,
    restart_coordinator,
    said,
    tiny,
    wait_serving,
    wait_step,
)

STEPS = 6


def training(simulated: Make, *overrides: str) -> SimulatedSwarm:
    """Three stages, of which the middle one has two peers."""
    swarm = simulated(tiny(f"schedule.steps={STEPS}", *overrides))
    swarm.start_coordinator(min_peers=4)
    rates = {"max_up_bytes_per_s": 1e8, "max_down_bytes_per_s": 1e8}
    peers = [swarm.start_peer(f"peer{number}", stage, **rates) for number, stage in enumerate((0, 1, 2, 1))]
    wait_serving(swarm, *peers)
    return swarm


def enrolled(swarm: SimulatedSwarm, stage: int, lie: Answer, *, rate: float = 1.0) -> Stranger:
    """A member without work that plays its part in the all-reduce, and then lies. It has been asked at least once."""
    mallory = Stranger(swarm, "mallory")
    mallory.knows(*swarm.peers)

    async def answer(message: Prepare, exchange: Exchange) -> Message:
        await mallory.share_nothing(message)
        found = lie(message, exchange)
        return found if isinstance(found, Message) else await found

    mallory.answers[Prepare] = answer
    mallory.beat(stage, up_bytes_per_s=rate, down_bytes_per_s=rate)
    swarm.until(lambda: bool(mallory.heard), "it takes part")
    return mallory


@message(kind="prepared", priority=Priority.CONTROL)
class Unchecked(Message):
    """A `Prepared` whose sender has no limits."""

    squared_norm: Annotated[float, AllowNonFinite()]
    digest: Digest
    basis: Digest = ""


async def never(message: Prepare, exchange: Exchange) -> Message:
    """Silence."""
    await asyncio.Event().wait()
    raise AssertionError


async def always_busy(message: Prepare, exchange: Exchange) -> Message:
    """Reports that it moves bytes and computes, in turn, and is never done."""
    for count in range(10**6):
        exchange.progress(Preparing(count * 10**9, count % 2 == 0))
        await asyncio.sleep(1.0)
    raise AssertionError


LIES: dict[str, Answer] = {
    "a negative norm": lambda *_: Unchecked(-1.0, "x"),
    "a norm that is no number": lambda *_: Prepared(math.nan, "x"),
    "an infinite norm": lambda *_: Prepared(math.inf, "x"),
    "a huge norm": lambda *_: Prepared(1e99, "x"),
    "another sum": lambda *_: Prepared(1.0, "0"),
    "lacks what it never had": lambda *_: Unprepared(np.array([0], dtype="<u4").tobytes(), (), "?"),
    "lacks half a number": lambda *_: Unprepared(b"abc", (), "?"),
    "says nothing": lambda *_: Unprepared(b"", (), ""),
    "accuses everybody": lambda message, _: Unprepared(b"", tuple(e.peer_id for e in message.roster), "?"),
    "another kind of message": lambda *_: Acknowledged(""),
    "silence": never,
    "progress without end": always_busy,
    "accuses one": lambda message, _: Unprepared(b"", (message.roster[0].peer_id,), "?"),
}


@pytest.mark.parametrize("lie", every_third(LIES))
def test_a_member_that_lies_in_prepare_costs_attempts_and_is_left_out(
    simulated: Make, references: References, lie: str
) -> None:
    swarm = training(simulated)
    mallory = enrolled(swarm, 1, LIES[lie])
    assert_reference(swarm, references)
    assert said(swarm, "prepare_failed"), "it has cost something"
    lost = {event.as_dict()["peer"] for name in ("peer_suspended", "peer_lost") for event in said(swarm, name)}
    assert lost == {mallory.peer_id}
    assert len(mallory.heard) <= 4, "it is not asked again and again"


@pytest.mark.parametrize("lie", ["another sum", "silence"])
def test_a_member_that_announces_the_widest_line_and_takes_no_share_is_left_out(
    simulated: Make, references: References, lie: str
) -> None:
    """It refuses the shares of the part that it owns, and says that it has the sum, or nothing at all."""
    swarm = training(simulated)
    mallory = enrolled(swarm, 1, LIES[lie], rate=1e15)
    assert_reference(swarm, references)
    assert {event.as_dict()["peer"] for event in said(swarm, "peer_lost")} == {mallory.peer_id}


def test_newcomers_that_claim_a_later_step_do_not_end_the_coordinator(simulated: Make, references: References) -> None:
    """More of them than peers that have done the run's work, while it trains and when it is started again."""
    swarm = training(simulated)
    wait_step(swarm, 2)
    first = swarm.lives["peer0"]
    hold(first)
    for number in range(6):
        Stranger(swarm, f"mallory{number}").beat(1, step=10**6, state_term=10**6)
    swarm.run_for(10.0)
    assert swarm.coordinator.is_running, swarm.coordinator.errors
    swarm.coordinator.kill()
    restart_coordinator(swarm)
    swarm.run_for(20.0)
    assert swarm.coordinator.is_running, swarm.coordinator.errors
    release(first)
    assert_reference(swarm, references)
