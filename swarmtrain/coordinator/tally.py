"""What each peer has done, and over which links: from the decided books and from the routes of answers. No I/O."""

from __future__ import annotations

import itertools
from collections import Counter, deque
from collections.abc import Iterable, Mapping

from swarmtrain.coordinator.journal import Decision
from swarmtrain.wire.messages import Hop

RECENT_ROUTES = 256  # answers over which the load of links is counted


class Tally:
    """Counts of one run. `contributed` is what the journal says; `links` covers the last answers only."""

    def __init__(self) -> None:
        self.contributed: Counter[str] = Counter()  # by peer: decided microbatches, over all stages it served
        self.names: dict[str, str] = {}  # by peer: what the journal says that it calls itself
        self._routes: deque[tuple[str, ...]] = deque(maxlen=RECENT_ROUTES)

    def resume(self, contributed: Mapping[str, int]) -> None:
        """Start from what the journal has counted."""
        self.contributed.clear()
        self.contributed.update(contributed)

    def new_names(self, named: Mapping[str, str]) -> dict[str, str]:
        """Those of `named` (peer -> name) that the journal does not have yet; it is about to get them."""
        found = {peer: name for peer, name in named.items() if name and self.names.get(peer) != name}
        self.names.update(found)
        return found

    def decided(self, decision: Decision) -> None:
        """A step was decided: its books count."""
        for members in decision.entries.values():
            for (peer_id, _), microbatches in members.items():
                self.contributed[peer_id] += len(microbatches)

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
