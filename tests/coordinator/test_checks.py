"""What follows from answers that cannot be right, from silence, and from leaving before one is checked."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from dataclasses import replace
from typing import Any, cast

import numpy as np
import pytest

from swarmtrain.chain.seals import ABSENT, Seal, packed, seal
from swarmtrain.coordinator.books import StepBooks
from swarmtrain.coordinator.check_policy import Break, Work
from swarmtrain.coordinator.checks import Checks
from swarmtrain.model.sizes import id_type
from swarmtrain.rpc.errors import CallRefused, CallTimeout
from swarmtrain.run.presets import preset
from swarmtrain.wire.messages import Check, Checked, FetchProof, FetchSeals, Hop, Seals, Way

from .contexts import bare_context, heartbeat

LAST = 2
LOSS = 2.5
NUM = 2


class Peers:
    """Three peers of each of three stages, whose books of a step balance; `answers` says otherwise, by kind."""

    def __init__(self) -> None:
        manifest = preset("nano", ["stages.count=3", "checks.share=1"])
        sampler: Any = type("Sampler", (), {"microbatch": lambda self, step, microbatch: np.zeros((1, 4))})()
        self.context = bare_context(manifest, node=cast(Any, self), sampler=sampler)
        self.books = self.context.books[0] = StepBooks(3, NUM)
        self.answers: dict[type, Callable[[str, Any], Any]] = {}
        self.asked: list[tuple[str, Any]] = []
        for stage in range(3):
            for name in "abc":
                self.context.members.heartbeat(f"{name}{stage}", heartbeat(stage, step=0), 0.0)
                self.context.members.admit(f"{name}{stage}")
        for microbatch in range(NUM):
            self.books.record(microbatch, LOSS, [Hop(stage, f"a{stage}", "1") for stage in range(3)])
        self.checks = Checks(self.context)

    async def call(self, peer_id: str, request: Any, deadline_s: float, on_progress: Any = None) -> Any:
        self.asked.append((peer_id, request))
        stage = request.stage
        if type(request) in self.answers and peer_id.startswith("a"):
            return self.answers[type(request)](peer_id, request)
        if isinstance(request, FetchSeals):
            num = len(request.microbatches) // 4
            return Seals(packed([honest(stage)] * num), np.full(num if stage == LAST else 0, LOSS).tobytes())
        assert isinstance(request, Check)
        return Checked(packed([honest(stage)] * len(request.cases)), "")

    def score(self, peer_id: str) -> float:
        return self.context.strikes.score(peer_id, asyncio.get_running_loop().time())


TOKENS = np.zeros((1, 4)).astype(id_type(preset("nano", []).model.vocab_size)).tobytes()


def honest(stage: int) -> Seal:
    """As a chain: what one stage has sent the next has received."""
    texts = [b"", b"one", b"two", b""]
    gradients = [b"", b"gradient of one", b"gradient of two", b""]
    loss = LOSS if stage == LAST else None
    return seal(TOKENS, texts[stage], texts[stage + 1], loss, gradients[stage + 1], gradients[stage])


def run(told: Callable[[Peers], Any]) -> None:
    async def main() -> None:
        async with asyncio.timeout(60.0):
            await told(Peers())

    asyncio.run(main())


def test_honest_seals_pass() -> None:
    async def told(peers: Peers) -> None:
        await peers.checks.look(0, peers.books)
        assert peers.context.checks.done == 3 * NUM
        assert peers.context.checks.mismatched == peers.context.checks.unanswered == 0
        assert all(map(peers.books.balances, range(3)))

    run(told)


@pytest.mark.parametrize("losses", [[], [LOSS], [LOSS] * 3, [7.0] * NUM, [float("nan")] * NUM])
def test_losses_that_are_not_those_of_the_seals_lose_their_peer_and_nothing_else(losses: list[float]) -> None:
    """One for each seal, and the sealed ones: nothing else could ever be settled."""

    async def told(peers: Peers) -> None:
        seals = packed([honest(LAST)] * NUM)
        peers.answers[FetchSeals] = lambda peer_id, request: (
            Seals(seals, np.array(losses, dtype="<f8").tobytes())
            if peer_id == "a2"
            else Seals(packed([honest(request.stage)] * NUM))
        )
        await peers.checks.look(0, peers.books)
        assert peers.context.members.get("a2") is None
        assert peers.books.losses == dict.fromkeys(range(NUM), LOSS)
        assert peers.score("a2") > 0 or "a2" in peers.context.standing.suspended

    run(told)


def test_who_seals_nothing_of_what_it_answers_for_is_left_out_in_the_end() -> None:
    """It could otherwise hold up a step for ever: what it has sealed as absent comes back from its ledger."""

    async def told(peers: Peers) -> None:
        peers.answers[FetchSeals] = lambda peer_id, request: Seals(
            packed([ABSENT if peer_id == "a0" else honest(request.stage)] * (len(request.microbatches) // 4)),
            np.full(NUM if request.stage == LAST else 0, LOSS).tobytes(),
        )
        for _ in range(4):
            for microbatch in range(NUM):
                peers.books.claim(microbatch, Hop(0, "a0", "1"))
            await peers.checks.look(0, peers.books)
        assert "a0" in peers.context.standing.suspended
        assert peers.context.members.get("a0") is None

    run(told)


@pytest.mark.parametrize("error", [CallRefused("closing"), CallTimeout("silent")])
def test_who_shows_no_proof_is_lost_and_not_excluded(error: Exception) -> None:
    """An honest peer may be about to leave. It does not stay as if nothing had been."""

    async def told(peers: Peers) -> None:
        def refuse(peer_id: str, request: Any) -> Any:
            raise error

        peers.answers[FetchSeals] = lambda peer_id, request: Seals(
            packed([replace(honest(request.stage), **({"received": bytes(16)} if peer_id == "a1" else {}))] * NUM),
            np.full(NUM if request.stage == LAST else 0, LOSS).tobytes(),
        )
        peers.answers[FetchProof] = refuse
        await peers.checks.look(0, peers.books)
        rosters = {stage: peers.books.roster(stage) for stage in range(3)}
        broken = peers.checks._broken(0, peers.books, rosters)
        assert broken[0] == [Break(0, 0, Way.FORWARD)]
        assert await peers.checks._settled(0, peers.books, rosters, broken[0][0]) is None
        assert peers.context.members.get("a1") is None
        assert peers.score("a1") > 0

    run(told)


def test_a_peer_that_leaves_after_it_has_sealed_is_checked_all_the_same() -> None:
    """What it has added is in the sum that is about to be decided."""

    async def told(peers: Peers) -> None:
        await peers.checks.look(0, peers.books)
        peers.context.members.remove("a1")
        work = Work(1, ("a1", "1"), (0,), adds_up=True)
        assert {member.peer_id for member in peers.checks._checkers(0, work)} == {"b1", "c1"}

    run(told)


def test_who_does_not_answer_as_a_checker_is_left_out_in_the_end() -> None:
    async def told(peers: Peers) -> None:
        def silent(peer_id: str, request: Any) -> Any:
            raise CallTimeout("silent")

        await peers.checks.look(0, peers.books)
        peers.answers[Check] = silent
        peers.asked.clear()
        request = Check("run", 1, 1, 0, (), b"", adds_up=False)
        member = peers.context.members.get("a1")
        assert member is not None
        for _ in range(6):
            assert await peers.checks._first_answer([member], request) is None
        assert "a1" in peers.context.standing.suspended
        assert len(peers.asked) == 4

    run(told)
