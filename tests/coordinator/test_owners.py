"""Who of several owners of one range is alone with its sum, and how ownership moves on."""

from __future__ import annotations

from swarmtrain.coordinator.owners import Added, odd_owners
from swarmtrain.coordinator.prepare import _turned
from swarmtrain.reduce.groups import Place

RIGHT = [b"1", b"2", b"3"]
PLACES = [Place(0, 0, 50), Place(1, 0, 30), Place(2, 0, 20)]


def way(turn: int, liar: str = "") -> Added:
    names = ["a", "b", "c"]
    owners = tuple(names[(index - turn) % 3] for index in range(3))
    digests = tuple(b"x" if owner == liar else digest for owner, digest in zip(owners, RIGHT, strict=True))
    return Added(owners, digests)


def test_the_owner_that_is_alone_everywhere_is_odd() -> None:
    for liar in "abc":
        assert odd_owners([way(turn, liar) for turn in range(3)]) == {liar}
    assert odd_owners([way(turn) for turn in range(3)]) == set()


def test_where_all_differ_nobody_is_odd() -> None:
    ways = [Added((owner,), (owner.encode(),)) for owner in "abc"]
    assert odd_owners(ways) == set()


def test_ownership_moves_to_another_peer_and_ranges_stay() -> None:
    turned = [_turned(PLACES, turn, ()) for turn in range(3)]
    assert all([place.owned for place in places] == [50, 30, 20] for places in turned)
    owners = [[place.member for place in places] for places in turned]
    assert all(len({names[index] for names in owners}) == 3 for index in range(3))


def test_who_may_not_own_owns_nothing_and_stays_in_the_roster() -> None:
    places = _turned(PLACES, 0, {1})
    assert {place.member: place.owned for place in places} == {0: 50, 1: 0, 2: 50}
    assert [place.owned for place in _turned(PLACES, 0, {0, 1, 2})] == [50, 30, 20]


def test_several_groups_own_alike_and_are_left_as_they_are() -> None:
    places = [Place(0, 0, 100), Place(1, 1, 100)]
    assert _turned(places, 1, {0}) == places
