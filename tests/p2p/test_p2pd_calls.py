"""Small calls between real hosts: what strangers can make the answering end hold in memory."""

from __future__ import annotations

import asyncio
from pathlib import Path

from swarmtrain.p2p.errors import PeerUnreachable
from swarmtrain.p2p.p2pd_calls import MAX_BYTES_BEING_ANSWERED, MAX_PAYLOAD_BYTES

from .host_helpers import hosts, run

PROTOCOL = "/test/calls"
DEADLINE_S = 60.0


def test_requests_that_are_being_answered_hold_bounded_bytes_and_give_them_back(tmp_path: Path) -> None:
    async def main() -> None:
        async with hosts(tmp_path, 2) as (callee, caller):
            held: list[int] = []
            refusals: list[str] = []
            settled = asyncio.Event()
            release = asyncio.Event()

            def check_settled() -> None:
                if len(held) + len(refusals) == num_calls:
                    settled.set()

            async def hold(peer_id: str, request: bytes) -> bytes:
                held.append(len(request))
                check_settled()
                await release.wait()
                return b"done"

            async def call() -> bytes | None:
                try:
                    return await caller.call(callee.peer_id, PROTOCOL, request, timeout_s=DEADLINE_S)
                except PeerUnreachable as error:
                    refusals.append(str(error))
                    check_settled()
                    return None

            await callee.serve_calls(PROTOCOL, hold)
            caller.learn(callee.addresses(), of=callee.peer_id)
            request = bytes(MAX_PAYLOAD_BYTES)
            num_fitting = MAX_BYTES_BEING_ANSWERED // len(request)
            num_calls = num_fitting + 5
            calls = [asyncio.create_task(call()) for _ in range(num_calls)]
            await settled.wait()
            assert 0 < len(held) <= num_fitting, "the bound was not kept"
            assert len(refusals) >= 5
            assert all("busy" in refusal for refusal in refusals), refusals
            release.set()
            answers = await asyncio.gather(*calls)
            assert answers.count(b"done") == len(held)
            for _ in range(num_fitting + 1):  # one after the other all are answered: the bytes were given back
                assert await caller.call(callee.peer_id, PROTOCOL, request, timeout_s=DEADLINE_S) == b"done"

    run(main())
