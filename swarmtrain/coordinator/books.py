"""The books of one step: which peer has which microbatch on which stage. Pure; the coordinator's I/O is elsewhere.

Peers claim (stage, microbatch) by appearing in the route of an answer. A claim counts while that incarnation of the
peer lives. A stage's books balance when every microbatch has a claim; its roster then names exactly one claimant for
each. Any other peer that has computed a microbatch takes it out of its sum again.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping
from dataclasses import dataclass

from swarmtrain.wire.messages import Hop

PeerKey = tuple[str, str]  # peer id, incarnation


@dataclass(frozen=True)
class ReplayPlan:
    """How to get a lost microbatch back: `holder`, one stage upstream, sends it again; None: lease it again."""

    microbatch: int
    lowest_missing_stage: int
    holder: Hop | None
    hints: tuple[Hop, ...]


class StepBooks:
    """Claims and losses of one step."""

    def __init__(self, num_stages: int, num_microbatches: int, rounds: Mapping[int, int] | None = None) -> None:
        """`rounds`: of microbatches that were begun anew before."""
        self.num_stages, self.num_microbatches = num_stages, num_microbatches
        self._rounds = dict(rounds or {})
        self._outdated: set[int] = set()  # begun anew, and no loss since
        self._answered: set[int] = set()
        self.losses: dict[int, float] = {}  # of routes whose every hop counts
        self._claims: list[list[list[PeerKey]]] = [[[] for _ in range(num_microbatches)] for _ in range(num_stages)]

    def record(
        self, microbatch: int, loss: float, route: Collection[Hop], round: int = 0, *, num_hops: int | None = None
    ) -> None:
        """An answer has arrived, over `num_hops` peers, of which those in `route` count.

        The first loss of a round stands: all answers for one microbatch carry the same. What came through a peer that
        does not count is no loss of the run: it is asked for again (`replay_plan`). An answer of a former round does
        not count.
        """
        if round != self.round_of(microbatch):
            return
        self.answered(microbatch)
        if num_hops is None or len(route) == num_hops:
            if microbatch in self._outdated:
                self._outdated.discard(microbatch)
                self.losses[microbatch] = loss
            self.losses.setdefault(microbatch, loss)
        for hop in route:
            self.claim(microbatch, hop)

    def answered(self, microbatch: int) -> None:
        """It has come back, whatever that is worth: it is not waited for any more, but repaired."""
        self._answered.add(microbatch)

    def round_of(self, microbatch: int) -> int:
        """How often a microbatch was begun anew."""
        return self._rounds.get(microbatch, 0)

    def begin_anew(self, microbatch: int, round: int) -> None:
        """Nothing of a microbatch counts any more, on no stage."""
        self._rounds[microbatch] = round
        self._outdated.add(microbatch)
        for stage in self._claims:
            stage[microbatch].clear()

    def touched_by(self, peer_id: str) -> list[int]:
        """Microbatches that this peer, in any life, may have had a part in: it claims them, or nobody knows yet."""
        return [
            i
            for i in range(self.num_microbatches)
            if i not in self.losses or any(peer_id == key[0] for stage in self._claims for key in stage[i])
        ]

    def claim(self, microbatch: int, hop: Hop) -> None:
        """A peer has this microbatch in its sum."""
        claimants = self._claims[hop.stage][microbatch]
        member = (hop.peer_id, hop.incarnation)
        if member not in claimants:
            claimants.append(member)

    def withdraw(self, stage: int, microbatches: Iterable[int], member: PeerKey) -> None:
        """A peer says that it does not have these after all."""
        for microbatch in microbatches:
            claimants = self._claims[stage][microbatch]
            if member in claimants:
                claimants.remove(member)

    def lose(self, stage: int, member: PeerKey) -> int:
        """A peer is gone, and its ledger with it. Returns the number of claims that this voids."""
        voided = 0
        for claimants in self._claims[stage]:
            if member in claimants:
                claimants.remove(member)
                voided += 1
        return voided

    def lose_peer(self, peer_id: str) -> int:
        """Nothing of a peer counts any more, in any of its lives, on any stage. Returns how many claims that voids."""
        lives = {(stage, member) for stage, rows in enumerate(self._claims) for row in rows for member in row}
        return sum(self.lose(stage, member) for stage, member in sorted(lives) if member[0] == peer_id)

    def holder(self, stage: int, microbatch: int) -> Hop | None:
        """A peer that has the microbatch on this stage."""
        claimants = self._claims[stage][microbatch]
        return Hop(stage, *claimants[0]) if claimants else None

    @property
    def is_answered(self) -> bool:
        """Whether every microbatch has come back once."""
        return len(self._answered) == self.num_microbatches

    def missing(self, stage: int) -> list[int]:
        """Microbatches that no peer has on this stage."""
        return [i for i in range(self.num_microbatches) if not self._claims[stage][i]]

    def balances(self, stage: int) -> bool:
        """Whether every microbatch is in a peer's sum on this stage, and its loss is known."""
        return self._has_losses and all(self._claims[stage])

    @property
    def _has_losses(self) -> bool:
        return len(self.losses) == self.num_microbatches and not self._outdated

    def roster(self, stage: int) -> dict[PeerKey, list[int]]:
        """The microbatches that each peer answers for: the first living claimant of each counts."""
        assert self.balances(stage)
        shares: dict[PeerKey, list[int]] = {}
        for microbatch, claimants in enumerate(self._claims[stage]):
            shares.setdefault(claimants[0], []).append(microbatch)
        return shares

    def replay_plan(self, microbatch: int) -> ReplayPlan | None:
        """What to do about a microbatch that some stage has lost; None if no stage has."""
        holders = [self.holder(stage, microbatch) for stage in range(self.num_stages)]
        missing = [stage for stage, holder in enumerate(holders) if holder is None]
        if not missing:
            # Its routes led through peers that do not count: leased again, it is answered from ledgers.
            hints = tuple(holder for holder in holders if holder is not None)
            has_loss = microbatch in self.losses and microbatch not in self._outdated
            return None if has_loss else ReplayPlan(microbatch, 0, None, hints)
        lowest = missing[0]
        hints = tuple(holder for holder in holders[lowest:] if holder is not None)
        return ReplayPlan(microbatch, lowest, holders[lowest - 1] if lowest > 0 else None, hints)
