"""A weighted mixture of several map-style datasets."""

from __future__ import annotations

import math
from bisect import bisect_right
from collections.abc import Sequence
from itertools import accumulate
from typing import Any

from pipelines.errors import UserError
from pipelines.settings.recipe import Dataset


class Mixture:
    """`num_samples` samples of several datasets in proportion to their weights.

    The count of each dataset differs from its exact share by less than one; if it exceeds the
    dataset, the dataset repeats. Samples of one dataset are adjacent and in order, because training
    shuffles them anyway. The sample at an index depends on the index alone.
    """

    def __init__(self, parts: Sequence[tuple[Dataset, float]], num_samples: int) -> None:
        """Raises `UserError` for weights or datasets that cannot be mixed."""
        self.datasets = [dataset for dataset, _ in parts]
        weights = [weight for _, weight in parts]
        if not weights or min(weights) < 0 or not 0 < math.fsum(weights) < math.inf:
            raise UserError(f"Mixture: weights {weights}: give weights >= 0, at least one over 0")
        for number, (dataset, weight) in enumerate(parts):
            if weight and not len(dataset):
                raise UserError(f"Mixture: dataset {number} is empty; leave it out")
        self.num_samples = num_samples
        self.counts = _apportion(num_samples, weights)
        self._ends = list(accumulate(self.counts))

    def __len__(self) -> int:
        return self.num_samples

    def place_of(self, index: int) -> tuple[int, int]:
        """The index of the dataset, and of the sample in it. Raises `IndexError`."""
        if not 0 <= index < self.num_samples:
            raise IndexError(index)
        which = bisect_right(self._ends, index)
        first = self._ends[which] - self.counts[which]
        return which, (index - first) % len(self.datasets[which])

    def __getitem__(self, index: int) -> Any:
        which, position = self.place_of(index)
        return self.datasets[which][position]


def _apportion(total: int, weights: Sequence[float]) -> list[int]:
    """Whole numbers with this sum, in proportion to the weights (largest remainder method)."""
    whole = math.fsum(weights)
    shares = [total * weight / whole for weight in weights]
    counts = [math.floor(share) for share in shares]
    by_remainder = sorted(range(len(shares)), key=lambda i: (counts[i] - shares[i], i))
    for number in by_remainder[: total - sum(counts)]:
        counts[number] += 1
    return counts
