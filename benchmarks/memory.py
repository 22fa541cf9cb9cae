"""Benchmark of a worker's memory at each ZeRO stage, by torch's storages, against the formula."""

from __future__ import annotations

import sys
import tempfile
from dataclasses import replace
from datetime import timedelta
from multiprocessing import set_forkserver_preload
from pathlib import Path
from typing import NamedTuple

import torch
import torch.distributed as dist
from report import Must, conclude, parser, show_table
from torch.multiprocessing import start_processes

from actors.distributed.backends.backend import backend_of
from actors.distributed.meshes import form_groups
from actors.runtime.program import StateBytes
from elastic.geometry.assignment import Assignment
from elastic.geometry.layout import Layout
from elastic.geometry.shard_map import region_of
from elastic.geometry.zero import STAGES
from elastic.planner.footprint import Footprint
from pipelines.run.program import TrainingProgram
from pipelines.run.recipes import byte_lm
from pipelines.settings import DataSettings

NUM_WORKERS = 4
LAYOUTS = [Layout(fsdp=4, zero=zero) for zero in STAGES]
LAYOUTS += [Layout(dp=2, fsdp=2, zero=zero) for zero in STAGES]
FOOTPRINTS = (Footprint(4, 0, 0), Footprint(0, 4, 0), Footprint(0, 0, 8))
"""Bytes per parameter in float32 with Adam: parameters, gradients, optimizer."""
SETTINGS = byte_lm().model_copy(
    update={"data": DataSettings(source="random", seq_len=32), "batch": 8, "eval_every": 0}
)


class Measured(NamedTuple):
    """The bytes of one worker right after the gradients are reduced."""

    layout: Layout
    sizes: StateBytes

    @property
    def parts(self) -> tuple[int, int, int]:
        return self.sizes.param_bytes, self.sizes.grad_bytes, self.sizes.optimizer_bytes

    def formula(self, num_params: int) -> list[float]:
        layout = self.layout
        return [num_params * part.divided(layout.zero, layout.fsdp) for part in FOOTPRINTS]


def run_rank(world_rank: int, folder: Path) -> None:
    """Run a step's forward and backward under each layout, as one of the workers."""
    torch.set_num_threads(1)
    file = dist.FileStore(str(folder / "store"), NUM_WORKERS)
    program = TrainingProgram(SETTINGS.model_dump(mode="json"), device="cpu")
    for layout in LAYOUTS:
        store = dist.PrefixStore(str(layout), file)
        dist.init_process_group("gloo", store=store, world_size=NUM_WORKERS, rank=world_rank)
        assignment = Assignment(1, layout, tuple(f"w{i}" for i in range(NUM_WORKERS)))
        timeout = timedelta(seconds=300)
        groups = form_groups(backend_of("cpu"), assignment, world_rank, program.device, timeout)
        replica = program.build(groups)
        regions = {spec: region_of(spec, layout, groups.place) for spec in program.specs()}
        replica.adopt({s.name: program.initial(s, r) for s, r in regions.items() if r is not None})
        replica.compute(1, _interrupt_never)
        torch.save(replica.state_bytes(), folder / f"{layout}-{world_rank}.pt")
        del replica
        dist.destroy_process_group()


def measure() -> list[Measured]:
    """For each layout the worker with the most bytes."""
    with tempfile.TemporaryDirectory() as folder:
        set_forkserver_preload(["pipelines.run.program"])
        start_processes(run_rank, (Path(folder),), NUM_WORKERS, start_method="forkserver")
        largest = []
        for layout in LAYOUTS:
            files = [Path(folder) / f"{layout}-{rank}.pt" for rank in range(NUM_WORKERS)]
            workers = [Measured(layout, torch.load(file, weights_only=False)) for file in files]
            largest.append(max(workers, key=lambda worker: sum(worker.parts)))
        return largest


def main() -> int:
    options = parser(__doc__.splitlines()[0]).parse_args()
    program = TrainingProgram(SETTINGS.model_dump(mode="json"), device="cpu")
    specs = [spec for spec in program.specs() if spec.kind == "parameter"]
    num_params = sum(spec.num_bytes for spec in specs) // 4
    rows, musts = [], []
    for measured in measure():
        formula = measured.formula(num_params)
        pairs = [*zip(measured.parts, formula, strict=True), (sum(measured.parts), sum(formula))]
        rows.append([_name(measured.layout), *(_cell(*pair) for pair in pairs)])
        deviation = max(abs(a / b - 1) for a, b in zip(measured.parts, formula, strict=True))
        musts.append(Must(f"{_name(measured.layout)}: off the formula", deviation * 100, 5, "%"))
    columns = ["layout", "parameters", "gradients", "optimizer", "all"]
    show_table(f"MB a worker, measured (formula): {num_params:,} parameters", columns, rows)
    return conclude(musts, options.check)


def _name(layout: Layout) -> str:
    return f"{replace(layout, zero=3)},zero={layout.zero}"


def _cell(measured: float, formula: float) -> str:
    return f"{measured / 1e6:.3f} ({formula / 1e6:.3f})"


def _interrupt_never() -> None:
    """The `interrupt` that never raises."""


if __name__ == "__main__":
    sys.exit(main())
