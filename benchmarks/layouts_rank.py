"""One process of `layouts.py`: our step and a bare loop train in alternating blocks.

Both run in the same processes, so that other load on the machine affects both equally.
"""

from __future__ import annotations

import gc
import json
import sys
import time
from collections.abc import Callable
from dataclasses import asdict, dataclass
from datetime import timedelta
from importlib import import_module
from pathlib import Path

import torch
import torch.distributed as dist

from actors.distributed.backends.backend import backend_of
from actors.distributed.meshes import form_groups
from actors.runtime.compute_time import compute_times
from actors.runtime.faults import FaultInjector
from actors.runtime.interruption import Interruption
from actors.runtime.machine import keep_freed_memory
from actors.runtime.program import Groups
from actors.snapshots.worker_snapshots import Snapshots
from actors.storage.storage import open_storage
from actors.worker.part_writer import PartWriter
from actors.worker.step_protocol import KeptRecords, Stepper
from actors.worker.step_timer import StepTimer
from elastic.geometry.assignment import Assignment
from elastic.geometry.layout import Layout
from elastic.geometry.shard_map import region_of
from pipelines.run.program import TrainingProgram
from pipelines.settings import TrainSettings

sys.path.append(str(Path(__file__).parent / "peers"))

TIMEOUT = timedelta(seconds=120)
NUM_COMPARED = 10
"""The number of steps whose losses are compared; they also warm up both systems."""


@dataclass(frozen=True)
class Case:
    """A layout and the bare loop for comparison."""

    layout: str
    script: str
    settings: TrainSettings
    num_blocks: int
    num_steps: int


@dataclass
class Measurement:
    """The results of world rank 0: seconds of a step of ours and of the bare loop by pair of
    blocks, and the losses of the first steps of both."""

    pairs_s: list[tuple[float, float]]
    losses: list[tuple[float, float]]


def run_rank(world_rank: int, cases: tuple[Case, ...], folder: Path) -> None:
    """Run all cases in one of the processes."""
    torch.set_num_threads(1)
    keep_freed_memory()  # as our workers do; the bare loop has it too
    file = dist.FileStore(str(folder / "store"), 2)
    for case in cases:
        layout = Layout.parse(case.layout)
        store = dist.PrefixStore(case.layout, file)
        dist.init_process_group(
            "gloo", store=store, world_size=layout.num_workers, rank=world_rank, timeout=TIMEOUT
        )
        measurement = measure(case, layout, world_rank)
        if world_rank == 0:
            (folder / f"{case.layout}.json").write_text(json.dumps(asdict(measurement)))
        dist.barrier()
        dist.destroy_process_group()


def measure(case: Case, layout: Layout, world_rank: int) -> Measurement:
    program = TrainingProgram(case.settings.model_dump(mode="json"), device="cpu")
    members = tuple(f"w{rank}" for rank in range(layout.num_workers))
    assignment = Assignment(1, layout, members)
    groups = form_groups(backend_of("cpu"), assignment, world_rank, program.device, TIMEOUT)
    sides = build_product_step(program, groups), build_bare_step(case, program, layout)
    losses = [[step_of(step) for step in range(1, NUM_COMPARED + 1)] for step_of in sides]
    gc.collect()
    gc.freeze()
    step, pairs_s = NUM_COMPARED, []
    for number in range(case.num_blocks):
        times_s = [0.0, 0.0]
        for side in (0, 1) if number % 2 else (1, 0):
            times_s[side] = time_block(sides[side], step, case.num_steps)
        step += case.num_steps
        pairs_s.append((times_s[0], times_s[1]))
    return Measurement(pairs_s, list(zip(*losses, strict=True)))


def build_product_step(program: TrainingProgram, groups: Groups) -> Callable[[int], float]:
    """Our step, which returns the loss."""
    stepper = build_stepper(program, groups)
    return lambda step: stepper.step()[0].loss or 0.0


def build_stepper(program: TrainingProgram, groups: Groups) -> Stepper:
    """Our step: compute, vote, apply."""
    replica = program.build(groups)
    regions = {spec: region_of(spec, groups.layout, groups.place) for spec in program.specs()}
    replica.adopt({s.name: program.initial(s, r) for s, r in regions.items() if r is not None})
    interruption = Interruption()
    interruption.running_generation = groups.assignment.generation
    snapshots = Snapshots("benchmark", "", (), every=1, secret=b"")
    no_faults = FaultInjector("benchmark")
    writer = PartWriter("benchmark", open_storage("."), program, no_faults, lambda event: None)
    untimed = compute_times(0, program.device)
    timer = StepTimer(program.device, lambda: program.waits)
    doing = (interruption, no_faults, snapshots, writer, untimed)
    return Stepper(groups, replica, 0, *doing, KeptRecords(), timer)


def build_bare_step(case: Case, program: TrainingProgram, layout: Layout) -> Callable[[int], float]:
    job = import_module("bare").Job(program.settings, program.workload, layout)
    step_of: Callable[[int], float] = import_module(case.script).make_step(job)
    return step_of


def time_block(step_of: Callable[[int], float], after: int, num_steps: int) -> float:
    """The mean seconds of a step in a block, over all processes."""
    dist.barrier()
    began = time.perf_counter()
    for step in range(after + 1, after + num_steps + 1):
        step_of(step)
    dist.barrier()
    return (time.perf_counter() - began) / num_steps
