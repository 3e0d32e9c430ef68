"""Routers for tests: with a clock that stands still, and peers that announce one service time."""

from __future__ import annotations

import math
import random

from swarmtrain.route.policies import RouterOptions
from swarmtrain.route.router import Router
from swarmtrain.route.views import PeerView
from swarmtrain.wire.peer_report import PeerReport

MEBI = float(1 << 20)


class Clock:
    def __init__(self) -> None:
        self.now = 0.0

    def __call__(self) -> float:
        return self.now


def peer(peer_id: str, service_s: float = 1.0, *, expires_at: float = math.inf, **said: object) -> PeerView:
    milliseconds = service_s * 1000.0
    times = {"forward_ms": milliseconds / 3, "backward_ms": milliseconds * 2 / 3}
    return PeerView(peer_id, PeerReport(0, **{**times, **said}), expires_at)  # type: ignore[arg-type]


def make_router(peers: list[PeerView], policy: str = "finish-time", seed: int = 0, **options: float) -> Router:
    router = Router(policy, clock=Clock(), rng=random.Random(seed), options=RouterOptions(**options))  # type: ignore[arg-type]
    router.update_peers(peers)
    return router
