"""Nodes: dialing on demand, one link per neighbour, limits, calls to oneself, an orderly end."""

from __future__ import annotations

import asyncio
import dataclasses
import os

import pytest

from swarmtrain.p2p.errors import HostDownError, PeerUnreachable
from swarmtrain.p2p.network import ByteStream
from swarmtrain.rpc.dialing import DialOptions
from swarmtrain.rpc.errors import CallRefused, CallTimeout, LinkClosed, MalformedAnswer, Refusal, RefusalCode
from swarmtrain.rpc.exchange import Exchange, Handler
from swarmtrain.rpc.link import LinkOptions
from swarmtrain.rpc.node import Node, NodeOptions
from swarmtrain.wire.errors import TooLong
from swarmtrain.wire.schema import Message

from .helpers import MIB, REGISTRY, Ask, Reply, State, Tensor, echo, next_turn, pattern, run, until
from .transports import MemoryNetwork, SocketStream, socket_pair

OPTIONS = NodeOptions(link=LinkOptions(heartbeat_s=1000.0), dial=DialOptions(first_backoff_s=30.0))


def make_nodes(
    *names: str, handler: Handler = echo, options: NodeOptions = OPTIONS
) -> tuple[MemoryNetwork, dict[str, Node]]:
    network = MemoryNetwork()
    nodes = {name: Node(network.add(name), REGISTRY, handler, options) for name in names}
    return network, nodes


async def close_all(nodes: dict[str, Node]) -> None:
    await asyncio.gather(*(node.close(5.0) for node in nodes.values()))
    for node in nodes.values():
        assert node.links() == ()


def test_a_call_dials_once_and_later_calls_reuse_the_link() -> None:
    async def main() -> None:
        network, nodes = make_nodes("a", "b", "c")
        a = nodes["a"]
        answers = await asyncio.gather(*(a.call("b", Ask(i), 10) for i in range(20)))
        assert answers == [Reply(i) for i in range(20)]
        assert network.transports["a"].num_dials == 1, "one dial at a time per peer"
        assert await a.call("c", Ask(1), 10, expect=Reply) == Reply(1)
        assert network.transports["a"].num_dials == 2
        assert {(link.peer_id, link.outgoing) for link in a.links()} == {("b", True), ("c", True)}
        assert [(link.peer_id, link.outgoing) for link in nodes["b"].links()] == [("a", False)]
        await close_all(nodes)

    run(main())


def test_an_answer_of_another_kind_than_expected_is_an_error() -> None:
    async def main() -> None:
        _, nodes = make_nodes("a", "b")
        assert await nodes["a"].call("b", Ask(1), 10, expect=Reply) == Reply(1)
        with pytest.raises(MalformedAnswer, match="reply"):
            await nodes["a"].call("b", Ask(1), 10, expect=State)
        await close_all(nodes)

    run(main())


def test_a_peer_that_dialed_us_is_called_over_its_own_link() -> None:
    async def main() -> None:
        network, nodes = make_nodes("a", "b")
        network.transports["a"].refuses = True  # as behind a NAT
        assert await nodes["a"].call("b", Ask(1), 10) == Reply(1)
        assert await nodes["b"].call("a", Ask(2), 10) == Reply(2)
        assert network.transports["b"].num_dials == 0
        await close_all(nodes)

    run(main())


def test_a_failed_dial_is_reported_and_not_repeated_at_once() -> None:
    async def main() -> None:
        network, nodes = make_nodes("a", "b")
        network.transports["b"].refuses = True
        a = nodes["a"]
        outcomes = await asyncio.gather(*(a.call("b", Ask(i), 10) for i in range(5)), return_exceptions=True)
        assert all(isinstance(outcome, PeerUnreachable) for outcome in outcomes)
        assert "refused the connection" in str(outcomes[0])
        assert network.transports["a"].num_dials == 1
        with pytest.raises(PeerUnreachable, match="not dialed for") as caught:
            await a.call("b", Ask(1), 10)
        assert 29 < caught.value.retry_after_s <= 30
        assert network.transports["a"].num_dials == 1
        network.transports["b"].refuses = False
        a.forgive("b")
        assert await a.call("b", Ask(1), 10) == Reply(1)
        with pytest.raises(PeerUnreachable, match="no route"):
            await a.call("nobody", Ask(1), 10)
        await close_all(nodes)

    run(main())


def test_a_dial_that_hangs_ends_with_the_deadline_of_the_call_or_of_dialing() -> None:
    async def main() -> None:
        network, nodes = make_nodes("a", "b", options=dataclasses.replace(OPTIONS, dial=DialOptions(dial_s=0.2)))
        network.transports["b"].hangs = asyncio.Event()
        patient = asyncio.create_task(nodes["a"].call("b", Ask(1), 30))
        with pytest.raises(CallTimeout):
            await nodes["a"].call("b", Ask(1), 0.02)
        assert not patient.done(), "the dial goes on for those who still wait"
        with pytest.raises(PeerUnreachable, match=r"no answer in 0\.2 s"):
            await patient
        await close_all(nodes)

    run(main())


def test_closing_while_dialing_fails_the_calls_that_wait_for_it() -> None:
    async def main() -> None:
        network, nodes = make_nodes("a", "b")
        network.transports["b"].hangs = asyncio.Event()
        call = asyncio.create_task(nodes["a"].call("b", Ask(1), 30))
        await until(lambda: network.transports["a"].num_dials == 1, "dialing")
        await close_all(nodes)
        with pytest.raises(LinkClosed, match="closed"):
            await call
        with pytest.raises(LinkClosed):
            await nodes["a"].call("b", Ask(1), 30)

    run(main())


def test_a_broken_link_is_replaced_at_the_next_call() -> None:
    async def main() -> None:
        network, nodes = make_nodes("a", "b")
        a = nodes["a"]
        assert await a.call("b", Ask(1), 10) == Reply(1)
        before = a.traffic()
        network.streams[0][1].abort()
        await until(lambda: a.links() == (), "noticed")
        assert await a.call("b", Ask(2), 10) == Reply(2)
        assert network.transports["a"].num_dials == 2
        after = a.traffic()
        assert before.sent.kind("ask").num_messages == 1
        assert after.sent.kind("ask").num_messages == 2, "counters outlive links"
        assert a.estimate("b").peer_id == "b"
        await close_all(nodes)

    run(main())


def test_a_request_that_was_not_written_is_sent_over_a_new_link_and_one_that_was_is_not() -> None:
    async def main() -> None:
        handled: list[int] = []

        async def handler(request: Message, exchange: Exchange) -> Message:
            assert isinstance(request, Ask)
            handled.append(request.number)
            if request.number == 3:
                network.streams[-1][1].abort()
            return Reply(request.number)

        network, nodes = make_nodes("a", "b", handler=handler)
        a = nodes["a"]
        assert await a.call("b", Ask(1), 10) == Reply(1)
        # The stream is full, so nothing of the next request gets out before it breaks.
        ours, theirs = network.streams[0]
        theirs.pause_reading()
        ours.wire_out.faults.capacity_bytes = 0
        blocker = asyncio.create_task(a.call("b", Tensor(0, bytes(10)), 10))
        await until(lambda: ours.wire_out.most_buffered > 0, "the first one is written")
        call = asyncio.create_task(a.call("b", Ask(2), 10))
        await next_turn()
        ours.abort()
        assert await call == Reply(2)
        with pytest.raises(LinkClosed) as caught:
            await blocker
        assert caught.value.request_sent
        with pytest.raises(LinkClosed):
            await a.call("b", Ask(3), 10)
        assert handled == [1, 2, 3], "nothing is ever handled twice"
        await close_all(nodes)

    run(main())


def test_a_call_that_crosses_the_end_of_an_idle_link_goes_over_a_new_one() -> None:
    async def main() -> None:
        network, nodes = make_nodes("a", "b", options=dataclasses.replace(OPTIONS, idle_s=0.1))
        assert await nodes["a"].call("b", Ask(1), 10) == Reply(1)
        network.streams[0][0].stall(True)
        # It is written before b gives up the idle link, and would arrive after that.
        assert await nodes["a"].call("b", Ask(2), 10) == Reply(2)
        assert network.transports["a"].num_dials == 2
        network.streams[0][0].stall(False)
        await close_all(nodes)

    run(main())


def test_calls_to_oneself_need_no_stream_and_obey_the_same_rules() -> None:
    async def handler(request: Message, exchange: Exchange) -> Message:
        assert exchange.peer_id == "a"
        if isinstance(request, Ask) and request.number == 1:
            exchange.progress(Reply(10))
            exchange.progress(Reply(11))
            return Reply(1)
        if isinstance(request, Ask) and request.number == 2:
            raise Refusal("no", "not today", 2.0)
        if isinstance(request, Ask) and request.number == 3:
            raise ZeroDivisionError
        if isinstance(request, Ask) and request.number == 4:
            await exchange.cancelled.wait()
            cancelled.append(True)
        exchange.release()
        return request

    cancelled: list[bool] = []

    async def main() -> None:
        network, nodes = make_nodes("a", handler=handler)
        a = nodes["a"]
        seen: list[Message] = []
        assert await a.call("a", Ask(1), 10, seen.append) == Reply(1)
        assert seen == [Reply(10), Reply(11)]
        with pytest.raises(CallRefused) as caught:
            await a.call("a", Ask(2), 10)
        assert (caught.value.code, caught.value.retry_after_s) == ("no", 2.0)
        with pytest.raises(CallRefused) as caught:
            await a.call("a", Ask(3), 10)
        assert caught.value.code == RefusalCode.INTERNAL
        with pytest.raises(CallTimeout):
            await a.call("a", Ask(4), 0.02)
        await until(lambda: cancelled == [True], "the handler learns of the timeout")
        data = pattern(MIB)
        answer = await a.call("a", State(5, data), 10, expect=State)
        assert isinstance(answer.data, memoryview)
        assert answer.data.obj is data, "nothing is copied"
        with pytest.raises(TooLong):
            await a.call("a", Ask(1, "x" * 2000), 10)
        with pytest.raises(MalformedAnswer):
            await a.call("a", Ask(1), 10, expect=State)
        assert network.transports["a"].num_dials == 0
        await close_all(nodes)

    run(main())


def test_idle_links_are_closed_and_busy_ones_are_not() -> None:
    async def main() -> None:
        release = asyncio.Event()

        async def handler(request: Message, exchange: Exchange) -> Message:
            if isinstance(request, Ask) and request.number == 2:
                await release.wait()
            return Reply(1)

        _, nodes = make_nodes("a", "b", "c", handler=handler, options=dataclasses.replace(OPTIONS, idle_s=0.1))
        busy = asyncio.create_task(nodes["a"].call("b", Ask(2), 30))
        assert await nodes["a"].call("c", Ask(1), 30) == Reply(1)
        await until(lambda: [link.peer_id for link in nodes["a"].links()] == ["b"], "the idle one goes")
        await until(lambda: nodes["c"].links() == (), "at both ends")
        assert not busy.done()
        release.set()
        assert await busy == Reply(1)
        await close_all(nodes)

    run(main())


def test_the_number_of_links_is_bounded_by_closing_idle_ones_or_refusing() -> None:
    async def main() -> None:
        release = asyncio.Event()

        async def handler(request: Message, exchange: Exchange) -> Message:
            if isinstance(request, Ask) and request.number == 2:
                await release.wait()
            return Reply(1)

        options = dataclasses.replace(OPTIONS, dial=DialOptions(max_links=2))
        names = ["hub", "a", "b", "c", "d"]
        _, nodes = make_nodes(*names, handler=handler, options=options)
        for name in ("a", "b", "c"):
            assert await nodes[name].call("hub", Ask(1), 10) == Reply(1)
            await until(lambda: len(nodes["hub"].links()) <= 2, "bounded")
        busy = [asyncio.create_task(nodes[name].call("hub", Ask(2), 10)) for name in ("b", "c")]
        await until(lambda: sum(link.num_open_calls for link in nodes["hub"].links()) == 2, "both busy")
        with pytest.raises(LinkClosed, match="busy"):
            await nodes["d"].call("hub", Ask(1), 10)
        assert nodes["hub"].num_refused_streams == 1
        with pytest.raises(PeerUnreachable, match="not dialed for"):
            await nodes["d"].call("hub", Ask(1), 10)
        with pytest.raises(PeerUnreachable, match="all 2 links are in use"):
            await nodes["hub"].call("d", Ask(1), 10)
        release.set()
        assert await asyncio.gather(*busy) == [Reply(1), Reply(1)]
        await close_all(nodes)

    run(main())


def test_one_peer_cannot_open_any_number_of_links() -> None:
    async def main() -> None:
        network, nodes = make_nodes("a", "b")
        streams = [await network.transports["a"].open("b", timeout_s=1) for _ in range(6)]
        assert len(nodes["b"].links()) == OPTIONS.max_incoming_per_peer
        assert nodes["b"].num_refused_streams == 2
        for stream in streams:
            stream.abort()
        await until(lambda: nodes["b"].links() == (), "all end")
        assert await nodes["a"].call("b", Ask(1), 10) == Reply(1)
        await close_all(nodes)

    run(main())


def test_calls_over_all_links_together_are_bounded() -> None:
    async def main() -> None:
        release = asyncio.Event()

        async def handler(request: Message, exchange: Exchange) -> Message:
            await release.wait()
            return Reply(1)

        _, nodes = make_nodes(
            "hub", "a", "b", handler=handler, options=dataclasses.replace(OPTIONS, max_inbound_calls=3)
        )
        calls = [asyncio.create_task(nodes[name].call("hub", Ask(1), 30)) for name in ("a", "b", "a", "b")]
        await until(lambda: any(call.done() for call in calls), "one is too many")
        release.set()
        outcomes = await asyncio.gather(*calls, return_exceptions=True)
        refused = [outcome for outcome in outcomes if isinstance(outcome, CallRefused)]
        assert [error.code for error in refused] == [RefusalCode.BUSY]
        assert outcomes.count(Reply(1)) == 3
        for _ in range(10):
            assert await nodes["a"].call("hub", Ask(1), 10) == Reply(1), "every place was given back"
        await close_all(nodes)

    run(main())


def test_close_ends_handlers_that_do_not_end_and_leaves_nothing_behind() -> None:
    async def main() -> None:
        ended: list[str] = []

        async def handler(request: Message, exchange: Exchange) -> Message:
            try:
                await asyncio.Event().wait()
            finally:
                ended.append(exchange.peer_id)
            return Reply(1)

        _, nodes = make_nodes("a", "b", handler=handler)
        calls = [asyncio.create_task(nodes["a"].call(name, Ask(1), 30)) for name in ("b", "a")]
        await until(lambda: bool(nodes["b"].links()) and nodes["b"].links()[0].num_open_calls == 1, "under way")
        await asyncio.gather(*(node.close(0.05) for node in nodes.values()))
        outcomes = await asyncio.gather(*calls, return_exceptions=True)
        assert isinstance(outcomes[0], (LinkClosed, CallRefused))
        assert isinstance(outcomes[1], CallRefused)
        assert sorted(ended) == ["a", "a"]

    run(main())


def test_the_owner_hears_of_links_that_end() -> None:
    async def main() -> None:
        network = MemoryNetwork()
        heard: list[tuple[str, LinkClosed]] = []
        a = Node(
            network.add("a"), REGISTRY, echo, OPTIONS, on_link_closed=lambda peer, error: heard.append((peer, error))
        )
        b = Node(network.add("b"), REGISTRY, echo, OPTIONS)
        await a.call("b", Ask(1), 10)
        await b.close()
        await until(lambda: len(heard) == 1, "told")
        assert heard[0][0] == "b"
        await a.close()

    run(main())


class SocketNetworkTransport:
    """A transport over real sockets: what leaks there are shows in the process's descriptors."""

    def __init__(self, peer_id: str, others: dict[str, SocketNetworkTransport]) -> None:
        self.peer_id = peer_id
        self._others = others
        others[peer_id] = self
        self._accept = lambda stream: None

    async def open(self, peer_id: str, *, timeout_s: float) -> ByteStream:
        ours, theirs = await socket_pair(self.peer_id, peer_id)
        self._others[peer_id].accept(theirs)
        return ours

    async def is_up(self) -> bool:
        return True

    def accept(self, stream: SocketStream) -> None:
        self._accept(stream)

    def listen(self, accept: object) -> None:
        self._accept = accept  # type: ignore[assignment]


def test_no_descriptor_and_no_task_is_left_after_many_nodes_and_links() -> None:
    async def main() -> None:
        before = len(os.listdir("/proc/self/fd"))
        for _ in range(5):
            transports: dict[str, SocketNetworkTransport] = {}
            nodes = {name: Node(SocketNetworkTransport(name, transports), REGISTRY, echo, OPTIONS) for name in "abcd"}
            await asyncio.gather(
                *(nodes[x].call(y, Tensor(1, pattern(100_000)), 10) for x in "abcd" for y in "abcd" if x != y)
            )
            assert len(os.listdir("/proc/self/fd")) > before
            await close_all(nodes)
        await until(lambda: len(os.listdir("/proc/self/fd")) <= before, "every socket is closed")

    run(main())


def test_a_failure_of_this_ends_own_transport_is_not_held_against_the_peer() -> None:
    async def main() -> None:
        network = MemoryNetwork()
        transport = network.add("a")
        a, b = Node(transport, REGISTRY, echo, OPTIONS), Node(network.add("b"), REGISTRY, echo, OPTIONS)
        await a.call("b", Ask(1), 10)
        assert a.has_link("b")
        transport.is_away = True
        a.cut()
        assert not a.has_link("b")
        for _ in range(3):
            with pytest.raises(HostDownError):
                await a.call("b", Ask(1), 10)
        transport.is_away = False
        await a.call("b", Ask(2), 10)  # at once: there is no back-off to wait out
        await close_all({"a": a, "b": b})

    run(main())


def test_a_call_that_breaks_with_this_ends_own_transport_says_so() -> None:
    async def main() -> None:
        network = MemoryNetwork()
        transport, never = network.add("a"), asyncio.Event()

        async def hang(message: Message, exchange: Exchange) -> Message:
            await never.wait()
            return message

        a, b = Node(transport, REGISTRY, echo, OPTIONS), Node(network.add("b"), REGISTRY, hang, OPTIONS)
        calling = asyncio.create_task(a.call("b", Ask(1), 10))
        await until(lambda: any(link.num_open_calls for link in b.links()), "the call is under way")
        transport.is_away = True
        a.cut()
        with pytest.raises(HostDownError):
            await calling
        await close_all({"a": a, "b": b})

    run(main())
