"""Reading of tensors in memory: the samples of a pass by one index for each tensor."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import torch
from torch import Tensor
from torch.utils.data import Subset, TensorDataset, default_collate

RowReader = Callable[[Sequence[int]], list[Tensor] | None]
"""Reads the samples with these indices as one batch; None if they must be read one by one."""


def row_reader(dataset: Any, collate: Callable[[list[Any]], Any]) -> RowReader | None:
    """What reads many samples of a `TensorDataset`, or of a `Subset` of one, as `default_collate`
    would make a batch of them; None for other data, and for another `collate`.

    One sample at a time costs 5 us, as much as a small net computes with it. A subclass
    may return anything, and a tensor that is not contiguous gives batches of other strides. The
    tensors and indices are those that the datasets have when a batch is read.
    """
    read = partial(_rows_of, dataset)
    return read if collate is default_collate and read(()) is not None else None


def _rows_of(dataset: Any, samples: Sequence[int]) -> list[Tensor] | None:
    while type(dataset) is Subset:
        samples = [int(dataset.indices[sample]) for sample in samples]
        dataset = dataset.dataset
    if type(dataset) is not TensorDataset or not all(map(_is_plain, dataset.tensors)):
        return None
    if samples and min(samples) < 0:  # counted from the end, which `index_select` does not
        return None
    rows = torch.tensor(samples, dtype=torch.int64)
    return [tensor.index_select(0, rows) for tensor in dataset.tensors]


def _is_plain(tensor: Tensor) -> bool:
    return (
        type(tensor) is Tensor
        and tensor.device.type == "cpu"
        and tensor.layout == torch.strided
        and tensor.is_contiguous()
        and not tensor.requires_grad
    )
