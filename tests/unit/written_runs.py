"""Writes a run's files as a controller would, so that readers can be tested without one."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from pipelines.run_folder import RunFolder


class WrittenRun:
    """A run folder whose lines are told one by one; `now` is the time of the next line."""

    def __init__(self, path: Path, now: float = 1_700_000_000.0) -> None:
        path.mkdir(parents=True, exist_ok=True)
        self.folder = RunFolder(path)
        self.now = now
        self.generation = 0
        self.step = 0
        self.workers: list[str] = []

    def tell(self, role: str, name: str, **fields: Any) -> None:
        head = {"time": self.now, role: name, "generation": self.generation}
        append(self.folder.journal, {**head, **fields, "format": 1})

    def open(self, max_workers: int = 4, steps: int = 1000) -> None:
        policy, job = {"max_workers": max_workers}, {"steps": steps}
        self.tell("event", "RunOpened", incarnation=1, policy=policy, job=job)

    def ready(self, worker: str, node: str = "node-0") -> None:
        self.tell("event", "WorkerReady", worker=worker, node=node, pid=100)

    def lose(self, worker: str, cause: str = "killed by signal 9") -> None:
        self.tell("event", "WorkerLost", worker=worker, cause=cause)

    def resume(self, workers: list[str]) -> None:
        self.generation += 1
        self.workers = workers
        layout = f"dp={len(workers)}"
        self.tell("command", "Resume", step=self.step, layout=layout, workers=workers)

    def roll_back(self, step: int) -> None:
        self.tell("command", "RolledBack", step=step, from_step=self.step, source="checkpoint")
        self.step = step

    def commit(self, loss: float | None = 2.0, step_s: float = 0.1, tokens: int = 1000) -> None:
        self.now += step_s
        self.step += 1
        row = {
            "time": self.now,
            "step": self.step,
            "generation": self.generation,
            "world_size": len(self.workers),
            "loss": loss,
            "tokens": tokens,
            "lr": 0.001,
            "grad_norm": 1.0,
            "step_s": step_s,
            "skipped": loss is None,
        }
        self.tell("event", "StepCommitted", record=row)
        append(self.folder.metrics, row)

    def start(self, num_workers: int = 4, **opened: int) -> None:
        """Open the run and let its first generation train."""
        self.open(num_workers, **opened)
        workers = [f"w{index}" for index in range(num_workers)]
        for worker in workers:
            self.ready(worker)
        self.now += 0.5
        self.resume(workers)

    def stop(self, outcome: str = "completed", reason: str = "") -> None:
        self.tell("command", "Stopped", outcome=outcome, step=self.step, reason=reason)


def append(path: Path, row: dict[str, Any]) -> None:
    with path.open("a") as file:
        file.write(json.dumps(row) + "\n")
