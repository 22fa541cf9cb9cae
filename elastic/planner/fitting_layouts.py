"""What would fit where a worker ran out of memory: the fewest shards, by the formula of ZeRO."""

from __future__ import annotations

from dataclasses import dataclass, replace

from elastic.geometry.layout import Layout
from elastic.geometry.training_job import Job
from elastic.planner.memory_model import worker_bytes

UNTOLD_SHARE = 0.1
"""Of what was held, so much is taken to be lacking where the allocator did not say how much."""


@dataclass(frozen=True, slots=True)
class Shortage:
    """What was measured when an allocation failed: bytes held at most, and bytes asked for in
    vain (0: not told)."""

    held_bytes: int
    wanted_bytes: int = 0

    def __str__(self) -> str:
        wanted = f" when {_told(self.wanted_bytes)} more were wanted" if self.wanted_bytes else ""
        return f"it held {_told(self.held_bytes)}{wanted}"


def advice(layout: Layout, job: Job, shortage: Shortage) -> str:
    """The measured bytes and what would fit, in one line."""
    fitting = fitting_layout(layout, job, shortage)
    held = worker_bytes(job, layout)
    if fitting is None:
        return (
            f"{shortage}; sharding its {_told(held)} of parameters, gradients and optimizer over "
            "more workers frees too little: lower microbatch, set activation_checkpointing, or "
            "raise tp, cp or pp"
        )
    less = held - worker_bytes(job, fitting)
    return (
        f"{shortage}; {fitting} on {fitting.num_workers} workers would fit, by the formula: "
        f"{_told(less)} less of parameters, gradients and optimizer on each"
    )


def fitting_layout(layout: Layout, job: Job, shortage: Shortage) -> Layout | None:
    """The least `fsdp`, then the least `zero`, whose part of the state is smaller by what was
    lacking times the job's margin, or None.

    What is not state (activations) stays as it is; a step has no more data ranks than microbatches.
    """
    lacking = shortage.wanted_bytes or UNTOLD_SHARE * shortage.held_bytes
    bound = worker_bytes(job, layout) - job.margin * lacking
    for fsdp in range(layout.fsdp, max(layout.fsdp, job.num_microbatches) + 1):
        if fsdp * layout.cp * layout.tp % layout.ep:
            continue
        for zero in range(layout.zero, 4):
            dp = layout.dp if fsdp == layout.fsdp else 1
            candidate = replace(layout, dp=dp, fsdp=fsdp, zero=zero)
            if worker_bytes(job, candidate) <= bound:
                return candidate
    return None


def _told(num_bytes: float) -> str:
    return f"{num_bytes / 1e6:,.1f} MB"
