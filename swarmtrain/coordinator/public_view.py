"""What the public page shows: the run and its people, chosen field by field. Pure.

Whatever is not named here stays with the operator: the invite, addresses, the exclusions, paths, the machine's own
figures, and every text that another machine or a broken link may have had a part in.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any

_RUN = (
    "kind", "state", "since", "next", "now", "started_at", "run", "name", "homepage", "step", "steps", "tokens",
    "tokens_per_step", "last", "val_loss", "split", "last_applied_at", "seconds_left", "routes", "contributors",
    "checkpoint_step",
)  # fmt: skip
_PEER = (
    "peer", "name", "stage", "state", "step", "silent_s", "microbatches", "forward_ms", "backward_ms", "capacity",
    "lately",
)  # fmt: skip
_SAID_BY_THE_RUN = ("training", "waiting", "complete")  # other states' reasons are start-up details: the invite is one
_EVENTS = ("peer_joined", "peer_left", "run_waits", "run_resumes", "run_rolled_back", "checkpoint_written")
_PLACES = ("path", "checkpoint")


def public_status(snapshot: Mapping[str, Any]) -> dict[str, Any]:
    """The snapshot for everybody."""
    shown = {key: snapshot[key] for key in _RUN}
    shown["reason"] = snapshot["reason"] if snapshot["state"] in _SAID_BY_THE_RUN else ""
    shown["stages"] = [
        [{**{key: peer[key] for key in _PEER}, "doubt": "link broken" if peer["doubt"] else ""} for peer in peers]
        for peers in snapshot["stages"]
    ]
    return {**shown, "is_public": True}


def public_events(events: Iterable[Mapping[str, Any]]) -> list[dict[str, Any]]:
    """The news for everybody."""
    return [
        {key: value for key, value in event.items() if key not in _PLACES}
        for event in events
        if event["event"] in _EVENTS
    ]
