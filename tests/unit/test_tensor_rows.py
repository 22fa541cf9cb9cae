"""Tensors in memory are read by one index, and the batch is what `default_collate` makes."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor
from torch.utils.data import Subset, TensorDataset, default_collate

from pipelines.reading.pass_reader import PassReader
from pipelines.reading.tensor_rows import row_reader

ROWS = torch.arange(40.0).view(10, 2, 2)
REQUEST = ((5, (3, 3, 0)), (6, (9,)))
"""Two microbatches with their seeds."""


class Negated(TensorDataset):
    def __getitem__(self, index: int) -> Any:
        return [-tensor for tensor in super().__getitem__(index)]


def whole() -> TensorDataset:
    return TensorDataset(ROWS, torch.arange(10))


@pytest.mark.parametrize(
    "dataset",
    [
        whole(),
        TensorDataset(torch.arange(10)),
        Subset(whole(), [9 - i for i in range(10)]),
        Subset(Subset(whole(), range(0, 10)), [(3 * i) % 10 for i in range(10)]),
    ],
    ids=["vectors and numbers", "one tensor", "subset", "subset of a subset"],
)
def test_batch_equals_that_of_single_samples(dataset: Any) -> None:
    samples = [3, 3, 0, 9]
    read = row_reader(dataset, default_collate)
    assert read is not None
    expected = default_collate([dataset[sample] for sample in samples])
    batch = read(samples)
    assert type(batch) is type(expected) and len(batch) == len(expected)
    for tensor, like in zip(batch, expected, strict=True):
        assert torch.equal(tensor, like) and tensor.stride() == like.stride()


@pytest.mark.parametrize(
    "dataset",
    [
        Negated(ROWS),
        Subset(Negated(ROWS), range(10)),
        TensorDataset(ROWS.mT),
        TensorDataset(ROWS.clone().requires_grad_()),
        list(ROWS),
    ],
    ids=["subclass", "subset of one", "not contiguous", "with gradients", "list"],
)
def test_other_data_are_read_sample_by_sample(dataset: Any) -> None:
    assert row_reader(dataset, default_collate) is None


def test_indices_from_the_end_are_read_sample_by_sample() -> None:
    [rows] = PassReader(lambda: Subset(TensorDataset(ROWS), [-1, 0]), default_collate).read(
        ((5, (1, 0)),)
    )
    assert torch.equal(rows, ROWS[[0, -1]])


def test_tensors_and_indices_are_those_of_the_moment() -> None:
    """As where a script fills a buffer, or takes other samples, between two steps."""
    data = TensorDataset(torch.zeros(10))
    part = Subset(data, [0, 1])
    reader = PassReader(lambda: part, default_collate)
    assert reader.read(((5, (0, 1)),))[0].tolist() == [0, 0]
    data.tensors = (torch.arange(10.0),)
    assert reader.read(((5, (0, 1)),))[0].tolist() == [0, 1]
    part.indices = [7, 3]
    assert reader.read(((5, (0, 1)),))[0].tolist() == [7, 3]
    data.tensors[0][3] = 30
    assert reader.read(((5, (0, 1)),))[0].tolist() == [7, 30]


def test_another_collate_is_called() -> None:
    def largest(items: list[tuple[Tensor]]) -> Tensor:
        return torch.stack([value.max() for [value] in items])

    batch = PassReader(lambda: TensorDataset(ROWS), largest).read(REQUEST)
    assert torch.equal(batch, ROWS[[3, 3, 0, 9]].amax((1, 2)))


def test_pass_reads_its_microbatches_at_once() -> None:
    noted: list[int] = []
    reader = PassReader(whole, default_collate)
    vectors, numbers = reader.read(REQUEST, noted.append)
    assert torch.equal(vectors, ROWS[[3, 3, 0, 9]]) and numbers.tolist() == [3, 3, 0, 9]
    assert noted == [3]
