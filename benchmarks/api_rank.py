"""One process of `api.py`: each form and the bare loop train in alternating blocks."""

from __future__ import annotations

import gc
import json
import runpy
from collections.abc import Callable
from importlib import import_module
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import torch
import torch.distributed as dist
from layouts_rank import NUM_COMPARED, TIMEOUT, build_product_step, time_block
from torch.utils.data import DataLoader

from actors.distributed.backends.backend import backend_of
from actors.distributed.meshes import form_groups
from actors.runtime.machine import keep_freed_memory
from elastic.geometry.assignment import Assignment
from elastic.geometry.layout import Layout
from pipelines.loop import Run
from pipelines.run.program import TrainingProgram
from pipelines.run.recipes import load

CUSTOM_MODEL = Path(__file__).parents[1] / "examples" / "custom_model.py"
FORMS = ("recipe", "imperative")


def run_rank(
    world_rank: int,
    num_ranks: int,
    num_blocks: int,
    num_steps: int,
    batch: int,
    microbatch: int,
    folder: Path,
) -> None:
    """Train all forms in alternating blocks. World rank 0 writes `results.json`: the seconds of a
    step of each form and of the bare loop by block, and the losses of the first steps."""
    torch.set_num_threads(1)
    keep_freed_memory()  # as our workers do; the bare loop has it too
    store = dist.FileStore(str(folder / "store"), num_ranks)
    options = {"world_size": num_ranks, "rank": world_rank, "timeout": TIMEOUT}
    dist.init_process_group("gloo", store=store, **options)
    custom_model = SimpleNamespace(**runpy.run_path(str(CUSTOM_MODEL)))
    sides = build_sides(custom_model, num_ranks, world_rank, batch, microbatch)
    losses = {
        name: [step_of(step) for step in range(1, NUM_COMPARED + 1)]
        for name, step_of in sides.items()
    }
    gc.collect()
    gc.freeze()
    step, times_s = NUM_COMPARED, []
    for number in range(num_blocks):
        turn = number % len(sides)
        names = [*list(sides)[turn:], *list(sides)[:turn]]
        times_s.append({name: time_block(sides[name], step, num_steps) for name in names})
        step += num_steps
    if world_rank == 0:
        (folder / "results.json").write_text(json.dumps({"times_s": times_s, "losses": losses}))
    dist.barrier()
    dist.destroy_process_group()


def build_sides(
    custom_model: Any, num_ranks: int, world_rank: int, batch: int, microbatch: int
) -> dict[str, Callable[[int], float]]:
    def train(run: Run) -> None:
        torch.manual_seed(0)
        model = custom_model.Net()
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9, weight_decay=1e-4)
        scheduler = torch.optim.lr_scheduler.LambdaLR(
            optimizer, lambda step: min(1.0, (step + 1) / 10)
        )
        loader = DataLoader(custom_model.Stripes(2048), microbatch, shuffle=True)
        model, optimizer, scheduler, _ = run.prepare(model, optimizer, scheduler, loader)
        for step in run.steps(10**6, microbatches=batch // microbatch):
            with step:
                for data in step.batches():
                    step.backward(custom_model.loss(model, data))
                optimizer.step()
                scheduler.step()

    recipe = load(custom_model.recipe)
    changes = {"batch": batch, "microbatch": microbatch, "eval_every": 0, "steps": 10**6}
    settings = recipe.settings.model_copy(update=changes)
    members = tuple(f"w{rank}" for rank in range(num_ranks))
    assignment = Assignment(1, Layout(dp=num_ranks), members)
    groups = form_groups(backend_of("cpu"), assignment, world_rank, torch.device("cpu"), TIMEOUT)
    sides = {}
    for name, form in zip(FORMS, (recipe, load(train)), strict=True):
        program = TrainingProgram(settings.model_dump(mode="json"), device="cpu", recipe=form)
        sides[name] = build_product_step(program, groups)
    bare = import_module("bare_own")
    sides["bare"] = bare.make_step(custom_model, batch // microbatch, microbatch)
    return sides
