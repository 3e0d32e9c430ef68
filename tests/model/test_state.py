"""A stage's state: laid out alike everywhere, replaced whole or not at all, and named by every bit of it."""

from __future__ import annotations

from collections.abc import Sequence

import pytest
import torch
from torch import Tensor

from swarmtrain.errors import CheckpointError, DivergedError
from swarmtrain.model.buffers import CHUNK_BYTES, StateLayout, as_bytes
from swarmtrain.model.cache import StageCache
from swarmtrain.model.layout import Role
from swarmtrain.model.state import StageState
from swarmtrain.model.worker import StageWorker
from swarmtrain.run.presets import preset

from .chains import Chain, relative, some_tokens, tiny


@pytest.mark.parametrize("kind", ["subspace", "projected", "dense"])
def test_tensors_do_not_overlap_and_start_at_64_bytes(kind: str) -> None:
    for index in range(4):
        state = StageState(tiny(f"boundary.kind={kind}"), index)
        end, moment_end = 0, 0
        for slot in state.slots:
            assert slot.offset >= end
            assert slot.moment_offset >= moment_end
            assert slot.offset * 4 % 64 == slot.moment_offset * 4 % 64 == 0
            end, moment_end = slot.span.stop, slot.moment_span.stop
        assert end <= state.parameters.numel()
        assert moment_end <= state.second_moment.numel()


def test_row_averaged_tensors_keep_one_second_moment_per_row() -> None:
    state = StageState(tiny("boundary.kind=projected"), 0)
    sizes = {slot.spec.role: (slot.spec.shape, slot.moment_size) for slot in state.slots}
    assert sizes[Role.ROWS_IN_S] == ((40, 16), 40)
    assert sizes[Role.COLUMNS_IN_S] == ((16, 24), 24)


def test_module_computes_with_the_flat_buffer() -> None:
    chain = Chain(tiny(), torch.float32)
    tokens = some_tokens(chain.manifest)
    before = chain.loss(tokens)
    chain.workers[1].state.parameters.mul_(1.1)
    assert chain.loss(tokens) != before


@pytest.mark.parametrize("kind", ["subspace", "projected", "dense"])
def test_state_survives_being_saved_and_loaded(kind: str) -> None:
    chain = Chain(tiny(f"boundary.kind={kind}"), torch.float32)
    chain.step(some_tokens(chain.manifest))
    for worker in chain.workers:
        state = worker.state
        twin = StageState(state.manifest, state.plan.index)
        assert twin.digest() != state.digest()
        twin.load(
            {name: value.clone() for name, value in state.named_tensors()},
            step=state.step,
            basis_epoch=state.basis_epoch,
        )
        assert twin.digest() == state.digest()
        assert twin.chunk_digests() == state.chunk_digests()


def test_a_state_that_does_not_fit_is_refused_and_changes_nothing() -> None:
    state = StageState(tiny(), 1)
    before = state.digest()
    good = {name: value.clone() + 1 for name, value in state.named_tensors()}
    name = next(iter(good))
    missing = {key: value for key, value in good.items() if key != name}
    surplus = {**good, "parameter/none": torch.zeros(1)}
    wrong_shape = {**good, name: torch.zeros(3)}
    wrong_type = {**good, name: good[name].double()}
    for tensors in (missing, surplus, wrong_shape, wrong_type, {}):
        with pytest.raises(CheckpointError):
            state.load(tensors, step=1, basis_epoch=0)
    assert state.digest() == before
    state.load(good, step=1, basis_epoch=0)
    assert state.digest() != before


def test_digest_depends_on_every_part_of_the_state() -> None:
    chain = Chain(tiny("boundary.track_every=5"), torch.float32)
    state = chain.workers[-1].state
    seen = {state.digest()}
    buffers = [state.parameters, state.first_moment, state.second_moment, state.basis, state.gram]
    for buffer in buffers:
        assert buffer is not None
        buffer.reshape(-1)[7] += 1.0
        seen.add(state.digest())
    state.step += 1
    seen.add(state.digest())
    state.basis_epoch += 1
    seen.add(state.digest())
    assert len(seen) == 8


def test_chunks_cover_every_byte_once() -> None:
    state = StageState(preset("nano", ["stages.count=1"]), 0)
    sizes = [buffer.numel() * buffer.element_size() for buffer in state.buffers]
    assert max(sizes) > CHUNK_BYTES
    covered = [0] * len(sizes)
    for index, start, stop in state.layout.chunks():
        assert start == covered[index]
        assert start < stop <= start + CHUNK_BYTES
        covered[index] = stop
    assert covered == sizes
    before = state.chunk_digests()
    state.parameters[CHUNK_BYTES // 4] += 1.0  # the first element of the second chunk
    assert [a == b for a, b in zip(before, state.chunk_digests(), strict=True)].count(False) == 1
    assert state.chunk_digests()[1] != before[1]


@pytest.mark.parametrize("kind", ["subspace", "projected", "dense"])
def test_a_newcomer_builds_the_state_from_chunks_of_bytes(kind: str) -> None:
    """The layout alone says how large everything is; nothing but bytes, step and epoch is needed beside it."""
    chain = Chain(tiny(f"boundary.kind={kind}"), torch.float32)
    chain.step(some_tokens(chain.manifest))
    donor = chain.workers[1].state
    layout = StateLayout(tiny(f"boundary.kind={kind}"), 1)
    assert layout.num_bytes == sum(buffer.numel() * buffer.element_size() for buffer in donor.buffers)
    fresh = layout.empty()
    for index, start, stop in layout.chunks():
        as_bytes(fresh[index])[start:stop] = as_bytes(donor.buffers[index])[start:stop]
    newcomer = StageState(tiny(f"boundary.kind={kind}"), 1)
    assert newcomer.digest() != donor.digest()
    newcomer.load_buffers(fresh, step=donor.step, basis_epoch=donor.basis_epoch)
    assert newcomer.digest() == donor.digest()
    if newcomer.basis is not None:
        assert donor.basis is not None
        assert torch.equal(newcomer.basis, donor.basis)
        assert newcomer.module.basis is newcomer.basis


def test_evaluation_keeps_no_graph_and_equals_training_forward() -> None:
    chain = Chain(tiny(), torch.float32)
    tokens = some_tokens(chain.manifest)
    boundary = None
    for worker, done in zip(chain.workers, chain.forward(tokens), strict=True):
        boundary = worker.evaluate(tokens, boundary)
        assert not boundary.requires_grad
        assert torch.equal(boundary, done.result)


def test_backward_changes_nothing_until_it_is_accumulated() -> None:
    chain = Chain(tiny(), torch.float32)
    before = [worker.state.digest() for worker in chain.workers]
    gradients = chain.backward(chain.forward(some_tokens(chain.manifest)))
    assert [worker.state.digest() for worker in chain.workers] == before
    worker = chain.workers[1]
    assert not worker.sum.total.any()
    worker.accumulate(gradients[1])
    assert worker.sum.total.any()
    worker.accumulate(gradients[1], sign=-1)
    assert not worker.sum.total.any()


def test_recomputed_forward_gives_the_same_gradient_bits() -> None:
    """Kept graph or recomputed from the stage's input: the ledger may choose."""
    chain = Chain(tiny(), torch.float32)
    tokens = some_tokens(chain.manifest)
    passes = chain.forward(tokens)
    first = chain.backward(passes)
    boundary, received = passes[1].boundary, first[2].boundary
    worker = chain.workers[1]
    again = worker.backward(worker.forward(tokens, boundary), received)
    for ours, theirs in zip(again.own, first[1].own, strict=True):
        assert ours is not None
        assert theirs is not None
        assert torch.equal(ours, theirs)


@pytest.mark.parametrize("stage", [0, 1, 3])
def test_numbers_that_are_not_finite_stop_a_step_and_leave_the_sum_alone(stage: int) -> None:
    chain = Chain(tiny(), torch.float32)
    tokens = some_tokens(chain.manifest)
    worker = chain.workers[stage]
    state = worker.state
    state.view(state.slots[-1].spec.name).view(-1)[0] = float("nan")
    boundary = None if stage == 0 else torch.zeros(3, 6, 4)
    done = worker.forward(tokens, boundary)
    gradient = None if stage == 3 else torch.ones_like(done.result)
    with pytest.raises(DivergedError):
        worker.accumulate(worker.backward(done, gradient))
    assert not worker.sum.total.any()


def test_applied_steps_clear_the_sum_and_count() -> None:
    chain = Chain(tiny(), torch.float32)
    for step in range(3):
        chain.step(some_tokens(chain.manifest, step))
        assert [worker.state.step for worker in chain.workers] == [step + 1] * 4
        assert not any(bool(worker.sum.total.any()) for worker in chain.workers)


@pytest.mark.parametrize("kind", ["subspace", "projected", "dense"])
def test_decoding_token_by_token_gives_the_logits_of_the_whole_text(kind: str) -> None:
    chain = Chain(tiny(f"boundary.kind={kind}"))
    ids = some_tokens(chain.manifest)  # (s, 7)
    caches = [StageCache() for _ in chain.workers]
    pieces = [ids[:, :3], *ids[:, 3:].split(1, dim=1)]
    found = [chain_logits(chain, piece, caches) for piece in pieces]
    assert relative(torch.cat(found, dim=1), chain_logits(chain, ids, [None] * 4)) < 1e-12


def chain_logits(chain: Chain, ids: Tensor, caches: Sequence[StageCache | None]) -> Tensor:
    """Scores (s, n, v) of new positions; advances the caches."""
    boundary = None
    with torch.no_grad():
        for worker, cache in zip(chain.workers[:-1], caches[:-1], strict=True):
            boundary = worker.state.module(ids, boundary, cache)
        logits = chain.workers[-1].state.module.logits(ids, boundary, caches[-1])
    for cache in caches:
        if cache is not None:
            cache.num_positions += ids.shape[1]
    return logits.view(*ids.shape, -1)


def test_training_a_tiny_model_lowers_its_loss() -> None:
    """Whatever else is exact: all kinds learn."""
    for kind in ("subspace", "projected", "dense"):
        chain = Chain(tiny(f"boundary.kind={kind}", "stages.count=2"), torch.float32)
        tokens = some_tokens(chain.manifest)
        before = chain.loss(tokens)
        for _ in range(15):
            chain.step(tokens)
        assert chain.loss(tokens) < before - 1.0


def test_passes_of_several_microbatches_may_be_open_at_once() -> None:
    """Two passes of different microbatches may be open at the same time."""
    chain = Chain(tiny(), torch.float32)
    worker: StageWorker = chain.workers[0]
    first = worker.forward(some_tokens(chain.manifest, 0), None)
    second = worker.forward(some_tokens(chain.manifest, 1), None)
    gradient = torch.ones_like(first.result)
    late = worker.backward(first, gradient)
    worker.backward(second, gradient)
    alone = worker.backward(worker.forward(some_tokens(chain.manifest, 0), None), gradient)
    assert all(torch.equal(a, b) for a, b in zip(late.own, alone.own, strict=True) if a is not None and b is not None)
