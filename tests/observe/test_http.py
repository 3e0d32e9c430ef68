"""The HTTP server against clients that do what they like: real sockets, real limits."""

from __future__ import annotations

import asyncio
import json
import math
from collections.abc import AsyncIterator, Awaitable, Callable
from pathlib import Path

import pytest

from swarmtrain.errors import UsageError
from swarmtrain.observe import http
from swarmtrain.observe.http import (
    EventStream,
    HttpServer,
    ListenError,
    Request,
    Response,
    as_json,
    checked_address,
    is_own_name,
    parse_address,
    same_port_as_before,
)


async def _ticks() -> AsyncIterator[bytes]:
    number = 0
    while True:
        number += 1
        yield f"data: {number}\n\n".encode()
        await asyncio.sleep(0.01)


async def _flood() -> AsyncIterator[bytes]:
    while True:
        yield b"x" * (1 << 20)


def _broken(request: Request) -> Response:
    raise RuntimeError("a fault of ours")


ROUTES: dict[str, http.Handler] = {
    "/": lambda request: Response(b"hello"),
    "/query": lambda request: as_json({**request.query, "host": request.headers.get("host")}),
    "/broken": _broken,
    "/ticks": lambda request: EventStream(_ticks()),
    "/flood": lambda request: EventStream(_flood()),
}


def serving(use: Callable[[HttpServer], Awaitable[None]]) -> None:
    async def main() -> None:
        server = HttpServer(ROUTES)
        await server.start("127.0.0.1", 0)
        try:
            async with asyncio.timeout(30):
                await use(server)
        finally:
            await server.close()

    asyncio.run(main())


async def ask(server: HttpServer, request: bytes, *, finish: bool = False) -> bytes:
    """Everything that comes back until the server closes."""
    reader, writer = await asyncio.open_connection("127.0.0.1", server.port)
    writer.write(request)
    if finish:
        writer.write_eof()
    try:
        return await reader.read()
    finally:
        writer.close()


async def until(condition: Callable[[], bool]) -> None:
    """Looks again and again; the deadline is `serving`'s."""
    while True:
        if condition():
            return
        await asyncio.sleep(0.02)


def test_get_and_head_are_answered_with_strict_headers() -> None:
    async def use(server: HttpServer) -> None:
        whole = await ask(server, b"GET / HTTP/1.1\r\nHost: x\r\n\r\n")
        head, _, body = whole.partition(b"\r\n\r\n")
        assert body == b"hello"
        assert head.startswith(b"HTTP/1.1 200 OK\r\n")
        for line in (b"Content-Length: 5", b"X-Content-Type-Options: nosniff", b"Content-Security-Policy: default-src"):
            assert line in head
        assert b"Access-Control" not in head
        assert await ask(server, b"HEAD / HTTP/1.0\r\n\r\n") == head + b"\r\n\r\n"
        answer = await ask(server, b"GET /query?a=1&b=%20 HTTP/1.1\r\nHOST:  y \r\n\r\n")
        assert json.loads(answer.partition(b"\r\n\r\n")[2]) == {"a": "1", "b": " ", "host": "y"}

    serving(use)


@pytest.mark.parametrize(
    ("request_bytes", "status"),
    [
        (b"POST / HTTP/1.1\r\nContent-Length: 3\r\n\r\nabc", 405),
        (b"DELETE /metrics HTTP/1.1\r\n\r\n", 405),
        (b"GET /nothing HTTP/1.1\r\n\r\n", 404),
        (b"GET /../../etc/passwd HTTP/1.1\r\n\r\n", 404),
        (b"GET /%2e%2e/page HTTP/1.1\r\n\r\n", 404),
        (b"GET http://other/ HTTP/1.1\r\n\r\n", 405),
        (b"GET / HTTP/9.9\r\n\r\n", 405),
        (b"\x16\x03\x01\x02\x00 tls \r\n\r\n", 400),
        (b"GET /" + b"a" * 3000 + b" HTTP/1.1\r\n\r\n", 405),
        (b"GET / HTTP/1.1\r\nX: " + b"a" * 20000 + b"\r\n\r\n", 431),
        (b"GET /broken HTTP/1.1\r\n\r\n", 500),
    ],
)
def test_bad_requests_get_one_plain_answer(request_bytes: bytes, status: int) -> None:
    async def use(server: HttpServer) -> None:
        answer = await ask(server, request_bytes)
        assert answer.split(b" ")[1] == str(status).encode()
        assert b"Traceback" not in answer
        assert (await ask(server, b"GET / HTTP/1.1\r\n\r\n")).endswith(b"hello")  # it goes on

    serving(use)


def test_clients_that_send_nothing_or_half_a_request_are_cut_off(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(http, "HEAD_S", 0.2)

    async def use(server: HttpServer) -> None:
        assert await ask(server, b"") == b""
        assert await ask(server, b"GET / HT") == b""
        assert await ask(server, b"GET / HT", finish=True) == b""

    serving(use)


def test_connections_and_streams_are_bounded(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(http, "MAX_CONNECTIONS", 4)
    monkeypatch.setattr(http, "MAX_STREAMS", 2)

    async def use(server: HttpServer) -> None:
        streams = [await asyncio.open_connection("127.0.0.1", server.port) for _ in range(2)]
        for reader, writer in streams:
            writer.write(b"GET /ticks HTTP/1.1\r\n\r\n")
            assert b"text/event-stream" in await reader.readuntil(b"data: 2\n\n")
        assert b"503" in await ask(server, b"GET /ticks HTTP/1.1\r\n\r\n")
        waiting = [await asyncio.open_connection("127.0.0.1", server.port) for _ in range(2)]
        await asyncio.sleep(0.05)
        assert await ask(server, b"") == b""  # the fifth is closed at once
        for _, writer in (*streams, *waiting):
            writer.close()
        await until(lambda: not server._clients)
        assert (await ask(server, b"GET / HTTP/1.1\r\n\r\n")).endswith(b"hello")

    serving(use)


def test_a_client_that_does_not_read_is_cut_off_and_costs_bounded_memory(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(http, "WRITE_S", 0.3)

    async def use(server: HttpServer) -> None:
        _, writer = await asyncio.open_connection("127.0.0.1", server.port)
        writer.write(b"GET /flood HTTP/1.1\r\n\r\n")
        await asyncio.sleep(0.1)
        assert len(server._clients) == 1
        await until(lambda: not server._clients)
        writer.close()

    serving(use)


def test_an_address_that_is_taken_is_one_clear_error() -> None:
    async def use(server: HttpServer) -> None:
        with pytest.raises(ListenError, match=f"cannot listen on 127.0.0.1:{server.port}"):
            await HttpServer({}).start("127.0.0.1", server.port)
        with pytest.raises(ListenError):
            await HttpServer({}).start("203.0.113.1", 0)

    serving(use)


def test_addresses() -> None:
    assert parse_address("127.0.0.1:0", "--page") == ("127.0.0.1", 0)
    assert parse_address("[::1]:80", "--page") == ("::1", 80)
    assert checked_address("off", "--page") == ""
    for bad in ("localhost", ":80", "host:", "host:99999", "host:-1", "host:8o"):
        with pytest.raises(UsageError, match=r"--page: .* is not HOST:PORT"):
            checked_address(bad, "--page")


def test_numbers_that_json_does_not_have_become_null() -> None:
    body = as_json({"loss": math.nan, "list": [math.inf, 1.5], "deep": {"x": (-math.inf,)}}).body
    assert json.loads(body) == {"loss": None, "list": [None, 1.5], "deep": {"x": [None]}}


def test_a_restarted_page_takes_its_former_port_if_it_is_free(tmp_path: Path) -> None:
    note = tmp_path / "page"

    async def use(server: HttpServer) -> None:
        note.write_text(f"http://{server.address}/\n")
        assert same_port_as_before("127.0.0.1", 0, note) == ("127.0.0.1", 0)  # taken
        port = server.port
        await server.close()
        assert same_port_as_before("127.0.0.1", 0, note) == ("127.0.0.1", port)
        assert same_port_as_before("127.0.0.1", 8080, note) == ("127.0.0.1", 8080)

    serving(use)
    for text in ("", "nonsense", "http://127.0.0.1:99999999/"):
        note.write_text(text)
        assert same_port_as_before("127.0.0.1", 0, note) == ("127.0.0.1", 0)


async def _echo(request: Request) -> Response:
    return Response(request.body)


async def _broken_action(request: Request) -> Response:
    raise RuntimeError("a fault of ours")


@pytest.mark.parametrize(
    ("request_bytes", "status", "body"),
    [
        (b"POST /echo HTTP/1.1\r\nContent-Length: 3\r\n\r\nabc", b"200", b"abc"),
        (b"POST /echo HTTP/1.1\r\nContent-Length: 0\r\n\r\n", b"200", b""),
        (b"POST /echo HTTP/1.1\r\n\r\n", b"411", b""),
        (b"POST /echo HTTP/1.1\r\nContent-Length: -1\r\n\r\n", b"411", b""),
        (b"POST /echo HTTP/1.1\r\nContent-Length: 4097\r\n\r\n", b"413", b""),
        (b"POST / HTTP/1.1\r\nContent-Length: 0\r\n\r\n", b"405", b""),
        (b"POST /echo HTTP/1.1\r\nHost: rebound.example.com\r\nContent-Length: 3\r\n\r\nabc", b"421", b""),
        (b"POST /nothing HTTP/1.1\r\nContent-Length: 0\r\n\r\n", b"404", b""),
        (b"GET /echo HTTP/1.1\r\n\r\n", b"404", b""),
        (b"POST /broken HTTP/1.1\r\nContent-Length: 0\r\n\r\n", b"500", b""),
    ],
)
def test_a_server_with_actions_answers_small_posts_and_nothing_else(
    request_bytes: bytes, status: bytes, body: bytes
) -> None:
    async def main() -> bytes:
        server = HttpServer(ROUTES, {"/echo": _echo, "/broken": _broken_action})
        await server.start("127.0.0.1", 0)
        try:
            async with asyncio.timeout(30):
                return await ask(server, request_bytes)
        finally:
            await server.close()

    answer = asyncio.run(main())
    assert answer.split()[1] == status
    assert not body or answer.endswith(b"\r\n\r\n" + body)


@pytest.mark.parametrize(
    ("host", "is_own"),
    [
        ("", True),
        ("127.0.0.1:8080", True),
        ("[::1]:8080", True),
        ("192.168.1.7", True),
        ("localhost:8080", True),
        ("coordinator:8080", True),
        ("attic.local:8080", True),
        ("page.example.com:8080", True),
        ("rebound.example.com:8080", False),
        ("127.0.0.1.example.com", False),
        ("local.example.com.", False),
    ],
)
def test_a_page_of_another_site_cannot_read_what_is_served_through_its_own_name(host: str, *, is_own: bool) -> None:
    assert is_own_name(host, "page.example.com") is is_own

    async def use(server: HttpServer) -> None:
        answer = await ask(server, f"GET / HTTP/1.1\r\nHost: {host}\r\n\r\n".encode())
        assert (b" 200 " in answer[:20]) is (is_own and "example" not in host)
        assert is_own or (b" 421 " in answer[:20] and b"hello" not in answer)

    serving(use)


@pytest.mark.parametrize(
    ("known_as", "host", "is_answered"),
    [
        ("*", "run.example.com:8081", True),
        ("*", "127.0.0.1", True),
        ("run.example.com", "RUN.example.com:8081", True),
        ("run.example.com", "rebound.example.com", False),
        ("", "run.example.com", False),
    ],
)
def test_a_server_answers_under_the_names_that_it_was_given(known_as: str, host: str, *, is_answered: bool) -> None:
    """The public page shows what everybody may see; Prometheus asks for metrics under the announced name."""

    async def main() -> bytes:
        server = HttpServer(ROUTES, known_as=known_as)
        await server.start("127.0.0.1", 0)
        try:
            async with asyncio.timeout(30):
                return await ask(server, f"GET / HTTP/1.1\r\nHost: {host}\r\n\r\n".encode())
        finally:
            await server.close()

    answer = asyncio.run(main())
    assert (b" 200 " in answer[:20]) is is_answered
    assert is_answered or (b" 421 " in answer[:20] and b"open it by its address" in answer)
