"""The gate of a link: who may speak at all, and what each end shows of itself."""

from __future__ import annotations

from typing import Protocol


class Gate(Protocol):
    """Decides about links. Both ends' peer ids are authenticated before it is asked."""

    def proof(self, peer_id: str) -> bytes:
        """What shows the other end that this one belongs to the same run; of no use to any third."""

    def is_proven(self, peer_id: str, proof: bytes) -> bool:
        """Whether the other end's proof is right. If not, it learns nothing more and gets no answer."""

    def credential(self) -> bytes:
        """This end's certificate; empty as long as it has none."""

    def met(self, peer_id: str, credential: bytes) -> bool:
        """The other end shows its certificate. False: it is none, and the link ends."""


class OpenGate:
    """Lets everybody in: for links outside of a run."""

    def proof(self, peer_id: str) -> bytes:
        """See `Gate`."""
        return b""

    def is_proven(self, peer_id: str, proof: bytes) -> bool:
        """See `Gate`."""
        return True

    def credential(self) -> bytes:
        """See `Gate`."""
        return b""

    def met(self, peer_id: str, credential: bytes) -> bool:
        """See `Gate`."""
        return True
