"""Why am I idle: each cause from the facts that make it, and which one wins."""

from __future__ import annotations

from dataclasses import replace

import pytest

from swarmtrain.observe.activity import Cause, PeerFacts, explain

SERVING = PeerFacts("serving", stage=1, step=4, has_next=True, next_stage_peers=2)


@pytest.mark.parametrize(
    ("facts", "cause", "reason"),
    [
        (SERVING, Cause.NO_LEASE, "no work has come"),
        (replace(SERVING, num_open=1), Cause.WORKING, ""),
        (replace(SERVING, is_reducing=True), Cause.WORKING, ""),
        (
            replace(SERVING, is_prepared=True),
            Cause.STEP_END,
            "its part of step 5 is done; the other stages are not ready",
        ),
        (replace(SERVING, next_stage_peers=0), Cause.NEXT_STAGE_EMPTY, "stage 2 has no peers"),
        (replace(SERVING, num_open=3, next_stage_peers=0), Cause.NEXT_STAGE_EMPTY, "stage 2 has no peers"),
        (replace(SERVING, num_open=1, capped_by="the upload cap"), Cause.CAPPED, "the upload cap"),
        (replace(SERVING, coordinator_silent_s=11.0), Cause.COORDINATOR_AWAY, "the coordinator does not answer"),
        (replace(SERVING, state="paused"), Cause.PAUSED, "paused by its owner"),
        (replace(SERVING, state="syncing", sync_text="40 %"), Cause.SYNCING, "40 %"),
        (replace(SERVING, state="joining"), Cause.JOINING, "waiting for the coordinator's verdict"),
        (replace(SERVING, state="draining"), Cause.DRAINING, "finishing the step that it has work in"),
    ],
)
def test_each_cause(facts: PeerFacts, cause: Cause, reason: str) -> None:
    found = explain(facts)
    assert (found.cause, found.reason) == (cause, reason)
    assert found.next


def test_what_the_coordinator_says_explains_idleness() -> None:
    banned = replace(SERVING, is_banned=True, coordinator_says="calls to it failed")
    found = explain(banned)
    assert (found.cause, found.reason) == (Cause.BANNED, "calls to it failed")
    far = replace(SERVING, empty_stages=(3, 5), coordinator_says="stages 3 and 5 have no peers")
    found = explain(far)
    assert (found.cause, found.reason) == (Cause.NO_LEASE, "no work has come: stages 3 and 5 have no peers")
    near = replace(SERVING, empty_stages=(2,), coordinator_says="x")  # its directory still lists peers that have died
    assert explain(near).cause is Cause.NEXT_STAGE_EMPTY


def test_a_peer_that_computes_is_never_idle() -> None:
    obstacles = replace(SERVING, next_stage_peers=0, capped_by="x", is_banned=True)
    assert explain(obstacles).cause is Cause.BANNED
    assert explain(replace(obstacles, is_computing=True)).cause is Cause.WORKING


def test_the_owners_wish_comes_first() -> None:
    facts = replace(SERVING, state="paused", coordinator_silent_s=99.0, next_stage_peers=0)
    assert explain(facts).cause is Cause.PAUSED


@pytest.mark.parametrize("text", ["", "catching up", "stage 2 has no peers", "banned: calls to it failed"])
def test_sentences_are_shown_and_never_read(text: str) -> None:
    found = explain(replace(SERVING, coordinator_says=text))
    assert found.cause is Cause.NO_LEASE
    assert text in found.reason
