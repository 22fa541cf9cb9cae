"""A dataset that can only be iterated, read by index: for sources without a length."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable, Iterable, Iterator
from typing import Any

from torch.utils.data import IterableDataset

from pipelines.errors import UserError
from pipelines.reading.pass_reader import seed_host
from pipelines.settings.recipe import Dataset

UNKNOWN_LENGTH = 0


class Stream:
    """Sample i is the i-th that the dataset yields; where it ends, it begins again.

    Every worker iterates over the whole dataset and keeps the samples of its own microbatches, so
    each sample is trained on once, in the same order with any number of workers. Before a sample is
    made, the random generators are seeded with its number. A dataset with `skip(n)`, as those of
    Hugging Face, is not iterated up to the sample at which a worker begins. One with `set_epoch`
    gets the number of each pass over it.
    """

    def __init__(self, dataset: Iterable[Any], num_first: int, num_recent: int) -> None:
        """The first `num_first` samples and the newest `num_recent` can be read again at once;
        for others the dataset is iterated again."""
        self._dataset = dataset
        self._num_first = num_first
        self._num_recent = num_recent
        self._first: dict[int, Any] = {}
        self._recent: OrderedDict[int, Any] = OrderedDict()
        self._iterator: Iterator[Any] | None = None
        self._has_skipped = False
        self._next = self._epoch = 0

    def __len__(self) -> int:
        """Not known: every index exists."""
        return UNKNOWN_LENGTH

    def __getitem__(self, index: int) -> Any:
        """Raises `UserError` for an empty dataset."""
        item = self._item(index)
        seed_host(index)  # what follows must not depend on how the sample was found
        return item

    def __getstate__(self) -> dict[str, Any]:
        """For another process, which iterates itself."""
        return {**self.__dict__, "_iterator": None, "_next": 0}

    def _item(self, index: int) -> Any:
        for kept in (self._first, self._recent):
            if index in kept:
                return kept[index]
        is_far = index > self._next + self._num_recent and hasattr(self._dataset, "skip")
        if self._iterator is None or index < self._next or is_far:
            self._begin_at(index)
        while self._next < index:
            self._advance()
        return self._advance()

    def _begin_at(self, index: int) -> None:
        """Iterate from the beginning, or from this sample if the dataset can skip."""
        skip = getattr(self._dataset, "skip", None) if index > self._num_first else None
        self._has_skipped = skip is not None
        self._begin(0, self._dataset if skip is None else skip(index))
        self._next = index if skip is not None else 0

    def _begin(self, epoch: int, samples: Iterable[Any]) -> None:
        self._epoch = epoch
        if (set_epoch := getattr(self._dataset, "set_epoch", None)) is not None:
            set_epoch(epoch)
        self._iterator = iter(samples)

    def _advance(self) -> Any:
        """The next sample."""
        assert self._iterator is not None
        number = self._next
        seed_host(number)
        try:
            item = next(self._iterator)
        except StopIteration:
            if self._has_skipped:  # beyond the end, which is not known
                return self._iterate_to(number)
            item = self._first_of_next_epoch()
        self._has_skipped = False
        self._next = number + 1
        if number < self._num_first:
            self._first[number] = item
        self._recent[number] = item
        if len(self._recent) > self._num_recent:
            self._recent.popitem(last=False)
        return item

    def _iterate_to(self, number: int) -> Any:
        self._has_skipped, self._next = False, 0
        self._begin(0, self._dataset)
        while self._next < number:
            self._advance()
        return self._advance()

    def _first_of_next_epoch(self) -> Any:
        self._begin(self._epoch + 1, self._dataset)
        assert self._iterator is not None
        for item in self._iterator:
            return item
        again = " again: its __iter__ must return a new iterator" if self._next else ""
        raise UserError(
            f"the dataset {type(self._dataset).__name__} yields no sample when it is "
            f"iterated{again}"
        )


def is_stream(dataset: object) -> bool:
    """Whether a dataset can only be iterated, but again and again."""
    kind = type(dataset)
    if isinstance(dataset, IterableDataset):
        return True
    has_index = hasattr(kind, "__getitem__") and hasattr(kind, "__len__")
    return hasattr(kind, "__iter__") and not hasattr(kind, "__next__") and not has_index


def open_indexed(open_dataset: Callable[[], Any], microbatch: int, batch: int) -> Dataset:
    """Open training data that any worker can read by index. Raises `UserError` for other data."""
    return indexed(open_dataset(), microbatch, batch)


def indexed(dataset: Any, microbatch: int, batch: int) -> Dataset:
    """Training data that any worker can read by index. Raises `UserError` for other data."""
    return Stream(dataset, microbatch, 2 * batch) if is_stream(dataset) else map_style(dataset)


def map_style(dataset: Any, name: str = "data") -> Dataset:
    """A dataset with a length and an index. Raises `UserError` for another."""
    missing = [name for name in ("__len__", "__getitem__") if not hasattr(type(dataset), name)]
    if missing:
        stream = ", or one that can be iterated again and again" if name == "data" else ""
        raise UserError(
            f"the recipe's {name} returned {type(dataset).__name__}, which has no "
            f"{' and no '.join(missing)}: return a dataset with both, so that any worker can read "
            f"any sample{stream}"
        )
    samples: Dataset = dataset
    return samples
