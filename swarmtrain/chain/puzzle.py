"""Proof of work: what admission to an open run costs whoever makes identities by the thousand. Pure.

A challenge belongs to one peer id. Its solution is one number for each of several puzzles, so that the time for all of
them varies little; checking takes microseconds.
"""

from __future__ import annotations

import hashlib
import struct

NUM_PUZZLES = 8
_NUMBER = struct.Struct("<Q")


def solve(challenge: bytes, peer_id: str, difficulty: int) -> bytes:
    """A solution: about `NUM_PUZZLES * 2**difficulty` hashes, at about a million per second."""
    return b"".join(_NUMBER.pack(_solve_one(challenge, peer_id, index, difficulty)) for index in range(NUM_PUZZLES))


def is_solved(challenge: bytes, peer_id: str, difficulty: int, work: bytes) -> bool:
    """Whether `work` is a solution."""
    if len(work) != NUM_PUZZLES * _NUMBER.size:
        return False
    start, limit = _start(challenge, peer_id), 1 << (256 - difficulty)
    numbers = [work[at : at + _NUMBER.size] for at in range(0, len(work), _NUMBER.size)]
    return all(_hash(start, index, number) < limit for index, number in enumerate(numbers))


def _solve_one(challenge: bytes, peer_id: str, index: int, difficulty: int) -> int:
    start, limit, number = _start(challenge, peer_id), 1 << (256 - difficulty), 0
    while _hash(start, index, _NUMBER.pack(number)) >= limit:
        number += 1
    return number


def _start(challenge: bytes, peer_id: str) -> bytes:
    return hashlib.sha256(b"swarmtrain work\0" + challenge + peer_id.encode()).digest()


def _hash(start: bytes, index: int, number: bytes) -> int:
    return int.from_bytes(hashlib.sha256(start + bytes((index,)) + number).digest(), "big")
