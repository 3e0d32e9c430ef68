"""Members made from directory records, and intents: what others write there is taken as far as it makes sense."""

from __future__ import annotations

from dataclasses import replace

import pytest

from swarmtrain.chain.rebalancing import Costs, MoveIntent, intent_of, members_of, with_known_speeds
from swarmtrain.route.moves import Intent
from swarmtrain.route.rebalance import PeerCapacity, plan_moves
from swarmtrain.run.presets import preset
from swarmtrain.wire.peer_report import PeerReport
from swarmtrain.wire.records import pack_record

REPORT = PeerReport(0, "serving", "life", 7, forward_ms=100.0, backward_ms=100.0, served_s=90.0)
COSTS = Costs((1.0, 2.0), boundary_bytes=1000.0)


def test_a_speed_in_one_stage_says_what_a_peer_is_worth_in_another() -> None:
    (cheap, costly) = members_of([{"a": REPORT}, {"b": REPORT}], COSTS, now=100.0)
    assert cheap.rate(1.0) == pytest.approx(5.0)
    assert cheap.rate(2.0) == pytest.approx(2.5)
    assert costly.rate(2.0) == pytest.approx(5.0), "as fast in the stage that costs twice as much"
    assert cheap.since == 10.0


def test_of_two_records_of_one_peer_the_newer_seat_counts() -> None:
    moved = replace(REPORT, assignment=2)
    former = replace(REPORT, assignment=1, state="draining")
    for records in ([{"a": former}, {"a": moved}], [{"a": moved}, {"a": former}]):
        (member,) = members_of(records, COSTS, now=0.0)
        assert member.state == "serving"
        assert member.stage == records.index({"a": moved})


def test_who_has_not_computed_yet_counts_as_usual() -> None:
    fresh = replace(REPORT, forward_ms=0.0, backward_ms=0.0)
    members = members_of([{"a": REPORT, "b": fresh}, {}], COSTS, now=0.0)
    assert {member.speed for member in members} == {5.0}
    assert with_known_speeds([PeerCapacity("a", 0, 0.0)])[0].speed == 1.0


@pytest.mark.parametrize(("up", "down"), [(2000.0, 0.0), (0.0, 2000.0), (2000.0, 9000.0), (9000.0, 2000.0)])
def test_the_narrower_announced_link_limits_what_a_peer_is_worth(up: float, down: float) -> None:
    (free,) = members_of([{"a": REPORT}, {}], COSTS, now=0.0)
    capped = replace(REPORT, up_bytes_per_s=up, down_bytes_per_s=down)
    (member,) = members_of([{"a": capped}, {}], COSTS, now=0.0)
    assert member.rate(1.0) == pytest.approx(1.0)
    assert free.rate(1.0) > 4.0


def test_pinned_peers_stay_and_others_go() -> None:
    crowd = dict.fromkeys("abcd", REPORT)
    members = members_of([crowd, {"e": REPORT}], COSTS, now=1000.0)
    (move,) = plan_moves(members, (1.0, 1.0), 1000.0)
    assert (move.source, move.target) == (0, 1)
    pinned = {name: replace(REPORT, pinned=True) for name in "abcd"}
    assert plan_moves(members_of([pinned, {"e": REPORT}], COSTS, now=1000.0), (1.0, 1.0), 1000.0) == []


def test_intents_survive_the_directory_and_nonsense_does_not() -> None:
    intent = Intent("a", 0, 3, 0.5)
    assert intent_of("a", pack_record(MoveIntent.of(intent))) == intent
    assert intent_of("a", pack_record(MoveIntent.of(replace(intent, gain=float("inf"))))) is not None
    assert intent_of("a", pack_record(MoveIntent(2, 2))) is None  # it was withdrawn
    for value in (None, b"", {}, {"source": 0, "target": 1}, pack_record(REPORT)):
        assert intent_of("a", value) is None


def test_costs_of_a_manifest_have_mean_one() -> None:
    costs = Costs.of(preset("nano", []))
    assert sum(costs.costs) / len(costs.costs) == pytest.approx(1.0)
    assert costs.boundary_bytes > 0
