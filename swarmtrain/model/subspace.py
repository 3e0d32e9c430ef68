"""The subspace S = span(U): its first basis, its moves, and what a move does to a stage's tensors.

Everything here is computed in fp64 and rounded to fp32 once, so that differences between linear-algebra libraries
seldom reach a bit of the result; digests catch the rest.
"""

from __future__ import annotations

import hashlib

import torch
from torch import Tensor

from swarmtrain.model.initial import draw_normal
from swarmtrain.model.layout import Role
from swarmtrain.run.manifest import Manifest


def orthonormal(matrix: Tensor) -> Tensor:
    """Q of the QR decomposition with the diagonal of R positive: unique, so every machine finds the same one."""
    q, r = torch.linalg.qr(matrix.double(), mode="reduced")
    signs = torch.where(torch.diagonal(r) < 0, -1.0, 1.0).double()
    return torch.mul(q, signs).contiguous()  # (d, k); row by row, so that flat views of it are views


def first_basis(manifest: Manifest) -> Tensor:
    """U at step 0: (d, k) fp64, orthonormal columns."""
    shape = (manifest.model.hidden_size, manifest.boundary.k)
    return orthonormal(draw_normal(manifest.run.seed, "subspace.basis", shape))


def tensor_digest(tensor: Tensor) -> str:
    """SHA-256 over shape and little-endian fp32 bytes."""
    plain = tensor.detach().to("cpu", torch.float32).contiguous()
    head = repr(tuple(plain.shape)).encode()
    return hashlib.sha256(head + plain.numpy().tobytes()).hexdigest()


def moved_basis(basis: Tensor, gram: Tensor, rate: float) -> Tensor:
    """One Riemannian descent step on f(U) = tr(C) - tr(UᵀCU), the energy of the gradients outside S.

    `gram` is C = sum GᵀG, (d, d). It is scaled to unit spectral size by its trace so that `rate` does not depend on the
    loss scale. A zero C moves nothing.
    """
    c = gram.double()
    c = 0.5 * (c + c.T)
    trace = float(torch.trace(c))
    u = basis.double()
    if not trace > 0.0:
        return u
    pull = c @ u / trace  # (d, k)
    tangent = 2.0 * (pull - u @ (u.T @ pull))  # the negative Riemannian gradient
    return orthonormal(u + rate * tangent)


def carried(role: Role, tensor: Tensor, old: Tensor, new: Tensor, *, squared: bool = False) -> Tensor:
    """What a parameter or first moment becomes when U moves from `old` to `new`.

    A factor keeps the part of its matrix that lies in the new S. `squared` carries second moments: with the squared
    entries of the rotation, which keeps them non-negative.
    """
    turn = old.double().T @ new.double()  # (k, k)
    if squared:
        turn = turn * turn
    x = tensor.double()
    if role is Role.FACTOR:
        return (turn.T @ x).to(tensor.dtype)  # (k, in)
    if role is Role.FACTOR_ROWS:
        return (x @ turn).to(tensor.dtype)  # (V, k)
    if role is Role.COLUMNS_IN_S:
        return (new.double() @ (new.double().T @ x)).to(tensor.dtype)  # (d, in)
    if role is Role.ROWS_IN_S:
        return ((x @ new.double()) @ new.double().T).to(tensor.dtype)  # (V, d)
    return tensor


def projected(role: Role, tensor: Tensor, basis: Tensor) -> Tensor:
    """The part of a dense constrained tensor (or its gradient) that lies in S."""
    u = basis.to(tensor.dtype)
    if role is Role.COLUMNS_IN_S:
        return u @ (u.T @ tensor)  # (d, in)
    if role is Role.ROWS_IN_S:
        return (tensor @ u) @ u.T  # (V, d)
    return tensor
