"""How long a step takes under a layout, by the planner's step cost."""

from __future__ import annotations

from dataclasses import replace
from math import inf

from elastic.geometry.errors import ElasticError, Infeasible
from elastic.geometry.layout import Layout
from elastic.geometry.target_layout import TargetLayout
from elastic.geometry.training_job import Capacity, Job
from elastic.planner.layout_choice import plan_layout
from elastic.planner.models.step_cost import cost_of


class LayoutTimes:
    """Scales the time of a step at full capacity to other layouts."""

    def __init__(
        self, job: Job, target_layout: TargetLayout, max_workers: int, per_node: int, step_s: float
    ) -> None:
        """Raises `ElasticError` if no layout fits `max_workers`."""
        self._job, self._target_layout = job, target_layout
        self._capacity = Capacity(max_workers, node_size=min(per_node, max_workers))
        chosen = plan_layout(None, self._capacity, target_layout, job, snapshots_cover=True)
        if isinstance(chosen, Infeasible):
            raise ElasticError(chosen.reason)
        self.full = chosen.layout
        self._step_s = step_s
        self._known: dict[Layout, float] = {}

    def of(self, layout: Layout) -> float:
        """The time of a step in seconds."""
        if layout not in self._known:
            relative = self._cost(layout) / self._cost(self.full)
            self._known[layout] = self._step_s * relative
        return self._known[layout]

    def with_workers(self, number: int) -> tuple[float, int]:
        """The time of a step with this many workers, and how many of them the layout uses; infinite
        if no layout fits them."""
        capacity = replace(self._capacity, num_workers=number)
        chosen = plan_layout(None, capacity, self._target_layout, self._job, snapshots_cover=True)
        if isinstance(chosen, Infeasible):
            return inf, 0
        return self.of(chosen.layout), chosen.layout.num_workers

    def _cost(self, layout: Layout) -> float:
        return cost_of(layout, self._job, self._capacity)
