"""Which layout to train under: the wish at full strength, else the best that the workers allow.

Tiers are tried in this order, and the first that has any layout is chosen from:

1. the wish, data axes included;
2. the wished model axes (pp, cp, tp, ep, vp) with other data axes;
3. all model axes with no degree above the wished one, `ep` and `vp` as large as they go;
4. model axes above the wished ones, where memory asks for them and the model's shape bounds
   them by a number.

So the model axes change only where they no longer fit, and are the wished ones again as soon as
they do. Within a tier, in this order:

1. the shortest step, by its estimated cost (see `costs`); whatever is within 5 % of the best
   counts as equal;
2. more replicas;
3. fewer bytes moved, estimated by how much of a worker's old part is not in its new one: `1 -
   min(old, new) / max(old, new)` for one axis that cuts the state, so nothing if all are as before;
4. the smaller degrees, in the order of the mesh axes.

While no snapshot covers the state, one replica alone is taken only where no two fit: a single
loss would cost steps. What the user cannot have with all workers, whatever the machines, is
refused: his are the mistakes to mend.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass, replace
from fractions import Fraction
from math import prod

from elastic.geometry.errors import Infeasible
from elastic.geometry.layout import Layout
from elastic.geometry.target_layout import TargetLayout
from elastic.geometry.training_job import Capacity, Job
from elastic.planner.candidates import Candidates, lowered, raised, refused_shape, unusable
from elastic.planner.memory_model import fits, too_big
from elastic.planner.step_cost import step_cost

STEP_TOLERANCE = 1.05 + 1e-9
NUM_REFUSALS_TOLD = 8


@dataclass(frozen=True, slots=True)
class LayoutChoice:
    """A layout, why this one, and why not those that were refused (the first few)."""

    layout: Layout
    reason: str
    refusals: tuple[str, ...] = ()


Priced = tuple[float, int, int, TargetLayout]
"""A layout that can be had: what its step costs, dp, fsdp, and its model axes."""


def plan_layout(
    previous: Layout | None,
    capacity: Capacity,
    target_layout: TargetLayout,
    job: Job,
    snapshots_cover: bool,
) -> LayoutChoice | Infeasible:
    """The layout to train under; see the head of this module for what is preferred."""
    num_workers = min(capacity.num_workers, target_layout.max_workers or capacity.num_workers)
    capacity = replace(capacity, num_workers=num_workers)
    mistake = _mistake(target_layout, job, capacity)
    if mistake:
        return Infeasible(mistake)
    refusals = []
    if target_layout.data_axes:
        refusal = _refused_target(target_layout, job, capacity, *target_layout.data_axes)
        if refusal is None:
            layout = target_layout.layout(*target_layout.data_axes)
            return LayoutChoice(
                layout, f"{layout} is the wish, and {num_workers} workers are there"
            )
        refusals.append(refusal)
    for candidates in _tiers(target_layout, job, capacity):
        refusals += candidates.refusals
        if candidates.pairs:
            priced = _priced(candidates, job, capacity)
            return _choose(priced, refusals, previous, capacity, snapshots_cover)
    return Infeasible(_nothing_fits(target_layout, job, capacity, refusals[0]))


def _mistake(target_layout: TargetLayout, job: Job, capacity: Capacity) -> str | None:
    """Why the wish cannot be had even with all workers, if so."""
    most = job.num_microbatches
    if target_layout.max_workers is not None:
        most = min(most, target_layout.max_workers // target_layout.num_model_ranks)
    if most < target_layout.least_fsdp:
        return unusable(target_layout, job, capacity, most)
    refusal = refused_shape(target_layout, job)
    if refusal or target_layout.data_axes is None:
        return refusal
    dp, fsdp = target_layout.data_axes
    layout = target_layout.layout(dp, fsdp)
    if dp * fsdp > job.num_microbatches:
        return (
            f"{layout}: {dp * fsdp} data ranks, but a step has only {job.num_microbatches} "
            "microbatches; lower dp x fsdp or the microbatch"
        )
    if fsdp % target_layout.least_fsdp:
        num_ranks = fsdp * target_layout.cp * target_layout.tp
        return f"ep={target_layout.ep} does not fold out of fsdp x cp x tp = {num_ranks}"
    return None


def _refused_target(
    target_layout: TargetLayout, job: Job, capacity: Capacity, dp: int, fsdp: int
) -> str | None:
    layout = target_layout.layout(dp, fsdp)
    if layout.num_workers > capacity.num_workers:
        return f"{layout} needs {layout.num_workers} workers, {capacity.num_workers} are there"
    if not fits(job, layout, capacity):
        return f"{layout}: {too_big(job, target_layout, capacity, fsdp)}"
    return None


def _nothing_fits(target_layout: TargetLayout, job: Job, capacity: Capacity, refusal: str) -> str:
    """Why not the wish, and why not all workers that are there as plain shards."""
    fsdp = min(capacity.num_workers, job.num_microbatches)
    if not fsdp:
        return refusal
    plain = replace(target_layout, pp=1, cp=1, tp=1, ep=1, vp=1)
    as_shards = f"{plain.layout(1, fsdp)}: {too_big(job, plain, capacity, fsdp)}"
    return refusal if refusal == as_shards else f"{refusal}; {as_shards}"


def _tiers(target_layout: TargetLayout, job: Job, capacity: Capacity) -> Iterator[Candidates]:
    """The second tier and those after it, each made only if those before have nothing."""
    yield _weighed([target_layout], job, capacity, least_ep=target_layout.ep)
    yield _weighed(lowered(target_layout, job), job, capacity)
    yield _weighed(raised(target_layout, job, capacity.num_workers), job, capacity)


def _weighed(
    tier: Iterable[TargetLayout], job: Job, capacity: Capacity, least_ep: int = 1
) -> Candidates:
    candidates = Candidates()
    for axes in tier:
        candidates.weigh(axes, job, capacity, least_ep)
    return candidates


def _priced(candidates: Candidates, job: Job, capacity: Capacity) -> list[Priced]:
    priced: list[Priced] = []
    for axes, pairs in candidates.pairs:
        cost = step_cost(axes, job, capacity)
        priced += [(cost(dp, fsdp), dp, fsdp, axes) for dp, fsdp in pairs]
    return priced


def _choose(
    priced: list[Priced],
    refusals: list[str],
    previous: Layout | None,
    capacity: Capacity,
    snapshots_cover: bool,
) -> LayoutChoice:
    """The best of a tier."""
    several = [one for one in priced if one[1] > 1]
    if not snapshots_cover and several:
        if len(several) < len(priced):
            lone = len(priced) - len(several)
            refusals.append(f"{lone} layouts of one replica: a single loss would cost steps")
        priced = several
    bound = min(cost for cost, _, _, _ in priced) * STEP_TOLERANCE
    quick = [one for one in priced if one[0] <= bound]
    most_replicas = max(dp for _, dp, _, _ in quick)
    equal = [one for one in quick if one[1] == most_replicas]
    best = min(equal, key=lambda one: (_moved_share(previous, one), _layout(one).degrees))
    return LayoutChoice(_layout(best), _reason(best, priced, refusals, capacity), _told(refusals))


def _moved_share(previous: Layout | None, one: Priced) -> Fraction:
    """How much of a worker's old part is not in its new one, estimated axis by axis."""
    if previous is None:
        return Fraction(0)
    _, _, fsdp, axes = one
    degrees = ((previous.pp, axes.pp), (previous.fsdp, fsdp), (previous.tp, axes.tp))
    kept = (Fraction(min(old, new), max(old, new)) for old, new in degrees)
    return 1 - prod(kept, start=Fraction(1))


def _layout(one: Priced) -> Layout:
    _, dp, fsdp, axes = one
    return axes.layout(dp, fsdp)


def _reason(best: Priced, priced: list[Priced], refusals: list[str], capacity: Capacity) -> str:
    """What it costs, what comes next, and what was refused first."""
    reason = (
        f"{_layout(best)} at {best[0]:.4g} microbatches a step, best of {len(priced)} for "
        f"{capacity.num_workers} workers"
    )
    others = [one for one in priced if one is not best]
    if others:
        least = min(cost for cost, _, _, _ in others)
        after = max((one for one in others if one[0] == least), key=lambda one: one[1])
        within = " (within 5 %, fewer replicas or more to move)" if least < best[0] else ""
        reason += f"; next {_layout(after)} at {least:.4g}{within}"
    return f"{reason}; {refusals[0]}" if refusals else reason


def _told(refusals: list[str]) -> tuple[str, ...]:
    """Each once, and of many the first, with a count of the others."""
    once = list(dict.fromkeys(refusals))
    told = once[:NUM_REFUSALS_TOLD]
    return (*told, f"and {len(once) - len(told)} more") if len(once) > len(told) else tuple(once)
