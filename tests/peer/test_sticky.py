"""Differences to what one partner holds: made whole on arrival, refused by everybody else, never a wrong tensor."""

from __future__ import annotations

import pytest
import torch

from swarmtrain.codec import Direction, MessageContext, decode, needs_state
from swarmtrain.peer.codecs import BadTensor, WrongPartner
from swarmtrain.peer.jobs import StageJobs
from swarmtrain.peer.ledger import Entry, Raw
from swarmtrain.run.manifest import Manifest, parse_manifest

from .test_stage_jobs import jobs_of, manifest, tokens

__all__ = ["manifest"]  # a fixture
CONTEXT = MessageContext(0, Direction.FORWARD)
FORWARD = ("ef21-topk50", "aqsgd-quant4")


def sticky(base: Manifest, forward: str) -> Manifest:
    backward = "ef21-topk50" if forward.startswith("ef21") else "quant8"
    return parse_manifest(base.canonical(), [f"wire.forward={forward}", f"wire.backward={backward}"])


def tensor_of(raw: Raw) -> torch.Tensor:
    return decode(raw, CONTEXT).tensor


def sent(first: StageJobs, run: Manifest, microbatch: int, visit: int = 0) -> tuple[Entry, bytes, bytes]:
    """(the sender's entry, the difference for its partner, the same whole) of one microbatch."""
    entry = Entry(0, microbatch, tokens(run, visit), b"")
    outcome = first.forward(entry, 0, "partner")
    assert outcome.ticket is not None
    first.codecs.settle(Direction.FORWARD, outcome.ticket, delivered=True)
    return entry, outcome.sticky, outcome.payload


@pytest.mark.parametrize("forward", FORWARD)
def test_the_partner_gets_exactly_what_everybody_else_would_get_whole(manifest: Manifest, forward: str) -> None:
    run = sticky(manifest, forward)
    first, last = jobs_of(run, 0), jobs_of(run, 1)
    for microbatch in range(3):
        entry, difference, whole = sent(first, run, microbatch)
        assert needs_state(difference)
        assert not needs_state(whole)
        received = Entry(0, microbatch, entry.tokens, difference, caller="sender")
        last.codecs.take_boundary(received, 0, "sender")
        assert torch.equal(tensor_of(received.boundary), tensor_of(whole))
        assert entry.output == whole  # what a replay sends


@pytest.mark.parametrize("forward", FORWARD)
def test_a_wrong_partner_refuses_and_takes_the_whole_tensor(manifest: Manifest, forward: str) -> None:
    run = sticky(manifest, forward)
    first, partner, stranger = jobs_of(run, 0), jobs_of(run, 1), jobs_of(run, 1)
    entry, key, _ = sent(first, run, 0)
    partner.codecs.take_boundary(Entry(0, 0, entry.tokens, key), 0, "sender")
    entry, difference, whole = sent(first, run, 1)  # the same tokens again: now a difference
    received = Entry(0, 1, entry.tokens, difference)
    with pytest.raises(WrongPartner):
        stranger.codecs.take_boundary(received, 0, "sender")
    assert received.boundary == difference
    received.boundary = whole
    stranger.codecs.take_boundary(received, 0, "sender")
    assert torch.equal(tensor_of(received.boundary), tensor_of(whole))


def test_after_a_refusal_the_next_message_is_a_key_frame(manifest: Manifest) -> None:
    run = sticky(manifest, "ef21-topk50")
    first, stranger = jobs_of(run, 0), jobs_of(run, 1)
    sent(first, run, 0)
    entry = Entry(0, 1, tokens(run, 0), b"")
    outcome = first.forward(entry, 0, "partner")
    assert outcome.ticket is not None
    with pytest.raises(WrongPartner):
        stranger.codecs.take_boundary(Entry(0, 1, entry.tokens, outcome.sticky), 0, "sender")
    first.codecs.settle(Direction.FORWARD, outcome.ticket, delivered=False)
    entry, key, whole = sent(first, run, 2)
    received = Entry(0, 2, entry.tokens, key)
    stranger.codecs.take_boundary(received, 0, "sender")
    assert torch.equal(tensor_of(received.boundary), tensor_of(whole))


def test_a_sticky_gradient_is_for_its_caller_and_whole_for_the_others(manifest: Manifest) -> None:
    run = sticky(manifest, "ef21-topk50")
    first, last = jobs_of(run, 0), jobs_of(run, 1)
    for microbatch in range(2):
        entry, difference, _ = sent(first, run, microbatch)
        received = Entry(0, microbatch, entry.tokens, difference, caller="sender")
        last.codecs.take_boundary(received, 0, "sender")
        whole = last.forward(received, 0).payload
        assert received.sticky is not None
        first.check_gradient(entry, 0, received.sticky.payload)
        gradient = first.codecs.take_gradient(entry, 0, received.sticky.payload, "last")
        assert torch.equal(tensor_of(gradient), tensor_of(whole))
    stranger, difference_of_second = jobs_of(run, 0), received.sticky.payload
    with pytest.raises(WrongPartner):
        stranger.codecs.take_gradient(entry, 0, difference_of_second, "last")


def test_damaged_differences_are_bad_tensors(manifest: Manifest) -> None:
    run = sticky(manifest, "ef21-topk50")
    first, last = jobs_of(run, 0), jobs_of(run, 1)
    entry, difference, _ = sent(first, run, 0)
    for damaged in (difference[:-1], difference[:20], b"", bytes(100)):
        with pytest.raises(BadTensor):
            last.codecs.take_boundary(Entry(0, 0, entry.tokens, damaged), 0, "sender")


def test_validation_leaves_no_trace_in_what_codecs_remember(manifest: Manifest) -> None:
    run = sticky(manifest, "ef21-topk50")
    one, other = jobs_of(run, 0), jobs_of(run, 0)
    sent(one, run, 0)
    sent(other, run, 0)
    other.evaluate(tokens(run, 3), b"", 0, 7)
    assert sent(one, run, 1)[1] == sent(other, run, 1)[1]


def test_equal_sequences_of_a_microbatch_are_different_samples(manifest: Manifest) -> None:
    run = sticky(manifest, "aqsgd-quant4")
    first, last = jobs_of(run, 0), jobs_of(run, 1)
    row = tokens(run, 0)[: len(tokens(run, 0)) // run.batch.sequences_per_microbatch]
    entry = Entry(0, 0, row * run.batch.sequences_per_microbatch, b"")
    outcome = first.forward(entry, 0, "partner")
    received = Entry(0, 0, entry.tokens, outcome.sticky)
    last.codecs.take_boundary(received, 0, "sender")
    assert torch.equal(tensor_of(received.boundary), tensor_of(outcome.payload))
