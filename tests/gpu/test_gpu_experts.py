"""Grouped products of experts on the GPU equal the loop, without a wait of the host."""

from __future__ import annotations

import pytest
import torch
from one_gpu import NEEDS_GPU
from torch import Tensor

from pipelines.settings import ExpertsSettings
from pipelines.training.models.expert_products import (
    has_grouped_kernel,
    multiply_in_groups,
    multiply_in_loop,
)
from pipelines.training.models.experts import MixtureOfExperts

pytestmark = NEEDS_GPU

DIM, HIDDEN_DIM = 64, 128


def draw_inputs(counts: list[int]) -> list[Tensor]:
    shapes = [(sum(counts), DIM)] + [(len(counts), HIDDEN_DIM, DIM)] * 3
    rows, w1, w2, w3 = (
        torch.randn(shape, device="cuda", dtype=torch.bfloat16) / 8 for shape in shapes
    )
    return [rows, w1, w2.transpose(1, 2).contiguous(), w3]


@pytest.mark.parametrize("counts", [[0, 5, 0, 300], [0, 0], [8, 16, 1], [1000, 0, 0, 7]], ids=str)
def test_grouped_products_equal_the_loop_with_dirty_memory(counts: list[int]) -> None:
    inputs = [tensor.requires_grad_() for tensor in draw_inputs(counts)]
    if not has_grouped_kernel(inputs[0], inputs[1]):
        pytest.skip("torch has no grouped kernel for this GPU")
    gradient = torch.randn(sum(counts), DIM, device="cuda", dtype=torch.bfloat16)
    expected = multiply_in_loop(inputs[0], counts, *inputs[1:])
    expected_gradients = torch.autograd.grad(expected, inputs, gradient)
    for _ in range(3):
        # What a kernel does not write must not be 0 by chance.
        blocks = [torch.full((1 << 20,), float("nan"), device="cuda") for _ in range(8)]
        del blocks
        actual = multiply_in_groups(inputs[0], torch.tensor(counts, device="cuda"), *inputs[1:])
        gradients = torch.autograd.grad(actual, inputs, gradient)
        for ours, reference in zip(
            (actual, *gradients), (expected, *expected_gradients), strict=True
        ):
            torch.testing.assert_close(ours, reference, rtol=0.02, atol=0.02)


def test_a_mixture_in_bfloat16_never_makes_the_host_wait() -> None:
    experts = ExpertsSettings(num_experts=8, top_k=2, hidden_dim=HIDDEN_DIM, shared_hidden_dim=8)
    module = MixtureOfExperts(DIM, experts).to("cuda", torch.bfloat16)
    hidden = torch.randn(2, 16, DIM, device="cuda", dtype=torch.bfloat16, requires_grad=True)
    if not has_grouped_kernel(hidden, module.experts.w1):
        pytest.skip("torch has no grouped kernel for this GPU")
    module(hidden).sum().backward()  # the first call initializes libraries
    torch.cuda.set_sync_debug_mode("error")
    try:
        module(hidden).sum().backward()
    finally:
        torch.cuda.set_sync_debug_mode("default")
