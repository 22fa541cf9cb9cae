"""The order of samples: frozen values, uniformity, batches, microbatches."""

from collections import Counter
from itertools import combinations, permutations
from math import factorial

import pytest

from elastic.geometry.sample_order import (
    InvalidSamples,
    batch_ids,
    deal,
    microbatch_seed,
    num_rounds,
    sample_of,
)


def test_sample_order_is_frozen():
    """Stored runs depend on these values: another order would repeat and lose samples."""
    assert [sample_of(0, i, 10) for i in range(10)] == [7, 6, 8, 5, 4, 9, 0, 2, 1, 3]
    assert [sample_of(0, i, 10) for i in range(10, 20)] == [5, 9, 6, 0, 3, 8, 2, 7, 4, 1]
    assert [sample_of(1, i, 10) for i in range(10)] == [6, 5, 7, 0, 1, 3, 8, 9, 2, 4]
    assert sample_of(7, 123_456_789_012, 10**9) == 964_708_440
    assert microbatch_seed(1, 2, 3) == 953_579_239_717_497_660


def samples_by_epoch(num_samples: int, num_epochs: int) -> list[tuple[int, ...]]:
    ids = [range(epoch * num_samples, (epoch + 1) * num_samples) for epoch in range(num_epochs)]
    return [tuple(sample_of(11, i, num_samples) for i in epoch) for epoch in ids]


@pytest.mark.parametrize("num_samples", [2, 3, 4, 5, 6])
def test_all_orders_of_a_few_samples_are_equally_likely(num_samples: int):
    counts = Counter(samples_by_epoch(num_samples, 20 * factorial(num_samples)))
    chi_squared = sum((counts[order] - 20) ** 2 / 20 for order in permutations(range(num_samples)))
    degrees = factorial(num_samples) - 1
    assert chi_squared < degrees + 5 * (2 * degrees) ** 0.5


@pytest.mark.parametrize("num_samples", [7, 9, 25])
def test_odd_and_even_permutations_are_equally_likely(num_samples: int):
    num_odd = sum(
        sum(a > b for a, b in combinations(order, 2)) % 2
        for order in samples_by_epoch(num_samples, 400)
    )
    assert 150 < num_odd < 250


def test_neighbours_in_a_large_epoch_are_uncorrelated():
    num_samples = 10**6
    samples = [sample_of(3, i, num_samples) / num_samples - 0.5 for i in range(20_000)]
    for lag in (1, 2, 1000, 1001):
        pairs = list(zip(samples, samples[lag:], strict=False))
        correlation = 12 * sum(a * b for a, b in pairs) / len(pairs)
        assert abs(correlation) < 5 / len(pairs) ** 0.5


def test_batches_cover_the_ids_from_step_1_on():
    assert list(batch_ids(1, 4)) == [0, 1, 2, 3]
    assert list(batch_ids(2, 4)) == [4, 5, 6, 7]


def test_skipped_batches_are_not_read():
    numbers = [batch_ids(step, 1, skipped=(3, 1, 2))[0] for step in range(1, 5)]
    assert numbers == [0, 4, 5, 6]


@pytest.mark.parametrize(
    ("num_microbatches", "num_data_ranks", "dealt", "rounds"),
    [
        (4, 2, [(0, 1), (2, 3)], 2),
        (7, 3, [(0, 1, 2), (3, 4), (5, 6)], 3),
        (2, 4, [(0,), (1,), (), ()], 1),
        (5, 1, [(0, 1, 2, 3, 4)], 5),
    ],
)
def test_microbatches_are_dealt_in_blocks(num_microbatches, num_data_ranks, dealt, rounds):
    assert deal(num_microbatches, num_data_ranks) == dealt
    assert num_rounds(num_microbatches, num_data_ranks) == rounds


def test_seeds_of_microbatches_differ():
    seeds = {microbatch_seed(r, s, m) for r in range(10) for s in range(1, 31) for m in range(10)}
    assert len(seeds) == 3000
    assert all(0 <= seed < 2**63 for seed in seeds)
    assert max(seeds) > 2**62


@pytest.mark.parametrize(
    "invalid_request",
    [
        lambda: sample_of(0, 0, 0),
        lambda: sample_of(0, -1, 5),
        lambda: batch_ids(0, 4),
        lambda: batch_ids(1, 0),
        lambda: deal(0, 1),
        lambda: deal(4, 2, (4,)),
        lambda: deal(4, 2, (2, 1)),
        lambda: deal(4, 2, (5, -1)),
        lambda: num_rounds(1, 0),
    ],
)
def test_invalid_sample_requests_are_refused(invalid_request):
    with pytest.raises(InvalidSamples):
        invalid_request()
