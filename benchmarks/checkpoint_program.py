"""The training program of `checkpoint.py`: it measures how long checkpoints block the training
thread, ours and the synchronous ones of torch.distributed.checkpoint (DCP) that it adds."""

from __future__ import annotations

import json
import os
import shutil
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
from dcp_regions import Part, save

from actors.runtime.program import Groups, Interrupt
from actors.worker.part_writer import PartWriter
from actors.worker.trainer import Trainer
from elastic.geometry.shard_map import region_of
from pipelines.run.program import TrainingProgram
from pipelines.training.replica.replica import ShardedReplica

EVERY = 4
"""Steps between our checkpoints; DCP's are in the middle."""
NOTES = "ELASTIC_BENCHMARK_NOTES"
"""The environment variable with the folder for measurements and for DCP's files."""


class TimedProgram(TrainingProgram):
    """The usual program with timers around its checkpoints, in a worker process."""

    def __init__(self, *arguments: Any, **settings: Any) -> None:
        super().__init__(*arguments, **settings)
        self._folder = Path(os.environ[NOTES])
        stalls = Stalls(self._folder / f"stalls-{os.getpid()}.jsonl")
        Trainer._save = stalls.timed("ours", Trainer._save, begins=True)
        PartWriter.await_copied = stalls.timed("ours", PartWriter.await_copied)
        self._stalls = stalls

    def build(self, groups: Groups) -> ShardedReplica:
        return _SavingReplica(self, groups, self._folder, self._stalls)


class Stalls:
    """Sums the parts of each stall, and writes the sum to a file after the last part."""

    def __init__(self, file: Path) -> None:
        self._file = file
        self._seconds: float | None = None

    def timed(self, kind: str, method: Callable[..., Any], begins: bool = False) -> Any:
        """The method with a timer. A stall starts in a method with `begins`, and ends after the
        next timed method without."""

        def replacement(*arguments: Any) -> Any:
            if not begins and self._seconds is None:
                return method(*arguments)
            began = time.perf_counter()
            result = method(*arguments)
            self._seconds = (self._seconds or 0.0) + time.perf_counter() - began
            if not begins:
                self.note(kind, self._seconds)
                self._seconds = None
            return result

        return replacement

    @contextmanager
    def timing(self, kind: str) -> Iterator[None]:
        began = time.perf_counter()
        yield
        self.note(kind, time.perf_counter() - began)

    def note(self, kind: str, seconds: float) -> None:
        with open(self._file, "a") as file:
            file.write(json.dumps({"kind": kind, "seconds": seconds}) + "\n")


class _SavingReplica(ShardedReplica):
    """Saves the full state with DCP before some steps."""

    def __init__(self, program: TimedProgram, groups: Groups, folder: Path, stalls: Stalls) -> None:
        super().__init__(program.workload, program.settings, groups)
        self._specs = program.specs()
        self._groups_of_run = groups
        self._folder = folder / "dcp"
        self._stalls = stalls

    def compute(
        self, step: int, interrupt: Interrupt, skipped_batches: tuple[int, ...] = ()
    ) -> torch.Tensor:
        if step % EVERY == EVERY // 2:
            with self._stalls.timing("dcp"):
                save(self._folder, self._parts())
            if self._groups_of_run.world_rank == 0:
                shutil.rmtree(self._folder)
        return super().compute(step, interrupt, skipped_batches)

    def _parts(self) -> dict[str, Part]:
        groups, tensors = self._groups_of_run, self.tensors()
        parts = {}
        for spec in self._specs:
            region = region_of(spec, groups.layout, groups.place)
            if region is not None:
                parts[spec.name] = Part.from_region(tensors[spec.name], region, spec.shape)
        return parts
