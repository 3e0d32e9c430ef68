"""The caller replays: give a microbatch to one of the peers of a stage, and to another if that one fails.

Used by the coordinator for stage 0 and by every peer for the stage after its own. The same bytes are sent each time;
hints lead to peers that are known to have finished the microbatch, so finished work is found again and not repeated.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Awaitable, Callable
from dataclasses import dataclass, field, replace
from typing import cast

from swarmtrain.chain.neighbours import Neighbours
from swarmtrain.p2p.errors import HostDownError, NetError, PeerUnreachable
from swarmtrain.route.views import Pick
from swarmtrain.rpc.errors import CallRefused, CallTimeout, Refusal
from swarmtrain.rpc.node import Node
from swarmtrain.wire.messages import Code, Done, Hop, Progress, Work
from swarmtrain.wire.schema import Message

log = logging.getLogger(__name__)

STALL_S = 30.0  # a callee that has not finished its forward by then (and by its predicted time) is given up
NEWS_S = 2.0
MAX_REMEMBERED = 4096  # peers whose refusals are counted
MAX_STOLEN = 2  # stolen microbatches per thief: an honest thief asks again when it begins with its last one
MAX_BACK_OFF_S = 8.0  # longest back-off after repeated final refusals
BACK_OFF_S = 0.2  # default back-off after BUSY without retry_after, or after a redirect

OnProgress = Callable[[Progress], None]
Check = Callable[[Done], Awaitable[None]]
OnDisputed = Callable[[str], None]  # a peer that said that training diverged, when another one has done the work

# Refusals that no other peer of the stage would answer differently: they go upstream to the caller.
_FINAL = {Code.AHEAD, Code.OLD_TERM, Code.WRONG_RUN, Code.STALE_BASIS}


def back_off_s(num_refusals: int) -> float:
    """The back-off after this many final refusals in a row. Each one doubles it."""
    return min(MAX_BACK_OFF_S, BACK_OFF_S * 2.0 ** min(num_refusals - 1, 16))


@dataclass
class Counters:
    """What happened to calls of one stage."""

    sent: int = 0
    answered: int = 0
    rerouted: dict[str, int] = field(default_factory=dict)  # by cause

    def reroute(self, cause: str) -> None:
        """One more call that had to go elsewhere."""
        self.rerouted[cause] = self.rerouted.get(cause, 0) + 1


@dataclass
class Sticky:
    """A boundary tensor as a difference to what one peer holds: for that peer only, the others get the whole one."""

    peer_id: str
    payload: bytes
    refused: bool = False
    delivered: bool = False


class Dispatcher:
    """Calls the peers of one stage."""

    def __init__(self, node: Node, neighbours: Neighbours) -> None:
        self._node, self.neighbours = node, neighbours
        self.counters = Counters()
        self._partner = ""
        self._stolen: dict[_Watch, str] = {}  # stolen work, and the thief that has it now
        self._num_refusals: dict[str, int] = {}  # final ones in a row, by peer

    def partner(self, num_bytes: int) -> str:
        """The peer that sticky codecs build on: the same one as long as it may be asked. Empty if there is none."""
        pick = self.neighbours.router.pick(num_bytes, prefer=(self._partner,) if self._partner else ())
        self._partner = pick.peer_id if pick is not None else ""
        return self._partner

    async def call(
        self,
        work: Work,
        *,
        deadline_s: float,
        on_progress: OnProgress | None = None,
        check: Check,
        sticky: Sticky | None = None,
        on_disputed: OnDisputed | None = None,
    ) -> Done:
        """Have `work` done by some peer of the stage. `check` raises ValueError for an answer that cannot be right.

        The answer's `waited_s` is at most the time that this took. It includes waiting while all peers were busy, and
        the whole detour to peers that were busy or had `work` stolen: without a queue there would have been none.
        `sticky` replaces the boundary for one peer, as long as that peer does not refuse it.
        Raises Refusal if the answer would be the same everywhere, or if no peer did it within `deadline_s`. That
        training diverged must be said by two peers, or by the only one there is.
        """
        loop = asyncio.get_running_loop()
        ends_at = loop.time() + deadline_s
        hints = {hop.stage: hop for hop in work.hints}
        tried: set[str] = set()
        thief, waited_s = "", 0.0  # the peer that has stolen it; what went by because of queues
        last, lacking = "no peer has been found", work.stage
        diverged: dict[str, Refusal] = {}  # the peer that says that training diverged
        while (left_s := ends_at - loop.time()) > 0:
            pick = self._pick(work, hints, tried | diverged.keys(), sticky, thief)
            if pick is None:
                if diverged and not self.neighbours.router.has_other(diverged.keys()):
                    raise next(iter(diverged.values()))
                tried.clear()
                await self.neighbours.wait_for_news(min(NEWS_S, left_s))
                continue
            waited_s += await self._wait_while_busy(pick, left_s)
            request = replace(work, hints=tuple(hop for hop in hints.values() if hop.stage > work.stage))
            is_sticky = sticky is not None and pick.peer_id == sticky.peer_id and not sticky.refused
            if sticky is not None and is_sticky:
                request = replace(request, boundary=sticky.payload)
            sent_at = loop.time()
            try:
                done = await self._call_one(request, pick, ends_at, hints, on_progress, check)
                if sticky is not None:
                    sticky.delivered = is_sticky
                for peer_id in diverged:
                    log.warning("%s says that training diverged: another peer did the same work", peer_id[-8:])
                    if on_disputed is not None:
                        on_disputed(peer_id)
                # Clamp: the sum over stages must stay within the field's range.
                return replace(done, waited_s=waited_s + min(done.waited_s, loop.time() - sent_at))
            except Refusal as refusal:
                if refusal.code in _FINAL or (refusal.code == Code.DIVERGED and diverged):
                    raise
                if refusal.code == Code.DIVERGED:
                    diverged[pick.peer_id] = refusal
                    hints = {hop.stage: hop for hop in work.hints}  # its way down the stages may be what is at fault
                    continue
                if sticky is not None and is_sticky and refusal.code == Code.NEED_KEYFRAME:
                    sticky.refused = True
                    continue
                last = f"{pick.peer_id[-8:]}: {refusal}"
                if refusal.code == Code.NOBODY and refusal.stage is not None:
                    lacking = refusal.stage
                is_stolen_now = refusal.code == Code.REDIRECTED and not work.is_stolen
                if is_stolen_now:
                    work, thief = replace(work, is_stolen=True), refusal.redirect_to
                if is_stolen_now or refusal.code == Code.BUSY:
                    waited_s += loop.time() - sent_at
                else:
                    tried.add(pick.peer_id)
            except HostDownError as error:
                last = str(error)
                await asyncio.sleep(min(BACK_OFF_S, left_s))
            except (NetError, ValueError) as error:
                tried.add(pick.peer_id)
                last = f"{pick.peer_id[-8:]}: {error}"
                log.debug("stage %d: %s", work.stage, last)
        text = f"stage {work.stage} did not do ({work.step}, {work.microbatch}): {last}"[:1000]
        raise Refusal(Code.NOBODY, text, stage=lacking)

    def _pick(
        self, work: Work, hints: dict[int, Hop], tried: set[str], sticky: Sticky | None, thief: str
    ) -> Pick | None:
        hint = hints.get(work.stage)
        known = [hint.peer_id] if hint is not None else []
        prefer = known + ([sticky.peer_id] if sticky is not None else []) + ([thief] if self._may_steal(thief) else [])
        return self.neighbours.router.pick(len(work.boundary) + len(work.tokens), exclude=tried, prefer=prefer)

    async def _wait_while_busy(self, pick: Pick, limit_s: float) -> float:
        """Wait while all peers are busy, or until news comes. Returns how long that took."""
        if pick.wait_s <= 0.0:
            return 0.0
        began = asyncio.get_running_loop().time()
        await self.neighbours.wait_for_news(min(pick.wait_s, limit_s))
        return asyncio.get_running_loop().time() - began

    def _may_steal(self, thief: str) -> bool:
        """Cap stolen microbatches per thief: victims cannot see whether it makes progress."""
        held = [watch for watch, peer_id in self._stolen.items() if peer_id == thief and not watch.is_forwarded]
        return bool(thief) and len(held) < MAX_STOLEN

    async def _call_one(
        self,
        request: Work,
        pick: Pick,
        ends_at: float,
        hints: dict[int, Hop],
        on_progress: OnProgress | None,
        check: Check,
    ) -> Done:
        router, peer_id = self.neighbours.router, pick.peer_id
        loop = asyncio.get_running_loop()
        started = loop.time()
        watch = _Watch(max(STALL_S, pick.timeout_s))

        def progress(item: Message) -> None:
            if isinstance(item, Progress):
                watch.seen()
                router.observed(peer_id, load_s=item.load_s)
                for hop in item.hops:
                    hints[hop.stage] = hop
                if on_progress is not None:
                    on_progress(item)

        self.counters.sent += 1
        if request.is_stolen:
            self._stolen[watch] = peer_id
        try:
            call = self._node.call(peer_id, request, ends_at - started, progress, expect=Done)
            done = await watch.run(call)
            if not done.route or done.route[0].peer_id != peer_id:
                # It would have another peer answer for what it did, and this one keep a stranger's signature.
                raise ValueError("an answer whose route does not begin with the peer that gives it")
            await check(done)
        except CallRefused as refused:
            self._refused(peer_id, refused)
            raise Refusal.of(refused.payload) from refused
        except HostDownError:
            self.counters.reroute("own-transport")  # the peer that was asked had no part in it
            raise
        except CallTimeout:
            self.counters.reroute("timeout")
            router.timed_out(peer_id, loop.time() - started)
            raise
        except (NetError, ValueError) as error:
            self.counters.reroute("unreachable" if isinstance(error, PeerUnreachable) else "failed")
            router.failed(peer_id)
            raise
        finally:
            self._stolen.pop(watch, None)
        self.counters.answered += 1
        self._num_refusals.pop(peer_id, None)
        self._learn(peer_id, request, done, watch)
        return done

    def _refused(self, peer_id: str, refused: CallRefused) -> None:
        self.counters.reroute(refused.code)
        if refused.code == Code.BUSY:
            self.neighbours.router.busy(peer_id, refused.retry_after_s or BACK_OFF_S)
        elif refused.code == Code.REDIRECTED:
            self.neighbours.router.busy(peer_id, BACK_OFF_S)
        elif refused.code in _FINAL or refused.code == Code.DIVERGED:
            self.neighbours.router.busy(peer_id, self._back_off_s(peer_id))
        elif refused.code == Code.NOT_SERVING and refused.retry_after_s > 0.0:
            self.neighbours.router.busy(peer_id, min(refused.retry_after_s, MAX_BACK_OFF_S))

    def _back_off_s(self, peer_id: str) -> float:
        """The back-off after a final refusal: the peer is in another step, and asking does not change that."""
        if peer_id not in self._num_refusals and len(self._num_refusals) >= MAX_REMEMBERED:
            self._num_refusals.clear()
        count = self._num_refusals[peer_id] = self._num_refusals.get(peer_id, 0) + 1
        return back_off_s(count)

    def _learn(self, peer_id: str, request: Work, done: Done, watch: _Watch) -> None:
        self.neighbours.observe_link(peer_id)
        wire_s = max(1e-6, watch.forwarded_after_s - done.queue_s - done.forward_s) if watch.forwarded_after_s else 1e-3
        self.neighbours.router.succeeded(
            peer_id,
            wire_s=wire_s,
            queue_s=done.queue_s,
            compute_s=done.forward_s,
            backward_s=done.backward_s or None,
            load_s=done.load_s,
        )


class _Watch:
    """Gives up a callee whose forward takes too long. What happens further down is the callee's to watch."""

    def __init__(self, limit_s: float) -> None:
        self._limit_s = limit_s
        self._loop = asyncio.get_running_loop()
        self._started = self._loop.time()
        self._is_forwarded = asyncio.Event()
        self.forwarded_after_s = 0.0

    @property
    def is_forwarded(self) -> bool:
        """Whether the callee has done its forward."""
        return self._is_forwarded.is_set()

    def seen(self) -> None:
        """A progress message came: the callee's forward is done."""
        if not self._is_forwarded.is_set():
            self.forwarded_after_s = self._loop.time() - self._started
            self._is_forwarded.set()

    async def run(self, call: object) -> Done:
        """The call's answer; CallTimeout if its callee stalls."""
        task = asyncio.ensure_future(cast("asyncio.Future[Done]", call))
        timer = self._loop.call_later(self._limit_s, self._expire, task)
        try:
            return await task
        except asyncio.CancelledError:
            asked_to_end = (current := asyncio.current_task()) is not None and current.cancelling() > 0
            if task.cancelled() and self._expired and not asked_to_end:  # both may happen in one instant
                raise CallTimeout(f"its forward took longer than {self._limit_s:.0f} s") from None
            task.cancel()
            raise
        finally:
            timer.cancel()

    _expired = False

    def _expire(self, task: asyncio.Future[Done]) -> None:
        if not self._is_forwarded.is_set() and not task.done():
            self._expired = True
            task.cancel()
