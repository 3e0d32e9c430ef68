"""Who of several owners of one range is alone with its sum, and how ownership moves on."""

from __future__ import annotations

import asyncio
from types import SimpleNamespace
from typing import Any, cast

from swarmtrain.coordinator.books import StepBooks
from swarmtrain.coordinator.owners import Added, Owners, odd_owners
from swarmtrain.coordinator.prepare import PreparedStage, _turned
from swarmtrain.reduce.groups import Place
from swarmtrain.run.presets import preset
from swarmtrain.wire.messages import Prepare, RosterEntry

from .contexts import bare_context

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


def test_a_step_does_not_hang_on_sums_that_differ_each_time() -> None:
    """Who sends shares can change them at every attempt: nobody is alone then, and no further attempt would tell."""
    names = "abc"
    roster = tuple(RosterEntry(name, "1", b"", 10) for name in names)
    request = Prepare("run", 1, 0, 0, 1, roster, ())
    num_prepared = 0

    def prepared() -> PreparedStage:
        nonlocal num_prepared
        num_prepared += 1
        ranges = bytes((num_prepared,)) * 48
        return PreparedStage(0, str(num_prepared), 1.0, (), {}, (), request, 0.0, ranges=(ranges,))

    async def prepare(step: int, group: tuple[int, ...], books: StepBooks, *, turn: int = 0) -> list[PreparedStage]:
        return [prepared()]

    async def main() -> None:
        context = bare_context(preset("nano", ["checks.share=1"]))
        owners = Owners(context, cast(Any, SimpleNamespace(prepare=prepare)))
        assert await owners.confirmed(0, StepBooks(1, 1), [prepared()]) is None
        assert num_prepared == 4 - 1, "it was added up three times"
        last = prepared()
        assert await owners.confirmed(0, StepBooks(1, 1), [last]) == [last]
        assert not context.disowned

    asyncio.run(main())
