"""Checkpoint interval for `checkpoint.every=auto`, from measured costs and observed failures.

The interval that loses the least time is about the square root of twice the cost of a checkpoint
times the mean time between failures (Young, 1974); Daly (2006) adds higher-order terms. The cost
is the time that a checkpoint adds to the steps during which it is copied and written. Before the
first measurement it is taken to be `FIRST_COST_S`. The observed failures are added to a prior of
one failure in `PRIOR_S`.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from math import sqrt

PRIOR_S = 86400.0
"""Prior before any observation: one failure a day."""
FIRST_COST_S = 1.0
LEAST_COST_S = 0.01
NUM_RECENT = 5


@dataclass(slots=True)
class CheckpointCosts:
    """Failures of a run and costs of its checkpoints, over all its sessions."""

    trained_s: float = 0.0
    """The duration of all steps together."""
    num_failures: int = 0
    failed_generation: int = 0
    """The latest generation that lost a member: all its losses count as one failure."""
    costs_s: list[float] = field(default_factory=list)
    """Costs of the latest checkpoints that were written undisturbed."""
    writes_s: list[float] = field(default_factory=list)
    """How long the latest checkpoints took until all parts were written."""
    cost_s: float | None = None
    """Cost so far of the checkpoint that is being written; None if none is."""

    def begin(self) -> None:
        """Note that all members begin to copy and write a checkpoint."""
        self.cost_s = 0.0

    def forget(self) -> None:
        """Note that the checkpoint being written, or its generation, was aborted."""
        self.cost_s = None

    def note_step(self, step_s: float, median_step_s: float, is_writing: bool) -> None:
        """Note a committed step; `is_writing` while a checkpoint is not complete yet."""
        self.trained_s += step_s
        if self.cost_s is None:
            return
        self.cost_s += step_s - median_step_s
        if not is_writing:
            self.costs_s = [*self.costs_s[1 - NUM_RECENT :], max(LEAST_COST_S, self.cost_s)]
            self.cost_s = None

    def note_write(self, write_s: float) -> None:
        """Note how long a checkpoint took, from its begin until all parts were written."""
        self.writes_s = [*self.writes_s[1 - NUM_RECENT :], write_s]

    def note_partial_write(self, write_s: float) -> None:
        """Note how long the written parts took of a checkpoint that broke: all would have taken
        longer. Shorter times than recent ones say nothing."""
        if write_s > max(self.writes_s, default=0.0):
            self.note_write(write_s)

    def note_failure(self, generation: int) -> None:
        """Note that this generation lost a member or the whole session of the run."""
        if generation != self.failed_generation:
            self.failed_generation = generation
            self.num_failures += 1

    def interval_s(self, least_s: float, most_s: float) -> float:
        """The time from one checkpoint to the next, within these bounds."""
        costs = sorted(self.costs_s)
        cost_s = costs[len(costs) // 2] if costs else FIRST_COST_S
        between_s = (self.trained_s + PRIOR_S) / (self.num_failures + 1)
        return min(most_s, max(least_s, best_interval_s(cost_s, between_s)))


def best_interval_s(cost_s: float, between_s: float) -> float:
    """Daly's estimate for this cost of a checkpoint and this mean time between failures."""
    if cost_s >= 2.0 * between_s:
        return between_s
    share = cost_s / (2.0 * between_s)
    return sqrt(2.0 * cost_s * between_s) * (1.0 + sqrt(share) / 3.0 + share / 9.0) - cost_s
