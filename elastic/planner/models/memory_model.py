"""Memory fit: which layouts fit a worker's memory by the memory model, and what would fit."""

from __future__ import annotations

from dataclasses import replace

from elastic.geometry.layout import Layout
from elastic.geometry.target_layout import TargetLayout
from elastic.geometry.training_job import STATE_MARGIN, Capacity, Job, MemoryFacts
from elastic.planner.models.worker_memory import worker_memory


def worker_bytes(job: Job, layout: Layout) -> int:
    """The peak of a worker's bytes in a step; see `worker_memory`."""
    return worker_memory(job, layout).total


def fits(job: Job, layout: Layout, capacity: Capacity) -> bool:
    """Whether a worker's part, with the margin, fits its memory, and none has run out with less."""
    memory_bytes = capacity.memory_bytes
    if memory_bytes is None and job.most_bytes is None:
        return True
    needed = worker_bytes(job, layout)
    if job.most_bytes is not None and needed > job.most_bytes:
        return False
    return memory_bytes is None or needed * job.margin <= memory_bytes


def by_state(job: Job) -> Job:
    """The job without what is predicted of activations, by which a worker needs less. The job
    itself once a worker has run out of memory: then the prediction is measured."""
    if not job.memory.passes or job.most_bytes is not None:
        return job
    return replace(job, memory=MemoryFacts(), margin=max(job.margin, STATE_MARGIN))


def least_fitting(job: Job, axes: TargetLayout, capacity: Capacity) -> int | None:
    """The smallest `fsdp` that fits and that `ep` folds out of; None if no `fsdp` fits."""

    def is_enough(multiple: int) -> bool:
        return fits(job, axes.layout(1, multiple * axes.least_fsdp), capacity)

    low, high = 1, max(1, job.state_bytes + job.param_bytes)
    if not is_enough(high):
        return None
    while low < high:  # the memory that a worker needs never grows with such an fsdp
        middle = (low + high) // 2
        low, high = (low, middle) if is_enough(middle) else (middle + 1, high)
    return low * axes.least_fsdp


def too_big(job: Job, axes: TargetLayout, capacity: Capacity, fsdp: int) -> str:
    """One line with the bytes needed, the bytes available and an `fsdp` that would fit."""
    num_bytes = worker_bytes(job, axes.layout(1, fsdp))
    needed = f"a worker needs {num_bytes} bytes for its part"
    if job.most_bytes is not None and num_bytes > job.most_bytes:
        needed += f", but one ran out of memory with more than {job.most_bytes}"
    else:
        needed += f", times a margin of {job.margin}, but has {capacity.memory_bytes}"
    fitting = least_fitting(job, axes, capacity)
    if fitting is None:
        return f"{needed}; no fsdp would fit at zero={axes.zero}: raise zero, tp or pp"
    microbatches = (
        f" and as many microbatches a step (now {job.num_microbatches})"
        if fitting > job.num_microbatches
        else ""
    )
    num_workers = fitting * axes.num_model_ranks
    return (
        f"{needed}; raise fsdp: fsdp={fitting} would fit with {num_workers} workers{microbatches}"
    )
