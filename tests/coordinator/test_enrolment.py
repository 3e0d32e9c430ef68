"""What a sign of life brings about at the coordinator."""

from __future__ import annotations

import asyncio

import pytest

from swarmtrain.coordinator.admission import StageBook
from swarmtrain.coordinator.enrolment import Enrolment
from swarmtrain.run.presets import preset
from swarmtrain.wire.messages import Enroll, Hop, Verdict

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
