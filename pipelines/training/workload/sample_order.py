"""The sample order of `elastic.geometry.sample_order`, vectorised over many ids.

One id at a time costs 7 us: a rank that reads 8,000 samples a second would spend a twentieth of its
time on it. For 768 ids at once it is 0.4 us each.
"""

from __future__ import annotations

from collections.abc import Iterable
from math import isqrt

import numpy as np
from numpy.typing import NDArray

from elastic.geometry.sample_order import InvalidSamples, round_keys
from pipelines.reading.stream import UNKNOWN_LENGTH

Numbers = NDArray[np.uint64]


def samples_of(seed: int, sample_ids: Iterable[int], num_samples: int) -> list[int]:
    """`sample_of` for each id, in order; the ids themselves if the number of samples is not known
    (0), as that of a stream. Raises `InvalidSamples` as it does."""
    ids = list(sample_ids)
    if num_samples == UNKNOWN_LENGTH and min(ids, default=0) >= 0:
        return ids
    if num_samples < 1 or min(ids, default=0) < 0:
        raise InvalidSamples(
            f"{len(ids)} ids of {num_samples} samples: needs 1 sample or more and ids from 0"
        )
    epochs, indices = np.divmod(np.array(ids, dtype=np.uint64), np.uint64(num_samples))
    for epoch in np.unique(epochs):
        in_epoch = np.flatnonzero(epochs == epoch)
        keys = np.array(round_keys(seed, int(epoch)), dtype=np.uint64)
        indices[in_epoch] = _permuted(indices[in_epoch], num_samples, keys)
    samples: list[int] = indices.tolist()
    return samples


def _permuted(indices: Numbers, num_samples: int, keys: Numbers) -> Numbers:
    """`permuted` for each index. Mixed bits are reduced below the modulus before the addition, as a
    sum of two numbers below 2^33 cannot wrap."""
    width = isqrt(num_samples - 1) + 1
    width += width % 2
    columns, rows = np.uint64(width), np.uint64(-(-num_samples // width))
    walking = np.arange(len(indices))
    while len(walking):
        upper, lower = np.divmod(indices[walking], columns)
        for even, odd in zip(keys[::2], keys[1::2], strict=True):
            lower = (lower + _mixed(even ^ upper) % columns) % columns
            upper = (upper + _mixed(odd ^ lower) % rows) % rows
        indices[walking] = upper * columns + lower
        walking = walking[indices[walking] >= num_samples]
    return indices


def _mixed(bits: Numbers) -> Numbers:
    """`mixed` for each element; unsigned 64-bit arithmetic wraps."""
    bits = (bits ^ (bits >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
    bits = (bits ^ (bits >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    return bits ^ (bits >> np.uint64(31))
