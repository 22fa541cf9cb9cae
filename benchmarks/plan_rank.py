"""One process of `plan.py`: it calibrates with the others, then trains each layout in turn."""

from __future__ import annotations

import gc
import json
import time
from dataclasses import replace
from datetime import timedelta
from pathlib import Path

import torch
from layouts_rank import build_stepper
from plan_cases import MODELS, NUM_WORKERS, program_of

from actors.distributed.backends.backend import backend_of
from actors.distributed.meshes import form_groups
from actors.runtime.machine import keep_freed_memory
from elastic.geometry.assignment import Assignment
from elastic.geometry.layout import Layout
from elastic.protocol.wire import encode
from pipelines.plan.calibration import MeasuringProcesses, measure_machine, measure_model
from pipelines.run.program import TrainingProgram

CPU = torch.device("cpu")
TIMEOUT = timedelta(seconds=600)
NUM_FIRST = 2
NUM_STEPS = 7
"""Steps of a layout in each sweep, after the first ones."""


def run_rank(world_rank: int, folder: Path, num_sweeps: int, models: tuple[str, ...]) -> None:
    """Calibrate, and train all cases; world rank 0 writes `result.json`."""
    torch.set_num_threads(1)
    keep_freed_memory()
    processes = MeasuringProcesses(world_rank, NUM_WORKERS, folder)
    result = {}
    began = time.perf_counter()
    machine = measure_machine(processes, CPU)
    machine_s = time.perf_counter() - began
    for model in models:
        program = program_of(model)
        began = time.perf_counter()
        axes = {(Layout.parse(text).tp, Layout.parse(text).cp) for text in MODELS[model]}
        shapes = [Layout(tp=tp, cp=cp) for tp, cp in sorted(axes - {(1, 1)})]
        times = measure_model(processes, program, shapes)
        trial_s = time.perf_counter() - began
        sweeps = [measure_sweep(processes, program, model) for _ in range(num_sweeps)]
        result[model] = {
            "calibration_s": [machine_s, trial_s],
            "times": encode(replace(times, machine=machine)),
            "steps_s": [dict(zip(MODELS[model], sweep, strict=True)) for sweep in sweeps],
        }
    if world_rank == 0:
        (folder / "result.json").write_text(json.dumps(result))


def measure_sweep(
    processes: MeasuringProcesses, program: TrainingProgram, model: str
) -> list[list[float]]:
    """The seconds of each step under each layout."""
    return [measure_layout(processes, program, Layout.parse(text)) for text in MODELS[model]]


def measure_layout(
    processes: MeasuringProcesses, program: TrainingProgram, layout: Layout
) -> list[float]:
    with processes.world(layout.num_workers, CPU) as is_in:
        if not is_in:
            return []
        members = tuple(f"worker {rank}" for rank in range(layout.num_workers))
        assignment = Assignment(1, layout, members)
        backend = backend_of("cpu")
        groups = form_groups(backend, assignment, processes.world_rank, program.device, TIMEOUT)
        stepper = build_stepper(program, groups)
        records = [stepper.step()[0] for _ in range(NUM_FIRST + NUM_STEPS)]
        del stepper
        gc.collect()
        return [record.step_s or 0.0 for record in records[NUM_FIRST:]]
