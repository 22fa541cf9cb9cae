"""Draws and statistics of single microbatches in a merged pass, also where backward repeats it."""

from __future__ import annotations

from contextlib import ExitStack
from copy import deepcopy

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional
from torch.utils.checkpoint import checkpoint

from pipelines.training.custom.modules.microbatch_draws import MicrobatchDraws
from pipelines.training.custom.modules.microbatch_statistics import MicrobatchStatistics

SEEDS = (5, 6, 7)


def modes() -> ExitStack:
    stack = ExitStack()
    stack.enter_context(MicrobatchDraws(SEEDS, torch.device("cpu")))
    stack.enter_context(MicrobatchStatistics(len(SEEDS)))
    return stack


@pytest.mark.parametrize("use_reentrant", [True, False])
def test_draws_that_backward_repeats_are_the_same_in_both(use_reentrant: bool) -> None:
    weight = torch.ones(4, requires_grad=True)
    points = torch.arange(1.0, 49.0).view(12, 4)

    def dropped(points: Tensor, weight: Tensor) -> Tensor:
        return functional.dropout(points * weight, 0.5)

    with modes():
        output = checkpoint(dropped, points, weight, use_reentrant=use_reentrant)
    output.sum().backward()
    assert weight.grad is not None
    torch.testing.assert_close(weight.grad, output.detach().sum(0))


def test_statistics_are_those_of_each_microbatch() -> None:
    torch.manual_seed(0)
    merged, points = nn.BatchNorm1d(4).double(), torch.randn(12, 4, dtype=torch.float64)
    alone = [deepcopy(merged) for _ in SEEDS]
    with modes():
        together = merged(points)
    parts = [module(part) for module, part in zip(alone, points.chunk(len(SEEDS)), strict=True)]
    torch.testing.assert_close(together, torch.cat(parts))
    for name in ("running_mean", "running_var"):
        mean = torch.stack([getattr(module, name) for module in alone]).mean(0)
        torch.testing.assert_close(getattr(merged, name), mean)
    together.pow(3).sum().backward()
    torch.cat(parts).pow(3).sum().backward()
    gradients = [module.weight.grad for module in alone]
    torch.testing.assert_close(merged.weight.grad, sum(g for g in gradients if g is not None))


def test_statistics_that_backward_repeats_are_those_of_the_pass() -> None:
    module, points = nn.BatchNorm1d(4).double(), torch.randn(12, 4, dtype=torch.float64)
    with modes():
        output = checkpoint(module, points, use_reentrant=False)
    torch.testing.assert_close(output, functional.batch_norm(points, None, None, training=True))


@pytest.mark.parametrize("size", [11, 12])
def test_evaluation_and_uneven_parts_are_torchs_own(size: int) -> None:
    module, points = nn.BatchNorm1d(4), torch.randn(size, 4)
    module.train(size == 11)
    expected = module(points)
    with modes():
        torch.testing.assert_close(module(points), expected)
