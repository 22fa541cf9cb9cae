"""A dataset that can only be iterated, read by index: for sources without a length."""

from __future__ import annotations

import random
from collections import OrderedDict
from collections.abc import Callable, Iterable, Iterator
from copy import deepcopy
from typing import Any

import numpy as np
import torch
from torch.utils.data import IterableDataset

from elastic.geometry.sample_order import keyed_seed
from pipelines.errors import UserError
from pipelines.reading.pass_reader import seed_host
from pipelines.reading.stream_positions import StreamPosition, StreamPositions, digest_of

UNKNOWN_LENGTH = 0


class Stream:
    """Sample i is the i-th that the dataset yields; where it ends, it begins again.

    Every worker iterates over the whole dataset and keeps the samples of its own microbatches, so
    each sample is trained on once, in the same order with any number of workers. The random
    generators are seeded with the number of each sample while it is made, and at the beginning of
    each pass over the dataset; afterwards they are as before. A dataset with `set_epoch` gets the
    number of each pass over it.
    """

    def __init__(
        self,
        dataset: Iterable[Any],
        num_first: int,
        num_recent: int,
        seed: int = 0,
        positions: StreamPositions | None = None,
    ) -> None:
        """The first `num_first` samples and the newest `num_recent` can be read again at once;
        for others the dataset is iterated again, from a position noted before them if it has
        `state_dict` and `load_state_dict`."""
        self._dataset = dataset
        self._unused: Any = _copied(dataset) if positions and _can_continue(dataset) else None
        """What begins at the beginning, whatever state the dataset has loaded."""
        self._positions = positions if self._unused is not None else None
        self._num_first = num_first
        self._num_recent = num_recent
        self._seed = seed
        self._note: Callable[[], None] = nothing
        self._first: dict[int, Any] = {}
        self._recent: OrderedDict[int, Any] = OrderedDict()
        self._iterator: Iterator[Any] | None = None
        self._next = self._epoch = 0

    def __len__(self) -> int:
        """Not known: every index exists."""
        return UNKNOWN_LENGTH

    def follow(self, note: Callable[[], None]) -> None:
        """Call `note` before each sample that is made on the way to those that are read."""
        self._note = note

    def __getitem__(self, index: int) -> Any:
        """A copy, which the reader may change. Raises `UserError` for an empty dataset."""
        states = torch.get_rng_state(), random.getstate(), np.random.get_state()
        try:
            return deepcopy(self._item(index))
        finally:
            torch.set_rng_state(states[0])
            random.setstate(states[1])
            np.random.set_state(states[2])

    def __getstate__(self) -> dict[str, Any]:
        """For another process, which iterates itself."""
        unread: dict[str, Any] = {"_first": {}, "_recent": OrderedDict(), "_iterator": None}
        return {**self.__dict__, **unread, "_next": 0, "_note": nothing}

    def _item(self, index: int) -> Any:
        for kept in (self._first, self._recent):
            if index in kept:
                return kept[index]
        if self._iterator is None or index < self._next or self._is_far(index):
            self._begin_before(index)
            if index in self._recent:
                return self._recent[index]
        while self._next < index:
            self._advance()
        return self._advance()

    def _is_far(self, index: int) -> bool:
        """Whether it pays to look for a noted position."""
        positions = self._positions
        return positions is not None and index - self._next > 2 * positions.every

    def _begin_before(self, index: int) -> None:
        """Begin at the newest known position before a sample."""
        self._recent.clear()
        position = self._positions.newest(index) if self._positions else None
        if position is not None and position.index > 0:
            self._next = position.index
            self._begin(position.epoch, position.state)
            if digest_of(self._advance()) == position.digest:
                return
            print("elastic: the dataset does not continue at its state_dict: it begins again")
            self._recent.clear()
        if self._positions is not None:
            self._dataset = deepcopy(self._unused)
        self._next = 0
        self._begin(0)

    def _begin(self, epoch: int, state: Any = None) -> None:
        self._epoch = epoch
        if (set_epoch := getattr(self._dataset, "set_epoch", None)) is not None:
            set_epoch(epoch)
        self._seed_with("epoch", epoch)
        if state is not None:
            self._dataset.load_state_dict(state)  # type: ignore[attr-defined]
        self._iterator = iter(self._dataset)

    def _advance(self) -> Any:
        """The next sample."""
        assert self._iterator is not None
        self._note()
        number, state = self._next, self._state()
        self._seed_with("sample", number)
        try:
            item = next(self._iterator)
        except StopIteration:
            item, state = self._first_of_next_epoch(), None
        self._next = number + 1
        if state is not None and self._positions:
            self._positions.note(StreamPosition(number, self._epoch, state, digest_of(item)))
        if number < self._num_first:
            self._first[number] = item
        self._recent[number] = item
        if len(self._recent) > self._num_recent:
            self._recent.popitem(last=False)
        return item

    def _state(self) -> Any:
        """The dataset's state, where its position is due to be noted."""
        if self._positions is None or not self._next or self._next % self._positions.every:
            return None
        return self._dataset.state_dict()  # type: ignore[attr-defined]

    def _first_of_next_epoch(self) -> Any:
        self._begin(self._epoch + 1)
        self._seed_with("sample", self._next)
        assert self._iterator is not None
        for item in self._iterator:
            return item
        again = " again: its __iter__ must return a new iterator" if self._next else ""
        raise UserError(
            f"the dataset {type(self._dataset).__name__} yields no sample when it is "
            f"iterated{again}"
        )

    def _seed_with(self, what: str, number: int) -> None:
        seed_host(keyed_seed("stream", self._seed, what, number))


def _copied(dataset: Any) -> Any:
    """A copy, or None for a dataset that cannot be copied, as one with a lock or a connection."""
    try:
        return deepcopy(dataset)
    except Exception:  # whatever the dataset holds: it is iterated from the beginning, then
        return None


def _can_continue(dataset: object) -> bool:
    return all(hasattr(type(dataset), name) for name in ("state_dict", "load_state_dict"))


def nothing() -> None:
    """The `note` that does nothing."""


def is_stream(dataset: object) -> bool:
    """Whether a dataset can only be iterated, but again and again."""
    kind = type(dataset)
    if isinstance(dataset, IterableDataset):
        return True
    has_index = hasattr(kind, "__getitem__") and hasattr(kind, "__len__")
    return hasattr(kind, "__iter__") and not hasattr(kind, "__next__") and not has_index
