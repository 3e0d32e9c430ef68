"""What the coordinator tells a serving peer in the reason of its directive: why there may be no work for it.

Both ends of that sentence are here. A sentence that is not understood is only shown.
"""

from __future__ import annotations

import re
from dataclasses import dataclass

MAX_STAGES = 16  # that are named; work does not get past the first of them anyway
_EMPTY = re.compile(r"stage ([0-9, ]{1,120}?)(?: and [0-9]{1,9} more)? has no peers")
_BANNED = "banned: "


@dataclass(frozen=True, slots=True)
class Word:
    """Why there may be no work."""

    text: str = ""
    banned: str = ""
    empty_stages: frozenset[int] = frozenset()


def banned(reason: str) -> str:
    """For a peer that is given no work for a while."""
    return f"{_BANNED}{reason}"


def no_peers(stages: list[int]) -> str:
    """For a run that waits for peers of these stages, in their order. Bounded, however many there are."""
    shown, num_more = ", ".join(map(str, stages[:MAX_STAGES])), len(stages) - MAX_STAGES
    return f"stage {shown}{f' and {num_more} more' if num_more > 0 else ''} has no peers"


def understood(reason: str) -> Word:
    """The other end."""
    if reason.startswith(_BANNED):
        return Word(reason, banned=reason.removeprefix(_BANNED))
    match = _EMPTY.search(reason)
    stages = [text.strip() for text in match[1].split(",")] if match else []
    return Word(reason, empty_stages=frozenset(int(text) for text in stages[:MAX_STAGES] if text.isdecimal()))
