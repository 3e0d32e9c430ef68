"""Moving U: downhill, orthonormal, at once on every stage, and without breaking what held before."""

from __future__ import annotations

import itertools

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from swarmtrain.model.layout import Role
from swarmtrain.model.state import StageState
from swarmtrain.model.subspace import carried, first_basis, moved_basis, orthonormal, tensor_digest
from swarmtrain.model.worker import StageWorker

from .chains import Chain, boundary_errors, exactness, relative, some_tokens, tiny

TRACKED = ("boundary.track_every=2", "boundary.track_rate=0.5")


def random_gram(seed: int, decay: float, size: int = 16) -> Tensor:
    """A covariance with a falling spectrum in random directions."""
    generator = np.random.default_rng(seed)
    directions = np.linalg.qr(generator.normal(size=(size, size)))[0]
    return torch.from_numpy(directions * np.exp(-decay * np.arange(size)) @ directions.T)


def outside_energy(basis: Tensor, gram: Tensor) -> float:
    """f(U): how much of the gradients' energy lies outside S, as a share of all of it."""
    c, u = gram.double(), basis.double()
    return 1.0 - float(torch.trace(u.T @ c @ u)) / float(torch.trace(c))


def defect(basis: Tensor) -> float:
    """How far from orthonormal."""
    return float((basis.T @ basis - torch.eye(basis.shape[1], dtype=basis.dtype)).abs().max())


@settings(deadline=None, max_examples=60)
@given(st.integers(0, 2**31), st.floats(0.0, 2.0), st.floats(1e-3, 0.5), st.integers(1, 16))
def test_moves_go_downhill_and_stay_orthonormal(seed: int, decay: float, rate: float, width: int) -> None:
    gram = random_gram(seed, decay)
    basis = orthonormal(torch.from_numpy(np.random.default_rng(seed + 1).normal(size=(16, width))))
    energies = [outside_energy(basis, gram)]
    for _ in range(6):
        basis = moved_basis(basis, gram, rate)
        assert defect(basis) < 1e-12
        energies.append(outside_energy(basis, gram))
    assert all(after <= before + 1e-13 for before, after in itertools.pairwise(energies))


def test_many_moves_find_the_best_subspace() -> None:
    gram = random_gram(1, 0.5)
    basis = first_basis(tiny())
    best = 1.0 - float(torch.linalg.eigvalsh(gram)[-4:].sum() / torch.trace(gram))
    assert outside_energy(basis, gram) > best + 0.2
    for _ in range(300):
        basis = moved_basis(basis, gram, 0.5)
    assert outside_energy(basis, gram) == pytest.approx(best, abs=1e-3)


def test_a_move_does_not_depend_on_the_scale_of_the_loss() -> None:
    gram, basis = random_gram(2, 0.5), first_basis(tiny())
    assert relative(moved_basis(basis, gram, 0.5), moved_basis(basis, 1e6 * gram, 0.5)) < 1e-12


def test_nothing_gathered_moves_nothing() -> None:
    basis = first_basis(tiny())
    assert torch.equal(moved_basis(basis, torch.zeros(16, 16), 0.5), basis)


def test_orthonormal_is_unique() -> None:
    """Whatever signs the decomposition chose: the factor R has a positive diagonal."""
    for seed in range(5):
        matrix = torch.from_numpy(np.random.default_rng(seed).normal(size=(16, 4)))
        q = orthonormal(matrix)
        r = q.T @ matrix
        assert defect(q) < 1e-12
        assert bool((torch.diagonal(r) > 0).all())
        assert float(torch.tril(r, -1).abs().max()) < 1e-12


def gathered(kind: str, *overrides: str, dtype: torch.dtype = torch.float64) -> Chain:
    """A chain that trained for two steps and is about to move U."""
    chain = Chain(tiny(f"boundary.kind={kind}", *TRACKED, *overrides), dtype)
    for step in range(2):
        chain.step(some_tokens(chain.manifest, step), some_tokens(chain.manifest, 50 + step))
    return chain


def move(chain: Chain) -> None:
    basis = chain.workers[-1].proposed_basis()
    for worker in chain.workers:
        worker.move_basis(basis)


def test_gram_matrix_is_that_of_uncompressed_gradients() -> None:
    """C = the mean over tokens of g gᵀ, with g the gradient of one token's loss where the stream leaves S."""
    chain = Chain(tiny(*TRACKED, "stages.count=1"))
    state, tokens = chain.workers[0].state, some_tokens(chain.manifest)
    done = chain.workers[0].forward(tokens, None)
    found = chain.workers[0].backward(done, None).own[-1]
    module = state.module
    module.loss(tokens[:, :-1], tokens[:, 1:], None)
    h = module.exit_state
    assert h is not None
    loss = module.loss(tokens[:, :-1], tokens[:, 1:], None)
    assert module.exit_state is not None
    per_token = torch.autograd.grad(loss, module.exit_state)[0] * h.shape[0]  # (t, d), of the summed loss
    assert found is not None
    assert relative(found.view(16, 16), per_token.T @ per_token / h.shape[0]) < 1e-12
    in_s = per_token @ module.basis @ module.basis.T
    assert relative(in_s, per_token) > 0.1  # there is something outside S to follow


def test_only_the_last_stage_gathers_and_only_when_tracking() -> None:
    chain = gathered("subspace")
    assert [worker.state.gram is not None for worker in chain.workers] == [False, False, False, True]
    assert float(chain.workers[-1].state.gram.abs().sum()) > 0.0  # type: ignore[union-attr]
    assert all(worker.state.gram is None for worker in Chain(tiny()).workers)


@pytest.mark.parametrize("kind", ["subspace", "projected"])
def test_a_move_lowers_the_energy_outside_the_subspace(kind: str) -> None:
    chain = gathered(kind)
    gram = chain.workers[-1].state.gram
    assert gram is not None
    gram = gram.clone().view(16, 16)
    before = outside_energy(chain.workers[0].state.basis, gram)  # type: ignore[arg-type]
    move(chain)
    assert outside_energy(chain.workers[0].state.basis, gram) < before - 1e-3  # type: ignore[arg-type]


@pytest.mark.parametrize("kind", ["subspace", "projected"])
@pytest.mark.parametrize("tie", ["true", "false"])
def test_after_a_move_split_is_still_whole(kind: str, tie: str) -> None:
    split = gathered(kind, f"model.tie_embeddings={tie}")
    tokens = some_tokens(split.manifest, 77)
    before = split.loss(tokens)
    move(split)
    whole = Chain(tiny(f"boundary.kind={kind}", f"model.tie_embeddings={tie}", *TRACKED, "stages.count=1"))
    state = whole.workers[0].state
    assert state.basis is not None
    state.basis.copy_(split.workers[0].state.basis)
    for name, value in split.parameters().items():
        state.view(name).copy_(value)
    found = exactness(split, whole, tokens)
    assert found.holds(), found
    assert 0.0 < abs(split.loss(tokens) - before) < 0.1


@pytest.mark.parametrize("kind", ["subspace", "projected"])
def test_a_stage_that_missed_the_move_is_not_exact(kind: str) -> None:
    chain = gathered(kind)
    basis = chain.workers[-1].proposed_basis()
    for worker in chain.workers[1:]:
        worker.move_basis(basis)
    assert max(boundary_errors(chain, some_tokens(chain.manifest))) > 1e-3


def test_weights_that_stay_behind_make_the_boundary_lossy() -> None:
    """Moving only the basis of the wire, not the projected weights."""
    chain = gathered("projected")
    basis = chain.workers[-1].proposed_basis()
    for worker in chain.workers:
        assert worker.state.basis is not None
        worker.state.basis.copy_(basis)
    assert max(boundary_errors(chain, some_tokens(chain.manifest))) > 1e-3


def test_after_a_move_the_two_constrained_forms_still_agree() -> None:
    """Parameters, first moments, loss and gradients, from a factored state and the dense state that it stands for."""
    factored, dense = gathered("subspace"), Chain(tiny("boundary.kind=projected", *TRACKED))
    old = factored.workers[0].state.basis
    assert old is not None
    for ours, theirs in zip(factored.workers, dense.workers, strict=True):
        write_dense(ours.state, theirs.state, old)
    basis = factored.workers[-1].proposed_basis()
    for worker in [*factored.workers, *dense.workers]:
        worker.move_basis(basis)
    for ours, theirs in zip(factored.workers, dense.workers, strict=True):
        expected = StageState(dense.manifest, theirs.state.plan.index, dtype=torch.float64)
        write_dense(ours.state, expected, basis)
        assert relative(theirs.state.parameters, expected.parameters) < 1e-12
        assert relative(theirs.state.first_moment, expected.first_moment) < 1e-12
    tokens = some_tokens(dense.manifest, 78)
    assert abs(factored.loss(tokens) - dense.loss(tokens)) < 1e-12


def write_dense(factored: StageState, dense: StageState, basis: Tensor) -> None:
    """Fill a projected state with the matrices that a factored one stands for."""
    for ours, theirs in zip(factored.slots, dense.slots, strict=True):
        for source, target in (
            (factored.parameters, dense.parameters),
            (factored.first_moment, dense.first_moment),
        ):
            value = source[ours.span].view(ours.spec.shape)
            if ours.spec.role is Role.FACTOR:
                value = basis @ value
            elif ours.spec.role is Role.FACTOR_ROWS:
                value = value @ basis.T
            target[theirs.span] = value.reshape(-1)


def test_every_stage_and_replica_ends_a_move_with_the_same_basis_and_digest() -> None:
    """Also the replica that was only told the new U."""
    chain = gathered("subspace", dtype=torch.float32)
    last = chain.workers[-1].state
    replica = StageWorker(StageState(chain.manifest, 3))
    replica.state.load(dict(last.named_tensors()), step=last.step, basis_epoch=last.basis_epoch)
    assert replica.state.digest() == last.digest()
    basis = chain.workers[-1].proposed_basis()
    for worker in [*chain.workers, replica]:
        worker.move_basis(basis.clone())
    assert len({tensor_digest(worker.state.module.basis) for worker in chain.workers}) == 1  # type: ignore[arg-type]
    assert {worker.state.basis_epoch for worker in chain.workers} == {1}
    assert replica.state.digest() == last.digest()
    assert last.gram is not None
    assert not last.gram.any()


def test_asking_for_the_next_basis_changes_nothing() -> None:
    chain = gathered("subspace")
    before = chain.workers[-1].state.digest()
    first, second = chain.workers[-1].proposed_basis(), chain.workers[-1].proposed_basis()
    assert torch.equal(first, second)
    assert chain.workers[-1].state.digest() == before


def test_second_moments_stay_non_negative_through_a_far_move() -> None:
    """They are carried as variances of independent coordinates: by the squared entries of the rotation."""
    old, new = first_basis(tiny()), first_basis(tiny("run.seed=4"))
    turn = old.T @ new
    assert float(turn.min()) < -0.1  # carried like a gradient they would turn negative
    values = torch.from_numpy(np.random.default_rng(0).uniform(0.0, 1.0, size=(40, 4)))
    rows = carried(Role.FACTOR_ROWS, values, old, new, squared=True)
    columns = carried(Role.FACTOR, values.T, old, new, squared=True)
    assert relative(rows, values @ (turn * turn)) < 1e-12
    assert relative(columns, rows.T) < 1e-12
    assert float(rows.min()) >= 0.0
    chain = gathered("subspace")
    before = [worker.state.second_moment.clone() for worker in chain.workers]
    for worker in chain.workers:
        worker.move_basis(new)
    assert all(bool((worker.state.second_moment >= 0).all()) for worker in chain.workers)
    assert not torch.equal(before[1], chain.workers[1].state.second_moment)


def test_a_move_to_the_same_place_changes_nothing() -> None:
    basis = first_basis(tiny())
    for role, shape in ((Role.FACTOR, (4, 24)), (Role.FACTOR_ROWS, (40, 4)), (Role.FREE, (5, 5))):
        value = torch.from_numpy(np.random.default_rng(0).normal(size=shape))
        assert relative(carried(role, value, basis, basis), value) < 1e-12
        assert relative(carried(role, value.abs(), basis, basis, squared=True), value.abs()) < 1e-12
