"""Reading of tensors in memory: the samples of a pass by one index for each tensor."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import torch
from torch import Tensor
from torch.utils.data import Subset, TensorDataset, default_collate

RowReader = Callable[[Sequence[int]], list[Tensor]]
"""Reads the samples with these indices as one batch."""


def row_reader(dataset: Any, collate: Callable[[list[Any]], Any]) -> RowReader | None:
    """What reads many samples of a `TensorDataset`, or of a `Subset` of one, as `default_collate`
    would make a batch of them; None for other data, and for another `collate`.

    One sample at a time costs 5 us, as much as a small net computes with it. A subclass
    may return anything, and a tensor that is not contiguous gives batches of other strides.
    """
    if collate is not default_collate:
        return None
    chosen = []
    while type(dataset) is Subset:
        chosen.append(torch.as_tensor(dataset.indices))
        dataset = dataset.dataset
    if type(dataset) is not TensorDataset or not all(map(_is_plain, dataset.tensors)):
        return None
    if not all(map(_counts_from_begin, chosen)):
        return None
    return partial(_rows_of, dataset.tensors, chosen)


def _is_plain(tensor: Tensor) -> bool:
    return (
        type(tensor) is Tensor
        and tensor.device.type == "cpu"
        and tensor.layout == torch.strided
        and tensor.is_contiguous()
        and not tensor.requires_grad
    )


def _counts_from_begin(indices: Tensor) -> bool:
    """Whether these are indices that `index_select` takes: a list may have negative ones."""
    is_plain = indices.dtype in (torch.int32, torch.int64) and indices.dim() == 1
    return is_plain and len(indices) > 0 and int(indices.min()) >= 0


def _rows_of(
    tensors: Sequence[Tensor], chosen: Sequence[Tensor], samples: Sequence[int]
) -> list[Tensor]:
    """`chosen` are the indices of each subset, from the outermost."""
    rows = torch.tensor(samples, dtype=torch.int64)
    for indices in chosen:
        rows = indices[rows]
    return [tensor.index_select(0, rows) for tensor in tensors]
