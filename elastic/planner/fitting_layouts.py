"""Fitting layouts: the fewest shards that would fit after a worker ran out of memory."""

from __future__ import annotations

from dataclasses import dataclass, replace

from elastic.geometry.layout import Layout
from elastic.geometry.training_job import Job
from elastic.planner.models.memory_model import worker_bytes

UNREPORTED_SHARE = 0.1
"""If the allocator did not report the size of the failed request: this share of the held bytes."""


@dataclass(frozen=True, slots=True)
class Shortage:
    """The measurements of a failed allocation: peak bytes held, and bytes requested (0: not
    reported)."""

    held_bytes: int
    wanted_bytes: int = 0

    def __str__(self) -> str:
        wanted = f" and requested {_in_mb(self.wanted_bytes)} more" if self.wanted_bytes else ""
        return f"it held {_in_mb(self.held_bytes)}{wanted}"


def advice(layout: Layout, job: Job, shortage: Shortage) -> str:
    """One line with the measured bytes and a layout that would fit."""
    fitting = fitting_layout(layout, job, shortage)
    held = worker_bytes(job, layout)
    if fitting is None:
        return (
            f"{shortage}; sharding its {_in_mb(held)} over more workers frees too little: lower "
            "microbatch, set activation_checkpointing, or raise tp, cp or pp"
        )
    num_freed = held - worker_bytes(job, fitting)
    return (
        f"{shortage}; by the memory model {fitting} on {fitting.num_workers} workers would fit: "
        f"{_in_mb(num_freed)} less on each"
    )


def fitting_bytes(layout: Layout, job: Job, shortage: Shortage) -> int:
    """The most bytes by the memory model under which a worker would not have run out: those of the
    layout without the lacking bytes times the job's margin, and no more than the worker had."""
    lacking = shortage.wanted_bytes or UNREPORTED_SHARE * shortage.held_bytes
    bound = int(worker_bytes(job, layout) - job.margin * lacking)
    return min(bound, shortage.held_bytes + shortage.wanted_bytes)


def fitting_layout(layout: Layout, job: Job, shortage: Shortage) -> Layout | None:
    """The least `fsdp`, then the least `zero`, that saves the lacking bytes times the job's margin;
    None if none does.

    Activations are taken to stay the same. A step has no more data ranks than microbatches.
    """
    bound = fitting_bytes(layout, job, shortage)
    for fsdp in range(layout.fsdp, max(layout.fsdp, job.num_microbatches) + 1):
        if fsdp * layout.cp * layout.tp % layout.ep:
            continue
        for zero in range(layout.zero, 4):
            dp = layout.dp if fsdp == layout.fsdp else 1
            candidate = replace(layout, dp=dp, fsdp=fsdp, zero=zero)
            if worker_bytes(job, candidate) <= bound:
                return candidate
    return None


def _in_mb(num_bytes: float) -> str:
    return f"{num_bytes / 1e6:,.1f} MB"
