"""The order of samples: a pure function of seed and step, whatever the world (invariant 5)."""

from __future__ import annotations

from collections.abc import Iterable
from functools import lru_cache
from hashlib import blake2b, shake_128
from math import isqrt
from struct import unpack

from elastic.geometry.errors import ElasticError

NUM_ROUNDS = 16
"""Feistel rounds. Four make a wide network pseudo-random (Luby and Rackoff, 1988); with sixteen
the orders of three to seven samples, too, are equally frequent (chi-squared; twelve fall short)."""

MASK = (1 << 64) - 1


class InvalidSamples(ElasticError):
    """There is no such order of samples: nothing to draw from, or a count below its least."""


def sample_of(seed: int, sample_id: int, num_samples: int) -> int:
    """The sample, in 0..num_samples-1, that a global sample id stands for.

    It is `permutation(seed, id div N)[id mod N]`: each epoch holds every sample once, in an order
    of its own. Time and memory do not grow with N. Raises `InvalidSamples` if N < 1 or id < 0.
    """
    if num_samples < 1 or sample_id < 0:
        raise InvalidSamples(f"sample id {sample_id} of {num_samples} samples: needs 1 or more")
    epoch, index = divmod(sample_id, num_samples)
    return permuted(index, num_samples, round_keys(seed, epoch))


def permuted(index: int, num_samples: int, keys: tuple[int, ...]) -> int:
    """Where a keyed permutation of 0..num_samples-1 takes an index.

    A generalised Feistel network over a x b >= N, and cycle walking back into 0..N-1
    (Black and Rogaway, Ciphers with Arbitrary Finite Domains, CT-RSA 2002). As a x b < N + a,
    a walk longer than one step is rare.
    """
    width = isqrt(num_samples - 1) + 1
    width += width % 2  # turning rows and columns of odd length makes even permutations only
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
    """One 64-bit key a Feistel round; remembered, as a batch asks for them once a sample."""
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


def batch_ids(step: int, batch: int, skipped: Iterable[int] = ()) -> range:
    """The sample ids of a step's global batch; steps count from 1, batches and ids from 0.

    Step s reads batch s - 1, the ids `(s-1) x batch` up to but not `s x batch`. `skipped` are the
    numbers of batches left out on purpose: the steps from there on read one batch further.
    Raises `InvalidSamples` if step < 1 or batch < 1.
    """
    if step < 1 or batch < 1:
        raise InvalidSamples(f"step {step} of batches of {batch} samples: both begin at 1")
    number = batch_number(step, skipped)
    return range(number * batch, (number + 1) * batch)


def batch_number(step: int, skipped: Iterable[int] = ()) -> int:
    """The batch, from 0, that a step, from 1, reads: the step-th of those that are not skipped."""
    number = step - 1
    for skipped_batches in sorted(set(skipped)):
        number += skipped_batches <= number
    return number


def deal(num_microbatches: int, num_data_ranks: int) -> list[tuple[int, ...]]:
    """The microbatches of a step that each data rank computes: contiguous blocks, as even as
    they go, the first ranks taking one more.

    Collectives must match, so every rank runs `num_rounds` rounds: those beyond its microbatches
    are empty. Raises `InvalidSamples` if there is no microbatch or no rank.
    """
    if num_microbatches < 1 or num_data_ranks < 1:
        raise InvalidSamples(
            f"{num_microbatches} microbatches for {num_data_ranks} data ranks: one each at least"
        )
    share, over = divmod(num_microbatches, num_data_ranks)
    firsts = [data_rank * share + min(data_rank, over) for data_rank in range(num_data_ranks + 1)]
    return [tuple(range(*firsts[i : i + 2])) for i in range(num_data_ranks)]


def num_rounds(num_microbatches: int, num_data_ranks: int) -> int:
    """How many rounds, empty ones included, each data rank runs in a step."""
    return len(deal(num_microbatches, num_data_ranks)[0])


def microbatch_seed(run_seed: int, step: int, microbatch: int) -> int:
    """The random seed (63 bits) of one microbatch of a step, the same on whatever rank it runs."""
    name = f"microbatch/{run_seed}/{step}/{microbatch}"
    return int.from_bytes(blake2b(name.encode(), digest_size=8).digest(), "little") >> 1
