"""Where newcomers are sent, and which peers may move: peers on their way count, and no stage is left with too few."""

from __future__ import annotations

import asyncio
from collections import Counter
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from swarmtrain.chain.rebalancing import MoveRules, RebalanceRule
from swarmtrain.coordinator.moves import Moves
from swarmtrain.rpc.errors import Refusal
from swarmtrain.run.presets import preset
from swarmtrain.wire.messages import AskMove, SeekStage

from .contexts import bare_context, changed, heartbeat

NUM_STAGES = 3
EVEN = [
    "model.num_layers=5",
    "stages.count=3",
    "stages.layers=[2, 2, 1]",
    "model.hidden_size=32",
    "model.ffn_size=64",
    "model.num_heads=4",
    "model.num_kv_heads=2",
]
MANIFEST = preset("nano", EVEN)
HEARTBEAT = heartbeat(0, "serving", "1", 0, "", assignment=1)
RULES = MoveRules(min_left=1, min_gain=0.1)


def make(rules: MoveRules = RULES) -> Moves:
    return Moves(bare_context(MANIFEST), rules)


def shows_up(moves: Moves, peer_id: str, stage: int, *, state: str = "serving", assignment: int = 1) -> None:
    moves._context.members.heartbeat(peer_id, changed(HEARTBEAT, stage=stage, state=state, assignment=assignment), 0.0)


def seek(moves: Moves, peer_id: str, *stages: int) -> int:
    return asyncio.run(moves.seek(SeekStage("run", stages or tuple(range(NUM_STAGES))), peer_id)).stage


def ask(moves: Moves, peer_id: str, source: int, target: int, assignment: int = 1) -> bool:
    return asyncio.run(moves.ask(AskMove("run", assignment, source, target), peer_id)).granted


def test_newcomers_that_come_all_at_once_are_spread() -> None:
    moves = make()
    assert Counter(seek(moves, f"p{i}") for i in range(9)) == {0: 3, 1: 3, 2: 3}


def test_a_newcomer_goes_to_the_weakest_stage_that_it_can_host() -> None:
    moves = make()
    for peer_id, stage in (("a", 0), ("b", 1), ("c", 1)):
        shows_up(moves, peer_id, stage)
    assert seek(moves, "d") == 2
    assert seek(moves, "e", 0, 1) == 0
    with pytest.raises(Refusal):
        seek(moves, "f", 7)


@pytest.mark.parametrize("line", ["up_bytes_per_s", "down_bytes_per_s"])
def test_a_stage_whose_peer_has_a_narrow_line_needs_help_first(line: str) -> None:
    moves = make()
    for stage, rate in enumerate((1e9, 1e4, 1e9)):
        announced: dict[str, Any] = {line: rate}
        beat = changed(HEARTBEAT, stage=stage, forward_ms=10.0, backward_ms=20.0, **announced)
        moves._context.members.heartbeat(f"p{stage}", beat, 0.0)
    assert seek(moves, "new") == 1


def test_only_one_of_two_gets_permission_for_the_same_gap() -> None:
    moves = make()
    for peer_id, stage in (("a", 0), ("b", 0), ("c", 0), ("d", 1), ("e", 1), ("f", 2)):
        shows_up(moves, peer_id, stage)
    assert ask(moves, "a", 0, 2)
    assert not ask(moves, "b", 0, 2), "the first one is on its way"
    assert ask(moves, "a", 0, 2), "asked twice, answered alike"


def test_a_mover_counts_where_it_goes_until_it_is_there() -> None:
    moves = make()
    for peer_id, stage in (("a", 0), ("b", 0), ("c", 0), ("d", 1), ("e", 1), ("f", 2)):
        shows_up(moves, peer_id, stage)
    assert ask(moves, "a", 0, 2)
    moves._context.members.remove("a")  # it has said goodbye to its old stage
    assert not ask(moves, "b", 0, 2)
    assert seek(moves, "g") == 0, "two are left in stage 0, the others have two"
    shows_up(moves, "a", 2, state="syncing", assignment=2)
    assert not ask(moves, "b", 0, 2)
    shows_up(moves, "a", 2, assignment=2)
    assert not ask(moves, "b", 0, 2)


def test_a_dead_peer_is_no_reason_to_stay_or_to_go() -> None:
    moves = make()
    for peer_id, stage in (("a", 0), ("b", 0), ("d", 1), ("e", 1), ("f", 2), ("g", 2)):
        shows_up(moves, peer_id, stage)
    assert not ask(moves, "a", 0, 2)
    for gone in ("f", "b"):
        moves._context.members.remove(gone)
    assert not ask(moves, "a", 0, 2), "no peer would be left in stage 0"
    assert ask(moves, "d", 1, 2) is False, "nothing would be won"


def test_a_run_that_does_not_rebalance_refuses() -> None:
    moves = make(MoveRules(RebalanceRule.NONE))
    for peer_id in "abc":
        shows_up(moves, peer_id, 0)
    assert not ask(moves, "a", 0, 2)


Requests = st.lists(st.tuples(st.integers(0, 7), st.integers(0, 2), st.booleans()), max_size=30)


@settings(deadline=None, max_examples=60)
@given(stages=st.lists(st.integers(0, 2), min_size=8, max_size=8), requests=Requests)
def test_whatever_is_asked_no_stage_loses_its_last_peer(
    stages: list[int], requests: list[tuple[int, int, bool]]
) -> None:
    """Requests in any order, some movers arrive and some never do: what was permitted can be done all at once."""
    moves = make()
    where, assignments = dict(enumerate(stages)), dict.fromkeys(range(8), 1)
    leaving: dict[int, int] = {}
    for number, stage in where.items():
        shows_up(moves, str(number), stage)
    for number, target, arrives in requests:
        if number in leaving:
            if arrives:
                where[number] = leaving.pop(number)
                assignments[number] += 1
                shows_up(moves, str(number), where[number], assignment=assignments[number])
        elif ask(moves, str(number), where[number], target, assignments[number]):
            leaving[number] = target
        staying = Counter(stage for peer, stage in where.items() if peer not in leaving)
        assert all(staying[stage] >= 1 for stage in set(stages))
