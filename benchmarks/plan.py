"""Benchmark of the step-time model of `elastic plan` against the steps of real workers."""

from __future__ import annotations

import json
import os
import sys
import tempfile
from collections.abc import Sequence
from dataclasses import dataclass, replace
from itertools import combinations
from multiprocessing import set_forkserver_preload
from pathlib import Path
from statistics import median, quantiles
from typing import Any

from plan_cases import MODELS, NUM_WORKERS, program_of
from plan_rank import run_rank
from report import Must, conclude, parser, show_table
from torch.multiprocessing import start_processes

from elastic.geometry.layout import Layout
from elastic.geometry.training_job import Capacity, Job, TimeFacts
from elastic.planner.models.step_cost import cost_of
from elastic.protocol.wire import decode
from pipelines.run.job import job_of


@dataclass(frozen=True)
class Row:
    """A layout of a model: its measured seconds in each sweep, and the predicted ones."""

    model: str
    layout: str
    sweeps_s: tuple[float, ...]
    predicted_s: float

    @property
    def measured_s(self) -> float:
        return sum(self.sweeps_s) / len(self.sweeps_s)

    @property
    def error(self) -> float:
        return 100 * (self.predicted_s / self.measured_s - 1)

    @property
    def noise(self) -> float:
        return 100 * (max(self.sweeps_s) - min(self.sweeps_s)) / self.measured_s


def predict(job: Job, times: TimeFacts, layout: str) -> float:
    plain = times.plain
    assert plain is not None
    known = replace(job, times=times, microbatch_s=plain.single_s)
    return cost_of(Layout.parse(layout), known, Capacity(NUM_WORKERS, None, NUM_WORKERS))


def rows_of(result: dict[str, Any]) -> list[Row]:
    rows = []
    for model, measured in result.items():
        program = program_of(model)
        job = job_of(program.settings, program, (1,))
        times = decode(TimeFacts, measured["times"])
        for layout in MODELS[model]:
            sweeps = tuple(median(sweep[layout]) for sweep in measured["steps_s"])
            rows.append(Row(model, layout, sweeps, predict(job, times, layout)))
    return rows


def kendall_tau(rows: Sequence[Row]) -> float:
    """The share of pairs of layouts in the same order by prediction and by measurement, minus that
    of the others."""
    signs = [
        (a.measured_s - b.measured_s) * (a.predicted_s - b.predicted_s) > 0
        for a, b in combinations(rows, 2)
    ]
    return 2 * sum(signs) / len(signs) - 1


def regret(rows: Sequence[Row]) -> float:
    """How much longer the step of the layout with the shortest prediction is than the shortest."""
    chosen = min(rows, key=lambda row: row.predicted_s)
    return 100 * (chosen.measured_s / min(row.measured_s for row in rows) - 1)


def musts_of(rows: Sequence[Row], result: dict[str, Any]) -> list[Must]:
    errors = [abs(row.error) for row in rows]
    by_model = [[row for row in rows if row.model == model] for model in result]
    calibration_s = [sum(measured["calibration_s"]) for measured in result.values()]
    return [
        Must("median error", median(errors), 8, "%"),
        Must("90th percentile of the errors", quantiles(errors, n=10)[-1], 20, "%"),
        Must("regret, worst model", max(regret(each) for each in by_model), 10, "%"),
        Must("Kendall tau, worst model", min(map(kendall_tau, by_model)), 0.8, "", at_least=True),
        Must("calibration, slowest model", max(calibration_s), 60),
    ]


def main() -> int:
    arguments = parser(__doc__.splitlines()[0])
    arguments.add_argument("--models", nargs="+", choices=MODELS, default=list(MODELS))
    arguments.add_argument("--sweeps", type=int, default=2, help="runs of each layout")
    arguments.add_argument("--raw", type=Path, help="the measurements: read if there, else written")
    options = arguments.parse_args()
    if options.raw and options.raw.exists():
        result = json.loads(options.raw.read_text())
    else:
        with tempfile.TemporaryDirectory() as folder:
            set_forkserver_preload(["pipelines.run.program"])
            given = (Path(folder), options.sweeps, tuple(options.models))
            start_processes(run_rank, given, NUM_WORKERS, start_method="forkserver")
            text = (Path(folder) / "result.json").read_text()
        if options.raw:
            options.raw.write_text(text)
        result = json.loads(text)
    rows = rows_of(result)
    show_table(
        f"Seconds of a step on {os.cpu_count()} cores: the median of real steps, and predicted",
        ["model", "layout", "measured", "noise", "predicted", "error"],
        [
            [
                row.model,
                row.layout,
                f"{row.measured_s:.4f}",
                f"{row.noise:.1f} %" if len(row.sweeps_s) > 1 else "-",
                f"{row.predicted_s:.4f}",
                f"{row.error:+.1f} %",
            ]
            for row in rows
        ],
    )
    return conclude(musts_of(rows, result), options.check)


if __name__ == "__main__":
    sys.exit(main())
