"""p2pd's control messages, and how they travel: a varint length, then a protobuf message.

The message types are those of the installed hivemind, taken from their one generated file: importing the package
itself would cost every daemon 60 MB and a second for an averager and an optimizer that it does not use.
"""

from __future__ import annotations

import asyncio
import importlib.util
from pathlib import Path
from typing import Any

from google.protobuf.message import DecodeError  # type: ignore[import-untyped]

from swarmtrain.p2p.addresses import decode_varint, encode_varint
from swarmtrain.p2p.host_errors import HostDownError, P2pdUnusableError

MAX_MESSAGE_BYTES = 16 * 2**20  # what we read from p2pd; LIST_PEERS of some ten thousand peers


def hivemind_directory() -> Path:
    """Where hivemind is installed; raises P2pdUnusableError if it is not. Does not import it."""
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
    """A message with its length before it."""
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
    """The next framed message, in `message`; raises HostDownError, OSError or IncompleteReadError."""
    header = bytearray()
    while (decoded := decode_varint(header)) is None:
        header += await reader.readexactly(1)
    if decoded[0] > MAX_MESSAGE_BYTES:
        raise HostDownError(f"p2pd announced a message of {decoded[0]} bytes")
    return parsed(await reader.readexactly(decoded[0]), message)
