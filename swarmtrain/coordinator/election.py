"""Which state of a stage a restarted coordinator trusts if its journal does not say. Pure.

The journal names the peers that had the state before the last decision; their heartbeats say what they have now. The
first peer to call may be wrong: its memory may have failed in the very step whose digests were not written. So more
than half of the peers that can know must agree; if fewer call in time, the most common digest among them counts. The
last peer of a stage is believed: no other report contradicts it, and no other peer could lose by it.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping

Key = tuple[str, str]  # peer id, incarnation


def electorate(before: Mapping[Key, str], had_work: Iterable[Key]) -> frozenset[Key]:
    """The peers that must have reached the state if alive: they had most peers' former state, or work in its step."""
    digests = list(before.values())
    usual = max(sorted(set(digests)), key=digests.count) if digests else ""
    return frozenset(had_work) | {key for key, digest in before.items() if digest == usual}


def elected(votes: Mapping[Key, str], voters: Iterable[Key], *, is_final: bool) -> str:
    """The digest that more than half of all voters have; if `is_final`, the one that most have; else empty.

    A peer that has voted is a voter, too: a newcomer may have reached the state with the others.
    """
    digests = list(votes.values())
    if not digests:
        return ""
    most = max(sorted(set(digests)), key=digests.count)
    is_majority = 2 * digests.count(most) > len(frozenset(voters) | votes.keys())
    return most if is_majority or is_final else ""
