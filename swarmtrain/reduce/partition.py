"""Who owns which part of a stage's gradient. Pure arithmetic."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

PIECE_ELEMENTS = 1 << 19  # of the flat gradient: 4 MiB on the way to the owner, 2 MiB on the way back


@dataclass(frozen=True)
class Piece:
    """A range of the flat gradient that one peer adds up."""

    index: int
    owner: int  # position in the roster
    start: int
    stop: int


def owned_elements(size: int, bytes_per_s: Sequence[float]) -> list[int]:
    """How many elements each peer owns, so that the reduction ends soonest; bandwidths of 0 mean unknown.

    Uses hivemind's load balancer, which solves the linear program "minimise the slowest peer's transfer time".
    """
    if len(bytes_per_s) == 1:
        return [size]
    from hivemind.averaging.load_balancing import load_balance_peers  # takes a second to import

    known = [rate for rate in bytes_per_s if rate > 0]
    usual = sum(known) / len(known) if known else 1.0
    rates = [rate if rate > 0 else usual for rate in bytes_per_s]
    shares = [int(share) for share in load_balance_peers(size, tuple(rates), min_size=0)]
    shares[shares.index(max(shares))] += size - sum(shares)
    return shares


def cut(owned: Sequence[int]) -> list[Piece]:
    """The pieces of a gradient whose owners' parts follow each other in roster order."""
    pieces: list[Piece] = []
    start = 0
    for owner, size in enumerate(owned):
        for offset in range(0, size, PIECE_ELEMENTS):
            stop = start + min(offset + PIECE_ELEMENTS, size)
            pieces.append(Piece(len(pieces), owner, start + offset, stop))
        start += size
    return pieces
