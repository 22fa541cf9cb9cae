"""One process of `plan.py`: it calibrates with the others, then trains each layout in turn."""

from __future__ import annotations

import gc
import json
import os
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import asdict, replace
from datetime import timedelta
from pathlib import Path

import torch
import torch.distributed as dist
from layouts_rank import build_stepper
from plan_cases import MODELS, NUM_WORKERS, program_of

from actors.distributed.backends.backend import backend_of, dissolve_groups, init_world
from actors.distributed.collective_trial import collective_times, interference
from actors.distributed.meshes import form_groups
from actors.runtime.machine import flush_denormals, keep_freed_memory
from elastic.geometry.assignment import Assignment
from elastic.geometry.layout import Layout
from elastic.geometry.training_job import CollectiveTimes, Machine, TimeFacts
from pipelines.run.program import TrainingProgram
from pipelines.training.replica.time_trial import time_facts

TIMEOUT = timedelta(seconds=600)
NUM_FIRST = 2
NUM_STEPS = 7
"""Steps of a layout in each sweep, after the first ones."""


class Gang:
    """The processes of the benchmark, and the worlds that some of them form in turn."""

    def __init__(self, world_rank: int, folder: Path) -> None:
        self.world_rank = world_rank
        self.file = dist.FileStore(str(folder / "store"), NUM_WORKERS)
        self.number = 0

    def meet(self) -> None:
        """Wait until all processes are here."""
        self.number += 1
        store = dist.PrefixStore(f"meet {self.number}", self.file)
        store.set(str(self.world_rank), "here")
        store.wait([str(rank) for rank in range(NUM_WORKERS)], TIMEOUT)

    @contextmanager
    def world(self, num_ranks: int) -> Iterator[bool]:
        """A world of the first processes; whether this process is one of them."""
        self.meet()
        is_in = self.world_rank < num_ranks
        backend = backend_of("cpu")
        if is_in:
            store = dist.PrefixStore(f"world {self.number}", self.file)
            init_world(backend, store, self.world_rank, num_ranks, TIMEOUT)
        yield is_in
        if is_in:
            dist.barrier()
            dissolve_groups(backend)


def run_rank(world_rank: int, folder: Path, num_sweeps: int, models: tuple[str, ...]) -> None:
    """Calibrate, and train all cases; world rank 0 writes `result.json`."""
    torch.set_num_threads(1)
    keep_freed_memory()
    gang = Gang(world_rank, folder)
    result = {}
    began = time.perf_counter()
    machine = measure_machine(gang)
    machine_s = time.perf_counter() - began
    for model in models:
        program = program_of(model)
        times, trial_s = measure_model(gang, program, model)
        sweeps = [measure_sweep(gang, program, model) for _ in range(num_sweeps)]
        result[model] = {
            "calibration_s": [machine_s, trial_s],
            "times": asdict(replace(times, machine=machine)),
            "steps_s": [dict(zip(MODELS[model], sweep, strict=True)) for sweep in sweeps],
        }
    if world_rank == 0:
        (folder / "result.json").write_text(json.dumps(result))


def measure_machine(gang: Gang) -> Machine:
    """The tables of collectives for each number of processes, and what compute hides of them."""
    device = torch.device("cpu")
    tables: list[CollectiveTimes] = []
    shares: list[float] = []
    for num_ranks in range(2, NUM_WORKERS + 1):
        with gang.world(num_ranks) as is_in:
            if is_in:
                world = dist.group.WORLD
                assert world is not None
                tables += collective_times(world, device)
                shares.append(interference(world, device))
    cores = len(os.sched_getaffinity(0))
    return Machine(cores, max(shares, default=1.0), collectives=tuple(tables))


def measure_model(gang: Gang, program: TrainingProgram, model: str) -> tuple[TimeFacts, float]:
    """The time trial, by as many processes at once as there are cores."""
    gang.meet()
    began = time.perf_counter()
    times = TimeFacts()
    axes = {(Layout.parse(text).tp, Layout.parse(text).cp) for text in MODELS[model]}
    layouts = [Layout(tp=tp, cp=cp) for tp, cp in sorted(axes - {(1, 1)})]
    if gang.world_rank < len(os.sched_getaffinity(0)):
        flush_denormals()
        times = time_facts(program.workload, program.settings, program.device, layouts)
    gang.meet()
    return times, time.perf_counter() - began


def measure_sweep(gang: Gang, program: TrainingProgram, model: str) -> list[list[float]]:
    """The seconds of each step under each layout."""
    return [measure_layout(gang, program, Layout.parse(text)) for text in MODELS[model]]


def measure_layout(gang: Gang, program: TrainingProgram, layout: Layout) -> list[float]:
    with gang.world(layout.num_workers) as is_in:
        if not is_in:
            return []
        members = tuple(f"worker {rank}" for rank in range(layout.num_workers))
        assignment = Assignment(1, layout, members)
        backend = backend_of("cpu")
        groups = form_groups(backend, assignment, gang.world_rank, program.device, TIMEOUT)
        stepper = build_stepper(program, groups)
        records = [stepper.step()[0] for _ in range(NUM_FIRST + NUM_STEPS)]
        del stepper
        gc.collect()
        return [record.step_s or 0.0 for record in records[NUM_FIRST:]]
