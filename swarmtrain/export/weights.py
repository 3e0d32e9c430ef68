"""The plain LLaMA that a checkpoint stands for, tensor by tensor.

The residual stream of a constrained model is h = c Uᵀ + T[ids]. Writing U into the matrices that write to the stream,
and U and T into the embedding, leaves a LLaMA without any trace of the subspace:

    W_o = U Z_o     W_down = U Z_d     embedding = E Uᵀ + T

Products are computed in fp64 and rounded once.
"""

from __future__ import annotations

import re
from collections.abc import Iterator

import torch
from torch import Tensor

from swarmtrain.checkpoint import Checkpoint
from swarmtrain.inference import stage_parameters
from swarmtrain.model.layout import EMBEDDING, HEAD, Role, StagePlan, TensorSpec, plan_stages
from swarmtrain.model.table import token_table
from swarmtrain.run.manifest import Manifest

_OUTSIDE_LAYERS = {
    EMBEDDING: "model.embed_tokens.weight",
    "final_norm.weight": "model.norm.weight",
    HEAD: "lm_head.weight",
}
_IN_LAYER = {
    "attention_norm.weight": "input_layernorm.weight",
    "attention.query.weight": "self_attn.q_proj.weight",
    "attention.key.weight": "self_attn.k_proj.weight",
    "attention.value.weight": "self_attn.v_proj.weight",
    "attention.output.weight": "self_attn.o_proj.weight",
    "mlp_norm.weight": "post_attention_layernorm.weight",
    "mlp.gate.weight": "mlp.gate_proj.weight",
    "mlp.up.weight": "mlp.up_proj.weight",
    "mlp.down.weight": "mlp.down_proj.weight",
}


def llama_name(name: str) -> str:
    """The name that `transformers` gives to the tensor we call `name`."""
    layer = re.fullmatch(r"layers\.(\d+)\.(.+)", name)
    if layer is None:
        return _OUTSIDE_LAYERS[name]
    return f"model.layers.{layer[1]}.{_IN_LAYER[layer[2]]}"


def llama_shapes(manifest: Manifest) -> dict[str, tuple[int, ...]]:
    """Every tensor of the exported model, in the order in which `llama_tensors` gives them."""
    d = manifest.model.hidden_size
    shapes = {}
    for plan in plan_stages(manifest):
        for spec in _exported(plan):
            shape = spec.shape
            if spec.role is Role.FACTOR:
                shape = (d, shape[1])
            elif spec.role is Role.FACTOR_ROWS:
                shape = (shape[0], d)
            shapes[llama_name(spec.name)] = shape
    return shapes


def llama_tensors(checkpoint: Checkpoint) -> Iterator[tuple[str, Tensor]]:
    """The exported model's tensors in fp32. One stage is in memory at a time."""
    for plan in plan_stages(checkpoint.manifest):
        tensors = stage_parameters(checkpoint, plan)
        basis = tensors.get("subspace/basis")
        for spec in _exported(plan):
            yield llama_name(spec.name), _dense(checkpoint.manifest, spec, tensors[spec.name], basis)


def _exported(plan: StagePlan) -> list[TensorSpec]:
    """A tied embedding lies on the first and on the last stage; the first one's is exported."""
    return [spec for spec in plan.tensors if spec.name != EMBEDDING or plan.is_first]


def _dense(manifest: Manifest, spec: TensorSpec, value: Tensor, basis: Tensor | None) -> Tensor:
    wide = value.double()
    if basis is not None and spec.role is Role.FACTOR:
        wide = basis.double() @ wide  # (d, in)
    elif basis is not None and spec.role is Role.FACTOR_ROWS:
        wide = wide @ basis.double().T  # (V, d)
    if spec.name == EMBEDDING and (table := token_table(manifest)) is not None:
        wide = wide + table.whole().double()  # (V, d)
    return wide.to(torch.float32)
