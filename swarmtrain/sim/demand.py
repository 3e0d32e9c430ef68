"""The workload of a manifest with the bytes that its wire codecs really send.

`workload_of` counts boundary tensors as fp32, which is all that daemons need before they have measured anything.
"""

from __future__ import annotations

from dataclasses import replace
from functools import lru_cache

import torch

from swarmtrain.boundary import Boundary, codec_pair, sample_names
from swarmtrain.codec import Direction, parse_pair
from swarmtrain.model.layout import boundary_width
from swarmtrain.model.workload import Workload, workload_of
from swarmtrain.run.manifest import Manifest

_MAX_ELEMENTS = 1 << 22  # a wider or longer tensor is measured by its first tokens


def demand_of(manifest: Manifest) -> Workload:
    """As `workload_of`; each direction's bytes are those of a message that has been encoded."""
    workload = workload_of(manifest)
    wire = manifest.wire
    if (wire.forward, wire.backward) == ("fp32", "fp32"):
        return workload
    rows, columns = manifest.batch.sequences_per_microbatch, manifest.model.sequence_length
    width = boundary_width(manifest)
    measured = min(columns, max(1, _MAX_ELEMENTS // (rows * width)))
    codec_pair(manifest)  # a bad name is an error of the manifest's key
    forward, backward = _message_bytes(wire.forward, wire.backward, (rows, measured, width))
    scale = columns / measured
    return replace(workload, boundary_bytes=scale * forward + workload.token_bytes, backward_bytes=scale * backward)


@lru_cache(maxsize=64)
def _message_bytes(forward: str, backward: str, shape: tuple[int, int, int]) -> tuple[int, int]:
    """Of the second message in each direction: the first one of a codec with state may be a key-frame."""
    boundary = Boundary(parse_pair(f"{forward}/{backward}"), 0)
    generator = torch.Generator().manual_seed(0)
    before: dict[Direction, int] = {}
    for microbatch in range(2):
        before = {way: traffic.num_bytes for way, traffic in boundary.traffic.items()}
        samples = sample_names(range(shape[0]))
        _, mask = boundary.cross(
            torch.randn(shape, generator=generator), Direction.FORWARD, 0, microbatch, samples=samples
        )
        boundary.cross(torch.randn(shape, generator=generator), Direction.BACKWARD, 0, microbatch, mask, samples)
    sent = {way: traffic.num_bytes - before[way] for way, traffic in boundary.traffic.items()}
    return sent[Direction.FORWARD], sent[Direction.BACKWARD]
