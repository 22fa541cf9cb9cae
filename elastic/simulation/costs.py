"""What the parts of a simulated run cost."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Costs:
    """Seconds and bytes a second of a run's parts.

    `step_s` is a step at full capacity; with fewer workers the planner's step cost scales it. The
    first step of a generation takes `first_step_s` more. A worker is ready `warm_up_s` after its
    node appears. The loss of a node is detected after `detect_s`; then the survivors unwind in
    `unwind_s` and form groups in `form_s`. State moves between workers at `bytes_per_s` for each
    worker, and between a worker and storage at `storage_bytes_per_s`. A checkpoint adds `save_s` to
    its step, and a snapshot adds `snapshot_s`. An on-demand node is there `on_demand_start_s` after
    its request; at most `on_demand_nodes` exist at once.
    """

    step_s: float = 1.0
    first_step_s: float = 0.1
    warm_up_s: float = 10.0
    detect_s: float = 4.0
    unwind_s: float = 0.05
    form_s: float = 0.2
    bytes_per_s: float = 1e9
    storage_bytes_per_s: float = 2e8
    save_s: float = 0.05
    snapshot_s: float = 0.0
    on_demand_start_s: float = 120.0
    on_demand_nodes: int = 100_000
