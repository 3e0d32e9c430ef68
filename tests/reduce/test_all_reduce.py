"""A stage's all-reduce gives every peer the bits of the exact sum; a failure names the peers that did not deliver."""

from __future__ import annotations

import asyncio
import weakref
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from swarmtrain.codec.gradient import GradientEncoder, parse_gradient_spec
from swarmtrain.reduce.all_reduce import AllReduce, AllReduceFailed, Lacks
from swarmtrain.reduce.shares import EXACT, CodedShares
from swarmtrain.rpc.errors import Refusal
from swarmtrain.wire.messages import Prepare, ReduceShare

from .loopback import FakeNode, bounded, entries

SIZE = 1000


def roster(num_peers: int, workers: set[int]) -> Prepare:
    return Prepare("run", 1, 0, 3, 1, entries(num_peers, SIZE, workers))


def share(seed: int) -> torch.Tensor:
    """Multiples of 2^-44, as the accumulators hold them: their fp64 sums are exact."""
    generator = torch.Generator().manual_seed(seed)
    return (torch.randn(SIZE, generator=generator, dtype=torch.float64) * 2**44).round() / 2**44


class Group:
    """One attempt: an all-reduce per peer."""

    def __init__(self, num_peers: int, workers: set[int], dead: set[str] | None = None) -> None:
        self.prepare = roster(num_peers, workers)
        self.members: dict[str, AllReduce] = {}
        self.shares = {i: share(i) for i in workers}
        for i in range(num_peers):
            node: Any = FakeNode(f"peer{i}", self.members, dead or set())
            self.members[f"peer{i}"] = AllReduce(node, self.prepare, self.shares.get(i))

    async def run(self, peer: str) -> torch.Tensor:
        out = torch.full((SIZE,), float("nan"))
        await self.members[peer].run(out)
        return out


@settings(deadline=None, max_examples=25)
@given(st.integers(1, 6), st.data())
def test_every_peer_gets_the_same_bits_and_they_are_the_exact_sum(num_peers: int, data: st.DataObject) -> None:
    workers = data.draw(st.sets(st.integers(0, num_peers - 1), min_size=1))

    async def main() -> None:
        group = Group(num_peers, workers)
        results = await asyncio.gather(*(group.run(peer) for peer in group.members))
        expected = sum(group.shares[i] for i in sorted(workers)).to(torch.float32)
        for result in results:
            assert torch.equal(result, expected)

    bounded(main())


@pytest.mark.parametrize(("num_peers", "piece_elements"), [(3, 10), (8, 40), (20, 7)])
def test_many_pieces_among_many_peers_do_not_deadlock(
    monkeypatch: pytest.MonkeyPatch, num_peers: int, piece_elements: int
) -> None:
    monkeypatch.setattr("swarmtrain.reduce.partition.PIECE_ELEMENTS", piece_elements)

    async def main() -> None:
        group = Group(num_peers, set(range(num_peers)))
        assert len(group.members["peer0"].pieces) >= SIZE // piece_elements
        results = await asyncio.gather(*(group.run(peer) for peer in group.members))
        assert all(torch.equal(result, results[0]) for result in results)

    bounded(main())


def test_control_shares_off_the_grid_would_depend_on_their_order() -> None:
    shares = [torch.full((1,), value, dtype=torch.float64) for value in (1e16, 1.0, -1e16)]
    assert shares[0] + shares[1] + shares[2] != shares[0] + shares[2] + shares[1]


def test_a_peer_that_does_not_deliver_is_named() -> None:
    async def main() -> None:
        group = Group(3, {0, 1, 2}, dead={"peer2"})
        with pytest.raises(AllReduceFailed) as failed:
            await group.run("peer0")
        assert failed.value.suspects == ("peer2",)

    bounded(main())


def test_an_owner_names_the_peers_whose_shares_are_missing() -> None:
    async def main() -> None:
        group = Group(3, {0, 1, 2})
        running = [asyncio.create_task(group.run(peer)) for peer in ("peer0", "peer2")]  # peer1 never begins
        for _ in range(20):
            await asyncio.sleep(0)
        first, second = group.members["peer0"], group.members["peer2"]
        assert first.waits() == second.waits() == (Lacks.SHARES, ["peer1"])
        for task in running:
            task.cancel()
        await asyncio.gather(*running, return_exceptions=True)

    bounded(main())


def piece_of(group: Group, owner: str) -> int:
    position = int(owner[4:])
    return next(piece.index for piece in group.members[owner].pieces if piece.owner == position)


@pytest.mark.parametrize("values", [b"\0" * 7, b"\0" * 8 * SIZE, np.full(SIZE // 2, np.nan).tobytes()])
def test_a_share_of_the_wrong_size_or_with_nan_is_refused_and_does_not_count(values: bytes) -> None:
    async def main() -> None:
        group = Group(2, {0, 1})
        part = ReduceShare("run", 1, 0, 3, 1, piece_of(group, "peer0"), values)
        with pytest.raises(Refusal):
            await group.members["peer0"].receive_share(part, "peer1")
        results = await asyncio.gather(group.run("peer0"), group.run("peer1"))
        assert torch.equal(results[0], (group.shares[0] + group.shares[1]).to(torch.float32))

    bounded(main())


def test_a_stranger_a_foreign_piece_and_a_peer_without_work_are_refused() -> None:
    async def main() -> None:
        group = Group(3, {0, 1})
        mine = piece_of(group, "peer0")
        values = np.zeros(
            group.members["peer0"].pieces[mine].stop - group.members["peer0"].pieces[mine].start
        ).tobytes()
        for part, sender in (
            (ReduceShare("run", 1, 0, 3, 1, mine, values), "stranger"),
            (ReduceShare("run", 1, 0, 3, 1, piece_of(group, "peer1"), values), "peer1"),
            (ReduceShare("run", 1, 0, 3, 1, 10**6, values), "peer1"),
            (ReduceShare("run", 1, 0, 3, 1, mine, values), "peer2"),
        ):
            with pytest.raises(Refusal):
                await group.members["peer0"].receive_share(part, sender)

    bounded(main())


def test_giving_up_refuses_the_peers_that_wait() -> None:
    async def main() -> None:
        group = Group(2, {0, 1})
        waiting = asyncio.create_task(group.run("peer1"))
        for _ in range(10):  # until its share has come: nothing else runs here
            await asyncio.sleep(0)
        assert group.members["peer1"].waits() == (Lacks.SHARES, ["peer0"])
        group.members["peer0"].close()
        with pytest.raises(AllReduceFailed, match="given up"):
            await waiting

    bounded(main())


def test_a_second_share_of_the_same_peer_changes_nothing() -> None:
    async def main() -> None:
        group = Group(2, {0, 1})
        mine = piece_of(group, "peer0")
        piece = group.members["peer0"].pieces[mine]
        values = group.shares[1][piece.start : piece.stop].numpy().tobytes()
        first = asyncio.create_task(
            group.members["peer0"].receive_share(ReduceShare("run", 1, 0, 3, 1, mine, values), "peer1")
        )
        await asyncio.sleep(0)
        results = await asyncio.gather(group.run("peer0"), group.run("peer1"))
        await first
        assert torch.equal(results[0], (group.shares[0] + group.shares[1]).to(torch.float32))
        assert torch.equal(results[0], results[1])

    bounded(main())


def test_a_sum_beyond_the_exact_range_is_not_a_number_at_every_peer() -> None:
    async def main() -> None:
        group = Group(2, {0, 1})
        for i in range(2):
            group.shares[i][7] = 300.0  # each is in range, together they leave it
        results = await asyncio.gather(group.run("peer0"), group.run("peer1"))
        for result in results:
            assert torch.isnan(result[7])

    bounded(main())


@pytest.mark.parametrize("codec", ["none", "int8", "topk64"])
def test_the_bytes_of_a_share_are_free_once_it_is_added(codec: str) -> None:
    """However many peers there are: an owner that waits for the last one holds no share."""

    async def main() -> None:
        encoder = GradientEncoder(parse_gradient_spec(codec), SIZE)
        form = EXACT if codec == "none" else CodedShares(encoder)
        prepare = roster(9, set(range(9)))
        members: dict[str, AllReduce] = {}
        node: Any = FakeNode("peer0", members, set())
        owner = AllReduce(node, prepare, share(0), form=form)
        piece = owner.pieces[piece_of_owner(owner)]
        alive, waiting, freed = [], [], []
        for i in range(1, 8):  # the ninth does not come
            packed = form.pack(share(i)[piece.start : piece.stop].numpy(), piece.start)
            buffer = np.frombuffer(bytearray(packed), dtype=np.uint8)
            alive.append(weakref.ref(buffer))
            message = ReduceShare("run", 1, 0, 3, 1, piece.index, memoryview(buffer))
            del buffer
            receiving = owner.receive_share(message, f"peer{i}", lambda: freed.append(1))
            waiting.append(asyncio.create_task(receiving))
        await asyncio.sleep(0)
        assert owner.waits() == (Lacks.SHARES, ["peer8"])
        assert not any(task.done() for task in waiting)
        assert [reference() for reference in alive] == [None] * 7
        assert len(freed) == 7
        for task in waiting:
            task.cancel()
        await asyncio.gather(*waiting, return_exceptions=True)

    bounded(main())


def piece_of_owner(owner: AllReduce) -> int:
    return next(piece.index for piece in owner.pieces if piece.owner == owner.groups.column)
