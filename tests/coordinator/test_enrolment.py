"""What a sign of life brings about at the coordinator."""

from __future__ import annotations

import asyncio
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import pytest

from swarmtrain.coordinator.admission import StageBook
from swarmtrain.coordinator.daemon import CoordinatorDaemon, CoordinatorOptions
from swarmtrain.coordinator.enrolment import Enrolment
from swarmtrain.net.errors import Refusal
from swarmtrain.observe.events import Events
from swarmtrain.run.presets import preset
from swarmtrain.wire.messages import Code, Enroll, FetchRun, Hop, SeekStage, Verdict

from .contexts import bare_context


@pytest.mark.parametrize(("digest", "verdict"), [("d3", Verdict.SERVE), ("another", Verdict.WAIT)])
def test_who_is_told_to_serve_counts_at_once_and_who_is_not_does_not(digest: str, verdict: Verdict) -> None:
    async def main() -> tuple[Verdict, bool]:
        manifest = preset("nano")
        stages = [StageBook("d3") for _ in range(manifest.stages.count)]
        context = bare_context(manifest, step=3, stages=stages)
        sign = Enroll("run", 1, "syncing", "1", 3, digest, 0.0, 0.0, 0.0, 0.0, "", "")
        answer = await Enrolment(context, lambda member: None).enroll(sign, "p")
        return answer.verdict, context.members.counts(Hop(1, "p", "1"))

    assert asyncio.run(main()) == (verdict, verdict is Verdict.SERVE)


@pytest.mark.parametrize(
    "message",
    [Enroll("run", 1, "serving", "1", 3, "", 0.0, 0.0, 0.0, 0.0, "", ""), FetchRun("run"), SeekStage("run", (0,))],
    ids=["enroll", "fetch_run", "seek_stage"],
)
def test_a_coordinator_that_is_still_starting_says_so_and_when_to_ask_again(message: Any, tmp_path: Path) -> None:
    async def main() -> None:
        daemon = CoordinatorDaemon(CoordinatorOptions(preset("nano"), tmp_path), Events(), cast(Any, None))
        with pytest.raises(Refusal) as caught:
            await daemon._handle(message, cast(Any, SimpleNamespace(peer_id="p")))
        assert caught.value.code == Code.NOT_SERVING
        assert caught.value.retry_after_s > 0.0
        assert daemon.refused == {Code.NOT_SERVING: 1}

    asyncio.run(main())
