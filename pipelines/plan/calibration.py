"""Calibration: what a machine takes for a recipe, measured by processes that meet as workers do.

Groups of two processes and more measure each kind of collective at six sizes, and what compute
hides of one. Then as many processes as there are devices train a few steps side by side, of the
whole model and cut in each way, with collectives that do nothing.
"""

from __future__ import annotations

import json
import os
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from datetime import timedelta
from hashlib import blake2b
from multiprocessing import set_forkserver_preload
from pathlib import Path
from tempfile import TemporaryDirectory

import torch
import torch.distributed as dist
from torch.multiprocessing import (
    ProcessExitedException,
    ProcessRaisedException,
    start_processes,
)

from actors.distributed.backends.backend import backend_of, dissolve_groups, init_world
from actors.distributed.collective_trial import collective_times, interference
from actors.health.device_speed import processor_of
from actors.runtime.code_digest import digest_of_program
from actors.runtime.machine import flush_denormals, keep_freed_memory
from elastic.geometry.layout import Layout
from elastic.geometry.training_job import CollectiveTimes, Machine, TimeFacts
from elastic.protocol.wire import decode, encode
from pipelines.errors import UserError
from pipelines.plan.planned_program import planned_program
from pipelines.run.program import TrainingProgram
from pipelines.training.replica.time_trial import time_facts

MOST_ON_CPU = 4
"""Processes that measure a machine without a GPU."""
TIMEOUT = timedelta(seconds=600)
RESULT = "times.json"
MEASURED_SETTINGS = (
    "model",
    "data",
    "microbatch",
    "dtype",
    "schedule",
    "offload",
    "activation_checkpointing",
    "compile",
    "optimizer",
    "lora",
)
"""The settings by which a recipe takes longer or shorter."""


@dataclass(frozen=True)
class Measured:
    """What was measured of a recipe: `times`, on a machine in words, for a program's digest."""

    machine: str
    digest: str
    num_processes: int
    times: TimeFacts


class MeasuringProcesses:
    """Processes of one machine, and the worlds that some of them form in turn."""

    def __init__(self, world_rank: int, num_processes: int, folder: Path) -> None:
        self.world_rank, self.num_processes = world_rank, num_processes
        self.file = dist.FileStore(str(folder / "store"), num_processes)
        self.number = self.num_exchanges = 0

    def meet(self) -> None:
        """Wait until all processes are here."""
        self.number += 1
        store = dist.PrefixStore(f"meet {self.number}", self.file)
        store.set(str(self.world_rank), "here")
        store.wait([str(rank) for rank in range(self.num_processes)], TIMEOUT)

    def slowest(self, times_s: list[float], num_processes: int) -> list[float]:
        """Element by element, the most of the first processes, each of which calls this."""
        self.num_exchanges += 1
        store = dist.PrefixStore(f"times {self.num_exchanges}", self.file)
        store.set(str(self.world_rank), json.dumps(times_s))
        ranks = range(num_processes)
        store.wait([str(rank) for rank in ranks], TIMEOUT)
        by_rank = [json.loads(store.get(str(rank))) for rank in ranks]
        return [max(each) for each in zip(*by_rank, strict=True)]

    @contextmanager
    def world(self, num_ranks: int, device: torch.device) -> Iterator[bool]:
        """A world of the first processes; whether this process is one of them."""
        self.meet()
        is_in = self.world_rank < num_ranks
        backend = backend_of(device.type)
        if is_in:
            store = dist.PrefixStore(f"world {self.number}", self.file)
            init_world(backend, store, self.world_rank, num_ranks, TIMEOUT)
        yield is_in
        if is_in:
            dist.barrier()
            dissolve_groups(backend)


def measured_at(
    path: Path, recipe: str, changes: tuple[str, ...], digest: str, layouts: Sequence[Layout]
) -> tuple[Measured, float]:
    """What the file has of this recipe, else what is measured now and written to it; and the
    seconds that this took.

    `layouts` are the model layouts to try. Raises `UserError` for a file of another recipe, and if
    the recipe cannot be measured.
    """
    if path.exists():
        measured = _read(path)
        if measured.digest != digest:
            raise UserError(
                f"--measured {path}: was measured for another recipe, or before it changed; name "
                "another file, or delete this one"
            )
        return measured, 0.0
    began = time.perf_counter()
    num_processes = num_measuring()
    shapes = [layout for layout in layouts if layout.num_workers <= num_processes]
    with TemporaryDirectory() as folder:
        set_forkserver_preload(["pipelines.run.program"])
        given = (num_processes, Path(folder), recipe, changes, shapes)
        try:
            start_processes(_run_rank, given, num_processes, start_method="forkserver")
        except (ProcessExitedException, ProcessRaisedException) as error:
            last_line = str(error).strip().splitlines()[-1]
            raise UserError(f"--measured {path}: the trial failed: {last_line}") from error
        times = decode(TimeFacts, json.loads((Path(folder) / RESULT).read_text()))
    measured = Measured(machine_name(), digest, num_processes, times)
    path.write_text(json.dumps(encode(measured)))
    return measured, time.perf_counter() - began


def measured_digest(program: TrainingProgram) -> str:
    """What a measurement depends on: the sources, the tensors, and some settings."""
    settings = program.settings.model_dump(mode="json", include=set(MEASURED_SETTINGS))
    key = json.dumps([digest_of_program(program.specs()), settings], sort_keys=True)
    return blake2b(key.encode(), digest_size=16).hexdigest()


def num_measuring() -> int:
    """How many processes measure this machine: one for each GPU, else up to `MOST_ON_CPU`."""
    if torch.cuda.is_available():
        return torch.cuda.device_count()
    return max(2, min(MOST_ON_CPU, len(os.sched_getaffinity(0))))


def machine_name() -> str:
    """The devices of this machine in a few words."""
    if torch.cuda.is_available():
        return f"{torch.cuda.device_count()} x {torch.cuda.get_device_name(0)}"
    return f"{len(os.sched_getaffinity(0))} cores of {processor_of(torch.device('cpu'))}"


def measure_machine(processes: MeasuringProcesses, device: torch.device) -> Machine:
    """The tables of collectives for each number of processes, and what compute hides of them."""
    tables: list[CollectiveTimes] = []
    shares: list[float] = []
    for num_ranks in range(2, processes.num_processes + 1):
        with processes.world(num_ranks, device) as is_in:
            if is_in:
                world = dist.group.WORLD
                assert world is not None
                tables += collective_times(world, device)
                shares.append(interference(world, device))
    cores = len(os.sched_getaffinity(0)) if device.type == "cpu" else 0
    return Machine(cores, max(shares, default=1.0), collectives=tuple(tables))


def measure_model(
    processes: MeasuringProcesses, program: TrainingProgram, layouts: Sequence[Layout]
) -> TimeFacts:
    """The time trial of a model, whole and under these model layouts, by as many processes at once
    as there are devices."""
    processes.meet()
    times = TimeFacts()
    num_devices = processes.num_processes
    if program.device.type == "cpu":
        num_devices = len(os.sched_getaffinity(0))
        flush_denormals()
    if processes.world_rank < num_devices:
        times = time_facts(
            program.workload,
            program.settings,
            program.device,
            layouts,
            lambda times_s: processes.slowest(times_s, min(num_devices, processes.num_processes)),
        )
    processes.meet()
    return times


def _run_rank(
    world_rank: int,
    num_processes: int,
    folder: Path,
    recipe: str,
    changes: tuple[str, ...],
    layouts: Sequence[Layout],
) -> None:
    """One process: it measures with the others; world rank 0 writes the result."""
    torch.set_num_threads(1)
    keep_freed_memory()
    device = torch.device("cpu")
    if torch.cuda.is_available():
        device = torch.device("cuda", world_rank)
        torch.cuda.set_device(device)
    program = planned_program(recipe, changes, str(device))
    processes = MeasuringProcesses(world_rank, num_processes, folder)
    machine = measure_machine(processes, device)
    times = replace(measure_model(processes, program, layouts), machine=machine)
    if world_rank == 0:
        (folder / RESULT).write_text(json.dumps(encode(times)))


def _read(path: Path) -> Measured:
    try:
        measured = decode(Measured, json.loads(path.read_text()))
    except (OSError, ValueError, TypeError, AttributeError) as error:
        raise UserError(f"--measured {path}: cannot be read: {error}") from None
    assert isinstance(measured, Measured)
    return measured
