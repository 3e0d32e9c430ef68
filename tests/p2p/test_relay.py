"""Relays: what they grant is read before they are used or offered."""

from __future__ import annotations

from pathlib import Path

import psutil
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from swarmtrain.p2p import relay
from swarmtrain.p2p.errors import AddressError, P2pdFailedError, PeerUnreachable
from swarmtrain.p2p.host import Host, HostOptions
from swarmtrain.p2p.identity import Identity
from swarmtrain.p2p.relay import Reservation, read_answer, reserve

from .host_helpers import LOOPBACK, hosts, is_running, run

pytestmark = pytest.mark.swarm

# HopMessage{type = STATUS, reservation{expire = 1, ...}, limit{duration = 120, data = 131072}, status = OK}
DEFAULT_ANSWER = bytes.fromhex("08021a02080122060878108080082864")


def test_a_relays_answer_is_read() -> None:
    assert read_answer(DEFAULT_ANSWER) == (100, Reservation(circuit_bytes=131072, circuit_s=120))
    assert not read_answer(DEFAULT_ANSWER)[1].is_useful
    assert read_answer(bytes.fromhex("080228c801")) == (200, Reservation(0, 0))
    assert Reservation(0, 0).is_useful


@settings(deadline=None, max_examples=200)
@given(st.binary(max_size=60), st.integers(0, len(DEFAULT_ANSWER) - 1))
def test_any_other_answer_is_an_address_error(noise: bytes, cut: int) -> None:
    for message in (noise, DEFAULT_ANSWER[:cut], DEFAULT_ANSWER[:cut] + noise):
        try:
            status, _ = read_answer(message)
        except AddressError:
            continue
        assert status >= 0


def test_only_a_host_that_was_started_as_a_relay_is_a_useful_one(tmp_path: Path) -> None:
    async def main() -> None:
        async with hosts(tmp_path, 2) as (plain, asking):
            assert asking._p2pd is not None
            reservation = await reserve(asking._p2pd, plain.peer_id, timeout_s=60)
            assert reservation.circuit_bytes == 128 * 1024, "p2pd has changed: see relay.py"
            serving = await Host.start(HostOptions(tmp_path / "relay", listen=LOOPBACK, relay=True))
            try:
                await asking.connect(serving.addresses())
                assert (await reserve(asking._p2pd, serving.peer_id, timeout_s=60)).is_useful
            finally:
                await serving.close()
            with pytest.raises(PeerUnreachable):
                await reserve(asking._p2pd, Identity.generate().peer_id, timeout_s=60)

    run(main())


def test_a_relay_that_lost_its_race_is_started_again(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    tried: list[int] = []

    async def pretend(*arguments: object) -> bool:
        tried.append(next(child.pid for child in psutil.Process().children() if child.name() == "p2pd"))
        return len(tried) == 3

    monkeypatch.setattr(relay, "_serves_useful_circuits", pretend)

    async def main() -> None:
        host = await Host.start(HostOptions(tmp_path / "relay", listen=LOOPBACK, relay=True))
        assert host.p2pd_process_id == tried[2]
        assert not any(is_running(process) for process in tried[:2])
        await host.close()

    run(main())
    assert len(set(tried)) == 3


def test_a_relay_that_never_gets_its_limits_is_an_error(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    async def never(*arguments: object) -> bool:
        return False

    monkeypatch.setattr(relay, "_serves_useful_circuits", never)
    monkeypatch.setattr(relay, "MAX_STARTS", 2)
    with pytest.raises(P2pdFailedError, match="default limits"):
        run(Host.start(HostOptions(tmp_path / "relay", listen=LOOPBACK, relay=True)))
    assert not [child for child in psutil.Process().children() if child.name() == "p2pd"]
