"""Which peer owns which part of a stage's gradient in an all-reduce. Pure arithmetic."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

PIECE_ELEMENTS = 1 << 19  # of the flat gradient: 4 MiB on the way to the owner, 2 MiB on the way back


@dataclass(frozen=True)
class Piece:
    """A range of the flat gradient that one peer adds up."""

    index: int
    owner: int  # position among the owners
    start: int
    stop: int


def owned_elements(size: int, up_and_down: Sequence[tuple[float, float]]) -> list[int]:
    """How many elements each peer owns, so that the all-reduce ends soonest; rates in bytes per second, up and down.

    Among n peers, one that owns the fraction s moves 1 + (n - 2) s gradients in each direction: 1 - s of its own to the
    other owners, and s for each of the n - 1 others. The result minimizes the time of the slowest peer. A rate of 0 is
    unknown. An unknown uplink counts as an average one: uplinks are the bottleneck, so a wide downlink says nothing of
    them, while a narrow downlink limits on its own.
    """
    return owned_by_rates(size, effective_rates(up_and_down))


def effective_rates(up_and_down: Sequence[tuple[float, float]]) -> list[float]:
    """One rate for both directions of each peer; see `owned_elements`."""
    known = [up for up, _ in up_and_down if up > 0] or [down for _, down in up_and_down if down > 0]
    usual = sum(known) / len(known) if known else 1.0
    return [min(up or usual, down or math.inf) for up, down in up_and_down]


def owned_by_rates(size: int, rates: Sequence[float]) -> list[int]:
    """See `owned_elements`."""
    shares = _shares(rates)
    owned = [int(size * share) for share in shares]
    owned[shares.index(max(shares))] += size - sum(owned)
    return owned


def _shares(rates: Sequence[float]) -> list[float]:
    """All owners end at the same time t: 1 + (n - 2) s = t * rate. Peers too slow for that own nothing."""
    num_extra = len(rates) - 2
    if num_extra <= 0:
        return [rate / sum(rates) for rate in rates]  # what a peer moves does not depend on who owns what
    owners = sorted(rates, reverse=True)
    while (time := (num_extra + len(owners)) / sum(owners)) * owners[-1] <= 1:
        owners.pop()
    return [max(0.0, (time * rate - 1) / num_extra) for rate in rates]


def cut(owned: Sequence[int]) -> list[Piece]:
    """Cut the gradient into pieces. What each owner owns is contiguous, in their order."""
    pieces: list[Piece] = []
    start = 0
    for owner, size in enumerate(owned):
        for offset in range(0, size, PIECE_ELEMENTS):
            stop = start + min(offset + PIECE_ELEMENTS, size)
            pieces.append(Piece(len(pieces), owner, start + offset, stop))
        start += size
    return pieces
