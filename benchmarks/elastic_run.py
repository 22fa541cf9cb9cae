"""A measured `elastic train`, started as by a user and followed through its files."""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from processes import Program, running

from pipelines.observe.history.run_folder import RunFolder, Tail

RUN_NAME = "measured"
LOCAL = {"RAY_ADDRESS": "local"}
Line = dict[str, Any]


@dataclass
class ElasticRun:
    """A run's program, and all lines of its journal and metrics read so far."""

    program: Program
    folder: RunFolder
    journal: list[Line] = field(default_factory=list)
    metrics: list[Line] = field(default_factory=list)

    def __post_init__(self) -> None:
        self._tails = Tail(self.folder.journal), Tail(self.folder.metrics)

    def read(self) -> None:
        """Read the new lines."""
        journal, metrics = self._tails
        self.journal += journal.drain()
        self.metrics += metrics.drain()

    def wait_until(self, condition: Callable[[], bool], timeout_s: float, awaited: str) -> None:
        """Read lines until the condition holds. Raises `Failed`."""

        def holds() -> bool:
            self.read()
            return condition()

        self.program.wait_until(holds, timeout_s, awaited)

    def lines_of(self, kind: str) -> list[Line]:
        """The journal's lines of one event or command."""
        return [line for line in self.journal if kind in (line.get("event"), line.get("command"))]

    def members(self) -> list[str]:
        """The current members in world-rank order; none before the first Resume."""
        resumes = self.lines_of("Resume")
        return resumes[-1]["workers"] if resumes else []

    def pid(self, worker: str) -> int:
        ready = (line for line in self.lines_of("WorkerReady") if line["worker"] == worker)
        return next(ready)["pid"]

    def num_steps_of(self, generation: int) -> int:
        return sum(line["generation"] == generation for line in self.metrics)

    def wait_for_world(self, num_workers: int, num_steps: int, timeout_s: float) -> int:
        """Wait until `num_workers` workers have committed `num_steps`; return their generation."""

        def trains() -> bool:
            last = self.metrics[-1] if self.metrics else None
            if last is None or last["world_size"] != num_workers:
                return False
            return self.num_steps_of(last["generation"]) >= num_steps

        self.wait_until(trains, timeout_s, f"{num_steps} steps of {num_workers} workers")
        return self.metrics[-1]["generation"]


@contextmanager
def elastic_train(
    storage: Path,
    recipe: str,
    arguments: Sequence[str],
    environment: Mapping[str, str] = LOCAL,
) -> Iterator[ElasticRun]:
    """Run `elastic train`, with MLflow on, until the block ends."""
    command = [sys.executable, "-m", "pipelines", "train", recipe, "--run-name", RUN_NAME]
    command += ["--storage", str(storage), "--steps", "1000000", *arguments]
    with run_command(command, storage, environment) as run:
        yield run


@contextmanager
def run_command(
    command: Sequence[str], storage: Path, environment: Mapping[str, str] = LOCAL
) -> Iterator[ElasticRun]:
    """Run a command that trains the run `RUN_NAME` in a storage, until the block ends."""
    storage.mkdir(parents=True, exist_ok=True)
    with running("elastic", command, storage, environment) as program:
        yield ElasticRun(program, RunFolder.of(storage, RUN_NAME))
