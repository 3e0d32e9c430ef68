"""A keyed shuffle of range(size) that needs no memory: the i-th element is computed, not looked up.

An index is written as a pair (left, right) with left < rows and right < columns, on a grid just large enough for `size`
and nearly square. Each round adds a keyed hash of one half to the other half, modulo rows or columns in turn; a round
can be undone, so all of them together permute the grid (a Feistel network on Z_rows x Z_columns: Black and Rogaway,
"Ciphers with arbitrary finite domains", 2002). An image outside range(size) is sent through again until it falls inside
("cycle walking"): that is a permutation of range(size), and the grid is so tight that it hardly ever happens.
"""

from __future__ import annotations

import hashlib
import math
from typing import Any

import numpy as np
import numpy.typing as npt

# In a range of 6 all 720 orders come up equally often from 12 rounds on (chi-square over 12,000 epochs); 8 show a bias.
NUM_ROUNDS = 16
MAX_SIZE = 1 << 62  # sums of two halves must fit in 64 bits, with room to spare

Words = npt.NDArray[np.uint64]


def permute(positions: npt.NDArray[np.integer[Any]], size: int, *, seed: int, epoch: int) -> npt.NDArray[np.int64]:
    """The images of `positions`, each in range(size), under the shuffle number `epoch` of `seed`.

    For a fixed (size, seed, epoch) this is a bijection of range(size). It is part of what defines a run: changing it
    changes the training data of every run there is.
    """
    if not 0 < size <= MAX_SIZE:
        raise ValueError(f"size is {size}; it must be from 1 to {MAX_SIZE}")
    if positions.size and not (positions.min() >= 0 and positions.max() < size):
        raise ValueError(f"positions must lie in [0, {size})")
    keys = round_keys(seed, epoch)
    rows = math.isqrt(size - 1) + 1
    columns = -(-size // rows)
    images = _permute_grid(positions.astype(np.uint64), rows, columns, keys)  # (positions,)
    while (outside := images >= size).any():
        images[outside] = _permute_grid(images[outside], rows, columns, keys)
    return images.astype(np.int64)  # (positions,)


def round_keys(seed: int, epoch: int) -> tuple[int, ...]:
    """`NUM_ROUNDS` 64-bit keys, from all bits of both numbers."""
    digest = b"".join(
        hashlib.blake2b(f"swarmtrain sampler 1: {seed} {epoch} {half}".encode(), digest_size=4 * NUM_ROUNDS).digest()
        for half in range(2)
    )
    return tuple(int.from_bytes(digest[start : start + 8], "little") for start in range(0, len(digest), 8))


def _permute_grid(indices: Words, rows: int, columns: int, keys: tuple[int, ...]) -> Words:
    left, right = indices // np.uint64(columns), indices % np.uint64(columns)  # (positions,) both
    for number, key in enumerate(keys):
        if number % 2 == 0:
            left = (left + _mix(right, key) % np.uint64(rows)) % np.uint64(rows)
        else:
            right = (right + _mix(left, key) % np.uint64(columns)) % np.uint64(columns)
    return left * np.uint64(columns) + right


def _mix(values: Words, key: int) -> Words:
    """A 64-bit hash of each value: the finalizer of splitmix64."""
    words = values + np.uint64(key)  # wraps around, as intended
    words = (words ^ (words >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
    words = (words ^ (words >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    return words ^ (words >> np.uint64(31))
