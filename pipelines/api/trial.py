"""A run as a trial of Ray Tune that reports every `report_every`-th committed step."""

from __future__ import annotations

import time
from collections import deque
from typing import Any

from pipelines.api.live_run import LiveRun
from pipelines.errors import UserError
from pipelines.observe.history.run_folder import Tail
from pipelines.run.plan import RunPlan

LOOK_EVERY_S = 0.1


class StepReports:
    """Reports a run's steps in order, each once; see `actors.ray_backend.tune_trial.TrialRun`."""

    def __init__(self, plan: RunPlan, report_every: int) -> None:
        self._folder = plan.folder
        self._every = report_every
        self._last_step = plan.settings.steps
        self._tail = Tail(plan.folder.metrics)
        self._last_report: dict[str, Any] = {}
        for row in self._tail.drain():  # steps of earlier sessions
            self._last_report = self._report(row)
        self._rows: deque[dict[str, Any]] = deque()
        self._run = LiveRun(plan)

    def next_report(self) -> dict[str, Any]:
        """Raises `TrainingFailedError`."""
        while True:
            was_over = self._run.is_over
            self._rows.extend(self._tail.drain())
            while self._rows:
                if report := self._due(self._rows.popleft()):
                    return report
            if was_over:
                self._run.result()
                return {**self._last_report, "done": True}
            time.sleep(LOOK_EVERY_S)

    def pause(self) -> dict[str, Any]:
        return {"run": self._folder.url}

    def resume(self, paused: dict[str, Any]) -> None:
        """Check that the trial continues its own run, which its name has resumed already."""
        if paused.get("run") != self._folder.url:
            raise UserError(
                f"run '{self._folder.name}': a trial can resume only its own run, not "
                f"{paused.get('run')}; use a scheduler that does not copy trials"
            )

    def stop(self) -> None:
        self._run.stop()

    def _due(self, row: dict[str, Any]) -> dict[str, Any] | None:
        """The report of a row, or None if it is not due; redone steps have been reported."""
        is_new = row["step"] > self._last_report.get("step", 0)
        is_last = row["step"] >= self._last_step
        if not is_new or (row["step"] % self._every and not is_last):
            return None
        self._last_report = self._report(row)
        if is_last:
            self._run.result()
        return {**self._last_report, "done": is_last}

    def _report(self, row: dict[str, Any]) -> dict[str, Any]:
        """The row with NaN for null, because schedulers compare numbers."""
        values = {name: float("nan") if value is None else value for name, value in row.items()}
        return {**values, "run": self._folder.url}
