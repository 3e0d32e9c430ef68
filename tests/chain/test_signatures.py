"""A signature holds for one tensor of one microbatch in one round, and for its sender alone."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest

from swarmtrain.chain.signatures import Parcel
from swarmtrain.p2p.identity import Identity
from swarmtrain.wire.messages import Way

PARCEL = Parcel("run", 1, Way.FORWARD, 3, 7, 0, bytes(16))


def test_a_parcel_is_its_senders() -> None:
    sender, other = Identity(bytes(32)), Identity(bytes(31) + b"1")
    signature = sender.sign(PARCEL.statement())
    assert PARCEL.is_signed(sender.peer_id, signature)
    assert not PARCEL.is_signed(other.peer_id, signature)
    assert not PARCEL.is_signed(sender.peer_id, b"")
    assert not PARCEL.is_signed("nobody", signature)


@pytest.mark.parametrize(
    "changed",
    [
        {"run": "other"},
        {"stage": 2},
        {"way": Way.BACKWARD},
        {"step": 4},
        {"microbatch": 8},
        {"round": 1},
        {"digest": bytes(15) + b"1"},
    ],
)
def test_another_parcel_is_not_signed(changed: dict[str, Any]) -> None:
    sender = Identity(bytes(32))
    assert not replace(PARCEL, **changed).is_signed(sender.peer_id, sender.sign(PARCEL.statement()))
