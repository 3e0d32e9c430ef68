"""The boundaries between stages in one process: every tensor is really encoded to bytes and decoded.

`Boundary` is for training: it holds the state of stateful codecs. `received` is for evaluation, where codecs neither
read nor change state: it gives the tensor that a receiver without history decodes.
"""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import dataclass

from torch import Tensor

from swarmtrain.codec import (
    Aux,
    CodecPair,
    CodecSpec,
    Decoder,
    Direction,
    MessageContext,
    decode,
    make_encoder,
    parse_pair,
    parse_spec,
)
from swarmtrain.codec.errors import CodecSpecError
from swarmtrain.codec.spec import CastSpec
from swarmtrain.codec.watch import ResidualWatch
from swarmtrain.errors import ManifestError
from swarmtrain.run.manifest import Manifest

_SENDER = {Direction.FORWARD: "lower", Direction.BACKWARD: "upper"}
_RECEIVER = {Direction.FORWARD: "upper", Direction.BACKWARD: "lower"}


@dataclass
class Traffic:
    """What has crossed a boundary in one direction, and the processor time that codecs took for it."""

    num_messages: int = 0
    num_bytes: int = 0
    encode_s: float = 0.0
    decode_s: float = 0.0


def sample_names(windows: Sequence[int]) -> tuple[int, ...]:
    """Names for the samples of a microbatch. Across the end of an epoch a window may occur twice."""
    return tuple(window + (list(windows[:row]).count(window) << 48) for row, window in enumerate(windows))


class Boundary:
    """One boundary between two stages: both directions through their codecs, as bytes."""

    def __init__(self, pair: CodecPair, index: int) -> None:
        specs = {Direction.FORWARD: pair.forward, Direction.BACKWARD: pair.backward}
        self.index = index
        self._encoders = {way: make_encoder(spec, boundary=index, direction=way) for way, spec in specs.items()}
        self._decoders = {way: Decoder() for way in specs}
        self.traffic = {way: Traffic() for way in specs}
        self._watch = ResidualWatch()

    def cross(
        self,
        tensor: Tensor,
        direction: Direction,
        step: int,
        microbatch: int,
        aux: Aux | None = None,
        samples: tuple[int, ...] = (),
    ) -> tuple[Tensor, Aux | None]:
        """The tensor that the other side decodes, and the mask that the microbatch's backward needs, if any."""
        context = MessageContext(
            self.index, direction, step, microbatch, _SENDER[direction], _RECEIVER[direction], samples=samples
        )
        encoder, traffic = self._encoders[direction], self.traffic[direction]
        started = time.thread_time()
        encoded = encoder.encode(tensor, context, aux)
        sent = time.thread_time()
        decoded = self._decoders[direction].decode(encoded.payload, context, aux)
        traffic.decode_s += time.thread_time() - sent
        traffic.encode_s += sent - started
        traffic.num_messages += 1
        traffic.num_bytes += len(encoded.payload)
        encoder.commit(encoded.ticket)
        return decoded.tensor.to(tensor.device, tensor.dtype), decoded.aux

    def watch(self, activation: Tensor) -> None:
        """The gradient of `activation` has just crossed: see `residual_cosine`."""
        self._watch.look(activation, self._encoders[Direction.BACKWARD].residual)

    @property
    def residual_cosine(self) -> float | None:
        """The last one looked at (codec/watch.py); None if gradients have no error feedback."""
        return self._watch.cosine

    def begin_step(self, step: int) -> None:
        """Let the codecs drop state that has grown too old."""
        for encoder in self._encoders.values():
            encoder.on_step(step)

    def forget(self, reason: str) -> None:
        """Drop the state of all codecs, at both ends."""
        for way, encoder in self._encoders.items():
            encoder.reset(reason)
            self._decoders[way].reset(reason)


def codec_pair(manifest: Manifest) -> CodecPair:
    """The codecs of the manifest's wire section; an error names the manifest's key."""
    wire = manifest.wire
    for key, text in (("wire.forward", wire.forward), ("wire.backward", wire.backward)):
        try:
            parse_spec(text)
        except CodecSpecError as error:
            raise ManifestError(key, str(error), fix=error.fix) from error
    try:
        return parse_pair(f"{wire.forward}/{wire.backward}")
    except CodecSpecError as error:
        raise ManifestError("wire.backward", str(error), fix=error.fix) from error


def is_lossless(spec: CodecSpec) -> bool:
    """Whether decoding returns the same fp32 numbers."""
    return isinstance(spec, CastSpec) and spec.format in ("fp32", "raw")


def received(tensor: Tensor, spec: CodecSpec, index: int) -> Tensor:
    """An activation (s, n, w) behind boundary `index`, for a receiver without history."""
    encoder = make_encoder(spec, boundary=index, direction=Direction.FORWARD)
    context = MessageContext(index, Direction.FORWARD, samples=tuple(range(tensor.shape[0])))
    payload = encoder.encode(tensor, context).payload
    return decode(payload, context).tensor.to(tensor.device, tensor.dtype)
