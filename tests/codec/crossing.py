"""A boundary in one process: activations and gradients pass through the same bytes as between two peers.

`crossing(tensor, step=…)` is an autograd operation whose forward is
decode(encode(x)) and whose backward is decode(encode(g)). Except for a reused mask the codec counts as the identity in
backward (straight-through), as it does in the swarm.
"""

from __future__ import annotations

import time
from dataclasses import dataclass, field, replace
from typing import Any, cast

import torch

from swarmtrain.codec.api import Aux, Direction, Encoder, MessageContext
from swarmtrain.codec.registry import Decoder, make_encoder
from swarmtrain.codec.spec import CodecPair


@dataclass(slots=True)
class Traffic:
    """What has crossed in one direction."""

    num_messages: int = 0
    num_bytes: int = 0
    encode_s: float = 0.0
    decode_s: float = 0.0


@dataclass(slots=True)
class _Lane:
    """One direction: sender and receiver, which always answers."""

    encoder: Encoder
    decoder: Decoder = field(default_factory=Decoder)
    traffic: Traffic = field(default_factory=Traffic)

    def pass_on(
        self, tensor: torch.Tensor, context: MessageContext, aux: Aux | None
    ) -> tuple[torch.Tensor, Aux | None]:
        begun = time.perf_counter()
        encoded = self.encoder.encode(tensor, context, aux)
        sent = time.perf_counter()
        decoded = self.decoder.decode(encoded.payload, context, aux)
        self.traffic.decode_s += time.perf_counter() - sent
        self.traffic.encode_s += sent - begun
        self.traffic.num_messages += 1
        self.traffic.num_bytes += len(encoded.payload)
        self.encoder.commit(encoded.ticket)
        return decoded.tensor.to(tensor.device, tensor.dtype), decoded.aux


class Crossing:
    """One boundary with both of its directions. `enabled = False` lets tensors pass untouched."""

    def __init__(self, pair: CodecPair, boundary: int) -> None:
        self.pair = pair
        self.boundary = boundary
        self.enabled = True
        self._forward = _Lane(make_encoder(pair.forward, boundary=boundary, direction=Direction.FORWARD))
        self._backward = _Lane(make_encoder(pair.backward, boundary=boundary, direction=Direction.BACKWARD))

    @property
    def forward_traffic(self) -> Traffic:
        """Activations."""
        return self._forward.traffic

    @property
    def backward_traffic(self) -> Traffic:
        """Gradients."""
        return self._backward.traffic

    def __call__(
        self,
        tensor: torch.Tensor,
        *,
        step: int = 0,
        microbatch: int = 0,
        samples: tuple[int, ...] = (),
        critical: bool = True,
    ) -> torch.Tensor:
        """`tensor` as the next stage receives it; its gradient comes back as the sender receives it."""
        if not self.enabled:
            return tensor
        context = MessageContext(
            self.boundary, Direction.FORWARD, step, microbatch, "sender", "receiver", critical, samples
        )
        return cast(torch.Tensor, _Cross.apply(tensor, self, context))  # type: ignore[no-untyped-call]

    def on_step(self, step: int) -> None:
        """Optimizer step `step` begins."""
        self._forward.encoder.on_step(step)
        self._backward.encoder.on_step(step)


class _Cross(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, tensor: torch.Tensor, crossing: Crossing, context: MessageContext) -> torch.Tensor:
        ctx.crossing, ctx.context = crossing, context
        received, ctx.aux = crossing._forward.pass_on(tensor, context, None)
        return received

    @staticmethod
    def backward(ctx: Any, *gradients: torch.Tensor) -> tuple[torch.Tensor, None, None]:
        context = replace(ctx.context, direction=Direction.BACKWARD, sender="receiver", receiver="sender")
        received, _ = ctx.crossing._backward.pass_on(gradients[0], context, ctx.aux)
        return received, None, None
