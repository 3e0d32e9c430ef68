"""The coordinator's status page and API over HTTP: read-only, from one snapshot. docs/observe.md lists the paths."""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncIterator
from functools import partial
from importlib import resources
from typing import Any

from swarmtrain.coordinator.observing import RunObserver
from swarmtrain.observe.http import EventStream, Handler, Request, Response, as_json, finite
from swarmtrain.observe.metrics import run_families
from swarmtrain.observe.service import daemon_routes

PUSH_S = 1.0  # the snapshot is pushed this often while nothing happens
PUSH_PAUSE_S = 0.25  # and with at least this between two pushes while much happens
PAGE_POLICY = (
    "default-src 'none'; script-src 'self'; style-src 'self'; connect-src 'self'; img-src 'self' data:; "
    "base-uri 'none'; form-action 'none'; frame-ancestors 'none'"
)
FILES = {
    "/": ("index.html", "text/html; charset=utf-8"),
    "/page.css": ("page.css", "text/css; charset=utf-8"),
    "/page.js": ("page.js", "text/javascript; charset=utf-8"),
    "/drawing.js": ("drawing.js", "text/javascript; charset=utf-8"),
    "/icon.svg": ("icon.svg", "image/svg+xml"),
}


def page_routes(observer: RunObserver) -> dict[str, Handler]:
    """Everything the coordinator serves."""
    files: dict[str, Handler] = {path: partial(_file, name, kind) for path, (name, kind) in FILES.items()}
    return {
        **files,
        **daemon_routes(observer.snapshot, run_families, observer.context.events.cost),
        "/api/history": lambda _: as_json(observer.keeper.status.curve()),
        "/api/events": lambda request: as_json(_events_after(observer, _number(request.query.get("after", "0")))),
        "/api/targets": lambda _: as_json(observer.targets()),
        "/api/live": lambda request: EventStream(_live(observer, _number(request.headers.get("last-event-id", "0")))),
    }


async def _live(observer: RunObserver, after: int) -> AsyncIterator[bytes]:
    """Server-sent events: the loss curve and its new points, each event as it happens, and the snapshot."""
    yield b"retry: 1000\n\n"
    shown = 0
    while True:
        points = observer.keeper.status.curve()
        if points and points[-1]["step"] != shown:
            is_new = not shown or points[-1]["step"] < shown  # a roll-back draws the curve anew
            yield _message("curve" if is_new else "points", [p for p in points if is_new or p["step"] > shown])
            shown = points[-1]["step"]
        for event in _events_after(observer, after):
            after = event["number"]
            yield _message("happened", event, event["number"])
        with observer.context.events.cost:
            message = _message("status", observer.snapshot())
        yield message
        await asyncio.sleep(PUSH_PAUSE_S)
        await observer.keeper.changed(PUSH_S)


def _events_after(observer: RunObserver, number: int) -> list[dict[str, Any]]:
    return [event for event in observer.keeper.status.news() if event["number"] > number]


def _message(name: str, item: object, number: int | None = None) -> bytes:
    text = json.dumps(finite(item), separators=(",", ":"))
    identity = f"id: {number}\n" if number is not None else ""
    return f"{identity}event: {name}\ndata: {text}\n\n".encode()


def _file(name: str, content_type: str, request: Request) -> Response:
    body = resources.files("swarmtrain.coordinator").joinpath("page", name).read_bytes()
    return Response(body, content_type, headers={"Content-Security-Policy": PAGE_POLICY})


def _number(text: str) -> int:
    return int(text) if text.isdecimal() and len(text) < 16 else 0
