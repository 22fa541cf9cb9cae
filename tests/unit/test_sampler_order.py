"""Any sampler or batch sampler, whatever holds its indices, and how much of it is kept."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
import torch
from torch.utils.data import BatchSampler, DataLoader, DistributedSampler, TensorDataset

from pipelines.loop.prepared.data_source import source_of
from pipelines.loop.state.errors import LoopMisused
from pipelines.reading.pass_reader import PassReader
from pipelines.reading.sampler_order import NUM_KEPT, InSamplerOrder

NUMBERS = list(range(10, 22))


class Batches:
    """Four batches of three, held in any type."""

    def __init__(self, held: Any) -> None:
        self.held = held

    def __iter__(self) -> Iterator[Any]:
        return (self.held(range(3 * i, 3 * i + 3)) for i in range(4))

    def __len__(self) -> int:
        return 4


@pytest.mark.parametrize("held", [list, tuple, range, iter, torch.tensor])
def test_batch_may_be_of_any_type(held: Any) -> None:
    def made(indices: range) -> Any:
        return indices if held is range else held(indices)

    order = InSamplerOrder(NUMBERS, Batches(made))
    assert order.first(2) == [[0, 1, 2], [3, 4, 5]]
    assert order[5] == [13, 14, 15], "the second pass"


def test_long_batches_are_kept_in_smaller_numbers() -> None:
    order = InSamplerOrder(NUMBERS, [list(range(12)) * 100])
    assert order[0] == NUMBERS * 100
    assert order._order._num_recent <= NUM_KEPT // 1200 + 256


def test_way_to_an_item_is_noted() -> None:
    noted: list[int] = []
    order = InSamplerOrder(NUMBERS, Batches(list))
    reader = PassReader(lambda: order, lambda items: items)
    reader.read(((1, (7,)),), noted.append)
    assert noted.count(7) > 7, "each item before it is a sign of life"


def test_batches_of_one_rank_are_refused() -> None:
    data = TensorDataset(torch.arange(12))
    of_one_rank = DistributedSampler(data, num_replicas=4, rank=0)
    with pytest.raises(LoopMisused, match="names the samples of one rank only"):
        source_of(DataLoader(data, batch_sampler=BatchSampler(of_one_rank, 3, False)))
