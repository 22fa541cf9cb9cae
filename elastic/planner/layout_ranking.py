"""Layout ranking: the layouts of so many workers on a device, by predicted seconds a step.

Seconds are those of the step-time model (`step_cost`), by what was measured of the device. If that
is nothing, a microbatch follows a roofline: it takes the larger of its operations at `efficiency`
of the device's peak and its memory traffic at the memory's bandwidth.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field, replace
from math import gcd

from elastic.geometry.layout import Layout
from elastic.geometry.target_layout import TargetLayout
from elastic.geometry.training_job import Bandwidths, Capacity, Job, Machine, TimeFacts
from elastic.planner.candidates import refused_shape
from elastic.planner.devices import DeviceSpec
from elastic.planner.models.memory_model import fits
from elastic.planner.models.step_cost import step_parts
from elastic.planner.models.worker_memory import WorkerMemory, pass_memory, worker_memory

EFFICIENCY = 0.45
"""The share of a device's peak that large matrix products and the kernels between them reach."""
PARAMETER_READS = 3
"""A microbatch reads all parameters in forward, and twice in backward."""
ACTIVATION_ACCESSES = 4
"""Activations are written and read in forward, and so are their gradients in backward."""
MAX_PP = 16
LEAST_CP_TOKENS = 1024
"""Context parallelism is a candidate if each rank keeps so many tokens."""


@dataclass(frozen=True, slots=True)
class Workplace:
    """What the workers are, and what a step of the job has to do.

    A step has `step_flops` operations in forward and backward, and `recomputed` times as many are
    computed with activation checkpointing. `price` is that of a worker for an hour. `times` are
    measured on this device; None: nothing is.
    """

    device: DeviceSpec
    peak_flops: float
    step_flops: float
    recomputed: float = 1.0
    efficiency: float = EFFICIENCY
    price: float | None = None
    times: TimeFacts | None = None


@dataclass(frozen=True, slots=True)
class Estimate:
    """The prediction for one layout; `seconds` are those of a step, by what takes them."""

    layout: Layout
    memory: WorkerMemory
    is_fitting: bool
    seconds: dict[str, float]
    mfu: float
    samples_per_s: float
    hours: float
    cost: float | None
    reason: str = ""

    @property
    def step_s(self) -> float:
        return sum(self.seconds.values())


@dataclass(frozen=True, slots=True)
class LayoutRanking:
    """Layouts for a number of workers: those that fit by seconds a step, then those that do not.

    `refusals` are reasons why the model does not allow some others.
    """

    num_workers: int
    estimates: tuple[Estimate, ...] = field(default=())
    refusals: tuple[str, ...] = ()

    @property
    def best(self) -> Estimate | None:
        first = self.estimates[0] if self.estimates else None
        return first if first is not None and first.is_fitting else None


def rank_layouts(
    job: Job, workplace: Workplace, num_workers: int, layouts: Iterable[Layout] = ()
) -> LayoutRanking:
    """Rank some layouts, by default all that make use of these workers."""
    refusals: list[str] = []
    chosen = []
    for layout in layouts or candidate_layouts(job, workplace.device, num_workers):
        refusal = _refusal(job, layout, num_workers)
        if refusal is None:
            chosen.append(layout)
        elif refusal not in refusals:
            refusals.append(refusal)
    job = with_speed(job, workplace)
    estimates = [_estimate(job, workplace, layout, num_workers) for layout in chosen]
    estimates.sort(key=_order)
    with_reasons = tuple(_with_reasons(estimates, workplace, job.margin))
    return LayoutRanking(num_workers, with_reasons, tuple(refusals))


def candidate_layouts(job: Job, device: DeviceSpec, num_workers: int) -> Iterator[Layout]:
    """The layouts that use as many of the workers as they can; `tp` and `cp` stay in a node."""
    limits = job.limits
    seq_len = limits.seq_len or 0
    max_pp = min(limits.num_layers or 1, num_workers, MAX_PP)
    for pp in _divisors_of_power(max_pp):
        for tp in _divisors_of_power(min(device.per_node, num_workers // pp)):
            if (limits.tp_divides or 1) % tp or (tp > 1 and limits.tp_divides is None):
                continue
            max_cp = min(device.per_node // tp, num_workers // (pp * tp))
            for cp in _divisors_of_power(max(1, min(max_cp, seq_len // LEAST_CP_TOKENS))):
                yield from _with_data_axes(job, TargetLayout(pp, cp, tp), num_workers)


def with_speed(job: Job, workplace: Workplace) -> Job:
    """The job with the seconds of a microbatch, and what is measured of this device or what the
    table knows of it.

    A worker on a device of its own hides communication behind compute; a CPU does both.
    """
    device, memory = workplace.device, job.memory
    bandwidths = Bandwidths(
        device.node_gb_s * 1e9 or None, device.far_gb_s * 1e9 or None, device.far_gb_s * 1e9 or None
    )
    if workplace.times is not None and workplace.times.plain is not None:
        machine = replace(workplace.times.machine, latency_s=device.latency_us / 1e6)
        times = replace(workplace.times, machine=machine)
        seconds = workplace.times.plain.single_s
        return replace(job, microbatch_s=seconds, bandwidths=bandwidths, times=times)
    flops = workplace.step_flops * workplace.recomputed / max(1, job.num_microbatches)
    moved = PARAMETER_READS * (memory.copy_bytes or job.param_bytes)
    if memory.passes:
        trial = pass_memory(memory.passes, 1)
        moved += ACTIVATION_ACCESSES * (trial.blocks_bytes + trial.outer_bytes)
    by_memory = moved / (device.memory_gb_s * 1e9) if device.memory_gb_s else 0.0
    seconds = max(flops / (workplace.peak_flops * workplace.efficiency), by_memory)
    machine = Machine(
        interference=1.0 if device.name == "cpu" else 0.0,
        latency_s=device.latency_us / 1e6,
        issue_s=device.issue_us / 1e6,
        memory_bytes_per_s=device.memory_gb_s * 1e9,
    )
    times = TimeFacts(machine=machine)
    return replace(job, microbatch_s=seconds, bandwidths=bandwidths, times=times)


def _estimate(job: Job, workplace: Workplace, layout: Layout, num_workers: int) -> Estimate:
    device = workplace.device
    capacity = Capacity(
        num_workers, int(device.memory_gb * 1e9) or None, device.per_node, device.per_node
    )
    axes = TargetLayout(layout.pp, layout.cp, layout.tp, layout.ep, layout.zero, layout.vp)
    seconds = step_parts(axes, job, capacity)(layout.dp, layout.fsdp)._asdict()
    step_s = sum(seconds.values())
    hours = job.steps * step_s / 3600
    peak = layout.num_workers * workplace.peak_flops
    return Estimate(
        layout,
        worker_memory(job, layout),
        fits(job, layout, capacity),
        seconds,
        mfu=workplace.step_flops / step_s / peak,
        samples_per_s=job.num_microbatches * job.microbatch / step_s,
        hours=hours,
        cost=None if workplace.price is None else hours * layout.num_workers * workplace.price,
    )


def _order(estimate: Estimate) -> tuple[bool, float, tuple[int, ...]]:
    """Fitting layouts first, then the shorter step, then more replicas and smaller degrees."""
    layout = estimate.layout
    need = estimate.step_s if estimate.is_fitting else float(estimate.memory.total)
    return (not estimate.is_fitting, need, (-layout.dp, *layout.degrees, layout.zero))


def _with_reasons(
    estimates: list[Estimate], workplace: Workplace, margin: float
) -> Iterator[Estimate]:
    best = estimates[0] if estimates and estimates[0].is_fitting else None
    for estimate in estimates:
        if estimate is best:
            yield replace(estimate, reason="the shortest step")
        elif estimate.is_fitting and best is not None:
            yield replace(estimate, reason=_why_slower(estimate, best))
        else:
            yield replace(estimate, reason=_why_too_big(estimate, workplace.device, margin))


def _why_slower(estimate: Estimate, best: Estimate) -> str:
    """What takes most of the time that the best layout does not need."""
    added = {name: s - best.seconds.get(name, 0.0) for name, s in estimate.seconds.items()}
    name = max(added, key=lambda key: added[key])
    ratio = estimate.step_s / best.step_s
    if ratio < 1.005:
        return "as fast"
    fewer = best.layout.num_workers - estimate.layout.num_workers
    if name == "compute" and fewer > 0:
        return f"{ratio:.3g}x the time: uses {fewer} workers less"
    return f"{ratio:.3g}x the time: {CAUSES.get(name, f'{name} communication')}"


CAUSES = {
    "compute": "work is dealt less evenly",
    "host": "more passes to issue",
    "bubble": "the pipeline's bubble",
    "optimizer": "a larger optimizer step",
}


def _why_too_big(estimate: Estimate, device: DeviceSpec, margin: float) -> str:
    memory = estimate.memory
    sizes = memory._asdict()
    name = max(sizes, key=lambda key: sizes[key])
    return (
        f"needs {memory.total * margin / 1e9:,.3g} GB of {device.memory_gb:g} with a margin of "
        f"{margin:g}; most: {name}"
    )


def _refusal(job: Job, layout: Layout, num_workers: int) -> str | None:
    """Why a layout is not possible, whatever the memory; or None."""
    axes = TargetLayout(layout.pp, layout.cp, layout.tp, layout.ep, layout.zero, layout.vp)
    if layout.num_workers > num_workers:
        return f"{layout} needs {layout.num_workers} workers"
    if layout.num_data_ranks > job.num_microbatches:
        return (
            f"{layout} has {layout.num_data_ranks} data ranks, but a step has only "
            f"{job.num_microbatches} microbatches"
        )
    return job.limits.refusal(layout) or refused_shape(axes, job)


def _with_data_axes(job: Job, axes: TargetLayout, num_workers: int) -> Iterator[Layout]:
    """Replicas alone, and each division of the data ranks in replicas and shards by stage."""
    most = min(num_workers // axes.num_model_ranks, job.num_microbatches)
    if most < 1:
        return
    num_experts = job.limits.num_experts or 1
    for fsdp in (fsdp for fsdp in range(1, most + 1) if most % fsdp == 0):
        ep = gcd(num_experts, fsdp * axes.cp * axes.tp)
        for zero in (1, 2, 3) if fsdp > 1 else (3,):
            yield replace(axes, zero=zero).layout(most // fsdp, fsdp)
            if ep > 1:
                yield replace(axes, zero=zero, ep=ep).layout(most // fsdp, fsdp)


def _divisors_of_power(most: int) -> Iterator[int]:
    """1, 2, 4 and so on, up to `most`."""
    degree = 1
    while degree <= most:
        yield degree
        degree *= 2
