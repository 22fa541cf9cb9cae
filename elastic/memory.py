"""Whether a worker's part of state and gradients fits its memory; if not, what would fit."""

from __future__ import annotations

from elastic.job import Capacity, Job
from elastic.wish import Wish


def worker_bytes(job: Job, axes: Wish, fsdp: int) -> int:
    """State and gradients of one worker: what `fsdp` cuts at this ZeRO stage, and the rest.

    `fsdp` cuts the optimizer's state from zero=1 on, the gradients (as large as the parameters)
    from 2, the parameters at 3; below that all parameters are there to compute with. All is
    divided by `pp x tp`; `cp` replicates (Rajbhandari et al., ZeRO, 2020, section 5).
    """
    whole, divided = _whole_and_divided(job, axes.zero)
    return -(-(whole - (-divided // fsdp)) // (axes.pp * axes.tp))


def fits(job: Job, axes: Wish, capacity: Capacity, fsdp: int) -> bool:
    """Whether a worker has room for its part and the margin."""
    memory_bytes = capacity.memory_bytes
    return memory_bytes is None or worker_bytes(job, axes, fsdp) * job.margin <= memory_bytes


def least_fitting(job: Job, axes: Wish, capacity: Capacity) -> int | None:
    """The smallest `fsdp` that fits and out of which `ep` folds; None: no `fsdp` fits."""
    low, high = 1, max(1, _whole_and_divided(job, axes.zero)[1])
    if not fits(job, axes, capacity, high):
        return None
    while low < high:  # what a worker needs never grows with fsdp
        middle = (low + high) // 2
        low, high = (low, middle) if fits(job, axes, capacity, middle) else (middle + 1, high)
    return -(-low // axes.least_fsdp) * axes.least_fsdp


def too_big(job: Job, axes: Wish, capacity: Capacity, fsdp: int) -> str:
    """What is needed, what is there, and what would fit."""
    needed = (
        f"a worker needs {worker_bytes(job, axes, fsdp)} bytes for its part, times {job.margin}, "
        f"and has {capacity.memory_bytes}"
    )
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


def _whole_and_divided(job: Job, zero: int) -> tuple[int, int]:
    """The bytes that every shard has, and those that are cut."""
    parts = ((1, job.state_bytes - job.param_bytes), (2, job.param_bytes), (3, job.param_bytes))
    divided = sum(num_bytes for stage, num_bytes in parts if zero >= stage)
    return job.state_bytes + job.param_bytes - divided, divided
