"""p2pd's control messages, and small calls between hosts over its persistent connection.

A call is one request and one answer, below 4 MiB, with a deadline. Only the directory uses calls; everything else goes
over raw streams. The connection also keeps p2pd alive, which ends when its last persistent connection closes.
hivemind's own client can lose its reading task, after which no call is ever answered, and it does not notice p2pd's
death; this client fails all calls at once.

A control message is a varint length and a protobuf message. The message types come from the generated file of the
installed hivemind: importing the package itself would cost every daemon 60 MB and a second, for an averager and an
optimizer that it does not use.
"""

from __future__ import annotations

import asyncio
import importlib.util
import logging
from pathlib import Path
from typing import Any

from google.protobuf.message import DecodeError  # type: ignore[import-untyped]

from swarmtrain import world
from swarmtrain.p2p.addresses import decode_varint, encode_varint, peer_id_from_bytes, peer_id_to_bytes
from swarmtrain.p2p.errors import AddressError, HostDownError, P2pdFailedError, P2pdUnusableError, PeerUnreachable
from swarmtrain.p2p.network import CallHandler

logger = logging.getLogger(__name__)

MAX_MESSAGE_BYTES = 16 * 2**20  # of one message from p2pd; LIST_PEERS with some ten thousand peers
MAX_PAYLOAD_BYTES = 3 * 2**20  # p2pd drops calls and answers above 4 MiB, answers silently
MAX_CALLS_BEING_ANSWERED = 256
MAX_BYTES_BEING_ANSWERED = 32 * 2**20  # of their requests, and of answers that p2pd has not read yet


def hivemind_directory() -> Path:
    """The directory of the installed hivemind, without importing it; raises P2pdUnusableError if there is none."""
    spec = importlib.util.find_spec("hivemind")
    if spec is None or not spec.submodule_search_locations:
        raise P2pdUnusableError(Path("p2pd"), "hivemind, which brings it, is not installed")
    return Path(spec.submodule_search_locations[0])


def _load_message_types() -> Any:
    path = hivemind_directory() / "proto" / "p2pd_pb2.py"
    spec = importlib.util.spec_from_file_location("swarmtrain.p2p._p2pd_pb2", path)
    if spec is None or spec.loader is None:
        raise P2pdUnusableError(path, "it cannot be loaded")
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


p2pd_pb2 = _load_message_types()


def framed(message: Any) -> bytes:
    """A message with its length in front."""
    raw: bytes = message.SerializeToString()
    return encode_varint(len(raw)) + raw


def parsed(raw: bytes, message: Any) -> Any:
    """`message`, filled from `raw`; raises HostDownError."""
    try:
        message.ParseFromString(raw)
    except DecodeError as error:
        raise HostDownError(f"p2pd sent a message that cannot be read: {error}") from None
    return message


async def read_message(reader: asyncio.StreamReader, message: Any) -> Any:
    """Read the next framed message into `message`; raises HostDownError, OSError or IncompleteReadError."""
    header = bytearray()
    while (decoded := decode_varint(header)) is None:
        header += await reader.readexactly(1)
    if decoded[0] > MAX_MESSAGE_BYTES:
        raise HostDownError(f"p2pd announced a message of {decoded[0]} bytes")
    return parsed(await reader.readexactly(decoded[0]), message)


class P2pdCalls:
    """The persistent connection to one p2pd, made by `connect`. It is useless once that p2pd has ended."""

    def __init__(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self._reader = reader
        self._writer = writer
        self._pending: dict[bytes, asyncio.Future[Any]] = {}
        self._handlers: dict[str, CallHandler] = {}
        self._being_answered: dict[bytes, asyncio.Task[None]] = {}
        self._num_request_bytes = 0  # of the calls that are being answered
        self._is_closed = False
        self._task = asyncio.create_task(self._read(), name="p2pd calls")

    @classmethod
    async def connect(cls, control_socket: Path) -> P2pdCalls:
        """Connect: p2pd then lives until this connection closes. Raises HostDownError, P2pdFailedError."""
        try:
            reader, writer = await asyncio.open_unix_connection(str(control_socket))
        except OSError as error:
            raise HostDownError(f"p2pd does not answer: {error}") from error
        try:
            writer.write(framed(p2pd_pb2.Request(type=p2pd_pb2.Request.PERSISTENT_CONN_UPGRADE)))
            response = await read_message(reader, p2pd_pb2.Response())
            if response.type == p2pd_pb2.Response.ERROR:
                raise P2pdFailedError(response.error.msg)
        except (OSError, asyncio.IncompleteReadError) as error:
            writer.close()
            raise HostDownError(f"p2pd closed its control connection: {error}") from error
        except BaseException:
            writer.close()
            raise
        return cls(reader, writer)

    async def serve(self, protocol: str, handler: CallHandler) -> None:
        """Answer calls of `protocol` with `handler`. If it raises, the caller gets an error answer."""
        self._handlers[protocol] = handler
        request = p2pd_pb2.AddUnaryHandlerRequest(proto=protocol, balanced=False)
        await self._ask(p2pd_pb2.PersistentConnectionRequest(addUnaryHandler=request))

    async def call(self, peer_id: str, protocol: str, payload: bytes, *, timeout_s: float) -> bytes:
        """The peer's answer. Raises HostDownError; PeerUnreachable, also for error answers and oversized payloads."""
        if len(payload) > MAX_PAYLOAD_BYTES:
            raise PeerUnreachable(f"a call of {len(payload)} bytes is too large")
        request = p2pd_pb2.CallUnaryRequest(peer=peer_id_to_bytes(peer_id), proto=protocol, data=payload)
        try:
            async with asyncio.timeout(timeout_s):
                answer = await self._ask(p2pd_pb2.PersistentConnectionRequest(callUnary=request))
        except TimeoutError:
            raise PeerUnreachable(f"peer {peer_id}: no answer within {timeout_s:g} s") from None
        if answer.HasField("daemonError"):
            raise PeerUnreachable(f"peer {peer_id}: {answer.daemonError.message[:300]}")
        if not answer.HasField("callUnaryResponse") or not answer.callUnaryResponse.HasField("response"):
            raise PeerUnreachable(f"peer {peer_id}: {answer.callUnaryResponse.error[:300].decode(errors='replace')}")
        response: bytes = answer.callUnaryResponse.response
        return response

    async def close(self) -> None:
        """Close the connection and fail all calls. p2pd ends, unless it has another connection."""
        self._task.cancel()
        await asyncio.gather(self._task, return_exceptions=True)

    async def _ask(self, request: Any) -> Any:
        if self._is_closed:
            raise HostDownError("p2pd is gone")
        call_id = world.token_bytes(16)
        request.callId = call_id
        future: asyncio.Future[Any] = asyncio.get_running_loop().create_future()
        self._pending[call_id] = future
        try:
            self._writer.write(framed(request))
            return await future
        except asyncio.CancelledError:
            cancel = p2pd_pb2.PersistentConnectionRequest(callId=call_id, cancel=p2pd_pb2.Cancel())
            self._write(cancel)
            raise
        finally:
            del self._pending[call_id]

    async def _read(self) -> None:
        reason = "p2pd is gone"
        try:
            while True:
                self._dispatch(await read_message(self._reader, p2pd_pb2.PersistentConnectionResponse()))
        except (OSError, asyncio.IncompleteReadError):
            logger.debug("p2pd closed its control connection")
        except (HostDownError, AddressError) as error:
            logger.error("p2pd's control connection broke: %s", error)
            reason = str(error)
        finally:
            self._is_closed = True
            self._writer.close()
            for future in self._pending.values():
                if not future.done():
                    future.set_exception(HostDownError(reason))
            for task in self._being_answered.values():
                task.cancel()

    def _dispatch(self, message: Any) -> None:
        call_id = bytes(message.callId)
        if message.HasField("requestHandling"):
            self._begin_answer(call_id, message.requestHandling)
        elif message.HasField("cancel"):
            if (task := self._being_answered.get(call_id)) is not None:
                task.cancel()
        elif (future := self._pending.get(call_id)) is not None and not future.done():
            future.set_result(message)

    def _begin_answer(self, call_id: bytes, request: Any) -> None:
        num_bytes = len(request.data)
        if call_id in self._being_answered or not self._may_answer(num_bytes):
            self._answer(call_id, error="busy")
            return
        task = asyncio.create_task(self._handle(call_id, request), name=f"answer {request.proto}")
        self._being_answered[call_id] = task
        self._num_request_bytes += num_bytes
        task.add_done_callback(lambda _: self._answered(call_id, num_bytes))

    def _may_answer(self, num_bytes: int) -> bool:
        """Whether one more request of `num_bytes` keeps number and memory of the answered calls within their bounds."""
        num_held_bytes = self._num_request_bytes + self._writer.transport.get_write_buffer_size()
        is_within = num_held_bytes + num_bytes <= MAX_BYTES_BEING_ANSWERED
        return is_within and len(self._being_answered) < MAX_CALLS_BEING_ANSWERED

    def _answered(self, call_id: bytes, num_bytes: int) -> None:
        self._being_answered.pop(call_id, None)
        self._num_request_bytes -= num_bytes

    async def _handle(self, call_id: bytes, request: Any) -> None:
        try:
            caller = peer_id_from_bytes(request.peer)
            response = await self._handlers[request.proto](caller, request.data)
        except Exception as error:  # the caller gets an answer, however the handler fails
            logger.debug("a call of %s failed: %r", request.proto, error)
            self._answer(call_id, error=f"{type(error).__name__}: {error}"[:300])
            return
        if len(response) > MAX_PAYLOAD_BYTES:
            self._answer(call_id, error="the answer is too large")
            return
        self._answer(call_id, response=response)

    def _answer(self, call_id: bytes, *, response: bytes | None = None, error: str = "") -> None:
        answer = p2pd_pb2.CallUnaryResponse()
        if response is not None:
            answer.response = response
        else:
            answer.error = error.encode()
        self._write(p2pd_pb2.PersistentConnectionRequest(callId=call_id, unaryResponse=answer))

    def _write(self, message: Any) -> None:
        if not self._is_closed:
            self._writer.write(framed(message))
