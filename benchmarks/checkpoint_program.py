"""The training program of `checkpoint.py`: it notes for how long checkpoints stop the training
thread, ours and the synchronous ones of torch.distributed.checkpoint (DCP) that it makes between.
"""

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
"""Steps from one of ours to the next; DCP's are in the middle."""
NOTES = "ELASTIC_BENCHMARK_NOTES"
"""The variable with the folder for what is noted and for DCP's files."""


class TimedProgram(TrainingProgram):
    """As the program that it times, in a worker process of its own."""

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
    """Sums the pieces of each stall, and writes it down when its last piece is over."""

    def __init__(self, file: Path) -> None:
        self._file = file
        self._seconds: float | None = None

    def timed(self, whose: str, method: Callable[..., Any], begins: bool = False) -> Any:
        """The same method; a stall begins with one, and is over with the next other."""

        def replacement(*arguments: Any) -> Any:
            if not begins and self._seconds is None:
                return method(*arguments)
            began = time.perf_counter()
            result = method(*arguments)
            self._seconds = (self._seconds or 0.0) + time.perf_counter() - began
            if not begins:
                self.note(whose, self._seconds)
                self._seconds = None
            return result

        return replacement

    @contextmanager
    def timing(self, whose: str) -> Iterator[None]:
        began = time.perf_counter()
        yield
        self.note(whose, time.perf_counter() - began)

    def note(self, whose: str, seconds: float) -> None:
        with open(self._file, "a") as file:
            file.write(json.dumps({"whose": whose, "seconds": seconds}) + "\n")


class _SavingReplica(ShardedReplica):
    """Saves all of the state by DCP before it computes some of its steps."""

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
        groups, held = self._groups_of_run, self.tensors()
        parts = {}
        for spec in self._specs:
            region = region_of(spec, groups.layout, groups.place)
            if region is not None:
                parts[spec.name] = Part.of(held[spec.name], region, spec.shape)
        return parts
