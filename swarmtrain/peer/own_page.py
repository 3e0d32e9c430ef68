"""The volunteer's own page: what the peer does and why, what it has given, and what its owner may change.

It is opened when the owner asks for it (`swarmtrain page`), on loopback only. A page of somebody else's in the same
browser can do nothing here: it does not know the token in the address, its Host is another one, and a change needs an
Origin that is this page's. There are no cookies.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from dataclasses import asdict
from functools import partial
from http import HTTPStatus
from importlib import resources
from pathlib import Path
from typing import Any, Protocol

from swarmtrain import world
from swarmtrain.courtesy.settings import Settings
from swarmtrain.errors import SwarmtrainError, UsageError
from swarmtrain.machine import Door, Machine
from swarmtrain.observe.http import Action, Handler, Request, Response, as_json

ADDRESS = "127.0.0.1:0"
POLICY = (
    "default-src 'none'; script-src 'self'; style-src 'self'; connect-src 'self'; img-src 'self' data:; "
    "base-uri 'none'; form-action 'none'; frame-ancestors 'none'"
)
FILES = {
    "": ("index.html", "text/html; charset=utf-8"),
    "page.css": ("page.css", "text/css; charset=utf-8"),
    "page.js": ("page.js", "text/javascript; charset=utf-8"),
}
NOTE, TOKEN = "own-page", "own-page-token"  # files in the state directory: the port of the last time, and the token
_SHOWN = (
    "now", "state", "cause", "reason", "next", "since", "started_at", "name", "peer", "run", "run_name", "stage",
    "step", "steps", "run_step", "run_loss", "run_tokens_per_s", "seconds_left", "silent_s", "credit", "memory_bytes",
    "lately", "courtesy",
)  # fmt: skip


class Owner(Protocol):
    """What the page may ask of the daemon."""

    def settings(self) -> Settings:
        """As the owner has changed them."""

    def in_force(self) -> Mapping[str, str]:
        """What holds now, as text, changed or not."""

    async def change(self, settings: Settings) -> None:
        """Change them, and keep them."""

    async def pause(self, paused: bool) -> None:
        """Pause the peer, or take that back."""


class OwnPage:
    """Of one daemon."""

    def __init__(self, machine: Machine, state_dir: Path, snapshot: Callable[[], dict[str, Any] | None]) -> None:
        self._machine, self._state_dir, self._snapshot = machine, state_dir, snapshot
        self._door: Door | None = None
        self._token = ""

    async def open(self, owner: Owner, history: Callable[[], list[tuple[float, int]]]) -> str:
        """The address; the page is served from the first time on."""
        if self._door is None:
            self._token = await world.in_thread(self._read_token)
            base = f"/{self._token}/"
            routes: dict[str, Handler] = {base + path: partial(self._file, *FILES[path]) for path in FILES}
            routes[base + "api"] = self._guarded(lambda _: as_json(self._shown(owner, history())))
            actions: dict[str, Action] = {
                base + "pause": self._acting(lambda _: owner.pause(True)),
                base + "resume": self._acting(lambda _: owner.pause(False)),
                base + "change": self._acting(lambda found: owner.change(Settings.checked(found))),
            }
            note = self._state_dir / NOTE
            self._door = await self._machine.serve_http(routes, ADDRESS, "page", note, actions)
            await world.in_thread(partial(_write, note, f"http://{self._door.address}/"))
        return f"http://{self._door.address}/{self._token}/"

    async def close(self) -> None:
        """Serve it no more."""
        if self._door is not None:
            await self._door.close()
            self._door = None

    def _shown(self, owner: Owner, history: list[tuple[float, int]]) -> dict[str, Any]:
        found = self._snapshot()
        shown = {key: found.get(key) for key in _SHOWN} if found is not None else {"state": "moving", "reason": ""}
        settings = {"changed": asdict(owner.settings()), "in_force": dict(owner.in_force())}
        traffic = found["traffic"] if found is not None else {}
        sides = {side: traffic[side]["total_bytes"] for side in ("sent", "received") if side in traffic}
        return {**shown, "settings": settings, "history": history, "traffic": sides}

    def _file(self, name: str, content_type: str, request: Request) -> Response:
        if not self._is_here(request):
            return _refused("this page is not served under that name")
        body = resources.files("swarmtrain.peer").joinpath("page", name).read_bytes()
        return Response(body, content_type, headers={"Content-Security-Policy": POLICY})

    def _guarded(self, handler: Callable[[Request], Response]) -> Handler:
        def answer(request: Request) -> Response:
            return handler(request) if self._is_here(request) else _refused("this page is not served under that name")

        return answer

    def _acting(self, act: Callable[[dict[str, Any]], Any]) -> Action:
        async def answer(request: Request) -> Response:
            if not self._is_here(request) or request.headers.get("origin") != f"http://{request.headers['host']}":
                return _refused("only the page itself may ask for that")
            try:
                found = json.loads(request.body or b"{}")
                if not isinstance(found, dict):
                    raise UsageError("that is no object")
                await act(found)
            except ValueError:
                return Response(b"that is not JSON", status=HTTPStatus.BAD_REQUEST)
            except SwarmtrainError as error:
                text = f"{error} ({error.fix})" if error.fix else str(error)
                return Response(text.encode(), status=HTTPStatus.BAD_REQUEST)
            return as_json({"ok": True})

        return answer

    def _is_here(self, request: Request) -> bool:
        """A name that an attacker's DNS gives to this address is not this page's."""
        assert self._door is not None
        port = self._door.address.rpartition(":")[2]
        return request.headers.get("host", "") in (f"127.0.0.1:{port}", f"localhost:{port}")

    def _read_token(self) -> str:
        """The same as before, so that an open page finds the daemon again."""
        path = self._state_dir / TOKEN
        known = path.read_text().strip() if path.exists() else ""
        if len(known) != 32 or not known.isalnum():
            known = world.token_hex(16)
            _write(path, known)
        return known


def _write(path: Path, text: str) -> None:
    """Readable by the owner only."""
    path.touch(mode=0o600)
    path.write_text(text + "\n")


def _refused(text: str) -> Response:
    return Response(text.encode(), status=HTTPStatus.FORBIDDEN)
