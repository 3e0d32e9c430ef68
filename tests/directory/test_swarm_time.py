"""Whose time counts: that of the largest group that agrees."""

from __future__ import annotations

import time

import pytest
from rpc.helpers import run

from swarmtrain.directory.swarm_time import SwarmClock, agreed_shift

from .test_directory import QUICK, crowd, join


@pytest.mark.parametrize(
    ("offsets", "shift", "shift_if_it_came_later"),
    [
        ([], 0, 0),
        ([1.0, -2.0], 0, 0),
        ([3600.0], 0, 3600),  # alone with one other: the one that came later goes by the other's
        ([3600.0, 3601.0], 3600, 3600),
        ([0.0, 3600.0], 0, 0),
        ([0.0, 3600.0, 3600.0], 0, 3600),
        ([0.0, 3600.0, 3600.0, 3600.0], 3600, 3600),
        ([-3600.0, 3600.0, 7200.0], 0, -3600),  # nobody agrees with anybody
    ],
)
def test_the_largest_group_counts(offsets: list[float], shift: float, shift_if_it_came_later: float) -> None:
    assert agreed_shift(offsets, yields=False) == pytest.approx(shift, abs=1.5)
    assert agreed_shift(offsets, yields=True) == pytest.approx(shift_if_it_came_later, abs=1.5)


def test_who_comes_with_another_time_goes_by_the_others_and_is_found(monkeypatch: pytest.MonkeyPatch) -> None:
    async def main() -> None:
        async with crowd(3) as (network, members, directories):
            wall = time.time
            monkeypatch.setattr(time, "time", lambda: wall() - 3600)
            directory = await join(network.host(members[0]), **QUICK)
            monkeypatch.undo()
            assert abs(directory.now() - wall()) < 2
            await directory.announce("peers", b"x", 30.0)
            found = await directories[2].lookup("peers")
            assert directory._host.peer_id in found
            await directory.close()

    run(main())


def test_setting_the_machines_clock_changes_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    clock, wall = SwarmClock(), time.time
    monkeypatch.setattr(time, "time", lambda: wall() + 3600)
    assert abs(clock() - wall()) < 1
    assert clock.wall_offset_s == pytest.approx(-3600, abs=1)
