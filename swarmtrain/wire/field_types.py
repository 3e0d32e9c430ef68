"""The types of fields that many messages have, with their limits."""

from __future__ import annotations

from typing import Annotated

from swarmtrain.wire.limits import Lengths, MaxLength, Range

MAX_ADDRESS = 256
MAX_ADDRESSES = 4

RunId = Annotated[str, MaxLength(64)]
PeerId = Annotated[str, MaxLength(128)]
Term = Annotated[int, Range(0, 2**40)]
Step = Annotated[int, Range(0, 2**40)]
StageIndex = Annotated[int, Range(0, 1023)]
MicrobatchIndex = Annotated[int, Range(0, 2**20)]
Attempt = Annotated[int, Range(0, 2**31)]
ExclusionNumber = Annotated[int, Range(0, 2**40)]
Assignment = Annotated[int, Range(0, 2**53)]
Round = Annotated[int, Range(0, 2**20)]
Signature = Annotated[bytes, Lengths((0, 64))]
SealDigest = Annotated[bytes, Lengths((0, 16))]
Digest = Annotated[str, MaxLength(64)]
Incarnation = Annotated[str, MaxLength(32)]
Milliseconds = Annotated[float, Range(0.0, 1e9)]
Seconds = Annotated[float, Range(0.0, 1e9)]
Loss = Annotated[float, Range(-1.0, 4e38)]  # of a token, fp32; a little below zero by rounding
Rate = Annotated[float, Range(0.0, 1e15)]  # bytes per second; 0: not announced
Text = Annotated[str, MaxLength(1024)]
Address = Annotated[str, MaxLength(MAX_ADDRESS)]  # a multiaddress
Addresses = Annotated[tuple[Address, ...], MaxLength(MAX_ADDRESSES)]
PeerState = Annotated[str, MaxLength(16)]
