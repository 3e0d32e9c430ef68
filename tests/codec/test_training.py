"""A tiny pipeline trained through its codecs in one process."""

from __future__ import annotations

import functools
from dataclasses import dataclass

import pytest
import torch
from torch import nn

from swarmtrain.codec import parse_pair

from .crossing import Crossing

WIDTH, CLASSES, BATCH, STEPS = 48, 10, 64, 100


class Stage(nn.Module):
    """A residual block."""

    def __init__(self) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(WIDTH)
        self.mlp = nn.Sequential(nn.Linear(WIDTH, 2 * WIDTH), nn.GELU(), nn.Linear(2 * WIDTH, WIDTH))

    def forward(self, hidden: torch.Tensor) -> torch.Tensor:
        return hidden + self.mlp(self.norm(hidden))  # (batch, width)


@dataclass
class Outcome:
    with_codec: float
    without_codec: float
    crossings: list[Crossing]


@functools.cache
def train(pair: str, seed: int = 0) -> Outcome:
    """Four stages, three boundaries; the task is a random two-layer teacher's label."""
    torch.manual_seed(seed)
    teacher = nn.Sequential(nn.Linear(WIDTH, 64), nn.Tanh(), nn.Linear(64, CLASSES))
    stages, head = nn.ModuleList(Stage() for _ in range(4)), nn.Linear(WIDTH, CLASSES)
    crossings = [Crossing(parse_pair(pair), boundary) for boundary in range(3)]
    inputs = torch.randn(1024, WIDTH)  # (samples, width)
    labels = teacher(3 * inputs).argmax(dim=1)  # (samples,)
    optimizer = torch.optim.AdamW([*stages.parameters(), *head.parameters()], lr=3e-3)

    def loss_of(samples: torch.Tensor, step: int) -> torch.Tensor:
        hidden = inputs[samples]  # (batch, width)
        for index, stage in enumerate(stages):
            hidden = stage(hidden)
            if index < 3:
                hidden = crossings[index](hidden, step=step, samples=tuple(samples.tolist()))
        return nn.functional.cross_entropy(head(hidden), labels[samples])

    for step in range(STEPS):
        for crossing in crossings:
            crossing.on_step(step)
        optimizer.zero_grad()
        loss_of(torch.arange(BATCH) + BATCH * (step % 16), step).backward()
        optimizer.step()
    losses = []
    for enabled in (True, False):
        for crossing in crossings:
            crossing.enabled = enabled
        with torch.no_grad():
            losses.append(float(loss_of(torch.arange(512), STEPS)))
    return Outcome(losses[0], losses[1], crossings)


def test_the_exact_pipeline_learns() -> None:
    exact = train("fp32")
    assert exact.with_codec == exact.without_codec < 1.0


@pytest.mark.parametrize("pair", ["quant4/quant8", "lowrank16"])
def test_mild_codecs_train_like_none(pair: str) -> None:
    assert train(pair).with_codec < train("fp32").with_codec + 0.1


def test_reusing_the_mask_trains_and_selecting_separately_does_not_keep_up() -> None:
    shared, separate = train("topk10"), train("topk10-separate")
    assert shared.with_codec < separate.with_codec
    assert shared.with_codec < shared.without_codec  # the codec has become part of the model


def test_traffic_is_what_the_sizes_say() -> None:
    crossings = train("quant4/quant8").crossings
    for crossing in crossings:
        forward, backward = crossing.forward_traffic, crossing.backward_traffic
        assert backward.num_messages == STEPS
        assert forward.num_messages == STEPS + 1  # and one evaluation
        per_message = 40 + BATCH * WIDTH + 2 * BATCH * WIDTH // 128
        assert backward.num_bytes == STEPS * per_message
        assert forward.encode_s > 0 < backward.decode_s
