"""The coordinator's status page and API over HTTP: read-only, from one snapshot. docs/observe.md lists the paths.

There are two views: the operator's, with everything, and the public one (`public_view.py`). All viewers of a view share
its messages: a snapshot is built and written once, however many look.
"""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncIterator, Callable
from functools import partial
from importlib import resources
from typing import Any

from swarmtrain.coordinator.downloads import Downloads
from swarmtrain.coordinator.observing import RunObserver
from swarmtrain.coordinator.public_view import public_events, public_status
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
    "/tables.js": ("tables.js", "text/javascript; charset=utf-8"),
    "/charts.js": ("charts.js", "text/javascript; charset=utf-8"),
    "/drawing.js": ("drawing.js", "text/javascript; charset=utf-8"),
    "/icon.svg": ("icon.svg", "image/svg+xml"),
}

Event = dict[str, Any]


class View:
    """What one kind of viewer sees."""

    def __init__(self, observer: RunObserver, *, is_public: bool) -> None:
        self.observer, self._is_public = observer, is_public
        self._message, self._built_at = b"", float("-inf")

    def snapshot(self) -> dict[str, Any]:
        """The run now."""
        whole = self.observer.snapshot()
        return public_status(whole) if self._is_public else whole

    def message(self) -> bytes:
        """The snapshot for the live stream: the same one for all who ask within PUSH_PAUSE_S."""
        now = asyncio.get_running_loop().time()
        if now - self._built_at >= PUSH_PAUSE_S:
            with self.observer.context.events.cost:
                self._message = _message("status", self.snapshot())
            self._built_at = now
        return self._message

    def events_after(self, number: int) -> list[Event]:
        """The news."""
        news = self.observer.keeper.status.news()
        shown = public_events(news) if self._is_public else news
        return [event for event in shown if event["number"] > number]

    async def live(self, after: int) -> AsyncIterator[bytes]:
        """Server-sent events: the loss curve and its new points, each event as it happens, and the snapshot."""
        yield b"retry: 1000\n\n"
        shown = 0
        while True:
            points = self.observer.keeper.status.curve()
            if points and points[-1]["step"] != shown:
                is_new = not shown or points[-1]["step"] < shown  # a roll-back draws the curve anew
                yield _message("curve" if is_new else "points", [p for p in points if is_new or p["step"] > shown])
                shown = points[-1]["step"]
            for event in self.events_after(after):
                after = event["number"]
                yield _message("happened", event, event["number"])
            yield self.message()
            await asyncio.sleep(PUSH_PAUSE_S)
            await self.observer.keeper.changed(PUSH_S)


def page_routes(observer: RunObserver, downloads: Downloads) -> dict[str, Handler]:
    """Everything that the coordinator serves to its operator."""
    return {
        **_view_routes(View(observer, is_public=False), downloads.listed),
        **daemon_routes(observer.snapshot, run_families, observer.context.events.cost),
        "/api/targets": lambda _: as_json(observer.targets()),
        "/checkpoint": downloads.file,
    }


def public_routes(observer: RunObserver, downloads: Downloads) -> dict[str, Handler]:
    """What it serves to everybody: no invite, no metrics, no downloads."""
    view = View(observer, is_public=True)
    return {**_view_routes(view, downloads.listed), "/api/status": lambda _: as_json(view.snapshot())}


def _view_routes(view: View, checkpoints: Callable[[], list[dict[str, Any]]]) -> dict[str, Handler]:
    files: dict[str, Handler] = {path: partial(_file, name, kind) for path, (name, kind) in FILES.items()}
    return {
        **files,
        "/api/history": lambda _: as_json(view.observer.keeper.status.curve()),
        "/api/events": lambda request: as_json(view.events_after(_number(request.query.get("after", "0")))),
        "/api/checkpoints": lambda _: as_json(checkpoints()),
        "/api/live": lambda request: EventStream(view.live(_number(request.headers.get("last-event-id", "0")))),
    }


def _message(name: str, item: object, number: int | None = None) -> bytes:
    text = json.dumps(finite(item), separators=(",", ":"))
    identity = f"id: {number}\n" if number is not None else ""
    return f"{identity}event: {name}\ndata: {text}\n\n".encode()


def _file(name: str, content_type: str, request: Request) -> Response:
    body = resources.files("swarmtrain.coordinator").joinpath("page", name).read_bytes()
    return Response(body, content_type, headers={"Content-Security-Policy": PAGE_POLICY})


def _number(text: str) -> int:
    return int(text) if text.isdecimal() and len(text) < 16 else 0
