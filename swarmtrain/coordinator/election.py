"""Which state of a stage a restarted coordinator goes by, if its journal does not say. Pure.

It knows who had the state before the last decision, and hears what each peer has now. Whoever comes first may be wrong:
its memory may have failed in the very step of which nothing was noted. So more than half of those who can know must
agree; if fewer come within a while, what most of those say. The last one of a stage is believed: there is
nothing to hold against it, and no other peer to lose by it.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping

Key = tuple[str, str]  # peer id, incarnation


def electorate(before: Mapping[Key, str], had_work: Iterable[Key]) -> frozenset[Key]:
    """Who must have come to the state, if they live: who had the one before it as most had it, or work in its step."""
    digests = list(before.values())
    usual = max(sorted(set(digests)), key=digests.count) if digests else ""
    return frozenset(had_work) | {key for key, digest in before.items() if digest == usual}


def elected(votes: Mapping[Key, str], voters: Iterable[Key], *, is_final: bool) -> str:
    """The digest that more than half of all voters have; if `is_final`, the one that most have; else empty.

    Whoever has voted is a voter, too: a newcomer may have come to the state with the others.
    """
    digests = list(votes.values())
    if not digests:
        return ""
    most = max(sorted(set(digests)), key=digests.count)
    is_majority = 2 * digests.count(most) > len(frozenset(voters) | votes.keys())
    return most if is_majority or is_final else ""
