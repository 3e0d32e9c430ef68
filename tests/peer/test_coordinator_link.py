"""What a peer learns of its coordinator from the directory, with nobody else to ask."""

from __future__ import annotations

import asyncio
from typing import Any, cast

from net.memory_hosts import MemoryNetwork

from swarmtrain.chain.offer import COORDINATOR_TOPIC
from swarmtrain.net.directory import Directory, DirectoryOptions
from swarmtrain.net.identity import RunKey
from swarmtrain.peer.coordinator_link import CoordinatorLink, directory_rules
from swarmtrain.run.invite import Invite


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

        for value in ({"t": 3, "a": ["/ip4/127.0.0.1/tcp/1"]}, {"t": 3, "a": [], "over": 1}):  # 1 is not True
            await coordinator.announce(COORDINATOR_TOPIC, value, 30.0, signer=key.sign)
            assert await link.look()
            assert (link.peer_id, link.term, link.is_over) == (first.peer_id, 3, False)

        await coordinator.announce(COORDINATOR_TOPIC, {"t": 4, "a": [], "over": True}, 30.0, signer=key.sign)
        await coordinator.close()
        network.cut_off.add(first.peer_id)  # the coordinator is gone; what it said is still there
        assert await link.look()
        assert (link.term, link.is_over) == (4, True)

    asyncio.run(main())
