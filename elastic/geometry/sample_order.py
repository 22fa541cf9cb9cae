"""Sample order: a pure function of seed and step, independent of the layout (invariant 5)."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from functools import lru_cache
from hashlib import blake2b, shake_128
from heapq import heapify, heapreplace
from itertools import accumulate, pairwise
from math import isqrt
from struct import unpack

from elastic.geometry.errors import ElasticError

NUM_ROUNDS = 16
"""Feistel rounds. Four make a wide network pseudo-random (Luby and Rackoff, 1988). With sixteen,
the orders of three to seven samples are equally frequent too (chi-squared test; twelve fail it)."""

MASK = (1 << 64) - 1


class InvalidSamples(ElasticError):
    """A sample order that does not exist: no samples, or a number below its minimum."""


def sample_of(seed: int, sample_id: int, num_samples: int) -> int:
    """The sample, in 0..num_samples-1, of a global sample id.

    It is `permutation(seed, id div N)[id mod N]`: each epoch holds every sample once, in its own
    order. Time and memory do not grow with N. Raises `InvalidSamples` if N < 1 or id < 0.
    """
    if num_samples < 1 or sample_id < 0:
        raise InvalidSamples(
            f"sample id {sample_id} of {num_samples} samples: the id must be 0 or more, and the "
            "number of samples 1 or more"
        )
    epoch, index = divmod(sample_id, num_samples)
    return permuted(index, num_samples, round_keys(seed, epoch))


def permuted(index: int, num_samples: int, keys: tuple[int, ...]) -> int:
    """The image of an index under a keyed permutation of 0..num_samples-1.

    A generalised Feistel network over a x b >= N, with cycle walking back into 0..N-1
    (Black and Rogaway, Ciphers with Arbitrary Finite Domains, CT-RSA 2002). Because a x b < N + a,
    a walk longer than one step is rare.
    """
    width = isqrt(num_samples - 1) + 1
    width += width % 2  # rotating rows and columns of odd length yields only even permutations
    height = -(-num_samples // width)
    while True:
        upper, lower = divmod(index, width)
        for even, odd in zip(keys[::2], keys[1::2], strict=True):
            lower = (lower + mixed(even ^ upper)) % width
            upper = (upper + mixed(odd ^ lower)) % height
        index = upper * width + lower
        if index < num_samples:
            return index


@lru_cache(maxsize=8)
def round_keys(seed: int, epoch: int) -> tuple[int, ...]:
    """One 64-bit key for each Feistel round; cached, because a batch needs them for each sample."""
    digest = shake_128(f"order/{seed}/{epoch}".encode()).digest(8 * NUM_ROUNDS)
    return unpack(f"<{NUM_ROUNDS}Q", digest)


def mixed(bits: int) -> int:
    """A bijection of 64 bits in which each input bit moves about half of the output bits.

    The finaliser of SplitMix64 (Steele, Lea and Flood, Fast Splittable Pseudorandom Number
    Generators, OOPSLA 2014; constants: Stafford's variant 13).
    """
    bits = ((bits ^ (bits >> 30)) * 0xBF58476D1CE4E5B9) & MASK
    bits = ((bits ^ (bits >> 27)) * 0x94D049BB133111EB) & MASK
    return bits ^ (bits >> 31)


def batch_ids(
    step: int, batch: int, skipped: Iterable[int] = (), updates_per_batch: int = 1
) -> range:
    """The sample ids of a step's global batch; steps count from 1, batches and ids from 0.

    Step s reads batch s - 1: the ids from `(s-1) x batch` up to, but not including, `s x batch`;
    with several updates per batch, that many steps in a row read the same batch. `skipped` are the
    numbers of skipped batches: each shifts the later steps by one batch.
    Raises `InvalidSamples` if step < 1 or batch < 1.
    """
    if step < 1 or batch < 1:
        raise InvalidSamples(f"step {step} of batches of {batch} samples: both must be 1 or more")
    number = batch_number(step, skipped, updates_per_batch)
    return range(number * batch, (number + 1) * batch)


def batch_number(step: int, skipped: Iterable[int] = (), updates_per_batch: int = 1) -> int:
    """The batch (from 0) that a step (from 1) reads, of the batches not skipped."""
    number = (step - 1) // updates_per_batch
    for skipped_batch in sorted(set(skipped)):
        number += skipped_batch <= number
    return number


def deal(
    num_microbatches: int, num_data_ranks: int, shares: Sequence[int] = ()
) -> list[tuple[int, ...]]:
    """The microbatches of a step for each data rank: contiguous blocks of the lengths `shares`.
    Without shares they are as even as possible; the first ranks take one more.

    Collectives must match, so every rank runs `num_rounds` rounds; the rounds after its last
    microbatch are empty. Raises `InvalidSamples` if there is no microbatch or no rank, or if the
    shares are those of other numbers.
    """
    if num_microbatches < 1 or num_data_ranks < 1:
        raise InvalidSamples(
            f"{num_microbatches} microbatches for {num_data_ranks} data ranks: both must be 1 or "
            "more"
        )
    sizes = shares or even_shares(num_microbatches, num_data_ranks)
    if len(sizes) != num_data_ranks or sum(sizes) != num_microbatches or min(sizes) < 0:
        raise InvalidSamples(
            f"shares {list(shares)} of {num_microbatches} microbatches for {num_data_ranks} data "
            "ranks: give one for each rank, none below 0, that add up to the microbatches"
        )
    return [tuple(range(*block)) for block in pairwise(accumulate(sizes, initial=0))]


def num_rounds(num_microbatches: int, num_data_ranks: int, shares: Sequence[int] = ()) -> int:
    """The number of rounds that each data rank runs in a step, empty ones included."""
    return max(map(len, deal(num_microbatches, num_data_ranks, shares)))


def even_shares(num_microbatches: int, num_data_ranks: int) -> tuple[int, ...]:
    """The number of microbatches of each data rank if all ranks are as fast."""
    share, num_larger = divmod(num_microbatches, num_data_ranks)
    return tuple(share + (rank < num_larger) for rank in range(num_data_ranks))


def balanced_shares(costs: Sequence[float], num_microbatches: int) -> tuple[int, ...]:
    """The number of microbatches of each data rank for which the slowest rank is done soonest.

    Rank r needs `costs[r]`, above 0, for a microbatch, in any unit. Each rank gets at least one
    microbatch if there are enough, because a rank without any shows no compute time. With equal
    costs these are `even_shares`. One microbatch after the other goes to the rank that would be
    done with it first, which is optimal for costs that grow with the share (Fox, Discrete
    Optimization via Marginal Analysis, Management Science 1966).
    """
    least = int(num_microbatches >= len(costs))
    shares = [least] * len(costs)
    ends = [((least + 1) * cost, rank) for rank, cost in enumerate(costs)]
    heapify(ends)
    for _ in range(num_microbatches - sum(shares)):
        _, rank = ends[0]
        shares[rank] += 1
        heapreplace(ends, ((shares[rank] + 1) * costs[rank], rank))
    return tuple(shares)


def microbatch_seed(run_seed: int, step: int, microbatch: int) -> int:
    """The random seed (63 bits) of one microbatch of a step; it does not depend on the rank."""
    return keyed_seed("microbatch", run_seed, step, microbatch)


def keyed_seed(*key: str | int) -> int:
    """A random seed (63 bits) that depends on the key alone, on any machine."""
    name = "/".join(map(str, key))
    return int.from_bytes(blake2b(name.encode(), digest_size=8).digest(), "little") >> 1
