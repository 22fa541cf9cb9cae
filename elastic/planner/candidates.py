"""Candidate layouts: the feasible layouts, tier by tier, and a reason for each refusal.

For each choice of model axes, every `fsdp` is a candidate, with the most replicas that the workers
allow: fewer replicas are never better. There are never more data ranks than microbatches.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field, replace
from itertools import product

from elastic.geometry.target_layout import TargetLayout
from elastic.geometry.training_job import Capacity, Job
from elastic.planner.models.memory_model import fits, too_big

Pair = tuple[int, int]
"""(dp, fsdp)."""


@dataclass(slots=True)
class Candidates:
    """Feasible layouts, as (dp, fsdp) by their model axes, and the reasons of the refusals."""

    pairs: list[tuple[TargetLayout, list[Pair]]] = field(default_factory=list)
    refusals: list[str] = field(default_factory=list)

    def weigh(self, axes: TargetLayout, job: Job, capacity: Capacity, least_ep: int) -> None:
        """Add all layouts with these model axes and the largest divisor of `ep`, down to
        `least_ep`, for which a layout is feasible."""
        divisors = [ep for ep in range(axes.ep, least_ep - 1, -1) if axes.ep % ep == 0]
        for with_ep in (replace(axes, ep=ep) for ep in divisors):
            pairs, refusal = pairs_of(with_ep, job, capacity)
            if pairs:
                self.pairs.append((with_ep, pairs))
                break
        if refusal:
            self.refusals.append(refusal)


def pairs_of(axes: TargetLayout, job: Job, capacity: Capacity) -> tuple[list[Pair], str]:
    """The feasible (dp, fsdp) for these model axes, and why others are infeasible, if any."""
    most = min(capacity.num_workers // axes.num_model_ranks, job.num_microbatches)
    refusal = unusable(axes, job, capacity, most)
    if refusal:
        return [], refusal
    step = axes.least_fsdp
    last = most - most % step
    first = _first_fitting(axes, job, capacity, most)
    if first == step:
        refusal = ""
    else:
        refusal = f"{axes.layout(1, first - step)}: {too_big(job, axes, capacity, first - step)}"
    return [(most // fsdp, fsdp) for fsdp in range(first, last + 1, step)], refusal


def unusable(axes: TargetLayout, job: Job, capacity: Capacity, most: int) -> str | None:
    """Why no layout with these model axes and up to `most` data ranks is possible, whatever the
    memory; or None."""
    refusal = refused_shape(axes, job)
    if refusal:
        return refusal
    if capacity.num_workers < axes.num_model_ranks:
        return (
            f"{_named(axes)} need at least {axes.num_model_ranks} workers, only "
            f"{capacity.num_workers} available: start more or lower a degree"
        )
    if most < axes.least_fsdp:
        return f"ep={axes.ep} divides no fsdp x cp x tp with fsdp up to {most}: lower ep"
    return None


def refused_shape(axes: TargetLayout, job: Job) -> str | None:
    """Why the model's shape does not allow these model axes, or None."""
    refusal = job.limits.refusal(axes.layout(1, axes.least_fsdp))
    num_stages = axes.pp * axes.vp
    if refusal is None and job.layer_costs and num_stages > len(job.layer_costs):
        return f"pp x vp = {num_stages} stages, but only {len(job.layer_costs)} layers have costs"
    return refusal


def lowered(target_layout: TargetLayout, job: Job) -> Iterator[TargetLayout]:
    """All model axes with no degree above the requested one."""
    axes = (
        range(1, target_layout.pp + 1),
        range(1, target_layout.cp + 1),
        range(1, target_layout.tp + 1),
    )
    yield from _with_degrees(target_layout, job, product(*axes))


def raised(target_layout: TargetLayout, job: Job, num_workers: int) -> Iterator[TargetLayout]:
    """Model axes with some degree above the requested one, where a limit bounds the degree."""
    limits = job.limits
    max_pp = max(target_layout.pp, min(limits.num_layers or 1, num_workers))
    max_tp = max(target_layout.tp, min(limits.tp_divides or 1, num_workers))
    axes = (range(1, max_pp + 1), range(1, target_layout.cp + 1), range(1, max_tp + 1))
    yield from _with_degrees(
        target_layout,
        job,
        (
            (pp, cp, tp)
            for pp, cp, tp in product(*axes)
            if (pp > target_layout.pp or tp > target_layout.tp)
            and (limits.tp_divides or tp) % tp == 0
        ),
    )


def _with_degrees(
    target_layout: TargetLayout, job: Job, degrees: Iterator[tuple[int, int, int]]
) -> Iterator[TargetLayout]:
    """The target layout with these (pp, cp, tp); `vp` falls to what the layers can fill."""
    for pp, cp, tp in degrees:
        max_vp = job.num_layers // pp if job.num_layers else target_layout.vp
        vp = max(1, min(target_layout.vp, max_vp)) if pp > 1 else 1
        yield replace(target_layout, pp=pp, cp=cp, tp=tp, vp=vp)


def _named(axes: TargetLayout) -> str:
    return f"pp={axes.pp}, cp={axes.cp}, tp={axes.tp}"


def _first_fitting(axes: TargetLayout, job: Job, capacity: Capacity, most: int) -> int:
    """The smallest `fsdp` up to `most` that fits and that `ep` folds out of, or the next above.

    By bisection: the memory that a worker needs does not grow with `fsdp`, but for the buffers that
    any sharding needs, so the least degree is tried first.
    """
    step = axes.least_fsdp

    def is_enough(multiple: int) -> bool:
        fsdp = multiple * step
        return fits(job, axes.layout(most // fsdp, fsdp), capacity)

    if is_enough(1):
        return step
    low, high = 2, most // step + 1
    while low < high:
        middle = (low + high) // 2
        if is_enough(middle):
            high = middle
        else:
            low = middle + 1
    return low * step
