"""What a peer learns of its coordinator from the directory, with nobody else to ask."""

from __future__ import annotations

import asyncio
import time
from typing import Any, cast

import msgpack
import pytest
from directory.memory_hosts import MemoryNetwork

from swarmtrain.chain.claim import CoordinatorRecord
from swarmtrain.chain.offer import COORDINATOR_TOPIC
from swarmtrain.directory.directory import Directory, DirectoryOptions
from swarmtrain.errors import ExitCode
from swarmtrain.p2p.identity import RunKey
from swarmtrain.peer.contacts import CoordinatorLink, RunUnreachable, directory_rules
from swarmtrain.rpc.errors import CallRefused
from swarmtrain.run.invite import Invite
from swarmtrain.wire.errors import WrongVersion
from swarmtrain.wire.messages import Code, StageFound
from swarmtrain.wire.records import pack_record
from swarmtrain.wire.schema import PROTOCOL_VERSION


def test_a_record_says_who_coordinates_under_which_term_and_that_the_run_is_over() -> None:
    async def main() -> None:
        network, key = MemoryNetwork(), RunKey.generate()
        first = network.host()
        invite = Invite("run", key.public_bytes, first.addresses())
        options = DirectoryOptions(rules=directory_rules(invite))
        coordinator = await Directory.start(cast(Any, first), "run", options)
        own = network.host(first)
        link = CoordinatorLink(
            invite, cast(Any, own), cast(Any, None), await Directory.start(cast(Any, own), "run", options)
        )
        assert not await link.look()

        for addresses in (("/ip4/127.0.0.1/tcp/1",), ()):
            value = pack_record(CoordinatorRecord(3, addresses=addresses))
            await coordinator.announce(COORDINATOR_TOPIC, value, 30.0, signer=key.sign)
            assert await link.look()
            assert (link.peer_id, link.term, link.is_over) == (first.peer_id, 3, False)

        value = pack_record(CoordinatorRecord(4, is_over=True))
        await coordinator.announce(COORDINATOR_TOPIC, value, 30.0, signer=key.sign)
        await coordinator.close()
        network.cut_off.add(first.peer_id)  # the coordinator is gone; what it said is still there
        assert await link.look()
        assert (link.term, link.is_over) == (4, True)

    asyncio.run(main())


def test_a_coordinator_of_another_protocol_version_is_named_as_such_and_one_of_this_version_is_followed() -> None:
    async def main() -> None:
        network, key = MemoryNetwork(), RunKey.generate()
        first = network.host()
        invite = Invite("run", key.public_bytes, first.addresses())
        options = DirectoryOptions(rules=directory_rules(invite))
        older, newer = [await Directory.start(cast(Any, host), "run", options) for host in (first, network.host(first))]
        own = network.host(first)
        directory = await Directory.start(cast(Any, own), "run", options)
        link = CoordinatorLink(invite, cast(Any, own), cast(Any, None), directory)
        header = msgpack.unpackb(pack_record(CoordinatorRecord(3))[4:])
        header[1] = PROTOCOL_VERSION + 1
        packed: bytes = msgpack.packb(header)
        other = len(packed).to_bytes(4, "little") + packed
        await older.announce(COORDINATOR_TOPIC, other, 30.0, signer=key.sign)
        with pytest.raises(WrongVersion, match=f"version {PROTOCOL_VERSION + 1}") as caught:
            await link.find(timeout_s=1.0)
        assert (caught.value.exit_code, bool(caught.value.fix)) == (ExitCode.TOO_OLD, True)
        await newer.announce(COORDINATOR_TOPIC, pack_record(CoordinatorRecord(4)), 30.0, signer=key.sign)
        assert await link.find(timeout_s=20.0) == newer._host.peer_id

    asyncio.run(main())


def test_of_two_coordinators_with_one_term_the_one_that_got_further_is_followed_while_it_is_listed() -> None:
    async def main() -> None:
        network, key, now = MemoryNetwork(), RunKey.generate(), time.time()
        first = network.host()
        invite = Invite("run", key.public_bytes, first.addresses())
        options = DirectoryOptions(rules=directory_rules(invite), clock=lambda: now)
        directories = [await Directory.start(cast(Any, first), "run", options)]
        directories.append(await Directory.start(cast(Any, network.host(first)), "run", options))
        own = network.host(first)
        link = CoordinatorLink(
            invite, cast(Any, own), cast(Any, None), await Directory.start(cast(Any, own), "run", options)
        )
        ids = [directory._host.peer_id for directory in directories]

        async def announce(which: int, term: int, step: int) -> str | None:
            nonlocal now
            now += 1.0
            claim = pack_record(CoordinatorRecord(term, step))
            await directories[which].announce(COORDINATOR_TOPIC, claim, (20.0, 50.0)[which], signer=key.sign)
            assert await link.look()
            return link.peer_id

        assert await announce(0, 4, 10) == ids[0]
        assert await announce(1, 4, 9) == ids[0]
        assert await announce(1, 4, 11) == ids[1]  # whatever the order of their ids
        assert await announce(0, 4, 12) == ids[0]
        assert await announce(1, 4, 11) == ids[0]
        now += 20.0  # the record of the first has expired
        assert await announce(1, 4, 11) == ids[1]
        assert await announce(0, 5, 0) == ids[0]
        assert await announce(0, 3, 50) == ids[0]
        assert link.term == 5  # an outdated term is not followed

    asyncio.run(main())


class Starting:
    """A coordinator that is ready when it is asked for the `ready_at`-th time."""

    def __init__(self, ready_at: int) -> None:
        self.num_asked, self._ready_at = 0, ready_at

    def forgive(self, peer_id: str) -> None:
        pass

    async def call(self, peer_id: str, message: object, *, deadline_s: float, expect: object) -> StageFound:
        self.num_asked += 1
        if self.num_asked < self._ready_at:
            raise CallRefused(Code.NOT_SERVING, "still starting", retry_after_s=0.01)
        return StageFound(1, "the weakest")


@pytest.mark.parametrize("ready_at", [1, 3])
def test_a_coordinator_that_is_still_starting_is_asked_again(ready_at: int) -> None:
    async def main() -> None:
        node, link = link_to(ready_at)
        assert await link.seek_stage([0, 1], timeout_s=20.0) == StageFound(1, "the weakest")
        assert node.num_asked == ready_at

    asyncio.run(main())


def test_a_coordinator_that_never_gets_ready_is_not_waited_for_longer_than_was_said() -> None:
    async def main() -> None:
        node, link = link_to(1 << 30)
        with pytest.raises(RunUnreachable, match="still starting"):
            await link.seek_stage([0, 1], timeout_s=0.1)
        assert node.num_asked > 1

    asyncio.run(main())


def link_to(ready_at: int) -> tuple[Starting, CoordinatorLink]:
    node = Starting(ready_at)
    link = CoordinatorLink(Invite("run", bytes(32), ()), cast(Any, None), cast(Any, node), cast(Any, None))

    async def found(*, timeout_s: float) -> str:
        return "coordinator"

    link.find = found  # type: ignore[method-assign]
    return node, link
