"""The library's flash kernels: where they can be used, and how the results of blocks are merged."""

from __future__ import annotations

import torch
from torch import Tensor


def has_flash_kernel(query: Tensor, key: Tensor, value: Tensor) -> bool:
    """Whether a GPU has a flash kernel for causal attention of these heads.

    Each is (batch, heads, length, head_dim); `key` and `value` may have fewer heads. The kernels
    need a recent GPU and 16-bit dtypes.
    """
    # The kernels themselves refuse other sizes; scaled_dot_product_attention pads them.
    if not query.is_cuda or query.shape[-1] % 8:
        return False
    is_grouped = query.shape[1] != key.shape[1]
    parameters = torch.backends.cuda.SDPAParams(query, key, value, None, 0.0, True, is_grouped)
    return torch.backends.cuda.can_use_flash_attention(parameters)


class MergedBlocks:
    """Attention to all keys, merged from attention to blocks of keys by their log-sum-exp."""

    def __init__(self, query: Tensor) -> None:
        exact = torch.promote_types(query.dtype, torch.float32)
        self._output = torch.zeros_like(query, dtype=exact)
        self._log_sum_exp = query.new_full(query.shape[:-1], -torch.inf, dtype=exact)

    def add(self, rows: slice, output: Tensor, log_sum_exp: Tensor) -> None:
        """Add the attention of some queries to one more block of keys."""
        merged, old = self._output[:, :, rows], self._log_sum_exp[:, :, rows]
        total = torch.logaddexp(old, log_sum_exp)
        merged.mul_((old - total).exp_()[..., None])
        merged.add_(output * (log_sum_exp - total).exp_()[..., None])
        old.copy_(total)

    def result(self) -> tuple[Tensor, Tensor]:
        """The attended values, and the log-sum-exp of each query; both float32 or better."""
        return self._output, self._log_sum_exp
