"""What is drawn, where seals do not meet, and who is alone among three."""

from __future__ import annotations

import random
from dataclasses import replace

import pytest

from swarmtrain.chain.seals import ABSENT, Seal, digest_of, packed, seal, sealed_loss, unpacked
from swarmtrain.coordinator.check_policy import Break, Draws, Finding, Made, breaks, judged, what_differs
from swarmtrain.coordinator.rounds import Rounds
from swarmtrain.wire.messages import Way

TOKENS = b"tokens"


def route() -> list[Seal]:
    """Three honest stages."""
    return [
        seal(TOKENS, b"", b"one", None, b"gradient of one", b""),
        seal(TOKENS, b"one", b"two", None, b"gradient of two", b"gradient of one"),
        seal(TOKENS, b"two", b"", 2.5, b"", b"gradient of two"),
    ]


def found(seals: list[Seal | None]) -> list[Break]:
    return breaks(4, seals, digest_of(TOKENS, b""))


def test_an_honest_route_is_a_chain() -> None:
    assert found([*route()]) == []
    assert found([route()[0], None, route()[2]]) == []


@pytest.mark.parametrize(
    ("stage", "changed", "lower", "way"),
    [
        (0, "received", -1, Way.FORWARD),
        (0, "sent", 0, Way.FORWARD),
        (1, "received", 0, Way.FORWARD),
        (1, "sent_gradient", 0, Way.BACKWARD),
        (1, "received_gradient", 1, Way.BACKWARD),
        (2, "received", 1, Way.FORWARD),
    ],
)
def test_a_changed_seal_breaks_the_chain_where_it_is(stage: int, changed: str, lower: int, way: Way) -> None:
    seals = route()
    seals[stage] = replace(seals[stage], **{changed: bytes(16)})
    assert found([*seals]) == [Break(4, lower, way)]


def test_other_tokens_break_the_chain() -> None:
    seals = route()
    seals[1] = seal(b"others", b"one", b"two", None, b"gradient of two", b"gradient of one")
    assert {item.lower for item in found([*seals])} == {0, 1}


def test_seals_travel_whole() -> None:
    assert unpacked(packed([*route(), ABSENT]), 4) == [*route(), ABSENT]
    with pytest.raises(ValueError, match="seals"):
        unpacked(packed(route()), 4)


def test_the_boundary_between_two_parts_is_sealed() -> None:
    assert digest_of(b"ab", b"c") != digest_of(b"a", b"bc") != digest_of(b"abc")
    assert sealed_loss(0.0) != sealed_loss(-0.0)


def test_half_of_the_share_goes_into_each_kind() -> None:
    draws, rng = Draws(0.2), random.Random(1)
    chance = draws.chance(1000, is_odd=False)
    assert chance == 0.1
    drawn = draws.single(range(10_000), chance, rng)
    assert 800 < len(drawn) < 1200


def test_new_and_odd_peers_are_drawn_more_often_and_never_more_than_always() -> None:
    draws = Draws(0.02)
    assert draws.chance(0, is_odd=False) == 1.0
    assert draws.chance(1, is_odd=False) == pytest.approx(5 * draws.chance(64, is_odd=False))
    assert draws.chance(64, is_odd=True) == pytest.approx(5 * draws.chance(64, is_odd=False))
    assert Draws(1.0).chance(1, is_odd=True) == 1.0
    assert Draws(0.0).chance(0, is_odd=True) == 0.0


def made(text: bytes, share: str = "") -> Made:
    return Made((seal(TOKENS, b"one", text, None, b"", b"gradient"),), share)


def test_who_is_alone_among_three_lies() -> None:
    assert judged(made(b"wrong"), made(b"right"), made(b"right")) is Finding.LIAR_IS_CHECKED
    assert judged(made(b"right"), made(b"wrong"), made(b"right")) is Finding.LIAR_IS_CHECKER
    assert judged(made(b"wrong"), made(b"other"), made(b"right")) is Finding.UNDECIDED


def test_what_was_received_does_not_matter_to_a_verdict() -> None:
    """Only what is made of it: a checker may have been given nothing that it needs not."""
    other = Made((replace(made(b"right").seals[0], received_gradient=bytes(16)),), "")
    assert made(b"right").differs(other) is None


def test_the_sentence_names_what_differs() -> None:
    assert what_differs(made(b"wrong"), made(b"right"), [7], is_last=False) == "its output for microbatch 7"
    assert what_differs(made(b"wrong"), made(b"right"), [7], is_last=True) == "its loss for microbatch 7"
    backward = Made((replace(made(b"right").seals[0], sent_gradient=bytes(16)),), "")
    assert what_differs(backward, made(b"right"), [7], is_last=False) == "its gradient for microbatch 7"
    sums = made(b"right", "a"), made(b"right", "b")
    assert what_differs(*sums, [7, 8], is_last=False) == "its sum of 2 microbatches"


def test_rounds_outlive_a_coordinator() -> None:
    saved: list[str] = []
    rounds = Rounds(saved.append)
    rounds.begin([(3, 1), (3, 2)])
    rounds.begin([(3, 1)])
    again = Rounds(saved.append, saved[-1])
    assert [again.of(3, i) for i in range(3)] == [0, 2, 1]
    assert len(again.packed({3})) == 2 * 16
    assert again.packed({4}) == b""
