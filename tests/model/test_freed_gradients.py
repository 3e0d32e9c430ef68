"""A parameter's gradient is added to the step's sum when it is there, and goes: the same bits, and less memory."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from swarmtrain.errors import DivergedError
from swarmtrain.model import worker as worker_module
from swarmtrain.model.exact import Addition, ExactSum, Removal
from swarmtrain.model.tracing import LiveBytes
from swarmtrain.model.worker import Pass, StageWorker

from .chains import Chain, some_tokens, tiny

KINDS = ("subspace", "projected", "dense", "learned")
VARIANTS: tuple[tuple[str, ...], ...] = (
    (),
    ("model.tie_embeddings=true", "stages.count=1"),
    ("boundary.tail_layers=2", "stages.count=2"),
    ("batch.accumulate=float",),
)


def passes_of(chain: Chain, tokens: Tensor) -> list[tuple[StageWorker, Pass, Tensor | None]]:
    """Each stage's pass, with the gradient of its output."""
    gradients = [item.boundary for item in chain.backward(chain.forward(tokens))]
    return list(zip(chain.workers, chain.forward(tokens), [*gradients[1:], None], strict=True))


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("variant", VARIANTS)
@pytest.mark.parametrize("recomputes", [False, True])
def test_the_same_bits_as_with_all_gradients_at_once(kind: str, variant: tuple[str, ...], recomputes: bool) -> None:
    chain = Chain(tiny(f"boundary.kind={kind}", *variant), torch.float32)
    for worker in chain.workers:
        worker.state.module.recomputes = recomputes
    for tokens in (some_tokens(chain.manifest), some_tokens(chain.manifest, seed=1)):
        for worker, done, gradient in passes_of(chain, tokens):
            upstream = worker.backward_into_sum(done, gradient, 0)
            again = worker.forward(done.tokens, done.boundary)
            found = worker.backward(again, gradient)
            worker.accumulate(found, 1)
            assert upstream is None if found.boundary is None else torch.equal(upstream, found.boundary)
    for worker in chain.workers:
        assert worker.sum_of(0).total.any()
        assert torch.equal(worker.sum_of(0).total, worker.sum_of(1).total)
        assert all(parameter.grad is None for parameter in worker.state.module.parameters())


def test_the_statistics_of_the_subspace_are_added_too() -> None:
    chain = Chain(tiny("boundary.track_every=2"), torch.float32)
    worker, done, _ = passes_of(chain, some_tokens(chain.manifest))[-1]
    worker.backward_into_sum(done, None, 0)
    worker.accumulate(worker.backward(worker.forward(done.tokens, done.boundary), None), 1)
    assert worker.sum_of(0).total[worker.state.gradient_offsets[-1] :].any()
    assert torch.equal(worker.sum_of(0).total, worker.sum_of(1).total)


def test_a_microbatch_is_taken_out_again_to_the_bit() -> None:
    chain = Chain(tiny(), torch.float32)
    for worker, done, gradient in passes_of(chain, some_tokens(chain.manifest)):
        again = worker.forward(done.tokens, done.boundary)
        worker.backward_into_sum(done, gradient)
        assert worker.sum.total.any()
        worker.backward_into_sum(again, gradient, sign=-1)
        assert not worker.sum.total.any()


@pytest.mark.parametrize("bad", [float("nan"), 1e9])
def test_a_gradient_that_cannot_be_added_leaves_the_sum_as_it_was(bad: float) -> None:
    """The layer before is computed first and is in the sum by then."""
    chain = Chain(tiny("stages.count=2"), torch.float32)
    worker, done, gradient = passes_of(chain, some_tokens(chain.manifest))[0]
    worker.backward_into_sum(worker.forward(done.tokens, None), gradient)
    before = worker.sum.total.clone()
    removed: list[int] = []
    embedding = worker.state.module.embedding.weight
    embedding.register_hook(lambda found: torch.full_like(found, bad))  # its gradient comes last
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(worker_module, "Removal", lambda addition: removed.extend(addition.added) or Removal(addition))
        with pytest.raises(DivergedError):
            worker.backward_into_sum(worker.forward(done.tokens, None), gradient)
    assert len(removed) == len(worker.state.slots) - 1, "everything else was in the sum"
    assert torch.equal(worker.sum.total, before)
    assert not worker.begin_anew_if_spoilt(worker.state.step)


def test_a_bad_gradient_for_upstream_leaves_the_sum_as_it_was() -> None:
    chain = Chain(tiny("stages.count=2"), torch.float32)
    worker, done, _ = passes_of(chain, some_tokens(chain.manifest))[-1]
    assert done.boundary is not None
    done.boundary.register_hook(lambda found: found * float("inf"))
    with pytest.raises(DivergedError, match="upstream"):
        worker.backward_into_sum(done, None)
    assert not worker.sum.total.any()


def test_the_capacity_of_a_sum_is_that_of_whole_microbatches() -> None:
    """As `add` counts it: the largest magnitude of a microbatch once, not once per tensor."""
    one_by_one, at_once = ExactSum(4), ExactSum(4)
    parts = [torch.tensor([1.0, 2.0]), torch.tensor([5.0, 3.0])]
    addition = Addition(one_by_one)
    for offset, part in zip((0, 2), parts, strict=True):
        addition.add(offset, part)
    at_once.add((0, 2), parts)
    assert one_by_one.capacity_used == at_once.capacity_used
    assert torch.equal(one_by_one.total, at_once.total)


def test_gradients_are_not_there_all_at_once() -> None:
    """One of eight layers, and not eight: counted while the backward runs."""
    chain = Chain(tiny("stages.count=1", "model.hidden_size=256", "model.ffn_size=512", "boundary.k=32"), torch.float32)
    worker, tokens = chain.workers[0], some_tokens(chain.manifest)
    size = 4 * worker.state.plan.num_parameters
    peaks = []
    for at_once in (True, False):
        done = worker.forward(tokens, None)
        with LiveBytes() as seen:
            if at_once:
                worker.accumulate(worker.backward(done, None))
            else:
                worker.backward_into_sum(done, None)
        peaks.append(seen.peak)
    done = worker.forward(tokens, None)
    with LiveBytes() as seen:
        worker.take_back(done, None, 0)
    assert peaks[0] > size
    assert peaks[1] < size / 3
    assert seen.peak < size / 2, "nor when they are taken out again, with another forward"
