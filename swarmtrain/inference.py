"""A trained model for inference: the stages of a checkpoint in one process, without gradients or optimizer state."""

from __future__ import annotations

from dataclasses import replace

import torch
from torch import Tensor

from swarmtrain.boundary import codec_pair, is_lossless, received
from swarmtrain.checkpoint import Checkpoint
from swarmtrain.codec import CodecSpec
from swarmtrain.data.source import TokenSource
from swarmtrain.errors import CheckpointError
from swarmtrain.model.cache import StageCache
from swarmtrain.model.layout import StagePlan, plan_stages
from swarmtrain.model.stage import Stage
from swarmtrain.model.table import TokenTable, token_table
from swarmtrain.native.bf16 import require_bf16
from swarmtrain.reference import open_run_source
from swarmtrain.run.manifest import Manifest


class TrainedModel:
    """The whole pipeline of a checkpoint. Boundary tensors pass through the forward codec, as in training.

    A model that was trained with a lossy codec is evaluated with it; `use_codec=False` leaves it out.
    """

    def __init__(self, checkpoint: Checkpoint, *, use_codec: bool = True, device: torch.device | str = "cpu") -> None:
        self.manifest, self.step, self.device = checkpoint.manifest, checkpoint.step, torch.device(device)
        if self.manifest.is_rounded:
            require_bf16(str(device))
        self.codec: CodecSpec | None = codec_pair(self.manifest).forward if use_codec else None
        table = token_table(self.manifest, self.device)  # one for all stages
        self.stages = [_load_stage(checkpoint, plan, table, self.device) for plan in plan_stages(self.manifest)]

    @property
    def is_lossless(self) -> bool:
        """Whether boundary tensors arrive as they were sent, so that splitting a sequence changes nothing."""
        return self.codec is None or is_lossless(self.codec) or len(self.stages) == 1

    def new_caches(self) -> list[StageCache]:
        """Empty caches, one per stage, for `logits`."""
        return [StageCache() for _ in self.stages]

    @torch.no_grad()
    def logits(self, ids: Tensor, caches: list[StageCache] | None = None) -> Tensor:
        """Scores (s, n, v) of token ids (s, n). With caches, ids are the positions after those seen so far."""
        ids = ids.to(self.device)
        boundary = self._up_to_last(ids, caches)
        scores = self.stages[-1].logits(ids, boundary, caches[-1] if caches else None)  # (t, v)
        for cache in caches or ():
            cache.num_positions += ids.shape[1]
        return scores.view(*ids.shape, -1)

    @torch.no_grad()
    def loss(self, tokens: Tensor) -> float:
        """Mean cross-entropy of a microbatch (s, n + 1): inputs in [:, :-1], targets in [:, 1:]."""
        tokens = tokens.to(self.device)
        ids = tokens[:, :-1]
        return float(self.stages[-1].loss(ids, tokens[:, 1:], self._up_to_last(ids, None)))

    def _up_to_last(self, ids: Tensor, caches: list[StageCache] | None) -> Tensor | None:
        """What the last stage receives, (s, n, w)."""
        boundary: Tensor | None = None
        for index, stage in enumerate(self.stages[:-1]):
            boundary = stage(ids, boundary, caches[index] if caches else None)
            if self.codec is not None:
                boundary = received(boundary, self.codec, index)
        return boundary


def open_checkpoint_source(manifest: Manifest, data: str | None = None) -> TokenSource:
    """The tokens of a checkpoint's run, from `data` if they are not where the manifest says."""
    if data is None:
        return open_run_source(manifest)
    return open_run_source(replace(manifest, data=replace(manifest.data, source=data)))


def stage_parameters(checkpoint: Checkpoint, plan: StagePlan) -> dict[str, Tensor]:
    """The parameters of one stage by full name, and the basis as `subspace/basis`, checked against the plan."""
    tensors = checkpoint.load_stage(plan.index)
    shapes = {f"parameter/{spec.name}": spec.shape for spec in plan.tensors}
    if checkpoint.manifest.has_subspace:
        shapes["subspace/basis"] = (checkpoint.manifest.model.hidden_size, checkpoint.manifest.boundary.k)
    for name, shape in shapes.items():
        found = tensors.get(name)
        if found is None or tuple(found.shape) != shape or found.dtype != torch.float32:
            raise CheckpointError(f"stage {plan.index} of {checkpoint.path} has no fp32 tensor {name} of shape {shape}")
    return {name.removeprefix("parameter/"): tensors[name] for name in shapes}


def _load_stage(checkpoint: Checkpoint, plan: StagePlan, table: TokenTable | None, device: torch.device) -> Stage:
    tensors = stage_parameters(checkpoint, plan)
    basis = tensors.pop("subspace/basis", None)
    stage = Stage(checkpoint.manifest, plan, basis.to(device) if basis is not None else None, table)
    dtype = torch.bfloat16 if checkpoint.manifest.is_rounded else torch.float32
    # Copies: tensors of a file may be aligned differently, and kernels then round differently than in training.
    weights = {name: tensor.to(device, dtype, copy=True) for name, tensor in tensors.items()}
    stage.load_state_dict(weights, assign=True)
    return stage.requires_grad_(False).eval()
