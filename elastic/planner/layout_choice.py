"""Layout choice: the target layout at full capacity, else the best layout that the workers allow.

The planner tries these tiers in order and chooses from the first that has a feasible layout:

1. the target layout, data axes included;
2. the requested model axes (pp, cp, tp, ep, vp) with other data axes;
3. all model axes with no degree above the requested one, `ep` and `vp` as large as possible;
4. model axes above the requested ones, if memory requires them and the model's shape limits
   them.

So the model axes change only when they no longer fit, and return as soon as they fit again.
Within a tier, the planner prefers in this order:

1. the shortest step, by its estimated cost (see `step_cost`); costs within 5 % of the best count
   as equal;
2. more replicas;
3. fewer bytes moved, estimated by the share of a worker's old part that is not in its new one: `1 -
   min(old, new) / max(old, new)` for one axis that cuts the state, so 0 if nothing changes;
4. the smaller degrees, in the order of the mesh axes.

While no snapshot covers the state, the planner takes a single replica only if two do not fit,
because a single loss would cost steps. A target layout that is impossible even with all workers,
whatever their memory, is a user error and is refused.

Where activations are predicted, layouts that then fit are preferred. But a prediction refuses
nothing that may fit: the target's own data axes, and layouts if no other is left, need room for the
state alone, until a worker has run out of memory.
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
from elastic.planner.models.memory_model import by_state, fits, too_big
from elastic.planner.models.step_cost import step_cost

STEP_TOLERANCE = 1.05 + 1e-9
NUM_SHOWN_REFUSALS = 8


@dataclass(frozen=True, slots=True)
class LayoutChoice:
    """A layout, the reason for it, the reasons of the first few refusals, and the predicted seconds
    of a step (0: not known)."""

    layout: Layout
    reason: str
    refusals: tuple[str, ...] = ()
    step_s: float = 0.0


Candidate = tuple[float, int, int, TargetLayout]
"""A feasible layout: the cost of its step, dp, fsdp, and its model axes."""


def plan_layout(
    previous: Layout | None,
    capacity: Capacity,
    target_layout: TargetLayout,
    job: Job,
    snapshots_cover: bool,
) -> LayoutChoice | Infeasible:
    """The layout to train under; the docstring of this module lists the preferences."""
    num_workers = min(capacity.num_workers, target_layout.max_workers or capacity.num_workers)
    capacity = replace(capacity, num_workers=num_workers)
    user_error = _user_error(target_layout, job, capacity)
    if user_error:
        return Infeasible(user_error)
    refusals: list[str] = []
    state_only = by_state(job)
    if target_layout.data_axes:
        refusal = _refused_target(target_layout, state_only, capacity, *target_layout.data_axes)
        if refusal is None:
            dp, fsdp = target_layout.data_axes
            layout = target_layout.layout(dp, fsdp)
            reason = f"{layout} is the target layout, and {num_workers} workers are available"
            step_s = step_cost(target_layout, job, capacity)(dp, fsdp) if job.microbatch_s else 0.0
            return LayoutChoice(layout, reason, step_s=step_s)
        refusals.append(refusal)
    for known in [job] if state_only is job else [job, state_only]:
        for candidates in _tiers(target_layout, known, capacity):
            refusals += candidates.refusals
            if candidates.pairs:
                costs = _with_costs(candidates, job, capacity)
                has_seconds = job.microbatch_s > 0
                return _choose(costs, refusals, previous, capacity, snapshots_cover, has_seconds)
    return Infeasible(_nothing_fits(target_layout, state_only, capacity, refusals[0]))


def _user_error(target_layout: TargetLayout, job: Job, capacity: Capacity) -> str | None:
    """Why the target layout is impossible even with all workers, or None."""
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
            f"{layout}: {dp * fsdp} data ranks, and {job.num_microbatches} microbatches in a "
            "step: lower dp x fsdp, or cut the batch into more microbatches"
        )
    if fsdp % target_layout.least_fsdp:
        num_ranks = fsdp * target_layout.cp * target_layout.tp
        return f"ep={target_layout.ep} does not divide fsdp x cp x tp = {num_ranks}"
    return None


def _refused_target(
    target_layout: TargetLayout, job: Job, capacity: Capacity, dp: int, fsdp: int
) -> str | None:
    layout = target_layout.layout(dp, fsdp)
    if layout.num_workers > capacity.num_workers:
        num_workers = capacity.num_workers
        return f"{layout} needs {layout.num_workers} workers, only {num_workers} available"
    if not fits(job, layout, capacity):
        return f"{layout}: {too_big(job, target_layout, capacity, fsdp)}"
    return None


def _nothing_fits(target_layout: TargetLayout, job: Job, capacity: Capacity, refusal: str) -> str:
    """Why the target layout does not fit, and why plain shards over all workers do not either."""
    fsdp = min(capacity.num_workers, job.num_microbatches)
    if not fsdp:
        return refusal
    plain = replace(target_layout, pp=1, cp=1, tp=1, ep=1, vp=1)
    as_shards = f"{plain.layout(1, fsdp)}: {too_big(job, plain, capacity, fsdp)}"
    return refusal if refusal == as_shards else f"{refusal}; {as_shards}"


def _tiers(target_layout: TargetLayout, job: Job, capacity: Capacity) -> Iterator[Candidates]:
    """The tiers from the second on, each computed only if the tiers before it are empty."""
    yield _candidates([target_layout], job, capacity, least_ep=target_layout.ep)
    yield _candidates(lowered(target_layout, job), job, capacity)
    yield _candidates(raised(target_layout, job, capacity.num_workers), job, capacity)


def _candidates(
    tier: Iterable[TargetLayout], job: Job, capacity: Capacity, least_ep: int = 1
) -> Candidates:
    candidates = Candidates()
    for axes in tier:
        candidates.weigh(axes, job, capacity, least_ep)
    return candidates


def _with_costs(candidates: Candidates, job: Job, capacity: Capacity) -> list[Candidate]:
    with_costs: list[Candidate] = []
    for axes, pairs in candidates.pairs:
        cost = step_cost(axes, job, capacity)
        with_costs += [(cost(dp, fsdp), dp, fsdp, axes) for dp, fsdp in pairs]
    return with_costs


def _choose(
    candidates: list[Candidate],
    refusals: list[str],
    previous: Layout | None,
    capacity: Capacity,
    snapshots_cover: bool,
    has_seconds: bool,
) -> LayoutChoice:
    """The best layout of a tier."""
    replicated = [candidate for candidate in candidates if candidate[1] > 1]
    if not snapshots_cover and replicated:
        if len(replicated) < len(candidates):
            num_single = len(candidates) - len(replicated)
            refusals.append(f"{num_single} layouts of one replica: a single loss would cost steps")
        candidates = replicated
    bound = min(cost for cost, _, _, _ in candidates) * STEP_TOLERANCE
    fastest = [candidate for candidate in candidates if candidate[0] <= bound]
    max_replicas = max(dp for _, dp, _, _ in fastest)
    equal = [candidate for candidate in fastest if candidate[1] == max_replicas]
    best = min(equal, key=lambda c: (_moved_share(previous, c), _layout(c).degrees))
    unit = "s" if has_seconds else "microbatches"
    reason = _reason(best, candidates, refusals, capacity, unit)
    step_s = best[0] if has_seconds else 0.0
    return LayoutChoice(_layout(best), reason, _first_refusals(refusals), step_s)


def _moved_share(previous: Layout | None, candidate: Candidate) -> Fraction:
    """The share of a worker's old part that is not in its new one, estimated axis by axis."""
    if previous is None:
        return Fraction(0)
    _, _, fsdp, axes = candidate
    degrees = ((previous.pp, axes.pp), (previous.fsdp, fsdp), (previous.tp, axes.tp))
    kept = (Fraction(min(old, new), max(old, new)) for old, new in degrees)
    return 1 - prod(kept, start=Fraction(1))


def _layout(candidate: Candidate) -> Layout:
    _, dp, fsdp, axes = candidate
    return axes.layout(dp, fsdp)


def _reason(
    best: Candidate,
    candidates: list[Candidate],
    refusals: list[str],
    capacity: Capacity,
    unit: str,
) -> str:
    """The cost of the best layout, the second best, and the first refusal."""
    reason = (
        f"{_layout(best)} at {best[0]:.4g} {unit} a step, best of {len(candidates)} for "
        f"{capacity.num_workers} workers"
    )
    others = [candidate for candidate in candidates if candidate is not best]
    if others:
        least = min(cost for cost, _, _, _ in others)
        second = max((c for c in others if c[0] == least), key=lambda c: c[1])
        note = " (within 5 %, but fewer replicas or more to move)" if least < best[0] else ""
        reason += f"; next {_layout(second)} at {least:.4g}{note}"
    return f"{reason}; {refusals[0]}" if refusals else reason


def _first_refusals(refusals: list[str]) -> tuple[str, ...]:
    """The first distinct refusals, and a count of the others."""
    distinct = list(dict.fromkeys(refusals))
    shown = distinct[:NUM_SHOWN_REFUSALS]
    num_hidden = len(distinct) - len(shown)
    return (*shown, f"and {num_hidden} more") if num_hidden else tuple(shown)
