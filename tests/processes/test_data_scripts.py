"""Scripts keep the order of their data: in sequence, weighted, drawn by a function, in batches."""

from __future__ import annotations

import pickle
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from random import SystemRandom
from threading import Lock
from typing import Any

import data_scripts
import pytest
import torch
from test_script_habits import run_habit
from torch.utils.data import (
    DataLoader,
    DistributedSampler,
    Sampler,
    SubsetRandomSampler,
    TensorDataset,
    WeightedRandomSampler,
)

from pipelines.loop.prepared.data_source import source_of
from pipelines.loop.script import script_of
from pipelines.loop.state.errors import LoopMisused
from pipelines.reading.endless import WithReplacement

pytestmark = pytest.mark.slow


@pytest.mark.parametrize("name", list(data_scripts.PLAIN))
def test_data_have_the_order_of_the_script_through_deaths(name: str, tmp_path: Path) -> None:
    run = run_habit(tmp_path, name, module=data_scripts)
    losses = data_scripts.plain_losses(data_scripts.PLAIN[name])
    assert list(run.losses().values()) == pytest.approx(list(losses), rel=1e-9)


def test_samples_are_drawn_as_often_as_their_weights_say() -> None:
    weights = [0.0, 1.0, 2.0, 0.0, 5.0]
    data = WithReplacement(range(5), weights)
    counts = Counter(data[index] for index in range(8000))
    assert counts.keys() == {1, 2, 4}
    for sample, count in counts.items():
        assert count / 1000 == pytest.approx(weights[sample], rel=0.1)
    uniform = Counter(WithReplacement(range(4))[index] for index in range(8000))
    assert all(count / 2000 == pytest.approx(1, rel=0.1) for count in uniform.values())


def test_function_with_a_position_is_refused() -> None:
    with pytest.raises(LoopMisused, match="next_batch returns other values when it is called"):
        script_of(data_scripts.drawn_by_position)
    with pytest.raises(LoopMisused, match="batches yields other values when it is called"):
        script_of(data_scripts.yielded_by_chance)


class OfOneRank(DistributedSampler[Any]):
    """A sampler that a script derives from that of torch."""


class Unseeded(Sampler[int]):
    def __iter__(self) -> Iterator[int]:
        return iter(SystemRandom().sample(range(10), 10))


class Locked(Sampler[int]):
    def __init__(self) -> None:
        self.lock = Lock()


@pytest.mark.parametrize(
    ("sampler", "reason"),
    [
        (OfOneRank(range(10), num_replicas=2, rank=0), "names the samples of one rank only"),
        (Unseeded(), "has another order with the same random seeds"),
        (Locked(), "cannot be copied"),
    ],
)
def test_sampler_whose_order_is_not_known_is_refused(sampler: Any, reason: str) -> None:
    with pytest.raises(LoopMisused, match=reason):
        source_of(DataLoader(TensorDataset(torch.arange(10)), batch_size=2, sampler=sampler))


def test_samplers_of_torch_without_a_counterpart_keep_their_order() -> None:
    """Without replacement no sample comes twice in an epoch, also in a copy for a reader."""
    data = TensorDataset(torch.arange(10))
    sampler = WeightedRandomSampler([1.0] * 10, 6, replacement=False)
    source = source_of(DataLoader(data, batch_size=2, sampler=sampler))
    chosen = [int(source.dataset[index][0]) for index in range(12)]
    assert source.epoch_size == 6 and len({*chosen[:6]}) == len({*chosen[6:]}) == 6
    copied = pickle.loads(pickle.dumps(source.dataset))
    assert [int(copied[index][0]) for index in reversed(range(12))] == chosen[::-1]


def test_samplers_of_a_part_and_of_torchrun_are_shuffled_by_the_run() -> None:
    data = TensorDataset(torch.arange(10))
    part = source_of(DataLoader(data, batch_size=2, sampler=SubsetRandomSampler([3, 5, 7])))
    assert part.epoch_size == 3 and [int(part.dataset[i][0]) for i in range(3)] == [3, 5, 7]
    for shuffle in (True, False):
        sampler = DistributedSampler(data, num_replicas=2, rank=0, shuffle=shuffle)
        source = source_of(DataLoader(data, batch_size=2, sampler=sampler))
        assert len(source.dataset) == (10 if shuffle else 0)
        assert source.epoch_size == 10


def test_epochs_of_a_loader_that_drops_the_last_batch_are_whole_steps() -> None:
    data = TensorDataset(torch.arange(50))
    shuffled = source_of(DataLoader(data, batch_size=4, shuffle=True, drop_last=True)).of_steps(12)
    assert shuffled.epoch_size == 48 and shuffled.note_on_epochs(12) is None
    shuffled.refuse_other_length()
    epochs = [[int(shuffled.dataset[48 * epoch + i][0]) for i in range(48)] for epoch in range(3)]
    assert all(len(set(epoch)) == 48 for epoch in epochs)
    assert len({tuple(epoch) for epoch in epochs}) == 3
    sampler = SubsetOfEven()
    own = source_of(DataLoader(data, batch_size=4, sampler=sampler, drop_last=True)).of_steps(8)
    assert own.epoch_size == 24
    assert [int(own.dataset[i][0]) for i in range(22, 27)] == [44, 46, 0, 2, 4]
    with pytest.raises(LoopMisused, match="an epoch of 50 samples has no step of 52"):
        source_of(DataLoader(data, batch_size=4, drop_last=True)).of_steps(52)


def test_loader_with_a_short_last_batch_is_noted() -> None:
    source = source_of(DataLoader(TensorDataset(torch.arange(50)), batch_size=4))
    assert source.of_steps(12) is source
    note = source.note_on_epochs(12)
    assert note is not None and "the last 2 of an epoch are computed with the first" in note
    assert source.note_on_epochs(25) is None


class SubsetOfEven(Sampler[int]):
    def __len__(self) -> int:
        return 25

    def __iter__(self) -> Iterator[int]:
        return iter(range(0, 50, 2))
