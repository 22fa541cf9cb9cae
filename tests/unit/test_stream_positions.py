"""A stream whose dataset has `state_dict` goes on from a noted position."""

from __future__ import annotations

import pickle
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

from pipelines.reading.stream import Stream
from pipelines.reading.stream_positions import StreamPositions, digest_of

LENGTH, EVERY = 25, 4


class Continuing:
    """Yields numbered tensors; it continues `shift` samples after the place of its state."""

    def __init__(self, shift: int = 0) -> None:
        self.place, self.epoch, self.shift = 0, 0, shift
        self.num_made = 0
        self.lock: Any = None

    def set_epoch(self, epoch: int) -> None:
        self.epoch = epoch

    def state_dict(self) -> dict[str, Any]:
        return {"place": self.place}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.place = state["place"] + self.shift

    def __iter__(self) -> Iterator[Tensor]:
        while self.place < LENGTH:
            self.place += 1
            self.num_made += 1
            yield torch.tensor([self.epoch, self.place - 1]) + 0 * torch.rand(())
        self.place = 0


def stream_of(folder: Path, shift: int = 0) -> tuple[Stream, Continuing]:
    dataset = Continuing(shift)
    return Stream(dataset, 2, 3, positions=StreamPositions(str(folder), EVERY)), dataset


def read_all(folder: Path, last: int) -> list[list[int]]:
    """Read from the first sample on, as a worker from the beginning does."""
    stream, _ = stream_of(folder)
    samples = []
    for index in range(last + 1):
        samples.append(stream[index].tolist())
        stream._positions.flush()
    return samples


def test_newcomer_goes_on_from_the_newest_position(tmp_path: Path) -> None:
    expected = read_all(tmp_path, 70)
    for index in (3, 4, 5, 30, 59, 63, 70):
        stream, dataset = stream_of(tmp_path)
        assert stream[0].tolist() == expected[0]  # as the trial of a warm-up
        stream, dataset = stream_of(tmp_path)
        assert stream[index].tolist() == expected[index]
        assert dataset.num_made <= EVERY + 1
        assert stream[index + 1 - (index == 70)].tolist() == expected[min(index + 1, 70)]


def test_stream_far_behind_goes_on_from_a_later_position(tmp_path: Path) -> None:
    expected = read_all(tmp_path, 60)
    stream, dataset = stream_of(tmp_path)
    assert stream[1].tolist() == expected[1]
    assert stream[58].tolist() == expected[58]
    assert dataset.num_made <= 2 + EVERY
    other = pickle.loads(pickle.dumps(stream))
    assert other[59].tolist() == expected[59]


def test_dataset_that_does_not_continue_begins_again(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    expected = read_all(tmp_path, 40)
    stream, _ = stream_of(tmp_path, shift=1)
    assert stream[30].tolist() == expected[30]
    assert "does not continue at its state_dict: it begins again" in capsys.readouterr().out


def test_dataset_that_cannot_be_copied_is_iterated_from_the_beginning(tmp_path: Path) -> None:
    dataset = Continuing()
    dataset.lock = threading.Lock()
    stream = Stream(dataset, 2, 3, positions=StreamPositions(str(tmp_path), EVERY))
    assert [stream[index].tolist() for index in range(10)] == [[0, index] for index in range(10)]
    assert not list(tmp_path.iterdir())


def test_damaged_position_is_not_used(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    expected = read_all(tmp_path, 20)
    for file in tmp_path.glob("*.json"):
        file.write_text('{"index": 3')
    stream, _ = stream_of(tmp_path)
    assert stream[20].tolist() == expected[20]
    assert "no position of the stream can be read" in capsys.readouterr().err


def test_digest_depends_on_every_part_of_a_sample() -> None:
    sample = {"text": "a", "ids": torch.arange(4), "more": [1, np.zeros(2)]}
    same = {"text": "a", "ids": torch.arange(4), "more": [1, np.zeros(2)]}
    assert digest_of(sample) == digest_of(same)
    others = [
        {**sample, "text": "b"},
        {**sample, "ids": torch.arange(1, 5)},
        {**sample, "ids": torch.arange(4).float()},
        {**sample, "more": [1, np.ones(2)]},
    ]
    assert len({digest_of(sample), *map(digest_of, others)}) == 5
