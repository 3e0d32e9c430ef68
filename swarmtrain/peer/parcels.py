"""What this peer sends to its neighbours is signed, and what it takes from them is: see chain/signatures.py."""

from __future__ import annotations

from dataclasses import dataclass

from swarmtrain.chain.seals import digest_of
from swarmtrain.chain.signatures import Parcel, Sign
from swarmtrain.peer.ledger import Entry, Raw
from swarmtrain.wire.messages import Done, Way, Work


@dataclass(frozen=True)
class Parcels:
    """Of one peer on one stage. Where peers do not check each other, nothing is signed and everything is taken."""

    run: str
    stage: int
    sign: Sign | None  # None: peers do not check each other

    def signed_output(self, work: Work) -> bytes:
        """For a request to the next stage."""
        if self.sign is None:
            return b""
        return self.sign(
            self._parcel(work.stage - 1, Way.FORWARD, work, digest_of(work.tokens, work.boundary)).statement()
        )

    def signed_gradient(self, entry: Entry, gradient: Raw) -> bytes:
        """For an answer to the stage before."""
        if self.sign is None or not self.stage:
            return b""
        return self.sign(self._parcel(self.stage, Way.BACKWARD, entry, digest_of(gradient)).statement())

    def is_from(self, work: Work, sender: str) -> bool:
        """Whether a request's tensor is its sender's. The coordinator's are tokens alone, which it knows itself."""
        if self.sign is None or not self.stage:
            return True
        parcel = self._parcel(self.stage - 1, Way.FORWARD, work, digest_of(work.tokens, work.boundary))
        return parcel.is_signed(sender, work.signature)

    def is_answer_of(self, entry: Entry, done: Done) -> bool:
        """Whether an answer's gradient is signed by the peer that its route begins with."""
        if self.sign is None:
            return True
        parcel = self._parcel(self.stage + 1, Way.BACKWARD, entry, digest_of(done.gradient))
        return parcel.is_signed(done.route[0].peer_id, done.signature)

    def _parcel(self, stage: int, way: Way, of: Work | Entry, digest: bytes) -> Parcel:
        return Parcel(self.run, stage, way, of.step, of.microbatch, of.round, digest)
