"""Writes a run's files as a controller does, to test readers without a controller."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import asdict
from pathlib import Path
from types import MappingProxyType
from typing import Any

from users_policy import users_policy

from actors.storage.line_logs import LineLog
from elastic.geometry.target_layout import TargetLayout
from elastic.geometry.training_job import Job
from elastic.protocol.commands import Command, Resume, Stopped
from elastic.protocol.controller_state import ControllerState
from elastic.protocol.events import Event, RunOpened, StepCommitted, WorkerLost, WorkerReady
from elastic.protocol.notes import RolledBack
from elastic.protocol.votes import StepRecord, Vote
from elastic.protocol.wire import command_line, event_line
from pipelines.observe.history.run_folder import RunFolder

MIDNIGHT = 1_700_006_400.0


class WrittenRun:
    """A run folder to which lines are appended one by one; `now` is the time of the next line."""

    def __init__(self, path: Path, now: float = MIDNIGHT) -> None:
        path.mkdir(parents=True, exist_ok=True)
        self.folder = RunFolder.of(path.parent, path.name)
        self.now = now
        self.generation = 0
        self.step = 0
        self.workers: tuple[str, ...] = ()

    def append_event(self, event: Event) -> None:
        append(
            self.folder.journal,
            event_line(self.now, event, ControllerState(generation=self.generation)),
        )

    def append_command(self, command: Command) -> None:
        state = ControllerState(generation=self.generation)
        append(self.folder.journal, command_line(self.now, command, state))

    def start(self, num_workers: int = 4, steps: int = 1000) -> None:
        """Open the run and start its first generation."""
        policy = users_policy(max_workers=num_workers)
        self.append_event(RunOpened(1, policy, TargetLayout(), Job(steps=steps)))
        for index in range(num_workers):
            self.ready(f"w{index}")
        self.now += 0.5
        self.resume(*(f"w{index}" for index in range(num_workers)))

    def ready(self, worker: str, node: str = "node-0") -> None:
        self.append_event(WorkerReady(worker, node, pid=100))

    def lose(self, worker: str, cause: str = "killed by signal 9") -> None:
        self.append_event(WorkerLost(worker, cause))

    def resume(self, *workers: str) -> None:
        self.generation += 1
        self.workers = workers
        self.append_command(
            Resume(self.generation, self.step, f"dp={len(workers)}", workers, (), 0)
        )

    def roll_back(self, step: int) -> None:
        self.append_command(RolledBack(self.generation, step, self.step, "checkpoint"))
        self.step = step

    def commit(
        self,
        loss: float | None = 2.0,
        step_s: float = 0.1,
        tokens: int = 1000,
        split: Mapping[str, float] = MappingProxyType({}),
    ) -> None:
        self.now += step_s
        self.step += 1
        world_size, skipped = len(self.workers), loss is None
        position = (self.now, self.step, self.generation, world_size)
        record = StepRecord(*position, loss, tokens, 0.001, 1.0, step_s, skipped, **split)
        vote = Vote(self.step, 0.0, tokens, 1.0, world_size)
        self.append_event(StepCommitted(self.generation, record, vote))
        append(self.folder.metrics, asdict(record))

    def sample(self, worker: str) -> None:
        """Append a sample of the device and host of a worker, as in its reports."""
        host = {"cpu_percent": 50.0, "host_memory_bytes": 2e9, "host_peak_bytes": 3e9}
        device = dict.fromkeys(("device_memory_bytes", "device_peak_bytes", "device_use_percent"))
        origin = {
            "time": self.now,
            "worker": worker,
            "node": "node-0",
            "generation": self.generation,
        }
        append(self.folder.system, {**origin, **host, **device})

    def stop(self, outcome: str = "completed", reason: str = "") -> None:
        self.append_command(Stopped(outcome, self.step, reason))


def append(log: LineLog, row: dict[str, Any]) -> None:
    Path(log.url).parent.mkdir(exist_ok=True)
    with open(log.url, "a") as file:
        file.write(json.dumps(row) + "\n")
