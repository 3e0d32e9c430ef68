"""The local control socket of a daemon: one JSON object per line, on this machine only."""

from __future__ import annotations

import asyncio
import json
import logging
import os
from collections.abc import Awaitable, Callable, Mapping
from pathlib import Path
from typing import Any

from swarmtrain.errors import ExitCode, StorageError, SwarmtrainError

log = logging.getLogger(__name__)

Command = Callable[[dict[str, Any]], Awaitable[dict[str, Any]]]
_MAX_LINE = 1 << 20


class ControlError(SwarmtrainError):
    """A daemon on this machine could not be asked."""

    error_id = "ST-CONTROL"
    exit_code = ExitCode.UNREACHABLE


class ControlServer:
    """Answers commands on a unix socket that only this user can open."""

    def __init__(self, path: Path, commands: Mapping[str, Command]) -> None:
        self.path, self._commands = path, commands
        self._server: asyncio.AbstractServer | None = None

    async def start(self) -> None:
        """Listen; the stale socket of a dead daemon is replaced. StorageError if the path cannot hold one."""
        before = os.umask(0o177)
        try:
            self.path.unlink(missing_ok=True)
            self._server = await asyncio.start_unix_server(self._serve, self.path, limit=_MAX_LINE)
        except OSError as error:
            raise StorageError(
                f"cannot listen on {self.path}: {error.strerror or error}",
                fix="choose another --state-dir, with a shorter path",
            ) from error
        finally:
            os.umask(before)

    @property
    def address(self) -> str:
        """The socket's path."""
        return str(self.path)

    async def close(self) -> None:
        """Stop listening and remove the socket."""
        if self._server is not None:
            self._server.close()
            await self._server.wait_closed()
        self.path.unlink(missing_ok=True)

    async def _serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        try:
            line = await reader.readline()
            answer = await self._answer(line)
            writer.write(json.dumps(answer).encode() + b"\n")
            await writer.drain()
        except (ConnectionError, ValueError) as error:
            log.debug("a control connection ended: %s", error)
        finally:
            writer.close()

    async def _answer(self, line: bytes) -> dict[str, Any]:
        try:
            request = json.loads(line)
            command = self._commands[request["command"]]
        except (ValueError, KeyError, TypeError):
            return {"error": f"unknown command; there are {', '.join(self._commands)}"}
        try:
            return await command(request)
        except SwarmtrainError as error:
            return {"error": f"{error.error_id}: {error}"}


async def ask(path: Path, command: str, **arguments: Any) -> dict[str, Any]:
    """Send a command to the daemon behind `path`. ControlError if there is no daemon or it refuses."""
    try:
        async with asyncio.timeout(10.0):
            reader, writer = await asyncio.open_unix_connection(path, limit=_MAX_LINE)
            writer.write(json.dumps({"command": command, **arguments}).encode() + b"\n")
            line = await reader.readline()
            writer.close()
        answer: dict[str, Any] = json.loads(line)
    except FileNotFoundError as error:
        raise ControlError(
            f"no daemon runs on {path.parent}", fix="see `swarmtrain status` for those that do"
        ) from error
    except (OSError, ValueError, TimeoutError) as error:
        raise ControlError(f"no answer from the daemon behind {path}: {error or 'timeout'}") from error
    if "error" in answer:
        raise ControlError(answer["error"])
    return answer
