"""Fixed models of systems that restart all workers from a checkpoint at every change.

Each time that nodes appear or disappear, the run continues `restart_s` later from its newest
checkpoint. The models are kind to these systems: checkpoints are written at Daly's best interval
for the trace, a restart always succeeds, and it takes no longer with more workers.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from itertools import pairwise
from math import inf

from elastic.planner.checkpoint_interval import LEAST_COST_S, best_interval_s
from elastic.simulation.costs import Costs
from elastic.simulation.trace import NOTICE, Availability


@dataclass(frozen=True, slots=True)
class RestartSystem:
    """`restart_s` is from the loss of a worker to the begin of the next step, as measured on one
    machine (benchmarks/README.md)."""

    name: str
    restart_s: float


MEASURED = (RestartSystem("torchrun", 5.21), RestartSystem("Ray Train", 12.1))


@dataclass(slots=True)
class RestartRun:
    """What such a system achieves; as `Ledger` does for the controller."""

    steps: int = 0
    num_redone: int = 0
    committed_s: float = 0.0
    worker_s: float = 0.0
    pauses_s: list[float] = field(default_factory=list)
    finish_s: float | None = None
    _unsaved: int = 0
    """The steps since the newest checkpoint, `_unsaved_s` and `_num_workers` their time each."""
    _unsaved_s: float = 0.0
    _num_workers: int = 0

    def commit(self, num_steps: int, num_unsaved: int, step_s: float, num_workers: int) -> None:
        """Count steps of one generation; the last ones are not in a checkpoint yet."""
        self.steps += num_steps
        self.committed_s += num_steps * step_s
        self.worker_s += num_steps * step_s * num_workers
        self._unsaved, self._unsaved_s, self._num_workers = num_unsaved, step_s, num_workers

    def undo(self) -> None:
        """Continue from the newest checkpoint: the steps since then are redone."""
        lost_s = self._unsaved * self._unsaved_s
        self.steps -= self._unsaved
        self.num_redone += self._unsaved
        self.committed_s -= lost_s
        self.worker_s -= lost_s * self._num_workers
        self._unsaved = 0


@dataclass(frozen=True, slots=True)
class RestartLimits:
    """Numbers of workers and the last step; `step_of` gives the time of a step with n workers,
    infinite if no layout fits them, and how many of them the layout uses."""

    min_workers: int
    max_workers: int
    per_node: int
    steps: int
    step_of: Callable[[int], tuple[float, int]]


def run_with_restarts(
    system: RestartSystem, trace: Availability, costs: Costs, limits: RestartLimits
) -> RestartRun:
    """Run a system over a trace, to the end of the trace or the last step."""
    run = RestartRun()
    interval_s = best_interval_s(
        max(LEAST_COST_S, costs.save_s), trace.end_s / max(1, trace.num_changes)
    )
    last_s: float | None = None
    """The end of the last step."""
    for (begin_s, number, is_loss), (end_s, *_) in pairwise(_groups(trace, costs, limits)):
        step_s, used = limits.step_of(number) if number >= limits.min_workers else (inf, 0)
        if last_s is not None:
            run.undo()
        ready_s = begin_s + costs.detect_s * is_loss
        ready_s += 0.0 if last_s is None else system.restart_s
        every = max(1, round(interval_s / step_s)) if step_s < inf else 1
        whole_s = step_s + costs.save_s / every
        num_steps = int(max(0.0, end_s - ready_s) / whole_s)
        num_steps = min(num_steps, limits.steps - run.steps)
        if num_steps:
            if last_s is not None:
                run.pauses_s.append(ready_s - last_s)
            run.commit(num_steps, num_steps % every, step_s, used)
            last_s = ready_s + num_steps * whole_s
        if run.steps >= limits.steps:
            run.finish_s = last_s
            break
    return run


def _groups(
    trace: Availability, costs: Costs, limits: RestartLimits
) -> Iterator[tuple[float, int, bool]]:
    """Each time at which the workers change, with their new number and whether some were lost. New
    workers count once they are warm; the last entry is the end of the trace."""
    there: set[str] = set()
    moments: list[tuple[float, bool, str]] = []
    for change in trace.changes:
        if change.kind != NOTICE:
            is_loss = change.kind == "remove"
            moments.append((change.time_s + costs.warm_up_s * (not is_loss), is_loss, change.node))
    known: dict[str, int] = {}
    for time_s, is_loss, node in sorted(moments):
        known[node] = known.get(node, 0) + (-1 if is_loss else 1)
        if time_s >= trace.end_s:
            break
        before = len(there)
        there = there | {node} if known[node] > 0 else there - {node}
        if len(there) != before:
            yield time_s, min(len(there) * limits.per_node, limits.max_workers), is_loss
    yield trace.end_s, 0, False
