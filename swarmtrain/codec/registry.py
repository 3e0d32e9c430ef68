"""From a spec to its encoder, and from a payload to its tensor."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

import torch

from swarmtrain.codec import aqsgd, cast, chunktopk, ef21, lowrank, minmax, quant, topk
from swarmtrain.codec.api import DEFAULT_LIMITS, Aux, Buffer, Decoded, Direction, Encoder, Limits, MessageContext
from swarmtrain.codec.critical import CriticalEncoder
from swarmtrain.codec.errors import CorruptPayload, UnknownCodec
from swarmtrain.codec.feedback import FeedbackEncoder
from swarmtrain.codec.mask import apply_mask
from swarmtrain.codec.names import parse_spec
from swarmtrain.codec.payload import Header, unseal
from swarmtrain.codec.samples import SampleStore
from swarmtrain.codec.spec import (
    AQSGDSpec,
    CastSpec,
    CodecSpec,
    CriticalSpec,
    EF21Spec,
    FeedbackSpec,
    LowRankSpec,
    MinMaxSpec,
    QuantSpec,
    TopKSpec,
)

_STICKY = (ef21.CODEC_ID, aqsgd.CODEC_ID)
_PLAIN_DECODERS: dict[int, Callable[[Header, memoryview], torch.Tensor]] = {
    cast.CODEC_ID: cast.decode_cast,
    quant.CODEC_ID: quant.decode_quant,
    minmax.CODEC_ID: minmax.decode_minmax,
    lowrank.CODEC_ID: lowrank.decode_lowrank,
    chunktopk.CODEC_ID: chunktopk.decode_chunk_topk,
}


def make_encoder(spec: CodecSpec, *, boundary: int, direction: Direction, store: SampleStore | None = None) -> Encoder:
    """A sender's encoder for one boundary and direction. Keep it as long as the peer serves that stage.

    `store` is where aqsgd remembers samples; without one it gets a store of its own, of the default size.
    """
    match spec:
        case CastSpec():
            return cast.CastEncoder(spec, boundary=boundary, direction=direction)
        case QuantSpec():
            return quant.QuantEncoder(spec, boundary=boundary, direction=direction)
        case MinMaxSpec():
            return minmax.MinMaxEncoder(spec, boundary=boundary, direction=direction)
        case TopKSpec():
            return topk.TopKEncoder(spec, boundary=boundary, direction=direction)
        case LowRankSpec():
            return lowrank.LowRankEncoder(spec, boundary=boundary, direction=direction)
        case _:
            return _make_wrapped(spec, boundary, direction, store)


def _make_wrapped(
    spec: FeedbackSpec | EF21Spec | AQSGDSpec | CriticalSpec,
    boundary: int,
    direction: Direction,
    store: SampleStore | None,
) -> Encoder:
    def make(inner: CodecSpec) -> Encoder:
        return make_encoder(inner, boundary=boundary, direction=direction)

    match spec:
        case FeedbackSpec():
            # With feedback a gradient selects for itself: a reused mask leaves out nothing that matters.
            inner = spec.inner if direction is Direction.FORWARD else _selecting(spec.inner)
            return FeedbackEncoder(spec, make(inner), _reconstruct, boundary=boundary, direction=direction)
        case CriticalSpec():
            exact = make(CastSpec("fp32"))
            return CriticalEncoder(spec, make(spec.inner), exact, boundary=boundary, direction=direction)
        case EF21Spec():
            inner = _selecting(spec.inner)
            return ef21.EF21Encoder(spec, make(inner), _reconstruct, boundary=boundary, direction=direction)
        case AQSGDSpec():
            encoders = make(_selecting(spec.inner)), make(parse_spec(spec.key))
            own_store = SampleStore() if store is None else store
            return aqsgd.AQSGDEncoder(spec, *encoders, _reconstruct, own_store, boundary=boundary, direction=direction)


def _selecting(spec: QuantSpec | TopKSpec | LowRankSpec) -> QuantSpec | TopKSpec | LowRankSpec:
    """The codec that chooses its own positions and offers no mask."""
    return replace(spec, separate=True) if isinstance(spec, TopKSpec) else spec


def decode(
    payload: Buffer, context: MessageContext, aux: Aux | None = None, *, limits: Limits = DEFAULT_LIMITS
) -> Decoded:
    """The tensor of `payload`: a pure function of the bytes and, for a backward message, of the forward mask `aux`.

    With `aux`, a backward tensor is zero outside the mask, whatever its codec: what was not sent forward has no
    gradient. (Only a message of `inline_aux` knows better: it belongs to what another peer sent forward.) Raises
    CorruptPayload, UnknownCodec, NeedAux; and NeedKeyframe for what only a `Decoder` can decode (the key-frames of
    sticky codecs need none).
    """
    header, body = unseal(payload, limits)
    if header.codec in _STICKY:
        return Decoder(store=SampleStore(budget_bytes=0)).decode(payload, context, aux, limits=limits)
    return _decode_free(header, body, context, aux)


def needs_state(payload: Buffer, *, limits: Limits = DEFAULT_LIMITS) -> bool:
    """True if only a `Decoder` can decode `payload`: it was made by a sticky codec. Raises CorruptPayload."""
    return unseal(payload, limits)[0].codec in _STICKY


class Decoder:
    """A receiver's decoder for one boundary and direction: decodes everything, sticky codecs included.

    State: estimates by sender (EF21) and by sample (AQ-SGD). Used by one thread at a time.
    """

    def __init__(self, *, store: SampleStore | None = None) -> None:
        self._estimates = ef21.EF21State(_reconstruct)
        self._samples = None if store is None else aqsgd.AQSGDState(_reconstruct, store)

    def decode(
        self, payload: Buffer, context: MessageContext, aux: Aux | None = None, *, limits: Limits = DEFAULT_LIMITS
    ) -> Decoded:
        """As the function `decode`, with the state that sticky codecs need. `context.sender` names the link."""
        header, body = unseal(payload, limits)
        if header.codec == ef21.CODEC_ID:
            tensor = self._estimates.decode(header, body, context.sender)
        elif header.codec == aqsgd.CODEC_ID:
            tensor = self._sample_state().decode(header, body, context)
        else:
            return _decode_free(header, body, context, aux)
        return Decoded(_masked(tensor, context, aux), None, header.dtype)

    def reset(self, reason: str) -> None:
        """Forget all state: the peer changed stage, was restored, or the run was rolled back."""
        self._estimates.reset()
        if self._samples is not None:
            self._samples.reset()

    def _sample_state(self) -> aqsgd.AQSGDState:
        if self._samples is None:
            self._samples = aqsgd.AQSGDState(_reconstruct, SampleStore())
        return self._samples


def _decode_free(header: Header, body: memoryview, context: MessageContext, aux: Aux | None) -> Decoded:
    if header.codec == topk.CODEC_ID:
        tensor, offered = topk.decode_topk(header, body, aux)
        own = None if header.flags & topk.INLINE_MASK else aux
        return Decoded(_masked(tensor, context, own), offered, header.dtype)
    decoder = _PLAIN_DECODERS.get(header.codec)
    if decoder is None:
        raise UnknownCodec(f"a payload was encoded by codec {header.codec}, which this build does not know")
    return Decoded(_masked(decoder(header, body), context, aux), None, header.dtype)


def _masked(tensor: torch.Tensor, context: MessageContext, aux: Aux | None) -> torch.Tensor:
    if aux is None or context.direction is Direction.FORWARD:
        return tensor
    return apply_mask(tensor, aux)


def _reconstruct(payload: Buffer, limits: Limits) -> torch.Tensor:
    """What every receiver decodes. A sticky payload inside another one is not something an encoder writes."""
    header, body = unseal(payload, limits)
    if header.codec in _STICKY:
        raise CorruptPayload("a payload that needs state lies within another one")
    return _decode_free(header, body, MessageContext(0, Direction.FORWARD), None).tensor
