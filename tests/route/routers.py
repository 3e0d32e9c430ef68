"""Routers for tests: with a clock that stands still, and peers that announce one service time."""

from __future__ import annotations

import random

from swarmtrain.route.policies import RouterOptions
from swarmtrain.route.router import Router
from swarmtrain.route.views import PeerView

MEBI = float(1 << 20)


class Clock:
    def __init__(self) -> None:
        self.now = 0.0

    def __call__(self) -> float:
        return self.now


def peer(peer_id: str, service_s: float = 1.0, **fields: object) -> PeerView:
    milliseconds = service_s * 1000.0
    return PeerView(peer_id, forward_ms=milliseconds / 3, backward_ms=milliseconds * 2 / 3, **fields)  # type: ignore[arg-type]


def make_router(peers: list[PeerView], policy: str = "finish-time", seed: int = 0, **options: float) -> Router:
    router = Router(policy, clock=Clock(), rng=random.Random(seed), options=RouterOptions(**options))  # type: ignore[arg-type]
    router.update_peers(peers)
    return router
