"""The streams that p2pd hands us: for each it connects to our unix socket and says whose it is."""

from __future__ import annotations

import asyncio
import logging
from collections import Counter
from collections.abc import Callable
from functools import partial
from pathlib import Path

from swarmtrain.p2p.host_errors import AddressError
from swarmtrain.p2p.p2pd import peer_of_stream
from swarmtrain.p2p.p2pd_stream import P2pdStream
from swarmtrain.p2p.transport import ByteStream

logger = logging.getLogger(__name__)

GREETING_DEADLINE_S = 10.0


class IncomingStreams:
    """Accepts streams within limits, in all and of one peer, for `accept`; refuses them while that is None."""

    def __init__(self, max_streams: int, max_streams_per_peer: int) -> None:
        self.accept: Callable[[ByteStream], None] | None = None
        self._max_streams = max_streams
        self._max_streams_per_peer = max_streams_per_peer
        self._streams: set[P2pdStream] = set()
        self._num_of_peer: Counter[str] = Counter()
        self._server: asyncio.Server | None = None

    async def serve(self, socket_path: Path) -> None:
        """Listen on `socket_path`. Survives restarts of p2pd."""
        loop = asyncio.get_running_loop()
        self._server = await loop.create_unix_server(self._new_stream, str(socket_path), backlog=1024)

    def close(self) -> list[P2pdStream]:
        """Take no more streams; those that are still open."""
        if self._server is not None:
            self._server.close()
        return list(self._streams)

    def _new_stream(self) -> P2pdStream:
        stream = P2pdStream()
        deadline = asyncio.get_running_loop().call_later(GREETING_DEADLINE_S, stream.abort)
        stream.greeting.add_done_callback(lambda _: deadline.cancel())
        stream.greeting.add_done_callback(partial(self._greeted, stream))
        self._streams.add(stream)
        stream.closed.add_done_callback(lambda _: self._streams.discard(stream))
        return stream

    def _greeted(self, stream: P2pdStream, greeting: asyncio.Future[bytes]) -> None:
        """p2pd has said whose stream it is: hand it on, or refuse it."""
        if greeting.cancelled() or greeting.exception() is not None:
            return
        try:
            stream.peer_id = peer_of_stream(greeting.result())
        except AddressError as error:
            logger.warning("an incoming stream was refused: %s", error)
            stream.abort()
            return
        is_full = len(self._streams) > self._max_streams
        if self.accept is None or is_full or self._num_of_peer[stream.peer_id] >= self._max_streams_per_peer:
            logger.debug("an incoming stream of %s was refused", stream.peer_id)
            stream.abort()
            return
        self._num_of_peer[stream.peer_id] += 1
        stream.closed.add_done_callback(lambda _: self._forget(stream.peer_id))
        try:
            self.accept(stream)
        except Exception:
            logger.exception("accepting a stream of %s failed", stream.peer_id)
            stream.abort()

    def _forget(self, peer_id: str) -> None:
        self._num_of_peer[peer_id] -= 1
        if self._num_of_peer[peer_id] <= 0:
            del self._num_of_peer[peer_id]
