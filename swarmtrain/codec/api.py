"""The codec interface: what a sender and a receiver of boundary tensors call.

    encoder = make_encoder(parse_spec("quant8"), boundary=3, direction=Direction.FORWARD)
    encoded = encoder.encode(tensor, context)      # -> payload, aux, ticket
    decoded = decode(encoded.payload, context)     # -> tensor, aux

Rules of use
- `encode` and `decode` run outside autograd, never change their input, and are deterministic.
- Every `encode` ends in exactly one `commit` (the message was answered) or `abort` (it was given up). Both are
  idempotent, and harmless for codecs without state.
- A resend sends the same bytes. Encoding again would count a residual twice.
- An encoder belongs to one sender, one boundary and one direction, and is used by one thread at a time.
- What `Scope.free_routes` says may be decoded by anybody from the bytes and the microbatch's own `Aux`. The others need
  a `Decoder` at the receiver and the same receiver each time; with any other they refuse with `NeedKeyframe`.
"""

from __future__ import annotations

import math
from abc import ABC, abstractmethod
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from enum import Enum, IntEnum

import torch

from swarmtrain.codec.spec import CodecSpec
from swarmtrain.codec.tensors import plain


class Direction(IntEnum):
    """Which way a boundary tensor travels."""

    FORWARD = 0  # activations, from stage s to s + 1
    BACKWARD = 1  # gradients, from stage s + 1 to s


class Scope(Enum):
    """Where a codec's state lives, and with it: who may decode."""

    NONE = "none"  # no state
    MICROBATCH = "microbatch"  # a mask that travels with the microbatch
    SENDER = "sender"  # residual or warm start at the sender; the decoder needs only the bytes
    LINK = "link"  # the same state at both ends of one link
    SAMPLE = "sample"  # the same state at both ends, for each training sample

    @property
    def free_routes(self) -> bool:
        """True if any replica of the receiving stage can decode; False if routes must be sticky."""
        return self in (Scope.NONE, Scope.MICROBATCH, Scope.SENDER)

    @property
    def remembers(self) -> bool:
        """True if a message depends on those of former microbatches."""
        return self not in (Scope.NONE, Scope.MICROBATCH)


@dataclass(frozen=True, slots=True)
class MessageContext:
    """What a message is, as its envelope says. Only stateful codecs look at more than `direction`."""

    boundary: int  # boundary s lies between stage s and stage s + 1
    direction: Direction
    step: int = 0
    microbatch: int = 0
    sender: str = ""
    receiver: str = ""
    critical: bool = True  # the receiver would wait for this message (see policy.py)
    samples: tuple[int, ...] = ()  # ids of the training samples along the first axis; AQ-SGD only


@dataclass(frozen=True, slots=True)
class Aux:
    """The forward mask of a microbatch: one bit per element, most significant bit first.

    Both ends keep it in the microbatch's ledger entry and hand it to the backward message's `encode` and `decode`.
    """

    shape: tuple[int, ...]
    mask: bytes  # ceil(elements / 8) bytes
    digest: bytes  # 8 bytes; names the mask in a backward payload


@dataclass(frozen=True, slots=True)
class Ticket:
    """Names one encoded message to its encoder until commit or abort."""

    serial: int
    step: int


@dataclass(frozen=True, slots=True)
class Encoded:
    """`payload` is what travels; `aux` is what the backward message of this microbatch needs, if anything."""

    payload: bytes
    aux: Aux | None
    ticket: Ticket
    received: torch.Tensor | None = None  # sticky codecs: what the receiver will hold, to send it whole if need be


@dataclass(frozen=True, slots=True)
class Decoded:
    """`tensor` is fp32 (or `source_dtype`, for the `raw` codec), contiguous, writable, on the CPU."""

    tensor: torch.Tensor
    aux: Aux | None
    source_dtype: torch.dtype


@dataclass(frozen=True, slots=True)
class Limits:
    """What the receiver is prepared to allocate. Checked against the header before anything is allocated."""

    max_elements: int = 1 << 28
    expected_shape: tuple[int, ...] | None = None  # refuse every other shape

    @staticmethod
    def exactly(shape: tuple[int, ...]) -> Limits:
        """Only this shape."""
        return Limits(math.prod(max(1, size) for size in shape), shape)


DEFAULT_LIMITS = Limits()
MAX_AGE = 2  # optimizer steps: a residual that was last used longer ago is dropped, weights and Jacobians have moved on
MAX_EARLIER = 1  # optimizer steps: messages of two open steps may alternate (schedule.delay)


Buffer = bytes | bytearray | memoryview
Reconstruct = Callable[[Buffer, Limits], torch.Tensor]  # what a receiver decodes from a payload without state


class Encoder(ABC):
    """One sender's encoder for one boundary and direction."""

    scope: Scope = Scope.NONE

    def __init__(self, spec: CodecSpec, *, boundary: int, direction: Direction) -> None:
        self.spec = spec
        self.boundary = boundary
        self.direction = direction
        self._serial = 0
        self.made: Counter[str] = Counter()  # "key-frame" and "difference", for sticky codecs

    def encode(self, tensor: torch.Tensor, context: MessageContext, aux: Aux | None = None) -> Encoded:
        """Turn `tensor` into bytes.

        `aux` is the mask of the same microbatch's forward message, for the backward direction.
        Raises NonFiniteTensor (state unchanged) for NaN, infinity and numbers that do not fit the format.
        """
        return self.encode_plain(plain(tensor), tensor.dtype, context, aux)

    @abstractmethod
    def encode_plain(
        self, numbers: torch.Tensor, source_dtype: torch.dtype, context: MessageContext, aux: Aux | None
    ) -> Encoded:
        """As `encode`, for contiguous fp32 `numbers` on the CPU that may still hold NaN or infinity."""

    @abstractmethod
    def max_bytes(self, shape: Sequence[int]) -> int:
        """Upper bound of the payload's length for this shape; exact for fixed-rate codecs."""

    @property
    def residual(self) -> torch.Tensor | None:
        """What earlier messages left out and the next one makes up for; None without error feedback."""
        return None

    def commit(self, ticket: Ticket) -> None:  # noqa: B027 (codecs without state need nothing)
        """The message has been delivered. Idempotent."""

    def abort(self, ticket: Ticket) -> None:  # noqa: B027 (codecs without state need nothing)
        """The message was given up: its residual is taken back. Idempotent."""

    def on_step(self, step: int) -> None:  # noqa: B027 (codecs without state need nothing)
        """Optimizer step `step` begins. Drops state that has grown too old."""

    def reset(self, reason: str) -> None:  # noqa: B027 (codecs without state need nothing)
        """Forget all state: the peer changed stage, was restored, or the run was rolled back."""

    def _new_ticket(self, context: MessageContext) -> Ticket:
        self._serial += 1
        return Ticket(self._serial, context.step)
