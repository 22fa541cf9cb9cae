"""A training step of a bfloat16 transformer: ours against a bare loop of the same module.

Both keep float32 weights and optimizer state, compute in bfloat16, clip by the global norm and use
fused AdamW. The bare loop has no groups and no vote.
"""

from __future__ import annotations

import gc
import json
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from statistics import median
from tempfile import TemporaryDirectory

import torch
from torch import Tensor
from torch.multiprocessing import start_processes

from actors.runtime.program import StateBytes
from elastic.geometry.layout import Layout
from elastic.geometry.regions import Region
from elastic.geometry.sample_order import batch_ids, sample_of
from elastic.planner.models.worker_memory import worker_memory
from elastic.protocol.votes import Vote
from pipelines.run.job import job_of
from pipelines.run.program import TrainingProgram
from pipelines.settings import DataSettings, OptimizerSettings, TrainSettings, TransformerSettings
from pipelines.training.replica.warm_up import group_of_one
from pipelines.training.workload.parallel_groups import ALONE

LARGE = TrainSettings(
    model=TransformerSettings(
        vocab_size=32_000,
        dim=2048,
        num_layers=24,
        num_heads=16,
        num_kv_heads=16,
        hidden_dim=5504,
    ),
    data=DataSettings(source="random", seq_len=2048),
    optimizer=OptimizerSettings(warmup_steps=1),
    dtype="bfloat16",
    batch=4,
    microbatch=4,
    eval_every=0,
)
"""1.35 B parameters."""
SMALL = LARGE.model_copy(
    update={
        "model": TransformerSettings(dim=64, num_layers=2, num_heads=4, num_kv_heads=4),
        "data": DataSettings(source="random", seq_len=64),
    }
)
"""To try the program without a GPU."""
WARM_UP_STEPS, NUM_STEPS = 5, 20
Step = Callable[[int], float]
"""Trains one step, counted from 1, and returns its mean loss."""


def measure(device: str, compiled: bool = False) -> dict[str, float]:
    """The seconds of a step of both, and the bytes and operations of ours; in a process of its own,
    which frees the device. `compiled`: with the blocks of both compiled by torch."""
    with TemporaryDirectory() as folder:
        arguments = (device, compiled, Path(folder))
        start_processes(_measure_here, arguments, 1, start_method="spawn")
        results: dict[str, float] = json.loads((Path(folder) / "results").read_text())
    return results


def _measure_here(_: int, device: str, compiled: bool, folder: Path) -> None:
    settings = (LARGE if device == "cuda" else SMALL).model_copy(update={"compile": compiled})
    program = TrainingProgram(settings.model_dump(mode="json"), device=device)
    results = {"tokens_a_step": float(settings.batch * settings.data.seq_len)}
    results |= _measure_ours(program)
    gc.collect()
    if device == "cuda":
        torch.cuda.empty_cache()
    results["bare_s"], results["bare_loss"] = seconds_of(bare_step(program), program.device)
    (folder / "results").write_text(json.dumps(results))


def _measure_ours(program: TrainingProgram) -> dict[str, float]:
    with our_step(program) as (step, sizes):
        ours_s, loss = seconds_of(step, program.device)
        figures = program.figures
        return {
            "ours_s": ours_s,
            "our_loss": loss,
            "state_bytes": float(_total(sizes())),
            "peak_bytes": _peak_bytes(),
            "predicted_bytes": _predicted_bytes(program),
            "step_flops": figures.step_flops or 0.0,
            "peak_flops": figures.peak_flops or 0.0,
            "num_params": sum(
                float(Region.whole(spec.shape).num_elements)
                for spec in program.specs()
                if spec.kind == "parameter"
            ),
        }


def seconds_of(step: Step, device: torch.device) -> tuple[float, float]:
    """The median seconds of a step after the warm-up, and the loss of the last step."""
    times_s: list[float] = []
    loss = 0.0
    for number in range(1, WARM_UP_STEPS + NUM_STEPS + 1):
        began = time.perf_counter()
        loss = step(number)
        if device.type == "cuda":
            torch.cuda.synchronize(device)
        times_s.append(time.perf_counter() - began)
    return median(times_s[WARM_UP_STEPS:]), loss


@contextmanager
def our_step(program: TrainingProgram) -> Iterator[tuple[Step, Callable[[], StateBytes]]]:
    """A step as a worker trains it, with its vote over a group of one."""
    with group_of_one(program.device) as groups:
        replica = program.build(groups)
        specs = [spec for spec in program.specs() if spec.kind != "parameter"]
        moments = {spec.name: program.initial(spec, Region.whole(spec.shape)) for spec in specs}
        replica.adopt({**_weights(program), **moments})

        def step(number: int) -> float:
            sums = replica.compute(number, _interrupt_never).tolist()
            numbers = torch.tensor(sums, dtype=torch.float64, device=program.device)
            groups.world.allreduce([numbers]).wait()
            loss_sum, num_tokens, sq_grad_norm = numbers.tolist()
            replica.apply(number, Vote(number, loss_sum, int(num_tokens), sq_grad_norm, 1))
            return float(loss_sum / num_tokens)

        yield step, replica.state_bytes


def _weights(program: TrainingProgram) -> dict[str, Tensor]:
    """Values of all parameters, drawn by the device: those of a run are drawn by the host, which
    would take longer than the measurement."""
    generator = torch.Generator(program.device).manual_seed(0)
    weights = {}
    for spec in program.specs():
        if spec.kind == "parameter":
            value = torch.ones(spec.shape, device=program.device)
            is_norm = len(spec.shape) == 1
            weights[spec.name] = value if is_norm else value.normal_(0, 0.02, generator=generator)
    return weights


def bare_step(program: TrainingProgram) -> Step:
    workload, settings, device = program.workload, program.settings, program.device
    with device:
        module = workload.module().to(torch.bfloat16)
    if settings.compile:
        for block in workload.blocks(module):
            block.compile()
    weights = dict(module.named_parameters())
    values = _weights(program)
    masters = {name: values[name].float() for name in weights}
    chosen = settings.optimizer
    groups = [
        {"params": _chosen(masters, lambda ndim: ndim > 1), "weight_decay": chosen.weight_decay},
        {"params": _chosen(masters, lambda ndim: ndim <= 1), "weight_decay": 0.0},
    ]
    betas = (chosen.beta1, chosen.beta2)
    optimizer = torch.optim.AdamW(groups, chosen.lr, betas, chosen.eps, fused=True)
    copies, wholes = list(weights.values()), list(masters.values())
    torch._foreach_copy_([copy.data for copy in copies], wholes)

    def step(number: int) -> float:
        ids = batch_ids(number, settings.batch)
        samples = [sample_of(settings.seed, i, workload.num_samples) for i in ids]
        fed = workload.feed(workload.read(samples), device, ALONE, 0)
        sums = workload.losses(module, fed, ALONE)
        mean = sums.loss / sums.num_tokens
        mean.backward()
        for whole, copy in zip(wholes, copies, strict=True):
            whole.grad = None if copy.grad is None else copy.grad.float()
            copy.grad = None
        torch.nn.utils.clip_grad_norm_(wholes, chosen.max_grad_norm)
        optimizer.step()
        optimizer.zero_grad()
        torch._foreach_copy_([copy.data for copy in copies], wholes)
        return float(mean.item())

    return step


def _chosen(tensors: dict[str, Tensor], holds: Callable[[int], bool]) -> list[Tensor]:
    return [tensor for tensor in tensors.values() if holds(tensor.ndim)]


def _total(sizes: StateBytes) -> int:
    return sizes.param_bytes + sizes.grad_bytes + sizes.optimizer_bytes


def _peak_bytes() -> float:
    return float(torch.cuda.max_memory_allocated()) if torch.cuda.is_available() else 0.0


def _predicted_bytes(program: TrainingProgram) -> float:
    job = job_of(program.settings, program, tp_degrees=[1], on_gpu=program.device.type == "cuda")
    return float(worker_memory(job, Layout(dp=1)).total)


def _interrupt_never() -> None:
    """The `interrupt` that never raises."""
