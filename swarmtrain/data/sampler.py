"""Which tokens microbatch (t, i) holds: a pure function of the run's seed, t and i.

All sequences of a run are numbered in one row: step by step, microbatch by microbatch. Number n is position n mod W of
epoch n div W, where W is the number of training windows, and each epoch visits the windows in a shuffle of its own. So
within an epoch no window comes twice and none is left out, and no state is needed to know what was used.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from swarmtrain.data.permutation import permute
from swarmtrain.data.source import Split, TokenSource
from swarmtrain.data.tokenizer import Tokens
from swarmtrain.errors import DataError


class Sampler:
    """Microbatches as arrays of shape (sequences_per_microbatch, sequence_length + 1).

    Row r of a microbatch holds the inputs in [:-1] and the targets in [1:]. Nothing here changes after construction.
    """

    def __init__(
        self,
        source: TokenSource,
        *,
        seed: int,
        sequence_length: int,
        sequences_per_microbatch: int,
        microbatches_per_step: int,
    ) -> None:
        """`DataError` if a part of the source is too small for one microbatch; validation may be off (fraction 0)."""
        if min(sequence_length, sequences_per_microbatch, microbatches_per_step) < 1:
            raise ValueError("sequence length, sequences per microbatch and microbatches per step start at 1")
        self._source = source
        self._seed = seed
        self._length = sequence_length + 1
        self._sequences = sequences_per_microbatch
        self._microbatches_per_step = microbatches_per_step
        self.num_windows = self._count_windows("train")
        validation_windows = self._count_windows("validation") if source.validation_fraction > 0 else 0
        self.num_validation_microbatches = validation_windows // sequences_per_microbatch

    @property
    def data_digest(self) -> str:
        """One name for the tokens that microbatches are made of."""
        return self._source.digest

    def microbatch(self, step: int, index: int) -> Tokens:
        """The tokens of microbatch `index` of `step`; both count from 0."""
        return self._stack("train", self.samples(step, index))  # (sequences, sequence_length + 1)

    def samples(self, step: int, index: int) -> tuple[int, ...]:
        """The training windows of microbatch `index` of `step`: one number per row."""
        if step < 0 or not 0 <= index < self._microbatches_per_step:
            raise ValueError(f"microbatch {index} of step {step}; a step has {self._microbatches_per_step}")
        first = (step * self._microbatches_per_step + index) * self._sequences
        return tuple(self._shuffled_windows(first))

    def validation(self, index: int) -> Tokens:
        """Validation microbatch `index`: always the same windows, in the order of the corpus."""
        if not 0 <= index < self.num_validation_microbatches:
            raise ValueError(f"validation microbatch {index} of {self.num_validation_microbatches}")
        first = index * self._sequences
        return self._stack("validation", range(first, first + self._sequences))  # (sequences, sequence_length + 1)

    def _shuffled_windows(self, first: int) -> list[int]:
        """The windows of one microbatch, from sequence number `first` on; an epoch may end in between."""
        windows: list[int] = []
        while len(windows) < self._sequences:
            epoch, position = divmod(first + len(windows), self.num_windows)
            count = min(self._sequences - len(windows), self.num_windows - position)
            positions = np.arange(position, position + count)  # (count,)
            windows += permute(positions, self.num_windows, seed=self._seed, epoch=epoch).tolist()
        return windows

    def _stack(self, split: Split, windows: Sequence[int]) -> Tokens:
        return np.stack([self._source.window(split, window, self._length) for window in windows])

    def _count_windows(self, split: Split) -> int:
        """Windows of this part, at least one microbatch of them."""
        found = self._source.num_windows(split, self._length)
        if found < self._sequences:
            first, end = self._source.token_range(split)
            part = "training" if split == "train" else "validation"
            raise DataError(
                f"the {part} part of the corpus has {end - first} tokens; "
                f"one microbatch needs {self._sequences} sequences of {self._length}",
                fix="use more data, shorter sequences or fewer of them per microbatch"
                + (", or another validation fraction" if self._source.validation_fraction > 0 else ""),
            )
        return found
