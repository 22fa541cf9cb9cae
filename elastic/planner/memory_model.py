"""Memory model: the bytes of state and gradients of a worker, and what fits its memory."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from elastic.geometry.layout import Layout
from elastic.geometry.target_layout import TargetLayout
from elastic.geometry.training_job import Capacity, Job
from elastic.geometry.zero import STAGES, ZeroPart, divides, zero_in_step


def worker_bytes(job: Job, layout: Layout) -> int:
    """Bytes of state and gradients of one worker in a step, sharded and whole parts together.

    `fsdp` shards the optimizer state from zero=1 on, the gradients (as large as the parameters)
    from 2 on, the parameters at 3; below 3 a worker holds whole parameters. `pp x tp` divides all
    of it. `pp x ep` divides experts, which are sharded over the rest of `fsdp x cp x tp`. For all
    other tensors `cp` replicates (Rajbhandari et al., ZeRO, 2020, section 5).
    """
    zero = zero_in_step(layout.zero, layout.pp)
    state, params = job.expert_state_bytes, job.expert_param_bytes
    num_expert_shards = layout.fsdp * layout.cp * layout.tp // layout.ep
    experts = _part(state, params, zero, num_expert_shards, layout.pp * layout.ep)
    state, params = job.state_bytes - state, job.param_bytes - params
    return experts + _part(state, params, zero, layout.fsdp, layout.pp * layout.tp)


def fits(job: Job, layout: Layout, capacity: Capacity) -> bool:
    """Whether a worker's part, with the margin, fits its memory."""
    memory_bytes = capacity.memory_bytes
    return memory_bytes is None or worker_bytes(job, layout) * job.margin <= memory_bytes


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
    needed = (
        f"a worker needs {worker_bytes(job, axes.layout(1, fsdp))} bytes for its part, times a "
        f"margin of {job.margin}, but has {capacity.memory_bytes}"
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


def _part(state_bytes: int, param_bytes: int, zero: int, num_shards: int, num_cuts: int) -> int:
    """One worker's bytes of the tensors that `num_cuts` ranks cut at any ZeRO stage."""
    parts: dict[ZeroPart, int] = {
        "optimizer": state_bytes - param_bytes,
        "gradients": param_bytes,
        "parameters": param_bytes,
    }
    divided = sum(num_bytes for part, num_bytes in parts.items() if divides(zero, part))
    whole = state_bytes + param_bytes - divided
    return -(-(whole - (-divided // num_shards)) // num_cuts)


Precision = Literal["half", "mixed", "full"]


@dataclass(frozen=True, slots=True)
class Footprint:
    """Bytes for each parameter, by purpose; `activations` is a rule of thumb."""

    parameters: int
    gradients: int
    optimizer: int
    activations: int = 0

    @property
    def total(self) -> int:
        return self.parameters + self.gradients + self.optimizer + self.activations

    def divided(self, zero: int, num_shards: int) -> float:
        """Bytes on each worker for each parameter, at a ZeRO stage over `num_shards` shards.

        Rajbhandari et al., ZeRO, 2020, figure 1: stage 1 divides the optimizer state, 2 also the
        gradients, 3 also the parameters; each worker has the activations of its own batch.
        Raises `ValueError` for another stage or fewer shards than one.
        """
        if zero not in STAGES:
            raise ValueError(f"zero={zero}: the ZeRO stage must be 0, 1, 2 or 3")
        if num_shards < 1:
            raise ValueError(f"{num_shards} shards: use at least 1")
        parts: dict[ZeroPart, int] = {
            "optimizer": self.optimizer,
            "gradients": self.gradients,
            "parameters": self.parameters,
        }
        divided = sum(size for part, size in parts.items() if divides(zero, part))
        return self.total - divided + divided / num_shards


FOOTPRINTS: dict[Precision, Footprint] = {
    "half": Footprint(2, 2, 4),
    "mixed": Footprint(2, 2, 12),
    "full": Footprint(4, 4, 8, 8),
}
"""Footprints with Adam. `half`: all in 16 bits. `mixed`: weights and gradients in 16 bits, a copy
of the weights and both moments in 32 bits. `full`: all in 32 bits, with as many bytes for
activations as for the moments."""
