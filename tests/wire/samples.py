"""A message with a field of every sort, and strategies that make it."""

from __future__ import annotations

from dataclasses import dataclass
from enum import IntEnum, StrEnum
from typing import Annotated

from hypothesis import strategies as st

from swarmtrain.wire.schema import AllowNonFinite, Blob, MaxLength, Message, Priority, Range, Registry, message


class Colour(StrEnum):
    RED = "red"
    BLUE = "blue"


class Level(IntEnum):
    LOW = 1
    HIGH = 9


@dataclass(frozen=True, slots=True)
class Hop:
    peer: Annotated[str, MaxLength(8)]
    stage: Annotated[int, Range(0, 63)]


@dataclass(frozen=True, slots=True)
class Part:
    hop: Hop
    data: Annotated[Blob, MaxLength(100)]


@message(kind="everything", priority=Priority.BOUNDARY)
class Everything(Message):
    small: Annotated[int, Range(-5, 5)]
    wide: Annotated[int, Range(-(2**63), 2**64 - 1)]
    flag: bool
    ratio: float
    loss: Annotated[float, AllowNonFinite()]
    share: Annotated[float, Range(0.0, 1.0)]
    text: Annotated[str, MaxLength(10)]
    digest: Annotated[bytes, MaxLength(32)]
    colour: Colour
    level: Level
    ids: Annotated[tuple[Annotated[int, Range(0, 1000)], ...], MaxLength(20)]
    route: Annotated[tuple[Hop, ...], MaxLength(4)]
    rates: Annotated[dict[str, float], MaxLength(3)]
    maybe: Hop | None
    tensor: Annotated[Blob, MaxLength(200)]
    parts: Annotated[tuple[Part, ...], MaxLength(3)]


@message(kind="nothing", priority=Priority.CONTROL)
class Nothing(Message):
    pass


@message(kind="one", priority=Priority.CONTROL)
class One(Message):
    value: Annotated[int, Range(0, 255)]


REGISTRY = Registry(Everything, Nothing, One)

texts = st.text(st.characters(exclude_categories=("Cs",)))
hops = st.builds(Hop, st.text(st.characters(exclude_categories=("Cs",)), max_size=8), st.integers(0, 63))
everythings = st.builds(
    Everything,
    small=st.integers(-5, 5),
    wide=st.integers(-(2**63), 2**64 - 1),
    flag=st.booleans(),
    ratio=st.floats(allow_nan=False, allow_infinity=False),
    loss=st.floats(allow_nan=False),
    share=st.floats(0.0, 1.0),
    text=st.text(st.characters(exclude_categories=("Cs",)), max_size=10),
    digest=st.binary(max_size=32),
    colour=st.sampled_from(Colour),
    level=st.sampled_from(Level),
    ids=st.lists(st.integers(0, 1000), max_size=20).map(tuple),
    route=st.lists(hops, max_size=4).map(tuple),
    rates=st.dictionaries(st.text(st.characters(exclude_categories=("Cs",)), max_size=5), st.floats(0, 9), max_size=3),
    maybe=st.none() | hops,
    tensor=st.binary(max_size=200),
    parts=st.lists(st.builds(Part, hops, st.binary(max_size=100)), max_size=3).map(tuple),
)

EXAMPLE = Everything(
    small=-3,
    wide=2**64 - 1,
    flag=True,
    ratio=0.5,
    loss=float("inf"),
    share=1.0,
    text="añ☃",
    digest=b"\x00\xff",
    colour=Colour.BLUE,
    level=Level.HIGH,
    ids=(1, 2, 1000),
    route=(Hop("a", 0), Hop("b", 63)),
    rates={"up": 1.5},
    maybe=Hop("c", 7),
    tensor=bytes(range(33)),
    parts=(Part(Hop("d", 1), b"xyz"), Part(Hop("e", 2), b"")),
)
