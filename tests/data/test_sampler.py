from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
from counting import Counting
from hypothesis import given, settings
from hypothesis import strategies as st

from swarmtrain.data.index import INDEX_FILE, ShardEntry, ShardIndex
from swarmtrain.data.sampler import Sampler
from swarmtrain.data.source import TokenSource, open_source
from swarmtrain.data.tokenizer import ByteTokenizer, describe
from swarmtrain.errors import DataError


def counting_sampler(
    num_tokens: int, *, seed: int = 1, length: int = 4, sequences: int = 3, microbatches: int = 2, fraction: float = 0.0
) -> Sampler:
    source = TokenSource(Counting(num_tokens), validation_fraction=fraction)
    return Sampler(
        source,
        seed=seed,
        sequence_length=length,
        sequences_per_microbatch=sequences,
        microbatches_per_step=microbatches,
    )


def windows_in_order(sampler: Sampler, num_sequences: int, sequences: int, microbatches: int, length: int) -> list[int]:
    """The window numbers of the first sequences of a run."""
    found: list[int] = []
    for number in range(-(-num_sequences // sequences)):
        batch = sampler.microbatch(number // microbatches, number % microbatches)
        found += (batch[:, 0] // (length + 1)).tolist()
    return found[:num_sequences]


@given(
    num_windows=st.integers(1, 120),
    seed=st.integers(0, 1 << 64),
    length=st.integers(1, 5),
    sequences=st.integers(1, 7),
    microbatches=st.integers(1, 5),
)
@settings(deadline=None, max_examples=60)
def test_every_window_comes_once_per_epoch(
    num_windows: int, seed: int, length: int, sequences: int, microbatches: int
) -> None:
    sequences = min(sequences, num_windows)
    num_tokens = num_windows * (length + 1) + length  # a rest that fills no window
    sampler = counting_sampler(num_tokens, seed=seed, length=length, sequences=sequences, microbatches=microbatches)
    assert sampler.num_windows == num_windows
    order = windows_in_order(sampler, 3 * num_windows, sequences, microbatches, length)
    for epoch in range(3):
        assert sorted(order[epoch * num_windows : (epoch + 1) * num_windows]) == list(range(num_windows))


def test_microbatches_hold_whole_windows_of_one_more_than_the_sequence() -> None:
    batch = counting_sampler(1003, length=9, sequences=5).microbatch(0, 0)
    assert batch.shape == (5, 10)
    assert batch.dtype == np.int64
    assert np.array_equal(batch - batch[:, :1], np.tile(np.arange(10), (5, 1)))
    assert all(first % 10 == 0 for first in batch[:, 0])


def test_samples_name_the_windows_of_a_microbatch() -> None:
    sampler = counting_sampler(1003, length=9, sequences=5)
    for step in range(30):  # over the end of the first epoch
        assert (sampler.microbatch(step, 1)[:, 0] // 10).tolist() == list(sampler.samples(step, 1))


@given(step=st.integers(0, 1 << 40), index=st.integers(0, 3), seed=st.integers(-(1 << 70), 1 << 70))
@settings(deadline=None, max_examples=60)
def test_a_microbatch_is_a_pure_function_of_seed_step_and_index(step: int, index: int, seed: int) -> None:
    first = counting_sampler(10_000, seed=seed, microbatches=4)
    expected = first.microbatch(step, index)
    first.microbatch(step + 1, 0)
    second = counting_sampler(10_000, seed=seed, microbatches=4)
    second.microbatch(0, 3)
    assert np.array_equal(second.microbatch(step, index), expected)
    assert np.array_equal(first.microbatch(step, index), expected)


def test_seeds_and_epochs_differ_and_the_first_is_shuffled() -> None:
    def orders(seed: int) -> list[list[int]]:
        sampler = counting_sampler(1000, seed=seed, sequences=5)
        order = windows_in_order(sampler, 400, 5, 2, 4)
        return [order[:200], order[200:]]

    found = orders(1) + orders(2) + [list(range(200))]
    for number, first in enumerate(found):
        for second in found[:number]:
            assert sum(a == b for a, b in zip(first, second, strict=True)) < 20


def test_the_training_data_of_a_run_is_pinned_for_ever() -> None:
    source = open_source("embedded", validation_fraction=0.05)
    sampler = Sampler(source, seed=0, sequence_length=16, sequences_per_microbatch=2, microbatches_per_step=4)
    text = source.open_tokenizer().decode(sampler.microbatch(100, 3)[1])
    assert (sampler.num_windows, sampler.num_validation_microbatches) == PINNED_COUNTS
    assert text == PINNED_TEXT


def test_training_never_sees_validation_tokens() -> None:
    sampler = counting_sampler(2000, fraction=0.13, sequences=4)
    border = 2000 - 260
    trained = np.concatenate([sampler.microbatch(step, index) for step in range(60) for index in range(2)])
    assert trained.max() < border
    for index in range(sampler.num_validation_microbatches):
        assert sampler.validation(index).min() >= border


def test_validation_is_fixed_and_in_order() -> None:
    sampler = counting_sampler(1000, fraction=0.5, length=9, sequences=4)
    assert sampler.num_validation_microbatches == 12
    batches = np.concatenate([sampler.validation(index) for index in range(12)])
    assert batches.reshape(-1).tolist() == list(range(500, 980))
    other = counting_sampler(1000, fraction=0.5, length=9, sequences=4, seed=9)
    assert np.array_equal(other.validation(3), sampler.validation(3))


def test_validation_can_be_switched_off() -> None:
    sampler = counting_sampler(100, fraction=0.0)
    assert sampler.num_validation_microbatches == 0
    with pytest.raises(ValueError, match="validation microbatch 0 of 0"):
        sampler.validation(0)


def test_a_corpus_below_one_microbatch_is_a_clear_error() -> None:
    with pytest.raises(
        DataError, match="training part of the corpus has 14 tokens; one microbatch needs 3 sequences of 5"
    ):
        counting_sampler(14)
    assert counting_sampler(15).microbatch(7, 1).shape == (3, 5)
    with pytest.raises(DataError, match="validation part of the corpus has 10 tokens") as caught:
        counting_sampler(1000, fraction=0.01)
    assert "validation fraction" in caught.value.fix


@pytest.mark.parametrize(("step", "index"), [(-1, 0), (0, -1), (0, 2)])
def test_microbatches_that_do_not_exist_are_refused(step: int, index: int) -> None:
    with pytest.raises(ValueError, match="microbatch"):
        counting_sampler(100).microbatch(step, index)


@pytest.mark.parametrize("broken", [{"length": 0}, {"sequences": 0}, {"microbatches": 0}])
def test_impossible_shapes_are_refused(broken: dict[str, int]) -> None:
    with pytest.raises(ValueError, match="start at 1"):
        counting_sampler(100, **broken)


PROGRAM = """
import resource, sys
from swarmtrain.data.sampler import Sampler
from swarmtrain.data.source import open_source
source = open_source(sys.argv[1], validation_fraction=0.01)
sampler = Sampler(source, seed=1, sequence_length=1023, sequences_per_microbatch=4, microbatches_per_step=4)
before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
for step in range(50):
    for index in range(4):
        sampler.microbatch(step, index)
print(source.num_tokens, resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before)
"""


def test_a_corpus_larger_than_the_memory_is_sampled_in_little_memory(tmp_path: Path) -> None:
    """64 GiB of (sparse, zero) tokens; the pages touched by 800 windows are all that may show up in memory."""
    shard_tokens = 1 << 33
    shards = tuple(ShardEntry(f"tokens-{number:06d}.bin", shard_tokens, "0" * 64) for number in range(4))
    for shard in shards:
        with (tmp_path / shard.file).open("wb") as file:
            file.truncate(shard.tokens * 2)
    index = ShardIndex("uint16", describe(ByteTokenizer()), shards, documents=0, prepared={})
    (tmp_path / INDEX_FILE).write_bytes(index.to_json())
    command = [sys.executable, "-c", PROGRAM, str(tmp_path)]
    answer = subprocess.run(command, check=True, timeout=120, capture_output=True, text=True).stdout.split()
    assert int(answer[0]) == 4 * shard_tokens
    grown_bytes = int(answer[1]) * (1 if sys.platform == "darwin" else 1024)
    assert grown_bytes < 64 << 20  # 800 windows touch 2400 pages at most; kernels map some more around them


PINNED_COUNTS = (117140, 3082)
PINNED_TEXT = "If Western Europe"
