"""Processes that the swarm benchmark measures: one end of a hop, or one peer of an all-reduce, ours and hivemind's.

Each is started with a JSON object of options on its command line, prints one JSON line when it is ready, and then
answers every line it reads (a command) with one line (seconds, or an acknowledgement).
"""

from __future__ import annotations

import asyncio
import json
import sys
import time
from collections.abc import Awaitable, Callable
from pathlib import Path
from typing import Any

import torch

LISTEN = ("/ip4/127.0.0.1/tcp/0",)


async def commands(answer: Callable[[dict[str, Any]], Awaitable[dict[str, Any]]]) -> None:
    """Answer commands on stdin until it ends."""
    loop = asyncio.get_running_loop()
    while line := await loop.run_in_executor(None, sys.stdin.readline):
        print(json.dumps(await answer(json.loads(line))), flush=True)


async def our_node(options: dict[str, Any], handler: Any) -> Any:
    """A host and a node, as every daemon has them."""
    from swarmtrain.p2p.host import Host
    from swarmtrain.p2p.network import HostOptions
    from swarmtrain.rpc.node import Node
    from swarmtrain.wire.messages import MESSAGES

    host = await Host.start(HostOptions(state_dir=Path(options["state_dir"]), listen=LISTEN))
    return host, Node(host, MESSAGES, handler)


async def our_hop_server(options: dict[str, Any]) -> None:
    """Answers a boundary tensor with a gradient of the same size."""
    from swarmtrain.codec import Direction, MessageContext, decode, make_encoder, parse_spec
    from swarmtrain.wire.messages import Done

    encoder = make_encoder(parse_spec("fp32"), boundary=0, direction=Direction.BACKWARD)

    async def handle(work: Any, exchange: Any) -> Done:
        tensor = decode(work.boundary, MessageContext(0, Direction.FORWARD)).tensor
        encoded = encoder.encode(tensor, MessageContext(0, Direction.BACKWARD))
        encoder.commit(encoded.ticket)
        return Done(0.0, (), 0.0, 0.0, 0.0, encoded.payload)

    host, node = await our_node(options, handle)
    print(json.dumps({"peer": node.peer_id, "addresses": list(host.addresses())}), flush=True)
    await commands(lambda command: asyncio.sleep(0, {}))
    await node.close()
    await host.close()


async def our_hop_client(options: dict[str, Any]) -> None:
    """Sends a boundary tensor, waits for its gradient: one forward and backward hop."""
    from swarmtrain.codec import Direction, MessageContext, decode, make_encoder, parse_spec
    from swarmtrain.rpc.errors import Refusal
    from swarmtrain.wire.messages import Done, Work

    async def refuse(message: Any, exchange: Any) -> Any:
        raise Refusal("unknown")

    host, node = await our_node(options, refuse)
    host.learn(options["addresses"])
    encoder = make_encoder(parse_spec("fp32"), boundary=0, direction=Direction.FORWARD)
    tensor = torch.randn(options["shape"])

    async def hop(command: dict[str, Any]) -> dict[str, Any]:
        started = time.perf_counter()
        encoded = encoder.encode(tensor, MessageContext(0, Direction.FORWARD))
        encoder.commit(encoded.ticket)
        work = Work("bench", 0, 1, 0, 0, 0, False, (), b"", encoded.payload)
        done = await node.call(options["peer"], work, 60.0, expect=Done)
        received = decode(done.gradient, MessageContext(0, Direction.BACKWARD)).tensor
        seconds = time.perf_counter() - started
        return {"seconds": seconds, "equal": torch.equal(received, tensor)}

    print(json.dumps({}), flush=True)
    await commands(hop)
    await node.close()
    await host.close()


async def our_all_reduce(options: dict[str, Any]) -> None:
    """One of several peers that all-reduce a gradient; every attempt has the same roster."""
    from swarmtrain.reduce.all_reduce import AllReduce
    from swarmtrain.reduce.partition import owned_elements
    from swarmtrain.rpc.errors import Refusal
    from swarmtrain.wire.messages import Prepare, ReduceShare, RosterEntry

    attempts: dict[int, asyncio.Future[AllReduce]] = {}

    def all_reduce_of(attempt: int) -> asyncio.Future[AllReduce]:
        return attempts.setdefault(attempt, asyncio.get_running_loop().create_future())

    async def handle(message: Any, exchange: Any) -> Any:
        if not isinstance(message, ReduceShare):
            raise Refusal("unknown")
        return await (await all_reduce_of(message.attempt)).receive_share(message, exchange.peer_id)

    host, node = await our_node(options, handle)
    # As a stage's sum of gradients is: on the grid of exact sums, and small.
    share = (torch.randn(options["size"], dtype=torch.float64) * 0.01 * 2.0**44).round() * 2.0**-44
    out = torch.empty(options["size"], dtype=torch.float32)

    async def answer(command: dict[str, Any]) -> dict[str, Any]:
        if "addresses" in command:
            host.learn(command["addresses"])
            return {}
        peers = command["peers"]
        owned = owned_elements(options["size"], [(0.0, 0.0)] * len(peers))
        roster = tuple(RosterEntry(peer, "", b"\0\0\0\0", count) for peer, count in zip(peers, owned, strict=True))
        started = time.perf_counter()
        all_reduce = AllReduce(node, Prepare("bench", 0, 0, 0, command["attempt"], roster), share)
        all_reduce_of(command["attempt"]).set_result(all_reduce)
        await all_reduce.run(out)
        return {"seconds": time.perf_counter() - started, "sum": float(out.double().sum())}

    print(json.dumps({"peer": node.peer_id, "addresses": list(host.addresses())}), flush=True)
    await commands(answer)
    await node.close()
    await host.close()


def hivemind_server(options: dict[str, Any]) -> None:
    """hivemind's own expert server, with an expert that only passes its input on."""
    from hivemind.moe import Server

    hidden = options["shape"][-1]
    server = Server.create(
        expert_uids=["bench.0"],
        expert_cls="nop",
        hidden_dim=hidden,
        max_batch_size=options["shape"][0],
        optim_cls=None,
        host_maddrs=list(LISTEN),
        start=True,
    )
    print(json.dumps({"addresses": [str(address) for address in server.dht.get_visible_maddrs()]}), flush=True)
    while sys.stdin.readline():
        print(json.dumps({}), flush=True)
    server.shutdown()


def hivemind_client(options: dict[str, Any]) -> None:
    """Forward and backward through hivemind's RemoteExpert."""
    from hivemind.dht import DHT
    from hivemind.moe.client.expert import RemoteExpert
    from hivemind.moe.server import get_experts

    dht = DHT(initial_peers=options["addresses"], start=True, host_maddrs=list(LISTEN))
    expert: RemoteExpert | None = None
    while expert is None:
        (expert,) = get_experts(dht, ["bench.0"])
    tensor = torch.randn(options["shape"]).requires_grad_(True)
    gradient = torch.randn(options["shape"])
    print(json.dumps({}), flush=True)
    while sys.stdin.readline():
        started = time.perf_counter()
        expert(tensor).backward(gradient)
        print(json.dumps({"seconds": time.perf_counter() - started, "equal": True}), flush=True)
    dht.shutdown()


def hivemind_averager(options: dict[str, Any]) -> None:
    """One of several peers of hivemind's averager."""
    from hivemind.averaging import DecentralizedAverager
    from hivemind.dht import DHT

    dht = DHT(initial_peers=options["addresses"], start=True, host_maddrs=list(LISTEN))
    averager = DecentralizedAverager(
        [torch.randn(options["size"])],
        dht=dht,
        start=True,
        prefix="bench",
        target_group_size=options["num_peers"],
        min_matchmaking_time=1.0,
        request_timeout=0.5,
        allreduce_timeout=60.0,
    )
    print(json.dumps({"addresses": [str(address) for address in dht.get_visible_maddrs()]}), flush=True)
    while sys.stdin.readline():
        started = time.perf_counter()
        ok = averager.step(timeout=60.0) is not None
        print(json.dumps({"seconds": time.perf_counter() - started, "ok": ok}), flush=True)
    averager.shutdown()
    dht.shutdown()


def main() -> None:
    """swarm_workers.py ROLE OPTIONS"""
    role, options = sys.argv[1], json.loads(sys.argv[2])
    torch.set_num_threads(1)
    if role.startswith("our_"):
        from swarmtrain.cli.daemons import keep_freed_memory

        keep_freed_memory()  # as our daemons do
    found = globals()[role]
    if asyncio.iscoroutinefunction(found):
        import uvloop

        uvloop.run(found(options))
    else:
        found(options)


if __name__ == "__main__":
    main()
