"""Products of rows with the weights of their experts: by grouped GEMMs, or by a loop over experts.

Weights are stacks of matrices: `w1` and `w3` (experts, hidden_dim, dim), `w2` (experts, dim,
hidden_dim). Rows (any, dim) are sorted by expert, with `counts` rows for each expert.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable
from torch.nn import functional

ROWS = 8
"""The sizes of groups are multiples of this: in backward `grouped_mm` multiplies along the rows,
and each group must start at a multiple of 16 bytes of bfloat16."""
KERNEL_CAPABILITIES = (9, 10)
"""The major compute capabilities of GPUs with a kernel in torch 2.13: Hopper and Blackwell."""


def has_grouped_kernel(rows: Tensor, w1: Tensor) -> bool:
    """Whether `grouped_mm` has a kernel for these rows and weights.

    Elsewhere it is a loop too, and the host waits for the device, to read the offsets.
    """
    if rows.device.type != "cuda" or rows.dtype != torch.bfloat16 or torch.version.hip:
        return False
    is_aligned = all(size % ROWS == 0 for size in w1.shape[1:])
    major, _ = torch.cuda.get_device_capability(rows.device)
    return is_aligned and major in KERNEL_CAPABILITIES


def multiply_in_groups(rows: Tensor, counts: Tensor, w1: Tensor, w2: Tensor, w3: Tensor) -> Tensor:
    """SwiGLU of each row by its expert, by `grouped_mm`. `counts` stays on the device.

    Each group has at least one padding row, since on Blackwell the gradients of an expert without
    rows are not 0 (pytorch issue 172439). The last group contains all rows that remain, since rows
    outside of the groups are undefined, and their gradients too (pytorch issue 193633). Padding
    rows are 0, so they change neither outputs nor gradients.
    """
    padded_counts = (counts // ROWS + 1) * ROWS
    ends = padded_counts.cumsum(0)
    shifts = (ends - padded_counts) - (counts.cumsum(0) - counts)
    positions = torch.arange(len(rows), device=rows.device)
    positions += shifts.repeat_interleave(counts, output_size=len(rows))
    num_padded = (len(rows) // ROWS + len(counts)) * ROWS
    ends[-1:].fill_(num_padded)  # an assignment would copy the number, and wait
    offsets = ends.to(torch.int32)

    def multiply(inputs: Tensor, weight: Tensor) -> Tensor:
        return functional.grouped_mm(inputs, weight.transpose(-2, -1), offs=offsets)

    padded = rows.new_zeros(num_padded, rows.shape[1]).index_copy(0, positions, rows)
    hidden = functional.silu(multiply(padded, w1)) * multiply(padded, w3)
    outputs: Tensor = _TakeRows.apply(multiply(hidden, w2), positions)
    return outputs


def multiply_in_loop(
    rows: Tensor, counts: Sequence[int], w1: Tensor, w2: Tensor, w3: Tensor
) -> Tensor:
    """SwiGLU of each row by its expert, by plain products for each expert."""
    weights = (weight.unbind() for weight in (w1, w2, w3))
    parts = [
        (functional.silu(part @ first.T) * (part @ third.T)) @ second.T
        for part, first, second, third in zip(rows.split(list(counts)), *weights, strict=True)
    ]
    return torch.cat(parts)


class _TakeRows(torch.autograd.Function):
    """Rows at different positions. The backward of plain indexing would add gradients in an
    undefined order."""

    @staticmethod
    def forward(ctx: Any, rows: Tensor, positions: Tensor) -> Tensor:
        ctx.save_for_backward(positions)
        ctx.num_rows = len(rows)
        return rows[positions]

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, None]:
        [positions] = ctx.saved_tensors
        zeros = gradient.new_zeros(ctx.num_rows, gradient.shape[1])
        return zeros.index_copy_(0, positions, gradient), None
