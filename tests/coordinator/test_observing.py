"""What the coordinator notes about peers whose links break."""

from __future__ import annotations

import asyncio
from typing import Any, cast

from swarmtrain.coordinator.admission import StageBook
from swarmtrain.coordinator.observing import RunObserver
from swarmtrain.net.errors import LinkClosed
from swarmtrain.run.presets import preset
from swarmtrain.wire.messages import Enroll

from .contexts import bare_context


def test_doubts_about_peers_that_never_return_are_forgotten() -> None:
    """Volunteers come and go for weeks: what is kept is bounded by those who are there."""

    async def main() -> list[str]:
        manifest = preset("nano")
        context = bare_context(manifest, stages=[StageBook() for _ in range(manifest.stages.count)])
        missing = cast(Any, None)
        observer = RunObserver(context, missing, missing, invite="", refused={})
        for number in range(50):
            peer = f"peer{number}"
            context.members.enroll(peer, Enroll("run", 1, "serving", "1", 3, "d", 0.0, 0.0, 0.0, 0.0, "", ""), 0.0)
            observer.link_closed(peer, LinkClosed("it is gone"))
            if number < 49:
                context.members.remove(peer)
        return list(observer._doubts)

    assert asyncio.run(main()) == ["peer49"]
