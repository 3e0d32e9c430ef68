"""The directory's small calls between daemons that have proven to each other that they belong to one run."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Protocol

from swarmtrain.p2p.errors import PeerUnreachable
from swarmtrain.p2p.network import CallHandler, CallNetwork


class CallGate(Protocol):
    """The part of a link's gate that small calls need, and what records must show."""

    @property
    def namespace(self) -> str:
        """What the run is called where anybody can read it."""

    def proof(self, peer_id: str) -> bytes:
        """See `rpc.gate.Gate`."""

    def is_proven(self, peer_id: str, proof: bytes) -> bool:
        """See `rpc.gate.Gate`."""

    def credential(self) -> bytes:
        """See `rpc.gate.Gate`."""

    def vouches(self, peer_id: str, credential: bytes) -> bool:
        """Whether a record with this credential counts as its owner's."""

    def is_excluded(self, peer_id: str) -> bool:
        """Whether records of a peer count as absent."""


class OpenCalls:
    """Lets everybody in: for a directory outside of a run."""

    def __init__(self, run_id: str) -> None:
        self.namespace = run_id

    def proof(self, peer_id: str) -> bytes:
        """See `CallGate`."""
        return b""

    def is_proven(self, peer_id: str, proof: bytes) -> bool:
        """See `CallGate`."""
        return True

    def credential(self) -> bytes:
        """See `CallGate`."""
        return b""

    def vouches(self, peer_id: str, credential: bytes) -> bool:
        """See `CallGate`."""
        return True

    def is_excluded(self, peer_id: str) -> bool:
        """See `CallGate`."""
        return False


class GuardedCalls:
    """A `CallNetwork` whose every call begins with the caller's proof. Without it there is no answer."""

    def __init__(self, network: CallNetwork, gate: CallGate) -> None:
        self._network, self._gate = network, gate

    @property
    def peer_id(self) -> str:
        """See `CallNetwork`."""
        return self._network.peer_id

    def addresses(self) -> tuple[str, ...]:
        """See `CallNetwork`."""
        return self._network.addresses()

    def known_addresses(self, peer_id: str) -> tuple[str, ...]:
        """See `CallNetwork`."""
        return self._network.known_addresses(peer_id)

    def learn(self, addresses: Iterable[str], *, of: str | None = None) -> None:
        """See `CallNetwork`."""
        self._network.learn(addresses, of=of)

    def hear(self, addresses: Iterable[str], *, of: str) -> None:
        """See `CallNetwork`."""
        self._network.hear(addresses, of=of)

    async def call(self, peer_id: str, protocol: str, payload: bytes, *, timeout_s: float) -> bytes:
        """See `CallNetwork`."""
        proof = self._gate.proof(peer_id)
        guarded = bytes((len(proof),)) + proof + payload
        return await self._network.call(peer_id, protocol, guarded, timeout_s=timeout_s)

    async def serve_calls(self, protocol: str, handler: CallHandler) -> None:
        """See `CallNetwork`."""

        async def checked(caller: str, payload: bytes) -> bytes:
            length = payload[0] if payload else 0
            if len(payload) < 1 + length or not self._gate.is_proven(caller, payload[1 : 1 + length]):
                raise PeerUnreachable("not for this peer")
            return await handler(caller, payload[1 + length :])

        await self._network.serve_calls(protocol, checked)
