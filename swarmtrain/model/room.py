"""The room of one device: where a stage's tensors lie, and every copy between the device and its host.

With `Offload.STATE` parameters and moments lie on the host, the optimizer runs there, and the device computes with
copies. With `Offload.SUMS` gradients go to the host too, one tensor at a time, as backward makes them. The same code
runs where the device is the CPU: then a copy is one from memory to memory, with the same bits.

On a graphics card copies go through two pinned buffers in turn, on a stream of their own. The stream of the computing
waits for them by an event, and no thread does (`ready`).
"""

from __future__ import annotations

import torch
from torch import Tensor

from swarmtrain.model.footprint import Offload

_STAGED_BYTES = 32 << 20
_CPU = torch.device("cpu")


class Room:
    """Of one stage. `device` computes, `home` has parameters and moments, `sums` has the sums of gradients."""

    def __init__(self, device: torch.device | str = "cpu", offload: Offload = Offload.NOTHING) -> None:
        self.device, self.offload = torch.device(device), offload
        self.home = _CPU if offload >= Offload.STATE else self.device
        self.sums = _CPU if offload >= Offload.SUMS else self.device
        self.bytes_to_device = 0
        self.bytes_to_host = 0
        self._lane = _Lane(self.device) if self.device.type == "cuda" and self.is_apart else None

    @property
    def is_apart(self) -> bool:
        """Whether the device computes with copies of parameters that lie elsewhere."""
        return self.offload >= Offload.STATE

    def upload(self, into: Tensor, source: Tensor) -> None:
        """Copy parameters into what the device computes with, rounded if that is narrower."""
        if self.is_apart:
            self.bytes_to_device += into.numel() * into.element_size()
        if self._lane is None:
            into.copy_(source)
        else:
            self._lane.upload(into, source)

    def ready(self) -> None:
        """What is computed from here on sees what was uploaded."""
        if self._lane is not None:
            self._lane.ready()

    def for_sum(self, gradient: Tensor) -> Tensor:
        """A gradient where its sum is."""
        if self.offload < Offload.SUMS:
            return gradient
        self.bytes_to_host += gradient.numel() * gradient.element_size()
        return gradient.to(self.sums)


class _Lane:
    """From the host to a graphics card."""

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._stream = torch.cuda.Stream(device)  # type: ignore[no-untyped-call]
        self._staged = [torch.empty(_STAGED_BYTES, dtype=torch.uint8, pin_memory=True) for _ in range(2)]
        first, second, self._done = (torch.cuda.Event() for _ in range(3))  # type: ignore[no-untyped-call]
        self._free = (first, second)

    def upload(self, into: Tensor, source: Tensor) -> None:
        """Piece by piece: the host rounds one while the other is on its way."""
        flat, values = into.view(-1), source.reshape(-1)
        size = _STAGED_BYTES // into.element_size()
        self._stream.wait_stream(torch.cuda.current_stream(self._device))  # who still reads what was there
        with torch.cuda.stream(self._stream):
            for number, start in enumerate(range(0, flat.numel(), size)):
                piece = flat[start : start + size]
                self._free[number % 2].synchronize()  # of the thread that applies steps, not of the one that computes
                staged = self._staged[number % 2].view(into.dtype)[: piece.numel()]
                staged.copy_(values[start : start + size])
                piece.copy_(staged, non_blocking=True)
                self._free[number % 2].record(self._stream)
            self._done.record(self._stream)

    def ready(self) -> None:
        """On the stream of the computing."""
        torch.cuda.current_stream(self._device).wait_event(self._done)
