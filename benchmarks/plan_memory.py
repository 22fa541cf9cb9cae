"""Benchmark of the memory model of `elastic plan` against the live bytes of real steps."""

from __future__ import annotations

import sys
import tempfile
from dataclasses import dataclass
from datetime import timedelta
from multiprocessing import set_forkserver_preload
from pathlib import Path
from statistics import median
from typing import Any
from weakref import ref

import torch
import torch.distributed as dist
from report import Must, conclude, parser, show_table
from torch import Tensor
from torch.multiprocessing import start_processes

from actors.distributed.backends.backend import backend_of
from actors.distributed.meshes import form_groups
from actors.distributed.torch_private import storage_key
from elastic.geometry.assignment import Assignment
from elastic.geometry.layout import Layout
from elastic.geometry.shard_map import region_of
from elastic.planner.models.worker_memory import worker_memory
from elastic.protocol.votes import Vote
from pipelines.run.job import job_of
from pipelines.run.program import TrainingProgram
from pipelines.run.recipes import load
from pipelines.settings import (
    DataSettings,
    HuggingFaceSettings,
    TrainSettings,
    TransformerSettings,
)
from pipelines.settings.recipe import Recipe
from pipelines.training.replica.memory_trial import LiveBytes

NUM_WORKERS = 4
NUM_STEPS = 1
NET = f"{Path(__file__).parents[1] / 'examples' / 'custom_model.py'}:recipe"
COMMON = {
    "data": DataSettings(source="random", seq_len=64),
    "batch": 8,
    "microbatch": 2,
    "pass_samples": 2,
    "eval_every": 0,
}
LLAMA = {
    "model_type": "llama",
    "hidden_size": 128,
    "intermediate_size": 384,
    "num_hidden_layers": 4,
    "num_attention_heads": 4,
    "num_key_value_heads": 4,
    "vocab_size": 512,
    "max_position_embeddings": 256,
    "tie_word_embeddings": False,
}
DATA_LAYOUTS = (
    "dp=1",
    "dp=2",
    "dp=4",
    "fsdp=2",
    "fsdp=4",
    "fsdp=4,zero=1",
    "fsdp=4,zero=2",
    "fsdp=2,zero=1",
)
MODEL_LAYOUTS = ("tp=2", "pp=2", "pp=2,dp=2", "fsdp=2,tp=2", "cp=2")


@dataclass(frozen=True)
class Case:
    """A model with some settings under one layout."""

    model: str
    layout: Layout
    changes: tuple[tuple[str, Any], ...] = ()

    @property
    def name(self) -> str:
        changes = "".join(f" {value}" for _, value in self.changes)
        return f"{self.model}{changes}"

    def program(self) -> TrainingProgram:
        if self.model == "conv net":
            recipe = load(NET)
            assert isinstance(recipe, Recipe)
            changes = {"batch": 32, "eval_every": 0, **dict(self.changes)}
            settings = recipe.settings.model_copy(update=changes)
            return TrainingProgram(settings.model_dump(mode="json"), device="cpu", recipe=NET)
        model = (
            HuggingFaceSettings(config=LLAMA)
            if self.model == "llama"
            else TransformerSettings(dim=128, num_layers=6, num_heads=4, hidden_dim=384)
        )
        settings = TrainSettings(**{**COMMON, "model": model, **dict(self.changes)})
        return TrainingProgram(settings.model_dump(mode="json"), device="cpu")


def cases() -> list[Case]:
    data = [Layout.parse(text) for text in DATA_LAYOUTS]
    model = [Layout.parse(text) for text in MODEL_LAYOUTS]
    full, half = ("activation_checkpointing", "full"), ("dtype", "bfloat16")
    llama = ("dp=2", "fsdp=4", "fsdp=2,zero=1", "tp=2")
    return [
        *(Case("llama", Layout.parse(text)) for text in llama),
        *(Case("transformer", layout) for layout in (*data, *model)),
        *(Case("transformer", Layout.parse(text), (full,)) for text in ("dp=2", "fsdp=4", "pp=2")),
        *(Case("transformer", Layout.parse(text), (half,)) for text in ("dp=4", "fsdp=4")),
        *(Case("conv net", layout) for layout in data[1:7]),
    ]


class RankBytes(LiveBytes):
    """Also counts storages whose size changes, as FSDP frees and allocates them."""

    def __init__(self) -> None:
        super().__init__()
        self.storages: dict[int, ref[torch.UntypedStorage]] = {}

    def see(self, tensor: Tensor) -> bool:
        if not super().see(tensor):
            return False
        key = storage_key(tensor)
        self.storages[key] = ref(tensor.untyped_storage(), lambda _: self.storages.pop(key, None))
        return True

    def measure(self) -> None:
        alive = [storage() for storage in list(self.storages.values())]
        self.now = sum(storage.nbytes() for storage in alive if storage is not None)
        self.peak = max(self.peak, self.now)

    def _forget(self, key: int) -> None:
        self.sizes.pop(key)


def run_rank(world_rank: int, folder: Path, chosen: list[Case]) -> None:
    """Train a few steps of each case in which this rank takes part."""
    torch.set_num_threads(1)
    file = dist.FileStore(str(folder / "store"), NUM_WORKERS)
    for number, case in enumerate(chosen):
        if world_rank < case.layout.num_workers:
            store = dist.PrefixStore(str(number), file)
            peak = _peak_of(case, world_rank, store)
            (folder / f"{number}-{world_rank}").write_text(str(peak))
            if world_rank == 0:
                print(f"{case.name}, {case.layout}: {peak} bytes", flush=True)


def _peak_of(case: Case, world_rank: int, store: dist.Store) -> int:
    layout, program = case.layout, case.program()
    size = layout.num_workers
    dist.init_process_group("gloo", store=store, world_size=size, rank=world_rank)
    assignment = Assignment(1, layout, tuple(f"w{i}" for i in range(size)))
    timeout = timedelta(seconds=300)
    groups = form_groups(backend_of("cpu"), assignment, world_rank, program.device, timeout)
    replica = program.build(groups)
    regions = {spec: region_of(spec, layout, groups.place) for spec in program.specs()}
    # Drawn before the count begins: some workloads keep the module from which they draw.
    values = {s.name: program.initial(s, r) for s, r in regions.items() if r is not None}
    with RankBytes() as live:
        for name in values:
            live.see(values[name])
        replica.adopt(values)
        values.clear()
        live.measure()
        live.peak = live.now
        for step in range(1, NUM_STEPS + 1):
            sums = replica.compute(step, _interrupt_never)
            dist.all_reduce(sums)
            loss_sum, num_tokens, sq_norm = sums.tolist()
            replica.apply(step, Vote(size, loss_sum, int(num_tokens), sq_norm, size))
    del replica
    dist.destroy_process_group()
    peak: int = live.peak
    return peak


def measure(chosen: list[Case]) -> list[int]:
    """For each case the peak of the worker with the most bytes."""
    with tempfile.TemporaryDirectory() as folder:
        set_forkserver_preload(["pipelines.run.program"])
        arguments = (Path(folder), chosen)
        start_processes(run_rank, arguments, NUM_WORKERS, start_method="forkserver")
        return [
            max(int(file.read_text()) for file in Path(folder).glob(f"{number}-*"))
            for number in range(len(chosen))
        ]


def predict(case: Case) -> int:
    program = case.program()
    degrees = sorted({1, case.layout.tp})
    return worker_memory(job_of(program.settings, program, degrees), case.layout).total


def main() -> int:
    arguments = parser(__doc__.splitlines()[0])
    arguments.add_argument("--model", help="only the cases of this model")
    options = arguments.parse_args()
    chosen = [case for case in cases() if options.model in (None, case.model)]
    measured = measure(chosen)
    predicted = [predict(case) for case in chosen]
    errors = [100 * (p / m - 1) for p, m in zip(predicted, measured, strict=True)]
    rows = [
        [case.name, str(case.layout), f"{m / 1e6:.2f}", f"{p / 1e6:.2f}", f"{error:+.1f} %"]
        for case, m, p, error in zip(chosen, measured, predicted, errors, strict=True)
    ]
    title = "Peak MB of a worker in a step: the live bytes of its tensors, and the prediction"
    show_table(title, ["model", "layout", "measured", "predicted", "error"], rows)
    absolute = sorted(abs(error) for error in errors)
    musts = [
        Must("below the truth at most", -min(errors), 5, "%"),
        Must("median error", median(absolute), 8, "%"),
        Must("layouts", len(chosen), 24, "", at_least=True),
    ]
    return conclude(musts, options.check)


def _interrupt_never() -> None:
    """The `interrupt` that never raises."""


if __name__ == "__main__":
    sys.exit(main())
