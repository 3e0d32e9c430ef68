"""What the coordinator notes about peers whose links break."""

from __future__ import annotations

import asyncio
from collections import Counter
from dataclasses import replace
from pathlib import Path
from typing import Any, cast

from swarmtrain.coordinator.admission import StageBook
from swarmtrain.coordinator.contributions import Contribution
from swarmtrain.coordinator.daemon import CoordinatorDaemon, CoordinatorOptions
from swarmtrain.coordinator.observing import RunObserver
from swarmtrain.observe.events import Events
from swarmtrain.rpc.errors import LinkClosed
from swarmtrain.run.presets import preset

from .contexts import bare_context, heartbeat


def test_doubts_about_peers_that_never_return_are_forgotten() -> None:
    """Volunteers come and go for weeks: what is kept is bounded by those who are there."""

    async def main() -> list[str]:
        manifest = preset("nano")
        context = bare_context(manifest, stages=[StageBook() for _ in range(manifest.stages.count)])
        missing = cast(Any, None)
        observer = RunObserver(context, missing, missing, invite="", refused={}, admission=dict)
        for number in range(50):
            peer = f"peer{number}"
            context.members.heartbeat(peer, heartbeat(1, "serving", "1", 3, "d"), 0.0)
            observer.link_closed(peer, LinkClosed("it is gone"))
            if number < 49:
                context.members.remove(peer)
        return list(observer._doubts)

    assert asyncio.run(main()) == ["peer49"]


def test_contributors_that_left_keep_their_names_and_those_that_are_here_say_theirs() -> None:
    context = bare_context(preset("nano"))
    context.members.heartbeat("here", replace(heartbeat(1), name="new"), 0.0)
    counts = {"here": 5, "gone": 7, "nameless": 1}
    context.tally.resume({peer: Contribution(Counter({0: count})) for peer, count in counts.items()}, 5)
    context.tally.names = {"here": "old", "gone": "otto"}
    missing = cast(Any, None)
    observer = RunObserver(context, missing, missing, invite="", refused={}, admission=dict)
    found = {item["peer"]: (item["name"], item["here"]) for item in observer._contributors(context.members.all())}
    assert found == {"here": ("new", True), "gone": ("otto", False), "nameless": ("", False)}
    assert context.tally.names["here"] == "old"  # what the journal has: the new name is written with the next step


def test_a_broken_link_is_in_doubt_until_the_next_heartbeat() -> None:
    beat = heartbeat(0, "serving", "1", 3, "d")

    async def main() -> list[float | None]:
        daemon = CoordinatorDaemon(CoordinatorOptions(preset("nano"), Path()), Events(), cast(Any, None))
        context = daemon.context = bare_context(preset("nano"))
        daemon.observer = RunObserver(context, cast(Any, None), cast(Any, None), invite="", refused={}, admission=dict)
        found = []
        for change in (lambda: None, lambda: daemon._link_closed("a", LinkClosed("cut")), lambda: None):
            context.members.heartbeat("a", beat, 0.0)
            change()
            member = context.members.get("a")
            assert member is not None
            found.append(member.doubted_at)
        return found

    before, broken, after = asyncio.run(main())
    assert before is None
    assert broken is not None
    assert after is None
