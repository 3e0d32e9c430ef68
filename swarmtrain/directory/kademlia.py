"""Kademlia without any network: the routing table, and the iterative search.

Nodes and keys have places, 160-bit numbers; the distance of two places is their XOR. A node remembers many nodes near
itself and few far away. A search asks the nearest nodes it knows for nearer ones until there are none.
(Maymounkov and Mazieres, 2002.)
"""

from __future__ import annotations

import asyncio
import heapq
from collections import OrderedDict
from collections.abc import Awaitable, Callable

PLACE_BYTES = 20

Ask = Callable[[str], Awaitable[dict[int, str] | None]]  # peer id -> the nodes that it knows; None: no answer


class RoutingTable:
    """Nodes by distance: at most `bucket_size` for each power of two, and the latest surplus ones in reserve."""

    def __init__(self, own_place: int, bucket_size: int) -> None:
        self._own_place = own_place
        self._bucket_size = bucket_size
        self._buckets: dict[int, OrderedDict[int, str]] = {}
        self._reserves: dict[int, OrderedDict[int, str]] = {}

    def __len__(self) -> int:
        return sum(map(len, self._buckets.values()))

    def peers(self) -> set[str]:
        """The peer ids of all nodes in the table."""
        return {peer_id for bucket in self._buckets.values() for peer_id in bucket.values()}

    def add(self, place: int, peer_id: str) -> str | None:
        """Note that a node has just shown itself.

        If its bucket is full, the node waits in reserve, and the least recently seen node of the bucket is returned:
        ping that one, and `add` or `remove` it according to the outcome.
        """
        if place == self._own_place:
            return None
        index = (place ^ self._own_place).bit_length()
        bucket = self._buckets.setdefault(index, OrderedDict())
        if place in bucket or len(bucket) < self._bucket_size:
            bucket[place] = peer_id
            bucket.move_to_end(place)
            return None
        reserve = self._reserves.setdefault(index, OrderedDict())
        reserve[place] = peer_id
        reserve.move_to_end(place)
        if len(reserve) > self._bucket_size:
            reserve.popitem(last=False)
        return next(iter(bucket.values()))

    def remove(self, place: int) -> None:
        """Note that a node did not answer; a node in reserve replaces it."""
        index = (place ^ self._own_place).bit_length()
        bucket, reserve = self._buckets.get(index, OrderedDict()), self._reserves.get(index, OrderedDict())
        reserve.pop(place, None)
        if bucket.pop(place, None) is not None and reserve:
            heir, peer_id = reserve.popitem()
            bucket[heir] = peer_id

    def far_places(self) -> list[int]:
        """One place in each distance range (power of two) down to the nearest known node, farthest first.

        A node that has searched for all of them knows a node in every range that is not empty.
        """
        if not len(self):
            return []
        nearest = min(index for index, bucket in self._buckets.items() if bucket)
        return [self._own_place ^ 1 << (index - 1) for index in range(8 * PLACE_BYTES, nearest, -1)]

    def nearest(self, place: int, count: int, *, without: int | None = None) -> dict[int, str]:
        """The `count` known nodes nearest to a place, nearest first."""
        known = ((p, peer_id) for bucket in self._buckets.values() for p, peer_id in bucket.items() if p != without)
        return dict(heapq.nsmallest(count, known, key=lambda entry: entry[0] ^ place))


async def search(
    place: int, start: dict[int, str], ask: Ask, *, own_place: int, beam: int, num_workers: int, max_asked: int
) -> list[str]:
    """The peer ids of the nodes nearest to `place` that answered, nearest first.

    Asks ever nearer nodes, `num_workers` at a time, until the `beam` nearest known ones have answered. Nodes that do
    not answer do not count; at most `max_asked` are asked, whatever others claim to know.
    """
    known = {node: peer_id for node, peer_id in start.items() if node != own_place}
    asked: set[int] = set()
    failed: set[int] = set()
    pending: dict[asyncio.Future[dict[int, str] | None], int] = {}
    try:
        while True:
            alive = heapq.nsmallest(beam, known.keys() - failed, key=lambda node: node ^ place)
            for node in alive:
                if node not in asked and len(pending) < num_workers and len(asked) < max_asked:
                    asked.add(node)
                    pending[asyncio.ensure_future(ask(known[node]))] = node
            if not pending:
                return [known[node] for node in alive if node in asked]
            done, _ = await asyncio.wait(pending, return_when=asyncio.FIRST_COMPLETED)
            for task in done:
                node, answer = pending.pop(task), task.result()
                if answer is None:
                    failed.add(node)
                else:
                    known.update((n, peer_id) for n, peer_id in answer.items() if n != own_place and n not in known)
    finally:
        for task in pending:
            task.cancel()
