"""What one step's vote carries, how it is packed for an all-reduce, and what a step records."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from math import isfinite

from elastic.reshard.parity import num_whole

RELATIVE_ERROR = 2.0**-50
"""For each rank: rounding of a sum over n ranks stays below n times this share of its size."""
LEAST_SIZE = 1e-290
"""Sums below this may lose all their digits where denormal numbers are flushed to zero."""
OVERFLOW_SIZE = 1e290
"""A sum is not finite only where the sizes of its terms add up to more than this."""


@dataclass(frozen=True, slots=True)
class Vote:
    """The sums over all ranks that decide a step; every rank reads the same values.

    `sq_grad_norm` is of the summed, not yet normalised gradients. A step whose
    `num_nonfinite` is positive is committed as skipped: parameters untouched. All values are
    finite: what is not counts as 0 in the sums.
    """

    step: int
    loss_sum: float
    num_tokens: int
    sq_grad_norm: float
    num_contributions: int
    num_nonfinite: int = 0
    num_pause_requests: int = 0
    num_snapshots: int = 0
    """So many ranks have the newest snapshot that was due whole at every keeper."""
    num_save_requests: int = 0
    num_writing: int = 0
    """So many ranks still write their part of an earlier checkpoint."""

    def is_save_due(self, every: int) -> bool:
        """Whether the state after this step is to be saved: by `every` (steps, 0 for never), or
        because it is wished for."""
        return (bool(every) and self.step % every == 0) or self.num_save_requests > 0

    def saves(self, every: int) -> bool:
        """Whether all ranks save it: it is due, and nobody is busy with another."""
        return self.is_save_due(every) and not self.num_writing


class BrokenVote(RuntimeError):
    """What came back from the all-reduce is not the sum of what the ranks put in."""


@dataclass(frozen=True, slots=True)
class Ballot:
    """One rank's part of a vote.

    `sums` are loss sum, token count and squared gradient norm. `compute_s` has a place for each
    rank, in seconds, in which a rank fills its own; or it is empty on all ranks.
    """

    step: int
    world_rank: int
    sums: tuple[float, float, float]
    wants_pause: bool = False
    snapshots: float = 0.0
    """As `elastic.parity.ballot_of` packs it."""
    wants_save: bool = False
    is_writing: bool = False
    compute_s: tuple[float, ...] = ()


@dataclass(frozen=True, slots=True)
class Tally:
    """A vote as all ranks read it, and the compute time of each rank if they put theirs in."""

    vote: Vote
    compute_s: tuple[float, ...] = ()


def pack_vote(ballot: Ballot) -> list[float]:
    """The float64 numbers that one rank puts into the all-reduce (sum) of a vote.

    A contribution of 1 stands at both ends. The middle holds the step and the rank, which sum to
    known numbers; before it are the values, behind it their guards in reverse order. Counts are
    whole and sum exactly: their guard is one weighted sum. Each training sum has half of it as a
    guard, and half of its absolute value, from which the allowed rounding follows. Compute times
    are not negative: their guard is one weighted sum.

    `unpack_vote` therefore refuses: a ballot that was not reduced, a vote of another step, zeros, a
    rank that is missing or counted twice, a single wrong number, a contiguous range that lacks a
    rank, a shifted vote, and random numbers. It does not see what stays below rounding, nor a
    value and its guard that both lack the same rank while the middle does not.
    """
    is_finite = all(map(isfinite, ballot.sums))
    sums = [value if isfinite(value) else 0.0 for value in ballot.sums]
    flags = (not is_finite, ballot.wants_pause, ballot.wants_save, ballot.is_writing)
    counts = [ballot.snapshots, *map(float, flags)]  # the first, since it needs 51 of 53 bits
    guards = [_weighted(counts), _weighted(ballot.compute_s)]
    guards += [abs(value) / 2 for value in sums] + [value / 2 for value in reversed(sums)]
    middle = [float(ballot.step), float(ballot.world_rank)]
    return [1.0, *sums, *ballot.compute_s, *counts, *middle, *guards, 1.0]


def unpack_vote(numbers: Sequence[float], step: int, num_workers: int) -> Tally:
    """Read the summed ballots of `num_workers` ranks for `step`.

    Raises `BrokenVote` if they are not the sum of all ballots, and `ValueError` if the token
    counts of all ranks do not add up to a whole number.
    """
    num_times = len(numbers) - _NUM_NUMBERS
    if num_times not in (0, num_workers):
        raise _broken(step, f"it has {len(numbers)} numbers")
    _check_exact(numbers, step, num_workers)
    loss_sum, num_tokens, sq_grad_norm = numbers[1:4]
    compute_s = tuple(numbers[4 : 4 + num_times])
    snapshots, *flags = (round(count) for count in numbers[4 + num_times : 9 + num_times])
    num_nonfinite, num_pauses, num_saves, num_writing = flags
    if not _check_sums(numbers, step, num_workers):
        # Each rank's part was finite: the sum overflows, and it does so on all ranks.
        loss_sum, sq_grad_norm, num_nonfinite = 0.0, 0.0, num_workers
        num_tokens = num_tokens if isfinite(num_tokens) else 0.0
    if num_tokens != round(num_tokens):
        raise ValueError(
            f"step {step}: the numbers of losses sum to {num_tokens}: give whole ones, as of "
            "tokens, and weigh the losses themselves"
        )
    vote = Vote(
        step=step,
        loss_sum=loss_sum,
        num_tokens=round(num_tokens),
        sq_grad_norm=sq_grad_norm,
        num_contributions=num_workers,
        num_nonfinite=num_nonfinite,
        num_pause_requests=num_pauses,
        num_snapshots=num_whole(snapshots),
        num_save_requests=num_saves,
        num_writing=num_writing,
    )
    return Tally(vote, compute_s)


def _check_exact(numbers: Sequence[float], step: int, num_workers: int) -> None:
    """The whole numbers of a vote, and its compute times. Raises `BrokenVote`."""
    num_times = len(numbers) - _NUM_NUMBERS
    *counts, of_steps, of_ranks, count_guard, time_guard = numbers[4 + num_times : 13 + num_times]
    exact = {
        "the contributions": (numbers[0], num_workers),
        "the last contributions": (numbers[-1], num_workers),
        "the step": (of_steps, step * num_workers),
        "the ranks": (of_ranks, num_workers * (num_workers - 1) // 2),
        "the counts": (count_guard, _weighted(counts)),
    }
    for name, (found, expected) in exact.items():
        if found != expected:
            raise _broken(step, f"{name} sum to {found:g}, not {expected:g}")
    apart = abs(time_guard - _weighted(numbers[4 : 4 + num_times]))
    if not apart <= num_workers * RELATIVE_ERROR * abs(time_guard) + LEAST_SIZE:
        raise _broken(step, "the compute times do not match their guard")


def _check_sums(numbers: Sequence[float], step: int, num_workers: int) -> bool:
    """Whether the training sums are finite. Raises `BrokenVote` if they do not match theirs."""
    share, are_finite = num_workers * RELATIVE_ERROR, True
    halves, sizes = numbers[-4:-1][::-1], numbers[-7:-4]
    for value, half, size in zip(numbers[1:4], halves, sizes, strict=True):
        slack = share * size + LEAST_SIZE
        if not all(map(isfinite, (value, half, size))):
            if not size > OVERFLOW_SIZE:
                raise _broken(step, f"{value:g} is no sum of finite numbers")
            are_finite = False
        elif abs(value / 2 - half) > slack or abs(half) > size + slack:
            raise _broken(step, f"{value:g} does not match its guard {half:g}")
    return are_finite


def _weighted(values: Sequence[float]) -> float:
    return sum(weight * value for weight, value in enumerate(values, 1))


def _broken(step: int, why: str) -> BrokenVote:
    return BrokenVote(f"the vote of step {step} came back broken: {why}")


_NUM_NUMBERS = len(pack_vote(Ballot(0, 0, (0.0, 0.0, 0.0))))


@dataclass(frozen=True, slots=True)
class StepRecord:
    """One committed step as it stands in `metrics.jsonl`; `time` is seconds since the epoch.

    A `missing` record says only that the step has committed: no living worker has its numbers.
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
