"""What a heartbeat brings about at the coordinator."""

from __future__ import annotations

import asyncio
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import pytest

from swarmtrain.coordinator.admission import MAX_DONORS, StageBook, StateOffer
from swarmtrain.coordinator.context import Wait
from swarmtrain.coordinator.daemon import CoordinatorDaemon, CoordinatorOptions
from swarmtrain.coordinator.heartbeats import Heartbeats
from swarmtrain.observe.events import Events
from swarmtrain.rpc.errors import Refusal
from swarmtrain.run.presets import preset
from swarmtrain.wire.messages import Code, Directive, FetchRun, Hop, SeekStage
from swarmtrain.wire.peer_report import STALLED
from swarmtrain.wire.schema import encode

from .contexts import bare_context, changed, heartbeat


@pytest.mark.parametrize(("digest", "directive"), [("d3", Directive.SERVE), ("another", Directive.WAIT)])
def test_a_peer_that_is_told_to_serve_counts_at_once_and_another_does_not(digest: str, directive: Directive) -> None:
    async def main() -> tuple[Directive, bool]:
        manifest = preset("nano")
        stages = [StageBook("d3") for _ in range(manifest.stages.count)]
        context = bare_context(manifest, step=3, stages=stages)
        beat = heartbeat(1, "syncing", "1", 3, digest)
        answer = await Heartbeats(context, lambda member: None).heartbeat(beat, "p")
        return answer.directive, context.members.counts(Hop(1, "p", "1"))

    assert asyncio.run(main()) == (directive, directive is Directive.SERVE)


@pytest.mark.parametrize(
    "message",
    [heartbeat(1, "serving", "1", 3, ""), FetchRun("run"), SeekStage("run", (0,))],
    ids=["heartbeat", "fetch_run", "seek_stage"],
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


@pytest.mark.parametrize(("others", "directive"), [(1, Directive.WAIT), (0, Directive.SERVE)])
def test_a_peer_whose_device_hangs_does_not_count_and_gives_up_its_work_if_others_serve(
    others: int, directive: Directive
) -> None:
    async def main() -> None:
        manifest = preset("nano")
        context = bare_context(manifest, step=3, stages=[StageBook("d3") for _ in range(manifest.stages.count)])
        heartbeats = Heartbeats(context, lambda member: None)
        beat = heartbeat(1, "serving", "1", 3, "d3")
        for peer in ["p", *(f"other{i}" for i in range(others))]:
            assert (await heartbeats.heartbeat(beat, peer)).directive is Directive.SERVE
        answer = await heartbeats.heartbeat(changed(beat, state=STALLED), "p")
        assert answer.directive is directive
        assert not context.members.counts(Hop(1, "p", "1"))
        assert (await heartbeats.heartbeat(beat, "p")).directive is Directive.SERVE
        assert context.members.counts(Hop(1, "p", "1"))

    asyncio.run(main())


@pytest.mark.parametrize("is_banned", [False, True])
def test_a_verdict_says_in_fields_what_keeps_work_from_a_serving_peer(is_banned: bool) -> None:
    async def main() -> None:
        manifest = preset("nano")
        router = SimpleNamespace(is_banned=lambda peer_id: is_banned)
        dispatcher = SimpleNamespace(neighbours=SimpleNamespace(router=router))
        stages = [StageBook("d3") for _ in range(manifest.stages.count)]
        context = bare_context(manifest, step=3, stages=stages, dispatcher=cast(Any, dispatcher))
        context.waits_for = Wait.for_peers(range(2, 1000))
        beat = heartbeat(0, "serving", "1", 3, "d3")
        verdict = await Heartbeats(context, lambda member: None).heartbeat(beat, "p")
        encode(verdict)
        assert verdict.is_banned is is_banned
        assert verdict.empty_stages == (() if is_banned else tuple(range(2, 18)))
        assert len(verdict.reason) < 120
        assert verdict.reason.endswith("17 and 982 more have no peers") is not is_banned

    asyncio.run(main())


@pytest.mark.parametrize(
    ("stages", "reason"),
    [
        ([3], "stage 3 has no peers"),
        ([0, 1], "stages 0 and 1 have no peers"),
        ([0, 2, 5], "stages 0, 2 and 5 have no peers"),
    ],
)
def test_a_wait_for_peers_names_the_stages(stages: list[int], reason: str) -> None:
    assert Wait.for_peers(stages) == Wait(reason, tuple(stages))


@pytest.mark.parametrize("num_replicas", [1, 64, 65, 200, 5000])
def test_a_verdict_can_be_told_however_many_replicas_keep_the_state(num_replicas: int) -> None:
    async def main() -> None:
        manifest = preset("nano")
        donors = tuple(f"donor{i}" for i in range(num_replicas))
        context = bare_context(manifest, step=3, stages=[StageBook("d3") for _ in range(manifest.stages.count)])
        context.stages[1].snapshot = StateOffer(3, "d3", donors)
        heartbeats = Heartbeats(context, lambda member: None)
        beat = heartbeat(1, "syncing", "1", 0, "")
        await heartbeats.heartbeat(beat, "p")
        context.members.listen(1, 3)
        told = [await heartbeats.heartbeat(beat, "p") for _ in range(20)]
        assert {answer.directive for answer in told} == {Directive.SYNC}
        for answer in told:
            encode(answer)
            assert 0 < len(answer.donors) == len(set(answer.donors)) <= num_replicas
        named = {donor for answer in told for donor in answer.donors}
        assert len(named) > min(num_replicas, MAX_DONORS) or num_replicas <= MAX_DONORS

    asyncio.run(main())
