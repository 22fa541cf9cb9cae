"""Grouped products of experts equal the loop, and their row counts stay on the device."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

from actors.distributed.torch_private import TorchDispatchMode
from pipelines.training.models.expert_products import (
    ROWS,
    has_grouped_kernel,
    multiply_in_groups,
    multiply_in_loop,
)

DIM, HIDDEN_DIM = 16, 24
TOLERANCES = {torch.float32: 1e-5, torch.bfloat16: 0.02}
COUNTS = st.lists(st.sampled_from([0, 0, 1, 3, ROWS - 1, ROWS, ROWS + 1, 37]), min_size=1)


def draw_inputs(counts: list[int], dtype: torch.dtype) -> list[Tensor]:
    generator = torch.Generator().manual_seed(sum(counts))
    shapes = [
        (sum(counts), DIM),
        (len(counts), HIDDEN_DIM, DIM),
        (len(counts), DIM, HIDDEN_DIM),
        (len(counts), HIDDEN_DIM, DIM),
    ]
    drawn = (torch.randn(shape, generator=generator) / 4 for shape in shapes)
    return [tensor.to(dtype).requires_grad_() for tensor in drawn]


class RecordOperators(TorchDispatchMode):
    """Records the names of all operators."""

    def __init__(self) -> None:
        super().__init__()
        self.names: set[str] = set()

    def __torch_dispatch__(self, operator, types, args=(), kwargs=None):
        self.names.add(operator.name())
        return operator(*args, **(kwargs or {}))


def assert_groups_equal_the_loop(counts: list[int], dtype: torch.dtype) -> None:
    rows, *weights = inputs = draw_inputs(counts, dtype)
    expected = multiply_in_loop(rows, counts, *weights)
    actual = multiply_in_groups(rows, torch.tensor(counts), *weights)
    gradient = torch.randn(expected.shape, dtype=dtype)
    expected_gradients = torch.autograd.grad(expected, inputs, gradient)
    actual_gradients = torch.autograd.grad(actual, inputs, gradient)
    tolerance = TOLERANCES[dtype]
    for ours, reference in zip(
        (actual, *actual_gradients), (expected, *expected_gradients), strict=True
    ):
        assert ours.dtype == reference.dtype
        torch.testing.assert_close(ours, reference, rtol=tolerance, atol=tolerance)
    for weight_gradient in actual_gradients[1:]:
        for expert, count in enumerate(counts):
            assert count or not weight_gradient[expert].any(), "an expert without rows"


@given(counts=COUNTS)
def test_outputs_and_gradients_equal_the_loop_for_any_counts(counts: list[int]) -> None:
    assert_groups_equal_the_loop(counts, torch.float32)


@pytest.mark.parametrize("counts", [[0], [0, 0, 0], [5, 0, 16, 0], [0, 9], [8, 8]], ids=str)
@pytest.mark.parametrize("dtype", TOLERANCES, ids=str)
def test_experts_without_rows_have_zero_gradients(counts: list[int], dtype: torch.dtype) -> None:
    assert_groups_equal_the_loop(counts, dtype)


def test_the_host_reads_no_counts() -> None:
    counts = [3, 0, 20]
    rows, *weights = draw_inputs(counts, torch.bfloat16)
    with RecordOperators() as recorded:
        multiply_in_groups(rows, torch.tensor(counts), *weights).sum().backward()
    assert "aten::_grouped_mm" in recorded.names
    assert not recorded.names & {"aten::_local_scalar_dense", "aten::item", "aten::nonzero"}


def test_cpu_and_other_dtypes_use_the_loop() -> None:
    for dtype in (torch.float32, torch.float64, torch.bfloat16):
        rows, w1, *_ = draw_inputs([8, 8], torch.float32)
        assert not has_grouped_kernel(rows.to(dtype), w1.to(dtype))
