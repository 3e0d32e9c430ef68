"""Real peers that run out of work say so, and their callers send them the next piece; bits stay as they are."""

from __future__ import annotations

from contextlib import closing
from pathlib import Path

import pytest

from .comparison import References, assert_books_balance, assert_equals_reference
from .harness import Daemon, Swarm, tiny, until

pytestmark = pytest.mark.swarm

PACE = {"SWARMTRAIN_PACE": "0.08:0.16"}  # a pass that takes a while, as on real machines


def test_a_peer_that_runs_out_of_work_is_sent_the_next_piece(place: Path, reference: References) -> None:
    manifest = tiny("stages.count=2", "schedule.steps=6", "batch.microbatches_per_step=24")
    with closing(Swarm(manifest, place, num_peers=8)) as swarm:
        swarm.start_coordinator()
        for stage in (0,) * 6 + (1, 1):  # a peer with few callers tells nobody
            swarm.start_peer(stage, "--enable-test-faults", environment=PACE)

        def sent(peer: Daemon) -> int:
            return int(peer.status()["traffic"]["sent"]["kinds"].get("hungry", {}).get("num_messages", 0))

        first, last = swarm.peers[:6], swarm.peers[6:]
        swarm.wait_serving()
        until(lambda: any(sent(peer) > 0 for peer in last), "a peer has said that it runs out of work")
        until(lambda: sum(peer.status()["fed"] for peer in first) > 0, "the first stage fed the last one")
        assert [peer.status()["fed"] for peer in last] == [0, 0]  # they send nothing on
        assert not any(map(sent, first))  # the coordinator is their only caller
        swarm.wait_end()
        assert_equals_reference(swarm, reference(manifest))
    assert_books_balance(swarm)
