"""How a peer leaves its stage for another one without two chasing the same gap, and without ever emptying a stage.

Two mechanisms, for two purposes. *Intents* in the directory keep most would-be movers from asking at all: a peer that
finds itself in the plan says so, looks again some seconds later, and goes on only if it is still in the plan and no
conflicting intent is better. They are a courtesy: directories are stale, so they prove nothing. *Grants* are the proof:
the coordinator's `MoveArbiter` counts a peer out of its stage from the moment it permits it to leave, and in again only
when that peer has announced itself under a higher version.

    staying --plan names me--> intending --second look agrees--> asking --grant--> leaving --arrived--> staying
       ^__ plan changed, better intent __|        refused, no answer: version + 1 __|

Lost, late, doubled or reordered messages can only keep a peer where it is: a mover that gives up waiting raises its
version first, so a grant it no longer waits for is void, and the arbiter keeps counting it out until it hears of the
new version. No clock is compared with another one.
"""

from __future__ import annotations

import random
from collections.abc import Sequence
from dataclasses import dataclass
from enum import Enum

from swarmtrain.route.rebalance import PeerCapacity, PlannedMove, RebalanceOptions, is_worth_it

PATIENCE_S = 30.0  # how long a mover waits for the coordinator's answer
SECOND_LOOK_S = (5.0, 10.0)


@dataclass(frozen=True, slots=True)
class Intent:
    """A published wish to move. Of two that conflict the larger gain wins, then the smaller peer id."""

    peer_id: str
    source: int
    target: int
    gain: float

    def conflicts(self, other: Intent) -> bool:
        """Two moves conflict if they touch a common stage."""
        return not {self.source, self.target}.isdisjoint((other.source, other.target))

    def beats(self, other: Intent) -> bool:
        """A total order, so that exactly one of two conflicting intents wins."""
        return (-self.gain, self.peer_id) < (-other.gain, other.peer_id)


@dataclass(frozen=True, slots=True)
class LeaveRequest:
    """Asks the coordinator for permission to leave, under the version the peer last announced."""

    peer_id: str
    version: int
    source: int
    target: int


@dataclass(frozen=True, slots=True)
class LeaveAnswer:
    """The coordinator's answer to the request of this version."""

    peer_id: str
    version: int
    target: int
    granted: bool
    why: str = ""


class MoverState(Enum):
    """Where a peer stands on its way out; the picture is in this module's docstring."""

    STAYING = "staying"
    INTENDING = "intending"
    ASKING = "asking"
    LEAVING = "leaving"


class Mover:
    """The peer's side. Call `look` now and then, and soon after `look_at`; it never blocks and sends nothing itself.

    Whenever `version` has changed, announce (peer id, stage, version) to the coordinator; repeating that does no harm.
    A restarted peer must begin with a version above its former ones (the time in milliseconds will do).
    """

    def __init__(
        self,
        peer_id: str,
        stage: int,
        version: int,
        rng: random.Random,
        second_look_s: tuple[float, float] = SECOND_LOOK_S,
    ) -> None:
        self.peer_id = peer_id
        self.stage = stage
        self.version = version
        self.state = MoverState.STAYING
        self.intent: Intent | None = None  # what to publish; None: withdraw what was published
        self.look_at = float("-inf")
        self.second_look_s = second_look_s
        self._rng = rng
        self._asked_at = float("-inf")

    def look(self, plan: Sequence[PlannedMove], intents: Sequence[Intent], now: float) -> LeaveRequest | None:
        """One look at the directory. Returns a request to send to the coordinator, or None; then read `intent`."""
        if self.state is MoverState.LEAVING:
            return None
        if self.state is MoverState.ASKING:
            if now - self._asked_at >= PATIENCE_S:
                self._give_up()
            return None
        mine = next((move for move in plan if move.peer_id == self.peer_id and move.source == self.stage), None)
        wish = None if mine is None else Intent(self.peer_id, mine.source, mine.target, mine.gain)
        if wish is None or any(o.peer_id != self.peer_id and o.conflicts(wish) and o.beats(wish) for o in intents):
            self.state, self.intent = MoverState.STAYING, None
            return None
        if self.intent is None or self.intent.target != wish.target:
            self.state, self.intent = MoverState.INTENDING, wish
            self.look_at = now + self._rng.uniform(*self.second_look_s)
            return None
        if now < self.look_at:
            return None
        self.state, self._asked_at = MoverState.ASKING, now
        return LeaveRequest(self.peer_id, self.version, self.stage, wish.target)

    def answered(self, answer: LeaveAnswer) -> bool:
        """Take the coordinator's answer. True: leave now (and only then). An answer not waited for is ignored."""
        if self.state is not MoverState.ASKING or self.intent is None:
            return False
        if (answer.peer_id, answer.version, answer.target) != (self.peer_id, self.version, self.intent.target):
            return False
        if not answer.granted:
            self._give_up()
            return False
        self.state = MoverState.LEAVING
        return True

    def arrived(self, stage: int) -> None:
        """The move is over, or was given up: the peer serves `stage`."""
        self.stage = stage
        self._give_up()

    def _give_up(self) -> None:
        self.version += 1
        self.state, self.intent = MoverState.STAYING, None


@dataclass(slots=True)
class _Assignment:
    """Where the arbiter believes a peer to be; `target` is set while it is permitted to leave `member.stage`."""

    member: PeerCapacity
    version: int
    target: int | None = None


class MoveArbiter:
    """The coordinator's side: which peers serve which stage, and which have been permitted to leave it.

    A stage is never left with fewer than `min_left` peers by moves, and at least one. Against crashes and peers that
    exit no arbiter helps; `min_left` of two is for them.
    """

    def __init__(self, costs: Sequence[float], options: RebalanceOptions | None = None) -> None:
        self._costs = tuple(costs)
        self._options = options or RebalanceOptions()
        self._min_left = max(1, self._options.min_left)
        self._assignments: dict[str, _Assignment] = {}
        self._last_version: dict[str, int] = {}  # also of peers that are gone: a late announcement must not revive them

    def serving(self, member: PeerCapacity, version: int) -> bool:
        """The peer announces its stage and speed. False: old news, ignored; it must announce a higher version."""
        last = self._last_version.get(member.peer_id)
        if (last is not None and version < last) or not 0 <= member.stage < len(self._costs):
            return False
        assignment = self._assignments.get(member.peer_id)
        if last is None or version > last:
            self._assignments[member.peer_id] = _Assignment(member, version)
            self._last_version[member.peer_id] = version
        elif assignment is None or assignment.member.stage != member.stage:
            return False
        else:
            assignment.member = member  # the same announcement with newer speeds; a permission given meanwhile stays
        return True

    def gone(self, peer_id: str) -> None:
        """The peer drains, exits, or was found dead. If that was wrong, it comes back under a higher version."""
        self._assignments.pop(peer_id, None)

    def known(self) -> list[str]:
        """All peers that have a assignment, permitted to leave it or not."""
        return list(self._assignments)

    def num_staying(self, stage: int) -> int:
        """Peers of a stage without permission to leave it."""
        return sum(
            1
            for assignment in self._assignments.values()
            if assignment.member.stage == stage and assignment.target is None
        )

    def request(self, request: LeaveRequest) -> LeaveAnswer:
        """Permit or refuse. A doubled request gets the same permission again."""
        assignment = self._assignments.get(request.peer_id)
        why = self._reason_against(request, assignment)
        if not why and assignment is not None:
            assignment.target = request.target
        return LeaveAnswer(request.peer_id, request.version, request.target, granted=not why, why=why)

    def _reason_against(self, request: LeaveRequest, assignment: _Assignment | None) -> str:
        if assignment is None or assignment.member.stage != request.source or assignment.version != request.version:
            return "not known as serving this stage under this version"
        if not 0 <= request.target < len(self._costs) or request.target == request.source:
            return "no such stage to go to"
        if assignment.target is not None:
            return "" if assignment.target == request.target else "already permitted to go elsewhere"
        if self.num_staying(request.source) - 1 < self._min_left:
            return "too few would stay"
        capacities, sizes = self._stages()
        # Half of the usual thresholds: views differ a little, and this peer has waited for its second look already.
        move = (request.source, request.target)
        is_good = is_worth_it(capacities, sizes, assignment.member, self._costs, move, self._options, caution=0.5)
        return "" if is_good else "the gap is closed already"

    def _stages(self) -> tuple[list[float], list[int]]:
        """(capacity, number of peers) of all stages, with every permitted mover counted where it is going."""
        capacities = [0.0] * len(self._costs)
        sizes = [0] * len(self._costs)
        for assignment in self._assignments.values():
            stage = assignment.member.stage if assignment.target is None else assignment.target
            capacities[stage] += assignment.member.rate(self._costs[stage])
            sizes[stage] += 1
        return capacities, sizes
