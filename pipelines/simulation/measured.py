"""Costs as a real run has shown them: medians of what its journal and its metrics say."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field
from statistics import median
from typing import Any

from pipelines.errors import UserError
from pipelines.observe.history.run_folder import RunFolder, Tail

LEAST_BYTES = 1 << 16
"""Smaller transfers say nothing about bandwidth."""
LEAST_S = 1e-6


@dataclass(slots=True)
class MeasuredRun:
    """What a run's files say. `step_s` was measured with `num_workers` workers. A cost that the run
    never paid is missing in `costs`."""

    costs: dict[str, float]
    step_s: float
    num_workers: int
    state_bytes: int
    num_microbatches: int


@dataclass(slots=True)
class CostSamples:
    """Single measurements by cost, and the beginnings of what is under way."""

    seconds: dict[str, list[float]] = field(default_factory=dict)
    job: dict[str, Any] = field(default_factory=dict)
    saved_at: dict[int, float] = field(default_factory=dict)
    """By step: when its record was made, at which writing a checkpoint begins."""
    _started: dict[str, float] = field(default_factory=dict)
    _began: dict[str, float] = field(default_factory=dict)

    def add(self, name: str, value: float) -> None:
        if value > 0:
            self.seconds.setdefault(name, []).append(value)

    def take(self, line: dict[str, Any]) -> None:
        """Add a line of the journal."""
        name, now = line.get("event") or line.get("command") or "", line["time"]
        match name:
            case "RunOpened":
                self.job = line["job"]
            case "StartWorkers":
                self._started |= dict.fromkeys(line["workers"], now)
            case "WorkerReady" if line["worker"] in self._started:
                self.add("warm_up_s", now - self._started.pop(line["worker"]))
            case "Abort" | "Form" | "Reshard":
                self._begin(name, now)
            case "StateReady" if line["bytes_moved"] >= LEAST_BYTES:
                self.add("bytes_per_s", line["bytes_moved"] / max(LEAST_S, line["seconds"]))
            case "PartWritten" if line["step"] in self.saved_at:
                write_s = max(LEAST_S, now - self.saved_at[line["step"]])
                for file in (line["file"], *(file for _, file in line.get("others", ()))):
                    if file["num_bytes"] >= LEAST_BYTES:
                        self.add("storage_bytes_per_s", file["num_bytes"] / write_s)

    def _begin(self, name: str, now: float) -> None:
        before = {"Form": ("Abort", "unwind_s"), "Reshard": ("Form", "form_s")}.get(name)
        if before and before[0] in self._began:
            self.add(before[1], now - self._began.pop(before[0]))
        self._began[name] = now


def measure(folder: RunFolder) -> MeasuredRun:
    """The costs of a run. Raises `UserError` if it has no steps."""
    rows = [row for row in Tail(folder.metrics).drain() if row.get("step_s")]
    if not rows:
        raise UserError(
            f"--from-run {folder.name}: it has no measured steps; name a run that has trained"
        )
    most = max(row["world_size"] for row in rows)
    step_s = median(row["step_s"] for row in rows if row["world_size"] == most)
    samples = CostSamples(saved_at={row["step"]: row["time"] for row in rows})
    for line in Tail(folder.journal).drain():
        if "time" in line:
            samples.take(line)
    for first in _first_steps(rows):
        if first["world_size"] == most:
            samples.add("first_step_s", first["step_s"] - step_s)
    for row in rows:
        if row.get("snapshot_s"):
            samples.add("snapshot_s", row["snapshot_s"])
    costs = {name: median(values) for name, values in samples.seconds.items()}
    job = samples.job
    return MeasuredRun(
        costs, step_s, most, job.get("state_bytes", 0), job.get("num_microbatches", 0)
    )


def _first_steps(rows: Iterable[dict[str, Any]]) -> Iterator[dict[str, Any]]:
    """The first step of each generation after the first, whose first step warms up."""
    newest: int | None = None
    for row in rows:
        if newest is not None and row["generation"] != newest:
            yield row
        newest = row["generation"]
