"""Stages of true size without memory: shapes and allocations are real, numbers are not there."""

from __future__ import annotations

import torch
from torch._subclasses.fake_tensor import FakeTensorMode

from swarmtrain.model.layout import boundary_width, plan_stages
from swarmtrain.model.stage import Stage
from swarmtrain.model.table import NormalTable, TokenTable
from swarmtrain.model.tracing import LiveBytes
from swarmtrain.run.manifest import Manifest


def counted(manifest: Manifest, index: int, *, recomputes: bool) -> tuple[int, int]:
    """(bytes kept after the forward of a microbatch, the most until its backward is done)."""
    plan = plan_stages(manifest)[index]
    shape = (manifest.batch.sequences_per_microbatch, manifest.model.sequence_length)
    with FakeTensorMode():
        stage = _stage(manifest, index)
        stage.recomputes = recomputes
        seen = LiveBytes()
        with seen:
            ids = torch.zeros(shape, dtype=torch.int64)
            boundary = None if plan.is_first else torch.zeros(*shape, boundary_width(manifest), requires_grad=True)
            output = stage.loss(ids, ids, boundary) if plan.is_last else stage(ids, boundary)
            kept = seen.live
            inputs = [*stage.parameters()] if boundary is None else [boundary, *stage.parameters()]
            outer = None if plan.is_last else torch.ones_like(output)
            found = torch.autograd.grad(output, inputs, outer, allow_unused=True)
        assert all(gradient is not None for gradient in found)
    return kept, seen.peak


def _stage(manifest: Manifest, index: int) -> Stage:
    plan, d = plan_stages(manifest)[index], manifest.model.hidden_size
    basis = torch.empty(d, manifest.boundary.k) if manifest.has_subspace else None
    table: TokenTable | None = None
    if manifest.boundary.kind != "dense":
        table = NormalTable(torch.empty(manifest.model.vocab_size, d))
    stage = Stage(manifest, plan, basis, table)
    stage._rotary = {}
    for spec in plan.tensors:
        parent, _, leaf = spec.name.rpartition(".")
        setattr(stage.get_submodule(parent), leaf, torch.nn.Parameter(torch.empty(spec.shape)))
    return stage
