"""Data without a length: in sequence, with replacement, or in drawn or yielded batches."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch.utils.data import IterableDataset

from elastic.geometry.sample_order import keyed_seed, permuted, round_keys
from pipelines.reading.pass_reader import seed_host
from pipelines.reading.stream import UNKNOWN_LENGTH
from pipelines.settings.recipe import Dataset


class Endless:
    """Every index has a sample, which depends on the index and the run's seed alone."""

    def __init__(self) -> None:
        self.seed = 0

    def __len__(self) -> int:
        """Not known: every index exists."""
        return UNKNOWN_LENGTH

    @property
    def length(self) -> int:
        """The number of samples from which those of all indices come; 0: not known."""
        return UNKNOWN_LENGTH


class InSequence(Endless):
    """The samples of a dataset in its order, again and again."""

    def __init__(self, dataset: Dataset, epoch_size: int | None = None) -> None:
        """`epoch_size` is the number of samples, from the first on, of an epoch."""
        super().__init__()
        self.dataset = dataset
        self._epoch_size = epoch_size

    def __getitem__(self, index: int) -> Any:
        return self.dataset[index % (self._epoch_size or len(self.dataset))]

    @property
    def length(self) -> int:
        return len(self.dataset)


class ShuffledInPart(Endless):
    """The samples of a dataset in another order in each epoch, which omits the last of them."""

    def __init__(self, dataset: Dataset, epoch_size: int) -> None:
        super().__init__()
        self._dataset = dataset
        self._epoch_size = epoch_size

    def __getitem__(self, index: int) -> Any:
        epoch, place = divmod(index, self._epoch_size)
        return self._dataset[permuted(place, self.length, round_keys(self.seed, epoch))]

    @property
    def length(self) -> int:
        return len(self._dataset)


class WithReplacement(Endless):
    """Samples of a dataset, each drawn independently of the others."""

    def __init__(self, dataset: Dataset, weights: Sequence[float] | None = None) -> None:
        """The weights of the samples need not sum to 1; None: all are equally likely."""
        super().__init__()
        self._dataset = dataset
        self._ends: NDArray[np.float64] | None = None
        if weights is not None:
            self._ends = np.cumsum(np.asarray(weights, dtype=np.float64))

    def __getitem__(self, index: int) -> Any:
        number = keyed_seed("with replacement", self.seed, index)
        if self._ends is None:
            return self._dataset[number % len(self._dataset)]
        place = number / 2**63 * self._ends[-1]
        return self._dataset[int(np.searchsorted(self._ends, place, side="right"))]

    @property
    def length(self) -> int:
        return len(self._dataset)


class DrawnBatches(Endless):
    """Batches that a function draws by the generators of torch, Python and NumPy."""

    def __init__(self, function: Callable[..., Any], arguments: Sequence[Any] = ()) -> None:
        super().__init__()
        self._function = function
        self._arguments = tuple(arguments)

    def __getitem__(self, index: int) -> Any:
        seed_host(seed := keyed_seed("batch", self.seed, index))
        if torch.cuda.is_available() and torch.cuda.is_initialized():
            torch.cuda.manual_seed(seed)
        return self._function(*self._arguments)

    def first(self) -> Any:
        return self[0]


class YieldedBatches(IterableDataset[Any]):
    """Batches that a generator function yields, in each pass from the first one on."""

    def __init__(self, function: Callable[..., Any], arguments: Sequence[Any] = ()) -> None:
        self._function = function
        self._arguments = tuple(arguments)

    def __iter__(self) -> Iterator[Any]:
        yield from self._function(*self._arguments)

    def first(self) -> Any:
        return next(iter(self), None)
