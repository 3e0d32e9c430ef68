"""Peers that lie with finite numbers: real daemons of which one function is replaced."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import numpy as np
import torch
from torch import Tensor

from swarmtrain.codec import Direction, MessageContext, decode
from swarmtrain.reduce.shares import ExactShares
from swarmtrain.reduce.totals import Buffer, Total
from swarmtrain.rpc.errors import Refusal
from swarmtrain.rpc.exchange import Exchange
from swarmtrain.simulated.swarm import Life, SimulatedSwarm
from swarmtrain.wire.messages import Code, Done, FetchSeals, Work

Change = Callable[[Tensor], Tensor]


def constant(tensor: Tensor) -> Tensor:
    """The same number everywhere."""
    return torch.full_like(tensor, 0.01)


def drawn(tensor: Tensor) -> Tensor:
    """Noise of the same size."""
    generator = torch.Generator().manual_seed(7)
    return torch.randn(tensor.shape, generator=generator, dtype=tensor.dtype) * tensor.std()


def scaled(tensor: Tensor) -> Tensor:
    """Half as much again."""
    return 1.5 * tensor


def flipped(tensor: Tensor) -> Tensor:
    """The other sign."""
    return -tensor


def noisy(tensor: Tensor) -> Tensor:
    """Off by a millionth."""
    return tensor * (1.0 + 1e-6 * torch.randn(tensor.shape, generator=torch.Generator().manual_seed(3)))


def stale() -> Change:
    """What it should have sent for the microbatch before."""
    kept: list[Tensor] = []

    def change(tensor: Tensor) -> Tensor:
        kept.append(tensor.clone())
        return kept[-2] if len(kept) > 1 else constant(tensor)

    return change


def changes() -> dict[str, Change]:
    """SENTINEL's list of attacks."""
    named = {"constant": constant, "random": drawn, "scaled": scaled, "flipped": flipped, "noisy": noisy}
    return {**named, "stale": stale()}


def _jobs(life: Life) -> Any:
    return life.daemon.assignment.stage.jobs


def lie_forward(life: Life, change: Change) -> None:
    """It sends another output than it has computed."""
    codecs = _jobs(life).codecs
    honest = codecs.encode_output
    codecs.encode_output = lambda entry, step, output, partner: honest(entry, step, change(output), partner)


def lie_backward(life: Life, change: Change) -> None:
    """It sends another gradient than it has computed."""
    codecs = _jobs(life).codecs
    honest = codecs.encode_gradient
    codecs.encode_gradient = lambda entry, step, gradient, *rest: honest(entry, step, change(gradient), *rest)


def lie_in_sum(life: Life, change: Change) -> None:
    """Its boundary tensors are right, and what it adds to the sum is not."""
    jobs = _jobs(life)
    honest = jobs.reconciled_share
    jobs.reconciled_share = lambda *given: honest(*given).mul(1.25)


def hide_sum(life: Life) -> None:
    """It does not say what its own part of a sum is."""

    async def nothing(share: Tensor) -> str:
        return ""

    life.daemon.assignment.stage.share_digest = nothing


def start_with(swarm: SimulatedSwarm, stages: list[int], liars: dict[str, Callable[[Life], None]]) -> None:
    """A coordinator and peers; before the first step those named in `liars` begin to lie."""
    swarm.start_coordinator(min_peers=len(stages) + 1)
    for index, stage in enumerate(stages):
        swarm.start_peer(f"peer{index}", stage)
    swarm.until(lambda: len(swarm.serving()) == len(stages), "all serve")
    for name, begin in liars.items():
        begin(swarm.lives[name])
    swarm.run_for(5.0)  # heartbeats
    swarm.start_peer("last", stages[-1])


def lie_as_owner(life: Life, change: Change) -> None:
    """What it adds up for others comes to something else, and the same for all of them."""

    class Changed(ExactShares):
        def answer(self, total: Total, start: int) -> Buffer:
            """See ShareFormat."""
            view: memoryview = change(torch.from_numpy(total.rounded())).numpy().astype("<f4").view(np.uint8).data
            return view

    coder = _jobs(life).coder
    honest = coder.sliced
    coder.sliced = lambda *, compress: (Changed(), honest(compress=compress)[1])


def send_other_than_sealed(life: Life, change: Change) -> None:
    """What it seals is right, and what it sends to the next stage is not."""
    jobs = _jobs(life)
    honest = jobs.forward

    def forward(entry: Any, step: int, partner: str = "") -> Any:
        outcome = honest(entry, step, partner)
        sent = jobs.codecs.encode_once(
            Direction.FORWARD, change(_decoded(outcome.payload)), step, entry.microbatch, entry.tokens
        )
        return replace(outcome, payload=sent.payload)

    jobs.forward = forward


def seal_other_than_received(life: Life) -> None:
    """It says that its neighbours have sent something else."""
    checking = life.daemon._handlers[FetchSeals].__self__
    honest = checking._seal
    checking._seal = lambda entry: replace(honest(entry), received=bytes(16))


def say_diverged(life: Life, asked: list[Work]) -> None:
    """Whatever it is given, it says that training diverged. What it was asked is added to `asked`."""

    async def refuse(message: Work, exchange: Exchange) -> Done:
        asked.append(message)
        raise Refusal(Code.DIVERGED, "it is not finite")

    life.daemon._handlers[Work] = refuse


def huge(tensor: Tensor) -> Tensor:
    """Finite, and too large for whatever is computed from it."""
    return torch.full_like(tensor, 1e30)


def _decoded(payload: bytes) -> Tensor:
    return decode(payload, MessageContext(0, Direction.FORWARD)).tensor


def accuse(life: Life) -> None:
    """It computes something else when it checks another peer, and sends what is right itself."""
    jobs = _jobs(life)
    honest = jobs.checked

    def accusing(*given: Any) -> Any:
        made = honest(*given)
        return replace(made, output=bytes(len(made.output)), gradient=bytes(len(made.gradient)), loss=made.loss + 1.0)

    jobs.checked = accusing
