"""Whether a run that is to be done by a time needs on-demand machines.

The policy is "uniform progress" of Wu et al., "Can't Be Late: Optimizing Spot Instance Savings
under Deadlines" (NSDI 2024), for a number of workers instead of one: the run uses spot machines
alone while its share of the steps is at least its share of the time. If it falls behind, on-demand
machines replace what spot lacks, until it is ahead by twice the cost of a change. If the time left
is no more than what the steps left take with all workers and two changes, on-demand machines stay.
"""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Progress:
    """Where a run is between its start and the time by which it is to be done.

    `share` of the steps are done, `elapsed_s` of `total_s` have passed. The steps left take
    `left_s` with all workers, and a change of workers `change_s`; both are 0 if not known.
    """

    share: float
    elapsed_s: float
    total_s: float
    left_s: float
    change_s: float

    @property
    def lead_s(self) -> float:
        """How far the run is ahead of uniform progress; negative if it is behind."""
        return self.share * self.total_s - self.elapsed_s

    @property
    def slack_s(self) -> float:
        """How long the run could stop and still be done in time with all workers."""
        return self.total_s - self.elapsed_s - self.left_s

    @property
    def has_no_slack(self) -> bool:
        """Whether the slack no longer covers a change to other machines and back."""
        return self.slack_s < 2 * self.change_s

    def behind_after_s(self) -> float:
        """When the run counts as behind if no further step is done, in seconds from its start."""
        return self.share * self.total_s + self.change_s

    def slack_until_s(self) -> float:
        """When the slack no longer covers a change if no further step is done."""
        return self.total_s - self.left_s - 2 * self.change_s

    def needs_on_demand(self, is_behind: bool) -> bool:
        """Whether on-demand machines replace what spot lacks; `is_behind` is the last answer.

        A run that is ahead counts as behind only after it has lost more than a change costs: every
        run is a little behind before its first step.
        """
        if self.has_no_slack:
            return True
        return self.lead_s < (2 if is_behind else -1) * self.change_s
