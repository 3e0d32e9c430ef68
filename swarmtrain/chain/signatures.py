"""What a peer sends for a microbatch, signed: so that of two neighbours who say different things one is proven wrong.

A receiver takes only what its sender has signed, and keeps the signature. If the sender seals something else, the
receiver shows it; a receiver that has none to show did not receive what it says. Where peers do not check each other
(`checks.share` = 0), nothing is signed.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from swarmtrain.p2p.addresses import key_of_peer_id
from swarmtrain.p2p.errors import AddressError
from swarmtrain.p2p.identity import verify
from swarmtrain.wire.messages import Way

_DOMAIN = b"swarmtrain sent 1\0"
Sign = Callable[[bytes], bytes]


@dataclass(frozen=True, slots=True)
class Parcel:
    """A tensor on its way from one stage to its neighbour. `digest` is as in a seal."""

    run: str
    stage: int  # of the sender
    way: Way
    step: int
    microbatch: int
    round: int
    digest: bytes

    def statement(self) -> bytes:
        """What is signed."""
        numbers = (self.stage, self.step, self.microbatch, self.round)
        return _DOMAIN + f"{self.run} {self.way} {' '.join(map(str, numbers))} {self.digest.hex()}".encode()

    def is_signed(self, sender: str, signature: bytes) -> bool:
        """Whether this is the sender's signature."""
        try:
            return verify(key_of_peer_id(sender), bytes(signature), self.statement())
        except AddressError:
            return False
