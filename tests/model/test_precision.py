"""model.precision = bf16: what is rounded and how often, and what stays in fp32."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from needs import needs_bf16
from torch import Tensor

from swarmtrain import checkpoint as checkpoints
from swarmtrain.errors import ManifestError
from swarmtrain.model.buffers import NEXT_WEIGHTS, WEIGHTS, StateLayout
from swarmtrain.model.exact import largest_magnitude
from swarmtrain.model.loss import head_loss
from swarmtrain.model.stage import Embedding
from swarmtrain.model.state import StageState
from swarmtrain.model.worker import StageWorker
from swarmtrain.run.manifest import Manifest

from .chains import Chain, boundary_errors, relative, some_tokens, tiny

pytestmark = needs_bf16()

KINDS = ("subspace", "dense", "learned")
BF16 = "model.precision=bf16"
DELAYED = ("schedule.delay=1", "checkpoint.every=4")
PREDICTED = (*DELAYED, "schedule.predict=true")
ROUNDING = 2.0**-8  # of one number, relative


def chain_of(*overrides: str) -> Chain:
    return Chain(tiny(BF16, *overrides), torch.float32)


def trained(worker: StageWorker, seed: int = 0) -> None:
    """One step with an invented gradient."""
    generator = torch.Generator().manual_seed(seed)
    gradient = torch.randn(worker.state.gradient_size, generator=generator, dtype=torch.float64)
    worker.apply(gradient, 1.0, 1e-2)
    worker.enter_step()


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("table", ["normal", "signs"])
def test_loss_and_gradients_are_those_of_fp32_up_to_rounding(kind: str, table: str) -> None:
    overrides = (f"boundary.kind={kind}", f"boundary.table={table}")
    ours, theirs = chain_of(*overrides), Chain(tiny(*overrides), torch.float32)
    tokens = some_tokens(ours.manifest)
    assert 0.0 < abs(ours.loss(tokens) - theirs.loss(tokens)) < 0.01
    exact = theirs.gradients(tokens)
    for name, gradient in ours.gradients(tokens).items():
        assert gradient.dtype == torch.bfloat16
        assert 0.0 < relative(gradient.float(), exact[name]) < 0.05, name


@pytest.mark.parametrize("kind", KINDS)
def test_what_crosses_the_loss_and_the_state_stay_in_fp32(kind: str) -> None:
    chain = chain_of(f"boundary.kind={kind}")
    tokens = some_tokens(chain.manifest)
    passes = chain.forward(tokens)
    assert {done.output.dtype for done in passes} == {torch.float32}
    crossing = [found.boundary for found in chain.backward(passes) if found.boundary is not None]
    assert {gradient.dtype for gradient in crossing} == {torch.float32}
    narrow = passes[0].result.bfloat16().float()
    assert torch.equal(narrow, passes[0].result) == (kind == "learned")  # whose encoder's product is what crosses
    for worker in chain.workers:
        assert {tensor.dtype for _, tensor in worker.state.named_tensors()} == {torch.float32}


@pytest.mark.parametrize("table", ["normal", "signs"])
def test_the_boundary_still_loses_nothing(table: str) -> None:
    """Whatever the products round: sender and receiver form the same hidden state."""
    chain = chain_of(f"boundary.table={table}")
    chain.step(some_tokens(chain.manifest, 1))
    assert boundary_errors(chain, some_tokens(chain.manifest)) == [0.0, 0.0, 0.0]


def test_the_projected_form_is_refused() -> None:
    """Its writers, rounded, leave S: a boundary would lose what lies outside."""
    with pytest.raises(ManifestError, match=r"model.precision: .* projected"):
        chain_of("boundary.kind=projected")


def test_microbatches_compute_with_copies_that_are_rounded_once_a_step() -> None:
    worker = StageWorker(StageState(tiny(BF16), 1))
    state = worker.state
    for seed in range(2):
        trained(worker, seed)
        flat = state.weights(state.step).flat
        assert torch.equal(flat, state.parameters.bfloat16())
        assert not torch.equal(flat.float(), state.parameters)
    assert state.newest.flat is state.weights(state.step).flat
    assert all(parameter.data_ptr() % 64 == 0 for parameter in state.newest.parameters)


@pytest.mark.parametrize("overrides", [DELAYED, PREDICTED])
def test_with_a_delay_versions_are_rounded_copies(overrides: tuple[str, ...]) -> None:
    """And the prediction is rounded once, from parameters in fp32."""
    worker = StageWorker(StageState(tiny(BF16, *overrides), 1))
    state, manifest = worker.state, worker.state.manifest
    before, predicted = state.parameters.clone(), 0
    for seed in range(6):
        trained(worker, seed)
        change = state.parameters - before if manifest.is_predicted(state.step + 1) else torch.zeros(())
        predicted += manifest.is_predicted(state.step + 1)
        assert torch.equal(state.weights(state.step + 1).flat, (state.parameters + change).bfloat16())
        assert torch.equal(state.newest.flat, state.parameters.bfloat16())
        before = state.parameters.clone()
    assert (predicted > 0) == (overrides is PREDICTED)


def test_evaluation_uses_the_newest_parameters() -> None:
    for overrides in ((), DELAYED, PREDICTED):
        plain, manifest = StageWorker(StageState(tiny(BF16), 3)), tiny(BF16, *overrides)
        delayed = StageWorker(StageState(manifest, 3))
        tokens, boundary = some_tokens(manifest), torch.zeros(3, 6, 4)
        for seed in range(3):
            trained(plain, seed)
            trained(delayed, seed)
        assert torch.equal(plain.evaluate(tokens, boundary), delayed.evaluate(tokens, boundary))


def test_versions_take_half_the_bytes() -> None:
    for name in (WEIGHTS, NEXT_WEIGHTS):
        sizes = []
        for precision in ("fp32", "bf16"):
            layout = StateLayout(tiny(f"model.precision={precision}", *PREDICTED), 1)
            index = layout.index(name)
            assert index is not None
            sizes.append(layout.buffers[index].num_bytes / layout.buffers[0].num_bytes)
        assert sizes == [1.0, 0.5]


@pytest.mark.parametrize("overrides", [(), DELAYED, PREDICTED])
def test_a_newcomer_computes_with_the_same_weights(overrides: tuple[str, ...]) -> None:
    donor, newcomer = (StageWorker(StageState(tiny(BF16, *overrides), 1)) for _ in range(2))
    for seed in range(3):
        trained(donor, seed)
    theirs = [buffer.clone() for buffer in donor.state.buffers]
    newcomer.state.load_buffers(theirs, step=donor.state.step, basis_epoch=0)
    assert newcomer.state.digest() == donor.state.digest()
    for step in (donor.state.step, donor.state.step + (1 if overrides else 0)):
        assert torch.equal(newcomer.state.weights(step).flat, donor.state.weights(step).flat)
    trained(donor, 9)
    trained(newcomer, 9)
    assert newcomer.state.digest() == donor.state.digest()
    assert torch.equal(newcomer.state.newest.flat, donor.state.newest.flat)


@pytest.mark.parametrize("overrides", [(), PREDICTED])
def test_a_checkpoint_keeps_fp32_and_its_weights_are_those_of_the_run(
    tmp_path: Path, overrides: tuple[str, ...]
) -> None:
    manifest = tiny(BF16, "stages.count=1", *overrides)
    worker, again = StageWorker(StageState(manifest, 0)), StageState(manifest, 0)
    for seed in range(4):  # a barrier with PREDICTED
        trained(worker, seed)
    path = checkpoints.save_states(tmp_path, [worker.state], keep=1, data_digest="")
    checkpoints.open_checkpoint(path).restore(again)
    assert torch.equal(again.parameters, worker.state.parameters)
    assert again.digest() == worker.state.digest()
    assert torch.equal(again.weights(4).flat, worker.state.weights(4).flat)


def test_a_tokens_gradients_are_added_before_they_are_rounded() -> None:
    """In bf16 itself a sum of ones ends at 256."""
    embedding = Embedding(4, 2)
    embedding.weight = torch.nn.Parameter(torch.ones(4, 2, dtype=torch.bfloat16))
    rows = embedding(torch.tensor([1] * 1000 + [2]))
    assert rows.dtype == torch.float32
    (gradient,) = torch.autograd.grad(rows.sum(), embedding.weight)
    assert gradient.tolist() == [[0.0, 0.0], [1000.0, 1000.0], [1.0, 1.0], [0.0, 0.0]]
    assert gradient.dtype == torch.bfloat16


def example() -> tuple[Tensor, Tensor, Tensor]:
    generator = torch.Generator().manual_seed(1)
    h = torch.randn(300, 12, generator=generator).bfloat16().requires_grad_(True)
    weight = torch.randn(50, 12, generator=generator).bfloat16().requires_grad_(True)
    return h, weight, torch.randint(0, 50, (300,), generator=generator)


@pytest.mark.parametrize("rows", [1, 7, 300])
def test_chunks_of_the_loss_are_added_in_fp32(rows: int) -> None:
    """However many there are, the gradient has the error of single roundings."""
    h, weight, targets = example()
    loss = head_loss(h, weight, targets, rows)
    exact = torch.nn.functional.cross_entropy(h.double() @ weight.double().t(), targets)
    assert loss.dtype == torch.float32
    assert abs(loss.item() - exact.item()) < ROUNDING
    found = torch.autograd.grad(loss, (h, weight))
    for mine, other in zip(found, torch.autograd.grad(exact, (h, weight)), strict=True):
        assert mine.dtype == torch.bfloat16
        assert relative(mine.double(), other.double()) < 1.5 * ROUNDING


def test_a_microbatch_is_added_and_taken_away_exactly() -> None:
    chain = chain_of()
    passes = chain.forward(some_tokens(chain.manifest))
    for worker, gradients in zip(chain.workers, chain.backward(passes), strict=True):
        worker.accumulate(gradients)
        assert largest_magnitude(worker.sum.total) > 0
        flat = torch.cat([own.double().reshape(-1) for own in gradients.own if own is not None])
        assert relative(worker.sum.total[worker.sum.total != 0], flat[flat != 0]) < 1e-12
        worker.accumulate(gradients, sign=-1)
        assert largest_magnitude(worker.sum.total) == 0


def losses(manifest: Manifest) -> list[float]:
    chain = Chain(manifest, torch.float32)
    found = []
    for step in range(6):
        chain.step(some_tokens(manifest, step % 2))
        found.append(chain.loss(some_tokens(manifest, 0)))
    return found


@pytest.mark.parametrize("kind", ["adamw", "muon"])
def test_training_follows_that_in_fp32(kind: str) -> None:
    ours, theirs = (losses(tiny(f"optimizer.kind={kind}", f"model.precision={name}")) for name in ("bf16", "fp32"))
    assert theirs[-1] < theirs[0] - 0.5
    assert all(abs(mine - other) < 0.1 for mine, other in zip(ours, theirs, strict=True))
