"""Benchmark of the pause of training when 2 workers become 4.

A cluster starts with slots for 2 workers; a second node adds 2 slots. After that growth two workers
are killed at a time, and their warm replacements make the other 2 workers 4 again. The pause is the
time from the last commit of 2 workers to the first of 4, minus the median step.
"""

from __future__ import annotations

import sys
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path
from statistics import median
from tempfile import TemporaryDirectory

from cluster import Cluster, cluster
from elastic_run import ElasticRun, elastic_train
from processes import kill
from report import Must, conclude, parser, show_table

STABLE_STEPS = 20
NUM_BEFORE, NUM_AFTER = 2, 4
TIMEOUT_S = 180.0


@dataclass(frozen=True)
class Growth:
    gap_s: float
    median_step_s: float
    reshard_s: float
    bytes_moved: int

    @property
    def pause_s(self) -> float:
        return self.gap_s - self.median_step_s


def measure(recipe: str, num_growths: int) -> list[Growth]:
    with (
        TemporaryDirectory(prefix="grow-") as name,
        cluster(Path(name), NUM_BEFORE) as ray,
        elastic_train(
            Path(name) / "storage",
            recipe,
            ["--workers", f"{NUM_BEFORE}:{NUM_AFTER}"],
            ray.environment,
        ) as run,
    ):
        return [_grow(run, ray, number) for number in range(num_growths)]


def _grow(run: ElasticRun, ray: Cluster, number: int) -> Growth:
    """Grow by a new node first, later by killing two workers and awaiting their replacements."""
    if number == 0:
        run.wait_for_world(NUM_BEFORE, STABLE_STEPS, TIMEOUT_S)
        ray.add_node(NUM_AFTER - NUM_BEFORE)
    else:
        for worker in run.members()[NUM_BEFORE:]:
            kill(run.pid(worker))
        run.wait_for_world(NUM_BEFORE, 1, TIMEOUT_S)
    generation = run.wait_for_world(NUM_AFTER, STABLE_STEPS, TIMEOUT_S)
    steps = [line for line in run.metrics if line["generation"] == generation]
    before = next(line for line in reversed(run.metrics) if line["generation"] < generation)
    resharded = next(line for line in run.lines_of("Resharded") if line["generation"] == generation)
    step_s = median(after["time"] - before["time"] for before, after in pairwise(steps))
    assert before["world_size"] == NUM_BEFORE, "the growth was not from 2 to 4 at once"
    return Growth(
        steps[0]["time"] - before["time"], step_s, resharded["seconds"], resharded["bytes_moved"]
    )


def main() -> int:
    arguments = parser(__doc__.splitlines()[0])
    arguments.add_argument("--growths", type=int, default=6)
    arguments.add_argument("--recipe", default="mlp")
    options = arguments.parse_args()
    growths = measure(options.recipe, options.growths)
    rows = [
        [
            "a node joined" if number == 0 else "replacements of two killed",
            *(f"{s:.3f}" for s in (g.gap_s, g.median_step_s, g.pause_s, g.reshard_s)),
            f"{g.bytes_moved:,}",
        ]
        for number, g in enumerate(growths)
    ]
    columns = ("2 become 4", "gap s", "median step s", "pause s", "form and reshard s", "bytes")
    show_table(f"growth of {options.recipe}", columns, rows)
    return conclude([Must("median pause", median(g.pause_s for g in growths), 0.5)], options.check)


if __name__ == "__main__":
    sys.exit(main())
