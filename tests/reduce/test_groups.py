"""All-reduces in two levels: who owns what, the bits of one group, and who is named when something is missing."""

from __future__ import annotations

import asyncio
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from runs import small

from swarmtrain.coordinator.attempt_watch import AttemptWatch
from swarmtrain.coordinator.blame import Blame, Reply
from swarmtrain.coordinator.members import Member
from swarmtrain.model.reduce_bytes import MAX_GROUP
from swarmtrain.model.state import StageState
from swarmtrain.peer.attempt import MAX_NAMED
from swarmtrain.reduce.all_reduce import AllReduce, AllReduceFailed, Lacks
from swarmtrain.reduce.coding import StageCoder
from swarmtrain.reduce.groups import Groups, arrange, fault_of
from swarmtrain.reduce.partition import Piece
from swarmtrain.reduce.shares import SUM_KEPT, ExactShares
from swarmtrain.rpc.errors import Refusal
from swarmtrain.wire.messages import Prepare, Preparing, ReducedPiece, ReduceShare, RosterEntry
from swarmtrain.wire.peer_report import PeerReport

from .loopback import FakeNode, bounded, entries, name, reduced_by_all

SIZE = 3000
COUNTS = (2, 5, 33, 70)
RATE = st.one_of(st.just(0.0), st.floats(1e3, 1e9))


@settings(deadline=None, max_examples=100)
@given(st.integers(0, 10**8), st.lists(st.tuples(RATE, RATE), min_size=1, max_size=200))
def test_everybody_has_a_place_and_every_group_owns_everything(size: int, rates: list[tuple[float, float]]) -> None:
    places = arrange(size, rates)
    assert sorted(place.member for place in places) == list(range(len(rates)))
    roster = [RosterEntry(name(place.member), "life", b"work", place.owned, place.group) for place in places]
    assert fault_of(roster, size) == ""
    sizes = [sum(place.group == group for place in places) for group in {place.group for place in places}]
    assert len(sizes) == -(-len(rates) // MAX_GROUP)
    assert max(sizes) <= MAX_GROUP
    assert max(sizes) - min(sizes) <= 1


def test_a_column_is_made_of_peers_of_similar_speed_and_the_slowest_own_nothing() -> None:
    rates = [(float(rate), 0.0) for rate in range(70, 0, -1)]
    places = arrange(10**6, rates)
    columns: dict[int, list[float]] = {}
    for group in range(3):
        members = [place for place in places if place.group == group]
        owned = [place.owned for place in members]
        assert owned == sorted(owned, reverse=True)
        for column, place in enumerate(members):
            columns.setdefault(column, []).append(rates[place.member][0])
    assert all(max(column) - min(column) <= 2 for column in columns.values())
    (left_over,) = [place for place in places if rates[place.member][0] == 1.0]
    assert left_over.owned == 0


@settings(deadline=None, max_examples=100)
@given(st.integers(1, 10**6), st.sampled_from([0, 1, 7, 4096]), st.integers(0, 50), st.integers(33, 300))
def test_the_parts_of_a_piece_are_the_whole_and_have_different_roots(
    size: int, unit: int, index: int, num_peers: int
) -> None:
    groups = Groups(entries(num_peers, 10**6, {0}), name(0))
    parts = groups.parts(Piece(index, 0, 100, 100 + size), unit)
    assert [parts[0].start, parts[-1].stop] == [100, 100 + size]
    assert [part.start for part in parts[1:]] == [part.stop for part in parts[:-1]]
    assert all(part.stop > part.start for part in parts)
    assert all(unit and (part.start - 100) % unit == 0 for part in parts[1:])
    assert len({part.root for part in parts}) == len(parts) <= groups.count


@pytest.mark.parametrize(
    "wrong",
    [
        [(5, 0), (4, 0)],  # does not make up the whole
        [(5, 0), (5, 0), (10, 1)],  # columns differ
        [(5, 0), (5, 0), (5, 2), (5, 2)],  # a group is missing
        [(5, 0), (5, 0), (0, 1)],  # a group owns nothing
        [],
    ],
)
def test_a_roster_that_does_not_fit_together_has_a_fault(wrong: list[tuple[int, int]]) -> None:
    roster = [RosterEntry(name(i), "life", b"", owned, group) for i, (owned, group) in enumerate(wrong)]
    assert fault_of(roster, 10)
    good = [RosterEntry(name(i), "life", b"", 5, i % 2) for i in range(4)]
    assert fault_of(good, 10) == ""


def shares_of(num_peers: int, workers: set[int], size: int = SIZE) -> list[torch.Tensor | None]:
    """On the exact grid."""
    found: list[torch.Tensor | None] = []
    for seed in range(num_peers):
        values = torch.randn(size, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)
        found.append((values * 2**44).round() / 2**44 if seed in workers else None)
    return found


class Stage:
    """One attempt: an all-reduce per peer."""

    def __init__(self, num_peers: int, workers: set[int], dead: set[str] | None = None) -> None:
        roster = entries(num_peers, SIZE, workers)
        self.prepare = Prepare("run", 1, 0, 3, 1, roster)
        self.shares = shares_of(num_peers, workers)
        self.members: dict[str, AllReduce] = {}
        self.nodes: list[Any] = []
        for i, share in enumerate(self.shares):
            node: Any = FakeNode(name(i), self.members, dead or set())
            self.nodes.append(node)
            self.members[name(i)] = AllReduce(node, self.prepare, share)

    async def run(self, peer: str) -> torch.Tensor:
        out = torch.full((SIZE,), float("nan"))
        await self.members[peer].run(out)
        return out

    @property
    def total(self) -> torch.Tensor:
        total = sum(share for share in self.shares if share is not None)
        assert isinstance(total, torch.Tensor)
        return total.to(torch.float32)


@pytest.fixture
def finely(monkeypatch: pytest.MonkeyPatch) -> None:
    """Small pieces, of many parts."""
    monkeypatch.setattr("swarmtrain.reduce.partition.PIECE_ELEMENTS", 70)
    monkeypatch.setattr(ExactShares, "unit", 8)


@pytest.mark.usefixtures("finely")
@pytest.mark.parametrize("num_peers", COUNTS)
@pytest.mark.parametrize("who", ["all", "every third", "one", "one group"])
def test_every_peer_gets_the_bits_of_the_exact_sum(num_peers: int, who: str) -> None:
    groups = -(-num_peers // MAX_GROUP)
    workers = {
        "all": set(range(num_peers)),
        "every third": set(range(0, num_peers, 3)),
        "one": {num_peers - 1},
        "one group": set(range(0, num_peers, groups)),  # rates are unknown: peers are dealt to groups in turn
    }[who]

    async def main() -> None:
        stage = Stage(num_peers, workers)
        assert stage.members[name(0)].groups.count == groups
        results = await asyncio.gather(*(stage.run(peer) for peer in stage.members))
        assert all(torch.equal(result, stage.total) for result in results)
        assert all(len(node.called) <= MAX_GROUP + groups - 2 for node in stage.nodes)
        assert all(node.called <= stage.members[node.peer_id].groups.partners() for node in stage.nodes)

    bounded(main())


@pytest.mark.parametrize("codec", ["bf16", "int8", "topk64", "powersgd2"])
@pytest.mark.parametrize("num_peers", COUNTS)
def test_all_peers_agree_on_compressed_gradients(codec: str, num_peers: int) -> None:
    async def main() -> None:
        manifest = small(f"reduce.codec={codec}", "stages.count=2")
        coders = [StageCoder(StageState(manifest, 0)) for _ in range(num_peers)]
        size = coders[0].layout.gradient_size
        shares = shares_of(num_peers, set(range(num_peers - 1)), size)
        exact = sum(share for share in shares if share is not None)
        assert isinstance(exact, torch.Tensor)
        found = await reduced_by_all(coders, shares)
        assert all(torch.equal(item.gradient, found[0].gradient) for item in found)
        loss = float((found[0].gradient - exact).norm() / exact.norm())
        assert 0.0 < loss < {"bf16": 5e-3, "int8": 3e-2}.get(codec, 1.0)

    bounded(main())


@pytest.mark.parametrize("codec", ["none", "bf16", "int8"])
def test_groups_change_no_bit(codec: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Neither of exact sums nor, where pieces are cut alike, of rounded ones."""

    async def main() -> None:
        manifest = small(f"reduce.codec={codec}", "stages.count=2")
        found = []
        for largest in (3, 6, 12):
            monkeypatch.setattr("swarmtrain.model.reduce_bytes.MAX_GROUP", largest)
            monkeypatch.setattr("swarmtrain.reduce.partition.owned_by_rates", _owned_by_the_first)
            monkeypatch.setattr("swarmtrain.reduce.groups.owned_by_rates", _owned_by_the_first)
            coders = [StageCoder(StageState(manifest, 0)) for _ in range(12)]
            shares = shares_of(12, set(range(12)), coders[0].layout.gradient_size)
            found.append((await reduced_by_all(coders, shares))[0].gradient)
        assert torch.equal(found[0], found[1])
        assert torch.equal(found[0], found[2])

    bounded(main())


def _owned_by_the_first(size: int, rates: list[float]) -> list[int]:
    return [size, *[0] * (len(rates) - 1)]


def test_what_topk_leaves_out_of_the_sum_stays_with_its_senders() -> None:
    """Nothing is lost: what was applied and what all peers still remember make up what they had."""

    async def main() -> None:
        manifest = small("reduce.codec=topk64", "stages.count=2")
        coders = [StageCoder(StageState(manifest, 0)) for _ in range(40)]
        size = coders[0].layout.gradient_size
        shares = shares_of(40, set(range(40)), size)
        found = await reduced_by_all(coders, shares)
        for item in found:
            item.commit()
        kept = sum(coder._encoder.error.double() for coder in coders if coder._encoder is not None)  # type: ignore[union-attr]
        had = sum(share for share in shares if share is not None)
        assert isinstance(had, torch.Tensor)
        applied = found[0].gradient
        assert int((applied != 0).sum()) <= SUM_KEPT * 64 * -(-size // 4096) + SUM_KEPT
        assert torch.allclose(kept + applied, had, atol=float(had.abs().max()) * 2.0**-8)  # a sum travels as bf16
        untouched = applied == 0
        assert torch.allclose(kept[untouched], had[untouched], atol=1e-4)

    bounded(main())


async def settled(stage: Stage, absent: set[str]) -> None:
    """All but some begin, and go on until nothing moves any more."""
    running = [asyncio.create_task(stage.run(peer)) for peer in stage.members if peer not in absent]
    for _ in range(1000):
        await asyncio.sleep(0)
    stage.running = running  # type: ignore[attr-defined]


async def ended(stage: Stage) -> None:
    for task in stage.running:  # type: ignore[attr-defined]
        task.cancel()
    await asyncio.gather(*stage.running, return_exceptions=True)  # type: ignore[attr-defined]


def first_in_the_chain(stage: Stage, absent: set[str]) -> tuple[Lacks, set[str]]:
    """Of all that peers wait for: what comes first, and who owes it."""
    waits = [item.waits() for peer, item in stage.members.items() if peer not in absent]
    first = min(lacks for lacks, _ in waits if lacks)
    return first, {peer for lacks, peers in waits if lacks is first for peer in peers}


def left_out(stage: Stage, absent: set[str]) -> list[str]:
    """Whom the coordinator leaves out of a second attempt that stands still as this one does."""
    peers = [peer for peer in stage.members if peer not in absent]
    watch = AttemptWatch(stage.members, 0.0)
    for peer in peers:
        lacks, names = stage.members[peer].waits()
        watch.heard(peer, Preparing(0, False, tuple(names)[:MAX_NAMED], int(lacks)), 1.0)
    complaints: list[Reply] = [watch.complaint(peer) for peer in stage.members]
    blame = Blame()
    report = PeerReport(0, "serving", "1", 3)
    members = [Member(peer, report, seen_at=0.0) for peer in stage.members]
    assert blame.attempt(members, complaints) == []
    return [member.peer_id for member in blame.attempt(members, complaints)]


def answers_nobody(stage: Stage, monkeypatch: pytest.MonkeyPatch) -> str:
    """An owner that adds up what it gets, and keeps the answers."""
    silent = next(entry.peer_id for entry in stage.prepare.roster if entry.owned and entry.group == 1)
    reduction = stage.members[silent]
    receive = reduction.receive_share

    async def never(share: ReduceShare, sender: str) -> Any:
        await receive(share, sender)
        return await asyncio.get_running_loop().create_future()

    monkeypatch.setattr(reduction, "receive_share", never)
    return silent


@pytest.mark.usefixtures("finely")
@pytest.mark.parametrize("absent", ["owner", "left over"])
def test_a_member_that_sends_nothing_is_the_only_one_that_is_waited_for_first(absent: str) -> None:
    async def main() -> None:
        stage = Stage(70, set(range(70)))
        is_owner = absent == "owner"
        gone = next(entry.peer_id for entry in stage.prepare.roster if bool(entry.owned) is is_owner)
        await settled(stage, {gone})
        assert first_in_the_chain(stage, {gone}) == (Lacks.SHARES, {gone})
        assert left_out(stage, {gone}) == [gone]
        elsewhere = [item for item in stage.members.values() if gone not in item.groups.members]
        assert elsewhere
        assert all(item.waits()[0] is not Lacks.SHARES for item in elsewhere)
        await ended(stage)

    bounded(main())


@pytest.mark.usefixtures("finely")
def test_an_owner_that_passes_on_no_sum_is_the_only_one_that_is_waited_for_first(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    async def main() -> None:
        stage = Stage(70, set(range(70)))
        silent = next(entry.peer_id for entry in stage.prepare.roster if entry.owned and entry.group == 1)

        async def never(*_: Any) -> bytes:
            return await asyncio.get_running_loop().create_future()  # type: ignore[no-any-return]

        monkeypatch.setattr(stage.members[silent], "_sum_of_part", never)
        await settled(stage, set())
        assert first_in_the_chain(stage, set()) == (Lacks.SUMS, {silent})
        assert left_out(stage, set()) == [silent]
        await ended(stage)

    bounded(main())


def test_a_root_that_answers_nobody_is_the_only_one_that_is_waited_for_first(monkeypatch: pytest.MonkeyPatch) -> None:
    async def main() -> None:
        monkeypatch.setattr(ExactShares, "unit", 8)
        stage = Stage(70, set(range(70)))
        silent = answers_nobody(stage, monkeypatch)
        await settled(stage, set())
        assert first_in_the_chain(stage, set()) == (Lacks.ROOTS, {silent})
        assert left_out(stage, set()) == [silent]
        await ended(stage)

    bounded(main())


@pytest.mark.usefixtures("finely")
def test_a_root_that_answers_nobody_is_left_out_although_it_complains_itself(monkeypatch: pytest.MonkeyPatch) -> None:
    """Its group sends it no second piece before it has answered the first: it names all of them, and only it does."""

    async def main() -> None:
        stage = Stage(70, set(range(70)))
        silent = answers_nobody(stage, monkeypatch)
        await settled(stage, set())
        assert stage.members[silent].waits()[0] is Lacks.SHARES
        assert left_out(stage, set()) == [silent]
        await ended(stage)

    bounded(main())


def test_a_dead_owner_is_named_by_its_group_and_by_its_column_and_by_nobody_else() -> None:
    async def main() -> None:
        dead = next(entry.peer_id for entry in entries(70, SIZE, set()) if entry.owned and entry.group == 2)
        stage = Stage(70, set(range(70)), dead={dead})
        for peer in stage.members:
            if peer == dead:
                continue
            if dead in stage.members[peer].groups.members:
                with pytest.raises(AllReduceFailed) as failed:
                    await stage.run(peer)
                assert failed.value.suspects == (dead,)
        partners = [item.groups.partners() for peer, item in stage.members.items() if peer != dead]
        assert sum(dead in known for known in partners) == 22 + 2  # its group has 23 members, there are three groups

    bounded(main())


@pytest.mark.parametrize(
    ("sender", "is_sum", "what"),
    [
        ("stranger", True, "of no member"),
        ("member", True, "a sum of a member that is not of the column"),
        ("column", False, "a share of another group's member"),
        ("column", True, "a sum that is none"),
        ("member", False, "a share that is none"),
    ],
)
def test_what_does_not_belong_to_a_piece_is_refused_and_does_not_count(sender: str, is_sum: bool, what: str) -> None:
    async def main() -> None:
        stage = Stage(70, set(range(70)))
        roster = stage.prepare.roster
        owner = stage.members[next(entry.peer_id for entry in roster if entry.owned)]
        mine = next(piece for piece in owner.pieces if piece.owner == owner.groups.column)
        root = next(part for part in owner.groups.parts(mine, ExactShares.unit) if part.root == 0)
        senders = {
            "stranger": "stranger",
            "member": next(peer for peer in sorted(owner.groups.members) if peer != owner.groups.peer_id),
            "column": owner.groups.owner(1),
        }
        part = root.index if is_sum else -1
        bad = b"abc" if "none" in what else np.zeros(mine.stop - mine.start).tobytes()
        with pytest.raises(Refusal):
            await owner.receive_share(ReduceShare("run", 1, 0, 3, 1, mine.index, bad, 0, part), senders[sender])
        results = await asyncio.gather(*(stage.run(peer) for peer in stage.members))
        assert all(torch.equal(result, stage.total) for result in results)

    bounded(main())


def test_a_sum_that_comes_twice_counts_once() -> None:
    async def main() -> None:
        stage = Stage(40, set(range(40)))
        for node in stage.nodes:
            node.call = twice(node.call)
        results = await asyncio.gather(*(stage.run(peer) for peer in stage.members))
        assert all(torch.equal(result, stage.total) for result in results)

    bounded(main())


def twice(call: Any) -> Any:
    """As one whose link broke before the answer came."""

    async def again(*args: Any, **options: Any) -> Any:
        first, second = await asyncio.gather(call(*args, **options), call(*args, **options))
        assert bytes(first.values) == bytes(second.values)
        return second

    return again


def test_an_attempt_that_is_given_up_while_sums_are_on_their_way_refuses_all_that_wait() -> None:
    async def main() -> None:
        stage = Stage(40, set(range(40)))
        late = name(39)
        await settled(stage, {late})
        for reduction in stage.members.values():
            reduction.close()
        await asyncio.gather(stage.run(late), return_exceptions=True)  # the last share comes after all
        found = await asyncio.gather(*stage.running, return_exceptions=True)  # type: ignore[attr-defined]
        assert all(isinstance(item, AllReduceFailed | torch.Tensor) for item in found)
        failed = [item for item in found if isinstance(item, AllReduceFailed)]
        assert failed
        assert all("given up" in str(item) and not item.suspects for item in failed)

    bounded(main())


def test_damaged_answers_are_refused_and_their_owner_is_named() -> None:
    async def main() -> None:
        stage = Stage(40, set(range(40)))
        whole = b"\x10\0\0\0" + bytes(16)
        for bad in (b"", b"abc", whole[:-1], whole + b"x", whole * 2):
            for node in stage.nodes:
                node.call = answering(bad)
            with pytest.raises(AllReduceFailed) as failed:
                await stage.run(name(0))
            assert set(failed.value.suspects) <= stage.members[name(0)].groups.partners()
            assert len(failed.value.suspects) == 1

    bounded(main())


def answering(values: bytes) -> Any:
    async def call(*args: Any, **options: Any) -> ReducedPiece:
        return ReducedPiece(values)

    return call
