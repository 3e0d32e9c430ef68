"""A small HTTP server: GET and HEAD, no keep-alive, hard limits on everything a client controls.

It is enough for a status page, Prometheus and a health check. A request changes something only where a server is given
`actions`: these answer POST with a small body, and judge themselves who may ask.
"""

from __future__ import annotations

import asyncio
import ipaddress
import json
import logging
import os
import re
import socket
import urllib.parse
from collections.abc import AsyncIterator, Awaitable, Callable, Mapping
from dataclasses import dataclass, field, replace
from functools import partial
from http import HTTPStatus
from pathlib import Path
from typing import Any, BinaryIO

from swarmtrain import world
from swarmtrain.errors import ExitCode, SwarmtrainError, UsageError

log = logging.getLogger(__name__)

MAX_HEAD_BYTES = 8192  # request line and headers
MAX_BODY_BYTES = 4096  # of a POST
HEAD_S = 5.0  # a client that has not sent its request by then is disconnected
WRITE_S = 10.0  # a client that does not read for so long is disconnected
EVERY_NAME = "*"  # of a server that shows what anybody may see
LOCAL_NAMES = (".local", ".localhost", ".lan", ".internal", ".home.arpa")
MAX_CONNECTIONS = 128
MAX_STREAMS = 64  # of them, event streams
MAX_FILES = 4  # of them, downloads of files
PIECE_BYTES = 1 << 18  # of a file: so much of it is in memory

_REQUEST = re.compile(rb"(GET|HEAD|POST) (/[!-~]{0,2000}) HTTP/1\.[01]\r\n")
_METHOD = re.compile(rb"[A-Z]{1,16} ")
_COMMON = {
    "X-Content-Type-Options": "nosniff",
    "Referrer-Policy": "no-referrer",
    "Cross-Origin-Resource-Policy": "same-origin",
    "Content-Security-Policy": "default-src 'none'; frame-ancestors 'none'",
    "Cache-Control": "no-store",
    "Connection": "close",
}


class ListenError(SwarmtrainError):
    """The address for the page or the metrics cannot be listened on."""

    error_id = "ST-LISTEN"
    exit_code = ExitCode.USAGE


@dataclass(frozen=True)
class Request:
    """A parsed request, as handlers see it."""

    path: str
    query: Mapping[str, str]
    headers: Mapping[str, str]  # lower-case names
    body: bytes = b""


@dataclass(frozen=True)
class Response:
    """A complete response."""

    body: bytes
    content_type: str = "text/plain; charset=utf-8"
    status: HTTPStatus = HTTPStatus.OK
    headers: Mapping[str, str] = field(default_factory=dict)


@dataclass(frozen=True)
class EventStream:
    """A response without an end: server-sent events, already formatted."""

    chunks: AsyncIterator[bytes]


@dataclass(frozen=True)
class FileBody:
    """A file, sent piece by piece: it may be larger than memory."""

    path: Path
    content_type: str
    name: str  # that the browser gives it


Answer = Response | EventStream | FileBody
Handler = Callable[[Request], Answer]
Action = Callable[[Request], Awaitable[Response]]


def as_json(item: Any) -> Response:
    """A JSON response. NaN and infinities, which JSON lacks, become null."""
    return Response(json.dumps(finite(item), separators=(",", ":")).encode(), "application/json")


def finite(item: Any) -> Any:
    """The same data with None for NaN and infinities."""
    if isinstance(item, float):
        return item if item - item == 0 else None
    if isinstance(item, Mapping):
        return {key: finite(value) for key, value in item.items()}
    if isinstance(item, list | tuple):
        return [finite(value) for value in item]
    return item


def parse_address(text: str, option: str) -> tuple[str, int]:
    """Host and port of `HOST:PORT`; UsageError for anything else."""
    host, separator, port = text.rpartition(":")
    host = host.removeprefix("[").removesuffix("]")
    if not separator or not host or not port.isdecimal() or int(port) > 65535:
        raise UsageError(f"{option}: {text!r:.80} is not HOST:PORT", fix="write 127.0.0.1:9090, or [::1]:9090")
    return host, int(port)


def checked_address(text: str, option: str) -> str:
    """An address from the command line, checked before anything starts; empty for `off`."""
    if text in ("", "off"):
        return ""
    parse_address(text, option)
    return text


def is_own_name(host: str, *own: str) -> bool:
    """Whether a request's Host names a machine as its own network does: nothing that a foreign page may have made up.

    `own` are further names of it: those that its operator wrote down.

    A page of another site can let its own name point to this address and then read what is served here (DNS rebinding).
    Its name has a dot and is a public one. An address, a name without a dot and the names of local networks are none.
    """
    name = host.rsplit(":", 1)[0] if not host.endswith("]") else host
    name = name.removeprefix("[").removesuffix("]").rstrip(".").lower()
    try:
        ipaddress.ip_address(name)
    except ValueError:
        is_local = "." not in name or name.endswith(LOCAL_NAMES)
        return is_local or name in (*(one.lower() for one in own if one), socket.gethostname().lower())
    return True


def show_address(host: str, port: int) -> str:
    """`HOST:PORT`, IPv6 in brackets."""
    return f"[{host}]:{port}" if ":" in host else f"{host}:{port}"


def same_port_as_before(host: str, port: int, note: Path) -> tuple[str, int]:
    """Port 0 becomes the port that this run's page had before, if it is free, so that open pages find it again."""
    if port:
        return host, port
    try:
        before = int(note.read_text().strip().removesuffix("/").rpartition(":")[2])
        with socket.socket(socket.AF_INET6 if ":" in host else socket.AF_INET) as probe:
            probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            probe.bind((host, before))
    except (OSError, ValueError, OverflowError):
        return host, 0
    return host, before


class HttpServer:
    """Serves `routes`, by exact path, at one address; and `actions` to those who POST."""

    def __init__(
        self, routes: Mapping[str, Handler], actions: Mapping[str, Action] | None = None, known_as: str = ""
    ) -> None:
        """`known_as`: a name of this machine in other networks, under which it answers, too; or EVERY_NAME."""
        self._routes, self._actions, self._known_as = routes, actions or {}, known_as
        self._server: asyncio.AbstractServer | None = None
        self._clients: set[asyncio.Task[None]] = set()
        self._num_streams = self._num_files = 0
        self.host, self.port = "", 0

    async def start(self, host: str, port: int) -> None:
        """Listen; port 0 takes a free one. ListenError if the address cannot be used."""
        try:
            self._server = await asyncio.start_server(self._accept, host, port, limit=MAX_HEAD_BYTES)
        except (OSError, UnicodeError) as error:
            reason = getattr(error, "strerror", None) or str(error)
            raise ListenError(
                f"cannot listen on {show_address(host, port)}: {reason}", fix="choose another address or port"
            ) from error
        self.host, self.port = host, self._server.sockets[0].getsockname()[1]

    @property
    def address(self) -> str:
        """Where it listens."""
        return show_address(self.host, self.port)

    async def close(self) -> None:
        """Stop listening and disconnect all clients."""
        if self._server is not None:
            self._server.close()
        for client in tuple(self._clients):
            client.cancel()
        await asyncio.gather(*self._clients, return_exceptions=True)
        if self._server is not None:
            await self._server.wait_closed()

    async def _accept(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        task = asyncio.current_task()
        assert task is not None
        if len(self._clients) >= MAX_CONNECTIONS:
            writer.close()
            return
        self._clients.add(task)
        try:
            await self._serve(reader, writer)
        except (ConnectionError, TimeoutError, asyncio.IncompleteReadError, asyncio.LimitOverrunError) as error:
            log.debug("an HTTP client was cut off: %s", error)
        except asyncio.CancelledError:
            pass  # the server closes
        finally:
            self._clients.discard(task)
            writer.close()

    async def _serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        try:
            async with asyncio.timeout(HEAD_S):
                head = await reader.readuntil(b"\r\n\r\n")
        except asyncio.LimitOverrunError:
            await self._send(writer, _plain(HTTPStatus.REQUEST_HEADER_FIELDS_TOO_LARGE), whole=True)
            return
        match = _REQUEST.match(head)
        if match is not None and match[1] == b"POST" and self._actions:
            await self._send(writer, await self._act(match[2].decode("ascii"), head, reader), whole=True)
            return
        if match is None or match[1] == b"POST":
            wrong = HTTPStatus.METHOD_NOT_ALLOWED if _METHOD.match(head) else HTTPStatus.BAD_REQUEST
            await self._send(writer, _plain(wrong), whole=True)
            return
        whole = match[1] == b"GET"
        request = _request(match[2].decode("ascii"), head)
        if not self._is_own(request):
            await self._send(writer, _misdirected(), whole=True)
            return
        answer = self._answer(request)
        if isinstance(answer, Response):
            await self._send(writer, answer, whole=whole)
        elif isinstance(answer, FileBody):
            await self._send_file(writer, answer, whole=whole)
        elif whole:
            await self._stream(writer, answer)

    async def _act(self, target: str, head: bytes, reader: asyncio.StreamReader) -> Response:
        request = _request(target, head)
        if not self._is_own(request):
            return _misdirected()
        action = self._actions.get(request.path)
        if action is None:
            return _plain(HTTPStatus.METHOD_NOT_ALLOWED if request.path in self._routes else HTTPStatus.NOT_FOUND)
        length = request.headers.get("content-length", "")
        if not length.isdecimal() or len(length) > 6:
            return _plain(HTTPStatus.LENGTH_REQUIRED)
        if int(length) > MAX_BODY_BYTES:
            return _plain(HTTPStatus.REQUEST_ENTITY_TOO_LARGE)
        async with asyncio.timeout(HEAD_S):
            body = await reader.readexactly(int(length))
        try:
            return await action(replace(request, body=body))
        except Exception:
            log.exception("cannot do what was asked")
            return _plain(HTTPStatus.INTERNAL_SERVER_ERROR)

    def _is_own(self, request: Request) -> bool:
        own = self._known_as
        return own == EVERY_NAME or is_own_name(request.headers.get("host", ""), self.host, own)

    def _answer(self, request: Request) -> Answer:
        handler = self._routes.get(request.path)
        if handler is None:
            return _plain(HTTPStatus.NOT_FOUND)
        try:
            answer = handler(request)
        except Exception:
            log.exception("cannot answer %s", request.path)
            return _plain(HTTPStatus.INTERNAL_SERVER_ERROR)
        if isinstance(answer, EventStream) and self._num_streams >= MAX_STREAMS:
            return _plain(HTTPStatus.SERVICE_UNAVAILABLE)
        if isinstance(answer, FileBody) and self._num_files >= MAX_FILES:
            return _plain(HTTPStatus.SERVICE_UNAVAILABLE)
        return answer

    async def _send(self, writer: asyncio.StreamWriter, response: Response, *, whole: bool) -> None:
        headers = {
            **_COMMON,
            "Content-Type": response.content_type,
            "Content-Length": str(len(response.body)),
            **response.headers,
        }
        writer.write(_head(response.status, headers) + (response.body if whole else b""))
        async with asyncio.timeout(WRITE_S):
            await writer.drain()

    async def _send_file(self, writer: asyncio.StreamWriter, file: FileBody, *, whole: bool) -> None:
        """The file as it is when it is opened: one that is removed meanwhile is still sent to its end."""
        self._num_files += 1
        try:
            try:
                source = await world.in_thread(partial(_open, file.path))
            except OSError:
                await self._send(writer, _plain(HTTPStatus.NOT_FOUND), whole=whole)
                return
            with source:
                size = os.fstat(source.fileno()).st_size
                headers = {
                    **_COMMON,
                    "Content-Type": file.content_type,
                    "Content-Length": str(size),
                    "Content-Disposition": f'attachment; filename="{file.name}"',
                }
                writer.write(_head(HTTPStatus.OK, headers))
                while whole and (piece := await world.in_thread(partial(source.read, PIECE_BYTES))):
                    writer.write(piece)
                    async with asyncio.timeout(WRITE_S):
                        await writer.drain()
        finally:
            self._num_files -= 1

    async def _stream(self, writer: asyncio.StreamWriter, stream: EventStream) -> None:
        self._num_streams += 1
        try:
            writer.write(_head(HTTPStatus.OK, {**_COMMON, "Content-Type": "text/event-stream"}))
            async for chunk in stream.chunks:
                writer.write(chunk)
                async with asyncio.timeout(WRITE_S):
                    await writer.drain()
        finally:
            self._num_streams -= 1


def _open(path: Path) -> BinaryIO:
    return path.open("rb")


def _request(target: str, head: bytes) -> Request:
    path, _, query = target.partition("?")
    headers: dict[str, str] = {}
    for line in head.decode("latin-1").split("\r\n")[1:]:
        name, separator, value = line.partition(":")
        if separator:
            headers[name.strip().lower()] = value.strip()
    return Request(path, dict(urllib.parse.parse_qsl(query, max_num_fields=16)) if query else {}, headers)


def _head(status: HTTPStatus, headers: Mapping[str, str]) -> bytes:
    lines = [f"HTTP/1.1 {status.value} {status.phrase}", *(f"{name}: {value}" for name, value in headers.items())]
    return ("\r\n".join(lines) + "\r\n\r\n").encode("latin-1")


def _misdirected() -> Response:
    text = "421 this server does not answer under that name: open it by its address, or by a name of its own network\n"
    return Response(text.encode(), status=HTTPStatus.MISDIRECTED_REQUEST)


def _plain(status: HTTPStatus) -> Response:
    return Response(f"{status.value} {status.phrase}\n".encode(), status=status)
