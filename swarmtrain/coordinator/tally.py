"""What each peer has done, and over which links: from the decided books and from the routes of answers. No I/O."""

from __future__ import annotations

import itertools
from collections import Counter, deque
from collections.abc import Iterable, Mapping

from swarmtrain.coordinator.contributions import Contribution
from swarmtrain.coordinator.journal import Decision
from swarmtrain.wire.messages import Hop

RECENT_ROUTES = 256  # answers over which the load of links is counted


class Tally:
    """Counts of one run. `contributed` is what the journal says; `links` covers the last answers only."""

    def __init__(self) -> None:
        self.contributed: Counter[str] = Counter()  # by peer: decided microbatches, over all stages it served
        self.contributions: dict[str, Contribution] = {}  # the same, in full
        self.step = 0  # the decided steps that are counted
        self.names: dict[str, str] = {}  # by peer: what the journal says that it calls itself
        self._routes: deque[tuple[str, ...]] = deque(maxlen=RECENT_ROUTES)

    def resume(self, contributions: Mapping[str, Contribution], step: int) -> None:
        """Start from what the journal has counted in its first `step` steps."""
        self.contributions, self.step = dict(contributions), step
        self.contributed = Counter({peer: known.microbatches for peer, known in contributions.items()})

    def new_names(self, named: Mapping[str, str]) -> dict[str, str]:
        """Those of `named` (peer -> name) that the journal does not have yet; it is about to get them."""
        found = {peer: name for peer, name in named.items() if name and self.names.get(peer) != name}
        self.names.update(found)
        return found

    def decided(self, decision: Decision, at: float = 0.0, seconds: float = 0.0) -> None:
        """A step was decided, `at` this wall time: its books count. It took `seconds`."""
        counts: dict[str, Counter[int]] = {}
        for stage, members in decision.entries.items():
            for (peer_id, _), microbatches in members.items():
                if microbatches:
                    counts.setdefault(peer_id, Counter())[stage] += len(microbatches)
        for peer_id, by_stage in counts.items():
            self.contributed[peer_id] += by_stage.total()
            self.contributions.setdefault(peer_id, Contribution()).add(by_stage.items(), at, seconds)
        self.step = decision.step + 1

    def answered(self, route: Iterable[Hop]) -> None:
        """A microbatch came back over this route."""
        self._routes.append(tuple(hop.peer_id for hop in route))

    def links(self) -> list[dict[str, object]]:
        """How many of the last answers went from one peer to the next, as a share of all."""
        pairs: Counter[tuple[str, str]] = Counter()
        for route in self._routes:
            pairs.update(itertools.pairwise(route))
        return [
            {"from": source, "to": target, "share": count / len(self._routes)}
            for (source, target), count in sorted(pairs.items())
        ]
