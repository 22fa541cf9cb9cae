"""Reading a dataset by index that can only be iterated."""

from __future__ import annotations

import pickle
import random
from collections.abc import Iterator

import pytest
import torch
from torch.utils.data import IterableDataset

from pipelines.errors import UserError
from pipelines.reading.stream import Stream, indexed, is_stream, map_style


class Numbers:
    """Yields pairs (epoch, number, drawn)."""

    def __init__(self, length: int = 10) -> None:
        self.length, self.epoch, self.num_begun = length, 0, 0

    def set_epoch(self, epoch: int) -> None:
        self.epoch = epoch

    def __iter__(self) -> Iterator[tuple[int, int, float]]:
        self.num_begun += 1
        for number in range(self.length):
            yield self.epoch, number, random.random()


class Skipping(Numbers):
    def skip(self, number: int) -> Iterator[tuple[int, int, float]]:
        return (each for each in self if each[1] >= number)


def positions(stream: Stream, indices: list[int]) -> list[tuple[int, int]]:
    return [stream[index][:2] for index in indices]


def test_stream_begins_again_with_the_next_epoch() -> None:
    assert positions(Stream(Numbers(3), 1, 4), [0, 2, 3, 5, 6]) == [
        (0, 0), (0, 2), (1, 0), (1, 2), (2, 0),
    ]  # fmt: skip


def test_newest_and_first_samples_are_kept() -> None:
    numbers = Numbers()
    stream = Stream(numbers, 2, 3)
    assert positions(stream, [7, 5, 6, 1, 0]) == [(0, 7), (0, 5), (0, 6), (0, 1), (0, 0)]
    assert numbers.num_begun == 1
    assert positions(stream, [3]) == [(0, 3)]
    assert numbers.num_begun == 2


def test_samples_do_not_depend_on_the_way_to_them() -> None:
    """Neither those drawn while the stream is iterated nor what is drawn after them."""
    one, other = Stream(Numbers(), 2, 3), Stream(Numbers(), 2, 3)
    expected = []
    for index in (1, 4, 4, 8, 13):
        expected.append((one[index], random.random(), torch.rand(1).item()))
    random.seed(77)
    assert (other[13], random.random(), torch.rand(1).item()) == expected[-1]
    assert (other[4], random.random(), torch.rand(1).item()) == expected[1] == expected[2]


def test_stream_that_can_skip_is_not_iterated_to_the_sample() -> None:
    numbers = Skipping()
    assert positions(Stream(numbers, 2, 3), [7, 8]) == [(0, 7), (0, 8)]
    assert positions(Stream(Skipping(), 2, 3), [1, 9, 10]) == [(0, 1), (0, 9), (1, 0)]


def test_skip_beyond_the_end_is_exact() -> None:
    assert positions(Stream(Skipping(), 2, 3), [25, 26]) == [(2, 5), (2, 6)]


def test_empty_stream_is_refused() -> None:
    with pytest.raises(UserError, match=r"Numbers yields no sample when it is iterated$"):
        Stream(Numbers(0), 1, 1)[0]


def test_stream_that_ends_for_ever_is_refused() -> None:
    class Once:
        def __init__(self) -> None:
            self.samples = iter(range(3))

        def __iter__(self) -> Iterator[int]:
            return self.samples

    stream = Stream(Once(), 1, 1)
    assert stream[2] == 2
    with pytest.raises(UserError, match="iterated again: its __iter__ must return a new"):
        stream[3]


def test_another_process_iterates_itself() -> None:
    stream = Stream(Numbers(), 2, 3)
    assert stream[5][1] == 5
    copy = pickle.loads(pickle.dumps(stream))
    assert positions(copy, [8, 2]) == [(0, 8), (0, 2)]


class Torch(IterableDataset[int]):
    def __iter__(self) -> Iterator[int]:
        return iter(range(3))

    def __len__(self) -> int:
        return 3


@pytest.mark.parametrize(
    ("dataset", "expected"),
    [(Torch(), True), (Numbers(), True), ([1, 2], False), ((i for i in range(3)), False)],
    ids=["torch", "iterable", "list", "generator"],
)
def test_streams_are_recognized(dataset: object, expected: bool) -> None:
    assert is_stream(dataset) == expected
    if expected:
        assert isinstance(indexed(dataset, 2, 8), Stream)


def test_other_data_are_refused() -> None:
    with pytest.raises(UserError, match="generator, which has no __len__ and no __getitem__"):
        indexed((i for i in range(3)), 2, 8)
    with pytest.raises(UserError, match=r"held_out returned Numbers, .* any sample$"):
        map_style(Numbers(), "held_out")
