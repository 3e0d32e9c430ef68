"""Turning a stream away politely: one GOODBYE that says why, then the other end closes."""

from __future__ import annotations

import asyncio

from swarmtrain.p2p.network import ByteStream
from swarmtrain.wire.frames import FrameType, RefusalPayload, pack_refusal

_PATIENCE_S = 2.0


class Rejection:
    """Reads and ignores what still comes over a stream that is not wanted, until the other end closes it."""

    def __init__(self, stream: ByteStream, code: str, text: str) -> None:
        self._stream = stream
        self._scratch = memoryview(bytearray(4096))
        self._timer = asyncio.get_running_loop().call_later(_PATIENCE_S, stream.abort)
        stream.start(self)
        stream.write(pack_refusal(FrameType.GOODBYE, 0, RefusalPayload(code, text)))

    def get_buffer(self, sizehint: int) -> memoryview:
        """See `StreamReceiver`."""
        return self._scratch

    def buffer_updated(self, num_bytes: int) -> None:
        """See `StreamReceiver`."""

    def stream_closed(self, error: Exception | None) -> None:
        """See `StreamReceiver`."""
        self._timer.cancel()

    def pause_writing(self) -> None:
        """See `StreamReceiver`."""

    def resume_writing(self) -> None:
        """See `StreamReceiver`."""
