"""A dataset in the order of any sampler, or batch sampler, read by index."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from copy import deepcopy
from functools import cached_property
from itertools import islice
from typing import Any

from pipelines.reading.endless import Endless
from pipelines.reading.stream import Stream
from pipelines.settings.recipe import Dataset

NUM_KEPT = 1 << 16
"""So many of the newest indices can be read again without another pass over the sampler."""
LEAST_KEPT = 256
"""At least so many items, however many indices each has."""


class InSamplerOrder(Endless):
    """Sample i is the i-th that a sampler names, pass after pass over it.

    A batch sampler names lists: their samples together are one item. Each worker, and each reader
    process, iterates over the sampler itself, which yields indices only, with the random generators
    seeded by the run. A sampler with `set_epoch` gets the number of each pass.
    """

    def __init__(
        self, dataset: Dataset, sampler: Iterable[Any], epoch_size: int | None = None
    ) -> None:
        """The sampler is copied; each pass ends after `epoch_size` items. Raises what its copy
        raises."""
        super().__init__()
        self.dataset = dataset
        self.sampler = sampler
        self._passes = _Passes(sampler, dataset, epoch_size)

    @cached_property
    def _order(self) -> Stream:
        [item] = self.first(1)
        size = len(item) if isinstance(item, list) else 1
        return Stream(self._passes, 0, max(LEAST_KEPT, NUM_KEPT // max(1, size)), self.seed)

    def follow(self, note: Callable[[], None]) -> None:
        """Call `note` before each item on the way to those that are read."""
        self._order.follow(note)

    def __getitem__(self, index: int) -> Any:
        chosen = self.chosen(index)
        if isinstance(chosen, list):
            return [self.dataset[sample] for sample in chosen]
        return self.dataset[chosen]

    def __getstate__(self) -> dict[str, Any]:
        """For another process, which iterates itself."""
        return {name: value for name, value in vars(self).items() if name != "_order"}

    def chosen(self, index: int) -> Any:
        """What the sampler names at an index: a sample, or a list of samples."""
        return self._order[index]

    def first(self, num: int) -> list[Any]:
        """What a new pass of a copy of the sampler names first, at most `num`."""
        order = Stream(self._passes, 0, num, self.seed)
        return [order[index] for index in range(num)]


class _Passes:
    """Passes over a copy of a sampler, each with the state that the one before has left."""

    def __init__(self, sampler: Iterable[Any], dataset: Dataset, epoch_size: int | None) -> None:
        self._dataset = dataset
        self._epoch_size = epoch_size
        self._unused = self._copied(sampler)
        self._sampler = self._unused

    def set_epoch(self, epoch: int) -> None:
        if epoch == 0:
            self._sampler = self._copied(self._unused)
        if (set_epoch := getattr(self._sampler, "set_epoch", None)) is not None:
            set_epoch(epoch)

    def __iter__(self) -> Iterator[Any]:
        return map(_plain, islice(self._sampler, self._epoch_size))

    def _copied(self, sampler: Iterable[Any]) -> Iterable[Any]:
        """A copy that shares the dataset, which a sampler often has."""
        return deepcopy(sampler, {id(self._dataset): self._dataset})


def _plain(item: Any) -> Any:
    """An index, or the indices of a batch as a list, whatever holds them."""
    if hasattr(item, "tolist"):  # a tensor or an array, also of one index
        return item.tolist()
    return list(item) if isinstance(item, Iterable) and not isinstance(item, str) else item
