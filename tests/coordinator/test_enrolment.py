"""What a sign of life brings about at the coordinator."""

from __future__ import annotations

import asyncio
from typing import Any, cast

import pytest

from swarmtrain.coordinator.admission import StageBook
from swarmtrain.coordinator.context import RunContext
from swarmtrain.coordinator.enrolment import Enrolment
from swarmtrain.observe.events import Events
from swarmtrain.run.presets import preset
from swarmtrain.wire.messages import Enroll, Hop, Verdict


@pytest.mark.parametrize(("digest", "verdict"), [("d3", Verdict.SERVE), ("another", Verdict.WAIT)])
def test_who_is_told_to_serve_counts_at_once_and_who_is_not_does_not(digest: str, verdict: Verdict) -> None:
    nothing = cast(Any, None)

    async def main() -> tuple[Verdict, bool]:
        manifest = preset("nano")
        context = RunContext(
            manifest=manifest,
            run_id="run",
            term=1,
            node=nothing,
            dispatcher=nothing,
            journal=nothing,
            sampler=nothing,
            events=Events(),
            step=3,
            stages=[StageBook("d3") for _ in range(manifest.stages.count)],
        )
        sign = Enroll("run", 1, "syncing", "1", 3, digest, 0.0, 0.0, 0.0, 0.0, "", "")
        answer = await Enrolment(context, lambda member: None).enroll(sign, "p")
        return answer.verdict, context.members.counts(Hop(1, "p", "1"))

    assert asyncio.run(main()) == (verdict, verdict is Verdict.SERVE)
