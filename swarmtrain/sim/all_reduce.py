"""The all-reduce of a step: what every peer moves, how long it takes on lines of its own, and how it proceeds in the
background on what boundary traffic leaves of the lines.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

from swarmtrain.reduce.partition import owned_elements
from swarmtrain.sim.peer import SimPeer
from swarmtrain.sim.world import World

_WHOLE = 1 << 40  # elements of an imaginary gradient: shares of it are as good as fractions
_DONE_S = 1e-9  # of line time: below that nothing is left


def moved_bytes(gradient_bytes: float, rates: Sequence[float]) -> list[float]:
    """Bytes that each peer of a group sends, and receives, when owners are chosen as the daemons choose them.

    `gradient_bytes` is what a peer would move if all parts were others'. Half of it are its shares on their way to the
    owners, half are sums on their way back; an owner moves its part once for every other peer.
    """
    num_peers = len(rates)
    if num_peers < 2:
        return [0.0] * num_peers
    if min(rates) == max(rates):
        return [equal_share_bytes(gradient_bytes, num_peers)] * num_peers
    owned = owned_elements(_WHOLE, [(rate, rate) for rate in rates])
    return [0.5 * gradient_bytes * (1.0 + (num_peers - 2) * elements / _WHOLE) for elements in owned]


def equal_share_bytes(gradient_bytes: float, num_peers: int) -> float:
    """What each of a group of equal peers sends, and receives: all but the part that it owns."""
    return gradient_bytes * (1.0 - 1.0 / num_peers)


def all_reduce_seconds(gradient_bytes: float, rates: Sequence[float]) -> float:
    """How long it takes with nothing else on the lines, both ways at once: until the last peer is done."""
    moved = moved_bytes(gradient_bytes, rates)
    return max((num_bytes / rate for num_bytes, rate in zip(moved, rates, strict=True)), default=0.0)


class _Member:
    """One peer in one attempt of its stage: the line time that it still needs, up and down."""

    __slots__ = ("attempt", "down_until_s", "is_done", "peer", "stage", "up_until_s")

    def __init__(self, peer: SimPeer, stage: int, attempt: int, num_bytes: float, now: float) -> None:
        self.peer = peer
        self.stage = stage
        self.attempt = attempt
        self.up_until_s = peer.up_idle_s(now) + num_bytes / peer.up_rate
        self.down_until_s = peer.down_idle_s(now) + num_bytes / peer.down_rate
        self.is_done = False

    def left_s(self, now: float) -> float:
        """At the earliest it is done after so long: nothing more may come between. 0: it is."""
        peer = self.peer
        up_s, down_s = self.up_until_s - peer.up_idle_s(now), self.down_until_s - peer.down_idle_s(now)
        left_s = 0.0
        if up_s > _DONE_S:
            left_s = up_s + (peer.up_free - now if peer.up_free > now else 0.0)
        if down_s > _DONE_S:
            left_s = max(left_s, down_s + (peer.down_free - now if peer.down_free > now else 0.0))
        return left_s


class BackgroundAllReduce:
    """One step's all-reduces, one in each stage. `on_done` is called when all stages have their sums.

    A member that dies before its stage is done takes its share with it: the stage begins again (`begin`) once others
    have computed its part, with all bytes.
    """

    def __init__(self, world: World, on_done: Callable[[], None]) -> None:
        self._world = world
        self._on_done = on_done
        self._members: dict[int, list[_Member]] = {}  # of stages under way
        self._attempts = [0] * world.scenario.num_stages
        self._has_sum = [False] * world.scenario.num_stages

    def begin(self) -> None:
        """Begin in all stages that neither have their sum nor are under way."""
        serving: dict[int, list[SimPeer]] = {}
        for peer in self._world.peers:
            if peer.state in ("serving", "draining"):
                serving.setdefault(peer.stage, []).append(peer)
        for stage, has_sum in enumerate(self._has_sum):
            if not has_sum and stage not in self._members:
                self._begin_stage(stage, serving.get(stage, []))

    def has_sum(self, stage: int) -> bool:
        """Whether all members of this stage have their sum: then it no longer depends on one of them."""
        return self._has_sum[stage]

    def lost(self, peer: SimPeer) -> bool:
        """A peer has died. True if it was a member of a stage under way: what has moved there was in vain."""
        if not any(member.peer is peer for member in self._members.get(peer.stage, ())):
            return False
        self._world.meters.count("all-reduces begun again", self._world.engine.now)
        del self._members[peer.stage]
        return True

    def _begin_stage(self, stage: int, peers: list[SimPeer]) -> None:
        scenario, now = self._world.scenario, self._world.engine.now
        self._attempts[stage] += 1
        rates = [min(peer.up_rate, peer.down_rate) for peer in peers]
        moved = moved_bytes(scenario.gradient_bytes_of(stage, len(peers)), rates)
        self._members[stage] = [
            _Member(peer, stage, self._attempts[stage], num_bytes, now)
            for peer, num_bytes in zip(peers, moved, strict=True)
        ]
        for member in self._members[stage]:
            self._world.engine.after(member.left_s(now), self._look, member)
        if not peers:
            self._ends(stage)

    def _look(self, member: _Member) -> None:
        """Boundary traffic that was put on the line since the last look has pushed the end away."""
        stage, now = member.stage, self._world.engine.now
        if member.attempt != self._attempts[stage] or stage not in self._members:
            return
        left_s = member.left_s(now)
        if left_s > 0.0:
            self._world.engine.after(left_s, self._look, member)
            return
        member.is_done = True
        if all(other.is_done for other in self._members[stage]):
            self._ends(stage)

    def _ends(self, stage: int) -> None:
        self._has_sum[stage] = True
        del self._members[stage]
        if all(self._has_sum):
            self._on_done()
