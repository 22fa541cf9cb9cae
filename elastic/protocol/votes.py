"""Votes: the numbers that decide a step, their packing for an all-reduce, and the step record."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from math import isfinite

RELATIVE_ERROR = 2.0**-50
"""Rounding error for each rank: that of a sum over n ranks is below n times this, relatively."""
LEAST_SIZE = 1e-290
"""Sums below this may lose all digits if denormal numbers are flushed to zero."""
NUM_ORDERS = 2**16
"""So many orders have different numbers in a vote. Their squares, weighted and summed over 100,000
ranks, fit a float64 exactly."""
OVERFLOW_SIZE = 1e290
"""A sum can overflow only if the absolute values of its terms add up to more than this."""


@dataclass(frozen=True, slots=True)
class Vote:
    """The sums over all ranks that decide a step; every rank reads the same values.

    `sq_grad_norm` is the squared norm of the summed, not yet normalised gradients. If
    `num_nonfinite` is positive, the step commits as skipped: parameters do not change. All values
    are finite: a number that is not finite counts as 0 in the sums.
    """

    step: int
    loss_sum: float
    num_tokens: int
    sq_grad_norm: float
    num_contributions: int
    num_nonfinite: int = 0
    num_pause_requests: int = 0
    num_snapshots: int = 0
    """The number of ranks whose newest due snapshot is complete at every snapshot server; 0 if they
    followed different orders."""
    num_save_requests: int = 0
    num_writing: int = 0
    """The number of ranks that still write their part of an earlier checkpoint."""

    def is_save_due(self, every: int) -> bool:
        """Whether a checkpoint of this step is due: by `every` (steps, 0 for never) or by a save
        request."""
        return (bool(every) and self.step % every == 0) or self.num_save_requests > 0

    def saves(self, every: int) -> bool:
        """Whether all ranks save this step: it is due, and no rank still writes another."""
        return self.is_save_due(every) and not self.num_writing


class BrokenVote(RuntimeError):
    """The result of the all-reduce is not the sum of what the ranks contributed."""


@dataclass(frozen=True, slots=True)
class Ballot:
    """One rank's part of a vote.

    `sums` are loss sum, token count and squared gradient norm. `compute_s` has one element for each
    rank, in seconds, of which a rank fills its own; or it is empty on all ranks.
    """

    step: int
    world_rank: int
    sums: tuple[float, float, float]
    wants_pause: bool = False
    snapshot_order: int | None = None
    """If its newest due snapshot is complete, `num_changes` of the order under which it is."""
    wants_save: bool = False
    is_writing: bool = False
    compute_s: tuple[float, ...] = ()


@dataclass(frozen=True, slots=True)
class Tally:
    """A vote as all ranks read it, and the compute time of each rank, if contributed."""

    vote: Vote
    compute_s: tuple[float, ...] = ()


def pack_vote(ballot: Ballot) -> list[float]:
    """The float64 numbers that one rank contributes to the sum all-reduce of a vote.

    The first and the last number are a contribution of 1. The middle has the step and the rank,
    which sum to known numbers. The values are before the middle, their guards after it in reverse
    order. Counts are integers and sum exactly, so their guard is one weighted sum. The guards of a
    training sum are its half, and half its absolute value, which bounds the rounding error. Compute
    times are not negative, so their guard is one weighted sum.

    So `unpack_vote` detects: a ballot that was not reduced, a vote of another step, zeros, a rank
    that is missing or counted twice, a single wrong number, a contiguous range that lacks a rank, a
    shifted vote, and random numbers. It cannot detect an error below rounding, nor a value and its
    guard that both lack the same rank while the middle does not.
    """
    is_finite = all(map(isfinite, ballot.sums))
    sums = [value if isfinite(value) else 0.0 for value in ballot.sums]
    flags = (not is_finite, ballot.wants_pause, ballot.wants_save, ballot.is_writing)
    counts = [*_order_numbers(ballot.snapshot_order), *map(float, flags)]
    guards = [_weighted(counts), _weighted(ballot.compute_s)]
    guards += [abs(value) / 2 for value in sums] + [value / 2 for value in reversed(sums)]
    middle = [float(ballot.step), float(ballot.world_rank)]
    return [1.0, *sums, *ballot.compute_s, *counts, *middle, *guards, 1.0]


def unpack_vote(numbers: Sequence[float], step: int, num_workers: int) -> Tally:
    """Read the summed ballots of `num_workers` ranks for `step`.

    Raises `BrokenVote` if they are not the sum of all ballots, and `ValueError` if the token
    counts of all ranks do not add up to an integer.
    """
    num_times = len(numbers) - _NUM_NUMBERS
    if num_times not in (0, num_workers):
        raise _broken(step, f"it has {len(numbers)} numbers")
    _check_exact(numbers, step, num_workers)
    loss_sum, num_tokens, sq_grad_norm = numbers[1:4]
    compute_s = tuple(numbers[4 : 4 + num_times])
    counts = map(round, numbers[4 + num_times : 11 + num_times])
    *orders, num_nonfinite, num_pauses, num_saves, num_writing = counts
    if not _check_sums(numbers, step, num_workers):
        # Each rank's number was finite, so the sum has overflowed, and it has on all ranks.
        loss_sum, sq_grad_norm, num_nonfinite = 0.0, 0.0, num_workers
        num_tokens = num_tokens if isfinite(num_tokens) else 0.0
    if num_tokens != round(num_tokens):
        raise ValueError(
            f"step {step}: the token counts sum to {num_tokens}, which is no integer: return an "
            "integer count, such as the number of tokens, and weight the losses instead"
        )
    vote = Vote(
        step=step,
        loss_sum=loss_sum,
        num_tokens=round(num_tokens),
        sq_grad_norm=sq_grad_norm,
        num_contributions=num_workers,
        num_nonfinite=num_nonfinite,
        num_pause_requests=num_pauses,
        num_snapshots=_num_under_one_order(*orders),
        num_save_requests=num_saves,
        num_writing=num_writing,
    )
    return Tally(vote, compute_s)


def _check_exact(numbers: Sequence[float], step: int, num_workers: int) -> None:
    """Check the integers of a vote and its compute times. Raises `BrokenVote`."""
    num_times = len(numbers) - _NUM_NUMBERS
    *counts, steps, ranks, count_guard, time_guard = numbers[4 + num_times : 15 + num_times]
    exact = {
        "the first contributions": (numbers[0], num_workers),
        "the last contributions": (numbers[-1], num_workers),
        "the steps": (steps, step * num_workers),
        "the ranks": (ranks, num_workers * (num_workers - 1) // 2),
        "the counts": (count_guard, _weighted(counts)),
    }
    for name, (actual, expected) in exact.items():
        if actual != expected:
            raise _broken(step, f"{name} sum to {actual:g}, not {expected:g}")
    error = abs(time_guard - _weighted(numbers[4 : 4 + num_times]))
    if not error <= num_workers * RELATIVE_ERROR * abs(time_guard) + LEAST_SIZE:
        raise _broken(step, "the compute times do not match their guard")


def _check_sums(numbers: Sequence[float], step: int, num_workers: int) -> bool:
    """Whether the training sums are finite. Raises `BrokenVote` if their guards do not match."""
    share, are_finite = num_workers * RELATIVE_ERROR, True
    halves, sizes = numbers[-4:-1][::-1], numbers[-7:-4]
    for value, half, size in zip(numbers[1:4], halves, sizes, strict=True):
        slack = share * size + LEAST_SIZE
        if not all(map(isfinite, (value, half, size))):
            if not size > OVERFLOW_SIZE:
                raise _broken(step, f"{value:g} is not a sum of finite numbers")
            are_finite = False
        elif abs(value / 2 - half) > slack or abs(half) > size + slack:
            raise _broken(step, f"{value:g} does not match its guard {half:g}")
    return are_finite


def _order_numbers(order: int | None) -> list[float]:
    """A rank's numbers for `_num_under_one_order`; all 0 without a complete snapshot."""
    if order is None:
        return [0.0] * 3
    number = order % NUM_ORDERS
    return [1.0, float(number), float(number**2)]


def _num_under_one_order(num_whole: int, total: int, total_of_squares: int) -> int:
    """The number of complete snapshots, or 0 if their orders differ: ranks of a set that follow
    different `StartSnapshots` orders have no parity in common.

    The squares of equal numbers have the least sum (Cauchy-Schwarz).
    """
    return num_whole if num_whole * total_of_squares == total**2 else 0


def _weighted(values: Sequence[float]) -> float:
    return sum(weight * value for weight, value in enumerate(values, 1))


def _broken(step: int, cause: str) -> BrokenVote:
    return BrokenVote(f"the all-reduced vote of step {step} is corrupt: {cause}")


_NUM_NUMBERS = len(pack_vote(Ballot(0, 0, (0.0, 0.0, 0.0))))


@dataclass(frozen=True, slots=True)
class StepRecord:
    """One committed step as in `metrics.jsonl`; `time` is in seconds since the epoch.

    A `missing` record only says that the step has committed: no live worker has its numbers.
    The fields of `SPLIT` split the time since the record before, as the reporting worker measured
    it. `reported` are the numbers that a script reports with a step.
    """

    time: float
    step: int
    generation: int
    world_size: int
    loss: float | None
    tokens: int | None
    lr: float | None
    grad_norm: float | None
    step_s: float | None
    skipped: bool
    missing: bool = False
    compute_s: float | None = None
    communication_s: float | None = None
    data_s: float | None = None
    vote_s: float | None = None
    snapshot_s: float | None = None
    other_s: float | None = None
    reported: dict[str, float | None] = field(default_factory=dict)


SPLIT = ("compute_s", "communication_s", "data_s", "vote_s", "snapshot_s", "other_s")
"""The fields of a step record that split its time; all of them are numbers, or none."""
