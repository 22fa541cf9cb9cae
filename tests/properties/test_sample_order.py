"""The sample order for any seed, sizes and world size (invariant 5)."""

from collections import Counter
from itertools import product

import pytest
from hypothesis import given
from hypothesis import strategies as st

from elastic.geometry.sample_order import (
    InvalidSamples,
    balanced_shares,
    batch_ids,
    deal,
    even_shares,
    mixed,
    num_rounds,
    sample_of,
)
from pipelines.training.workload.sample_order import samples_of

seeds = st.integers()
counts = st.integers(1, 40)


@given(seeds, st.integers(0, 10**6), st.integers(1, 400))
def test_epoch_contains_every_sample_once(seed: int, epoch: int, num_samples: int):
    first = epoch * num_samples
    samples = [sample_of(seed, first + i, num_samples) for i in range(num_samples)]
    assert sorted(samples) == list(range(num_samples))


@given(seeds, st.integers(2, 10**15), st.data())
def test_no_two_ids_of_a_huge_epoch_share_a_sample(seed: int, num_samples: int, data):
    ids = data.draw(st.lists(st.integers(0, num_samples - 1), min_size=2, unique=True))
    samples = {sample_of(seed, i, num_samples) for i in ids}
    assert len(samples) == len(ids)
    assert all(0 <= sample < num_samples for sample in samples)


@given(seeds, st.integers(1, 30), counts, st.integers(1, 4))
def test_batches_across_epochs_lose_and_repeat_no_sample(
    seed: int, num_samples: int, batch: int, num_epochs: int
):
    num_ids = num_samples * num_epochs
    steps = range(1, -(-num_ids // batch) + 1)
    ids = [i for step in steps for i in batch_ids(step, batch)]
    assert ids == list(range(len(ids)))
    for epoch in range(num_epochs):
        epoch_ids = ids[epoch * num_samples : (epoch + 1) * num_samples]
        samples = Counter(sample_of(seed, i, num_samples) for i in epoch_ids)
        assert samples == Counter(range(num_samples))


@given(seeds, st.integers(1, 2**63 - 1) | counts, st.lists(st.integers(0, 2**63 - 1) | counts))
def test_drawing_many_samples_equals_drawing_one_by_one(
    seed: int, num_samples: int, ids: list[int]
):
    assert samples_of(seed, ids, num_samples) == [sample_of(seed, i, num_samples) for i in ids]


@pytest.mark.parametrize(("ids", "num_samples"), [([-1], 0), ([0], -1), ([3, -1], 7)])
def test_drawing_many_samples_refuses_invalid_ids_and_sizes(ids: list[int], num_samples: int):
    with pytest.raises(InvalidSamples):
        samples_of(0, ids, num_samples)


@given(seeds, st.lists(st.integers(0, 2**63 - 1)))
def test_samples_of_a_stream_are_in_their_own_order(seed: int, ids: list[int]):
    assert samples_of(seed, ids, 0) == ids


@given(counts, st.integers(1, 30), st.sets(st.integers(0, 40)))
def test_steps_read_all_batches_but_the_skipped_ones(batch: int, num_steps: int, skipped: set[int]):
    first_ids = [batch_ids(step, batch, skipped)[0] for step in range(1, num_steps + 1)]
    expected = [number * batch for number in range(100) if number not in skipped]
    assert first_ids == expected[:num_steps]


@given(counts, counts)
def test_every_microbatch_is_dealt_once_and_evenly(num_microbatches: int, num_data_ranks: int):
    dealt = deal(num_microbatches, num_data_ranks)
    sizes = [len(microbatches) for microbatches in dealt]
    assert len(dealt) == num_data_ranks
    assert [m for microbatches in dealt for m in microbatches] == list(range(num_microbatches))
    assert max(sizes) - min(sizes) <= 1
    assert max(sizes) == num_rounds(num_microbatches, num_data_ranks)


@given(st.lists(st.integers(0, 9), min_size=1, max_size=8).filter(any))
def test_microbatches_are_dealt_by_shares_in_order(shares: list[int]):
    dealt = deal(sum(shares), len(shares), shares)
    assert [len(microbatches) for microbatches in dealt] == shares
    assert [m for microbatches in dealt for m in microbatches] == list(range(sum(shares)))
    assert num_rounds(sum(shares), len(shares), shares) == max(shares)


def longest(shares: tuple[int, ...], costs: list[float]) -> float:
    return max(share * cost for share, cost in zip(shares, costs, strict=True))


costs_of_ranks = st.lists(st.floats(0.1, 10.0), min_size=1, max_size=4)


@given(costs_of_ranks, st.integers(1, 10))
def test_no_other_shares_are_done_sooner_than_balanced_ones(
    costs: list[float], num_microbatches: int
):
    shares, least = balanced_shares(costs, num_microbatches), int(num_microbatches >= len(costs))
    assert sum(shares) == num_microbatches and min(shares) >= least
    others = product(range(least, num_microbatches + 1), repeat=len(costs))
    best = min(longest(o, costs) for o in others if sum(o) == num_microbatches)
    assert longest(shares, costs) == best


@given(st.floats(0.1, 10.0), counts, counts)
def test_balanced_shares_of_equal_ranks_are_even(
    cost: float, num_microbatches: int, num_data_ranks: int
):
    shares = balanced_shares([cost] * num_data_ranks, num_microbatches)
    assert sorted(shares) == sorted(even_shares(num_microbatches, num_data_ranks))


@given(costs_of_ranks, st.integers(4, 40))
def test_slower_rank_has_no_larger_share(costs: list[float], num_microbatches: int):
    shares = balanced_shares(sorted(costs), num_microbatches)
    assert list(shares) == sorted(shares, reverse=True)


@given(st.integers(0, 2**64 - 1), st.integers(0, 63))
def test_mixing_is_injective_for_single_bit_changes(bits: int, flipped: int):
    assert 0 <= mixed(bits) < 2**64
    assert mixed(bits) != mixed(bits ^ (1 << flipped))
