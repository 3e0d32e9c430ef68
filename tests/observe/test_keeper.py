"""The status that a daemon keeps, what counters have to say, and what that costs."""

from __future__ import annotations

import asyncio
import time

from swarmtrain.observe.cost import Cost
from swarmtrain.observe.events import Events, PeerJoined, StepApplied
from swarmtrain.observe.keeper import RerouteNews, StatusKeeper


def test_those_who_watch_are_woken_by_the_next_event() -> None:
    async def main() -> None:
        keeper = StatusKeeper("coordinator")
        watching = [asyncio.create_task(keeper.changed(30.0)) for _ in range(3)]
        await asyncio.sleep(0)
        keeper(PeerJoined("p", 0, 0))
        async with asyncio.timeout(5):
            await asyncio.gather(*watching)
        began = time.monotonic()
        await keeper.changed(0.05)
        assert time.monotonic() - began >= 0.04

    asyncio.run(main())


def test_a_restarted_coordinator_has_its_curve_back_and_goes_on() -> None:
    keeper = StatusKeeper("coordinator", num_steps=10)
    keeper.recall(
        StepApplied(step, loss, 10 * step, speed, 1.0, 0.1, val_loss, at=5.0)
        for step, loss, speed, val_loss in ((1, 3.0, 8.0, None), (2, 2.5, 0.0, 2.75))
    )
    assert (keeper.status.step, keeper.status.val_loss) == (2, 2.75)
    keeper(StepApplied(3, 2.0, 30, 9.0, 1.0, 0.1, at=7.0))
    assert [(p.step, p.loss, p.tokens_per_s, p.val_loss) for p in keeper.status.points] == [
        (1, 3.0, 8.0, None),
        (2, 2.5, None, 2.75),
        (3, 2.0, 9.0, None),
    ]
    assert keeper.status.last_applied_at == 7.0


def test_reroutes_are_told_once_and_what_is_usual_is_no_news() -> None:
    news = RerouteNews(2)
    assert [(e.cause, e.calls) for e in news.since_last({"timeout": 2, "busy": 9, "redirected": 1})] == [("timeout", 2)]
    assert list(news.since_last({"timeout": 2, "busy": 12, "redirected": 7})) == []
    assert [(e.stage, e.cause, e.calls) for e in news.since_last({"timeout": 3, "failed": 1})] == [
        (2, "timeout", 1),
        (2, "failed", 1),
    ]


def test_the_cost_of_watching_counts_processor_time_once() -> None:
    cost = Cost()
    with cost, cost:
        ends_at = time.thread_time() + 0.02
        while time.thread_time() < ends_at:
            pass
    time.sleep(0.05)  # not ours
    assert 0.02 <= cost.seconds < 0.04
    events = Events(lambda event: None)
    events.emit(PeerJoined("p", 0, 0))
    assert events.cost.seconds > 0
