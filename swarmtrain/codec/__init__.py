"""Boundary tensor <-> bytes. Torch only."""

from swarmtrain.codec.api import (
    DEFAULT_LIMITS,
    Aux,
    Decoded,
    Direction,
    Encoded,
    Encoder,
    Limits,
    MessageContext,
    Scope,
    Ticket,
)
from swarmtrain.codec.errors import (
    CodecError,
    CodecSpecError,
    CorruptPayload,
    NeedAux,
    NeedKeyframe,
    NonFiniteTensor,
    UnknownCodec,
)
from swarmtrain.codec.mask import aux_from_bytes
from swarmtrain.codec.names import parse_pair, parse_spec
from swarmtrain.codec.registry import Decoder, decode, make_encoder, needs_state
from swarmtrain.codec.samples import SampleStore
from swarmtrain.codec.spec import CodecPair, CodecSpec
from swarmtrain.codec.topk import inline_aux

__all__ = [
    "DEFAULT_LIMITS",
    "Aux",
    "CodecError",
    "CodecPair",
    "CodecSpec",
    "CodecSpecError",
    "CorruptPayload",
    "Decoded",
    "Decoder",
    "Direction",
    "Encoded",
    "Encoder",
    "Limits",
    "MessageContext",
    "NeedAux",
    "NeedKeyframe",
    "NonFiniteTensor",
    "SampleStore",
    "Scope",
    "Ticket",
    "UnknownCodec",
    "aux_from_bytes",
    "decode",
    "inline_aux",
    "make_encoder",
    "needs_state",
    "parse_pair",
    "parse_spec",
]
