"""Reading a dataset by index that can only be iterated."""

from __future__ import annotations

import pickle
import random
from collections.abc import Iterator

import pytest
import torch
from torch.utils.data import IterableDataset

from pipelines.errors import UserError
from pipelines.reading.indexed import map_style, open_indexed
from pipelines.reading.stream import Stream, is_stream
from pipelines.settings import TrainSettings


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
    one, other = Stream(Numbers(), 2, 3), Stream(Numbers(), 2, 3)
    expected = {index: one[index] for index in (1, 4, 8, 13)}
    random.seed(77)
    assert {index: other[index] for index in (13, 4, 8, 1)} == expected


class Shuffled:
    """Draws its order when it is iterated."""

    def __iter__(self) -> Iterator[int]:
        order = list(range(10))
        random.shuffle(order)
        return iter(order)


def test_order_that_is_drawn_at_the_beginning_is_the_same_on_all_workers() -> None:
    one, other = Stream(Shuffled(), 2, 3), Stream(Shuffled(), 2, 3)
    random.seed(1)
    first = [one[index] for index in range(25)]
    random.seed(2)
    assert [other[index] for index in (20, 3, 4, 24)] == [first[i] for i in (20, 3, 4, 24)]
    assert sorted(first[:10]) == sorted(first[10:20]) == list(range(10))
    assert first[:10] != first[10:20], "each pass has its own order"


def test_another_seed_draws_another_order() -> None:
    orders = [[Stream(Shuffled(), 2, 3, seed)[i] for i in range(10)] for seed in (0, 1)]
    assert orders[0] != orders[1]


def test_generators_are_as_before_a_read() -> None:
    stream = Stream(Numbers(), 2, 3)
    random.seed(5)
    torch.manual_seed(5)
    expected = random.random(), torch.rand(1).item()
    random.seed(5)
    torch.manual_seed(5)
    stream[7]
    assert (random.random(), torch.rand(1).item()) == expected


def test_reader_may_change_what_it_has_read() -> None:
    class Tensors:
        def __iter__(self) -> Iterator[torch.Tensor]:
            return (torch.full((2,), float(i)) for i in range(4))

    stream = Stream(Tensors(), 2, 3)
    stream[1].mul_(10)
    assert stream[1].tolist() == [1.0, 1.0]


def test_samples_on_the_way_are_noted() -> None:
    stream, notes = Stream(Numbers(), 2, 3), []
    stream.follow(lambda: notes.append(len(notes)))
    stream[7]
    assert len(notes) == 8


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
        assert isinstance(open_indexed(lambda: dataset, TrainSettings()), Stream)


def test_other_data_are_refused() -> None:
    with pytest.raises(UserError, match="generator, which has no __len__ and no __getitem__"):
        open_indexed(lambda: (i for i in range(3)), TrainSettings())
    with pytest.raises(UserError, match=r"held_out returned Numbers, .* any sample$"):
        map_style(Numbers(), "held_out")
