"""Stages of true size without memory: shapes and allocations are real, numbers are not there."""

from __future__ import annotations

from functools import partial

import torch
from torch import Tensor
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
            found: list[torch.dtype] = []
            for parameter in stage.parameters():
                parameter.register_post_accumulate_grad_hook(partial(_freed, found))
            outer = None if plan.is_last else torch.ones_like(output)
            torch.autograd.backward(output, outer)
        assert len(found) == len(plan.tensors)
    return kept, seen.peak


def _freed(found: list[torch.dtype], parameter: Tensor) -> None:
    """As when it is added to the step's sum."""
    assert parameter.grad is not None
    found.append(parameter.grad.dtype)
    parameter.grad = None


def _stage(manifest: Manifest, index: int) -> Stage:
    plan, d = plan_stages(manifest)[index], manifest.model.hidden_size
    basis = torch.empty(d, manifest.boundary.k) if manifest.has_subspace else None
    table: TokenTable | None = None
    if manifest.boundary.kind != "dense":
        table = NormalTable(torch.empty(manifest.model.vocab_size, d))
    stage = Stage(manifest, plan, basis, table)
    stage._rotary = {}
    dtype = torch.bfloat16 if manifest.is_rounded else torch.float32
    for spec in plan.tensors:
        parent, _, leaf = spec.name.rpartition(".")
        setattr(stage.get_submodule(parent), leaf, torch.nn.Parameter(torch.empty(spec.shape, dtype=dtype)))
    return stage
