"""Seldom critical messages: what a boundary of theirs remembers, and that it is watched as any other's is."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from swarmtrain.codec import Direction, parse_pair
from swarmtrain.codec.lowrank import residual_cosine
from swarmtrain.study.critical import SeldomCriticalBoundary


def sent_back(boundary: SeldomCriticalBoundary, gradient: Tensor, step: int) -> Tensor:
    """What arrives of a gradient."""
    boundary.begin_step(step)
    return boundary.cross(gradient, Direction.BACKWARD, step, 0)[0]


def test_the_residual_is_what_a_critical_message_left_out_and_waits_for_the_next_one() -> None:
    numbers = torch.randn(5, 2, 6, 8, generator=torch.Generator().manual_seed(1))
    first, exact, second, activation, following = numbers
    boundary = SeldomCriticalBoundary(parse_pair("fp32/ef-quant4:critical"), 0, every=2)
    left_out = first - sent_back(boundary, first, 0)
    boundary.watch(activation)
    assert torch.equal(sent_back(boundary, exact, 1), exact)
    boundary.watch(following)
    assert boundary.residual_cosine == pytest.approx(residual_cosine(left_out, activation, following))

    fresh = SeldomCriticalBoundary(parse_pair("fp32/ef-quant4:critical"), 0, every=2)
    torch.testing.assert_close(sent_back(boundary, second, 2), sent_back(fresh, second + left_out, 0))


def test_without_error_feedback_there_is_no_residual() -> None:
    boundary = SeldomCriticalBoundary(parse_pair("fp32/quant4:critical"), 0, every=2)
    for step, gradient in enumerate(torch.randn(3, 2, 6, 8, generator=torch.Generator().manual_seed(1))):
        sent_back(boundary, gradient, step)
        boundary.watch(gradient)
    assert boundary.residual_cosine is None
