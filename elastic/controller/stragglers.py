"""Stragglers: in synchronous training all wait for the slowest, so who is slow costs all of them.

Members tell now and then how long they have computed, without their waits for others. One that took
far longer than the others that do the same work, report after report, leaves at the next step
boundary if a spare can take its place; else a person is told of it, once.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from statistics import median

from elastic.controller.forming import next_assignment
from elastic.geometry.errors import Infeasible
from elastic.geometry.layout import Layout
from elastic.geometry.sample_order import deal
from elastic.protocol.commands import Command, Replaced, Warned
from elastic.protocol.controller_state import CoreState
from elastic.protocol.events import ComputeTimed
from elastic.protocol.phases import Running

MAX_DOUBLINGS = 16


def slowness(
    compute_s: Sequence[float], layout: Layout, num_microbatches: int, factor: float
) -> dict[int, float]:
    """The world ranks that took over `factor` times the median of the others with equal duties, the
    slowest first, and how many times it was.

    Duties are equal on the same pipeline stage with as many microbatches. 0 is no time at all.
    """
    groups: dict[tuple[int, int], list[int]] = {}
    dealt = deal(num_microbatches, layout.num_data_ranks)
    for world_rank, spent_s in enumerate(compute_s):
        place = layout.coordinates(world_rank)
        if spent_s > 0:
            share = dealt[place.dp * layout.fsdp + place.fsdp]
            groups.setdefault((place.pp, len(share)), []).append(world_rank)
    found: dict[int, float] = {}
    for group in groups.values():
        times = sorted(compute_s[world_rank] for world_rank in group)
        for world_rank in group if len(group) > 1 else ():
            spent_s = compute_s[world_rank]
            if spent_s > factor * times[0]:
                place_in_order = times.index(spent_s)
                usual_s = median(times[:place_in_order] + times[place_in_order + 1 :])
                if spent_s > factor * usual_s:
                    found[world_rank] = spent_s / usual_s
    return dict(sorted(found.items(), key=lambda item: (-item[1], item[0])))


def on_timed(state: CoreState, now: float, event: ComputeTimed) -> list[Command]:
    """Count the reports in a row in which a member was a straggler, and act on them."""
    held, policy = state.held, state.policy
    about = (event.generation, event.step)
    if event.generation != state.generation or about <= state.timed or held is None:
        return []
    if not isinstance(state.phase, Running):
        return []
    state.timed = about
    layout, members = held.assignment.layout, held.assignment.members
    found = _slow_ranks(state, layout, event)
    times = {members[world_rank]: factor for world_rank, factor in found.items()}
    state.told_slow &= state.worker_records.keys()
    state.num_slow = {worker: state.num_slow.get(worker, 0) + 1 for worker in times}
    # A spare that turns out as slow is not replaced as soon: that need not help either.
    patience = policy.straggler_reports * 2 ** min(state.num_replaced, MAX_DOUBLINGS)
    commands: list[Command] = []
    for worker, factor in times.items():
        told = f"it computes {factor:.1f} times as long as the others that do the same work"
        if state.num_slow[worker] >= patience and _takes_its_place(state, worker):
            state.num_replaced += 1
            state.num_slow.pop(worker)
            commands.append(Replaced(worker, told))
        elif state.num_slow[worker] >= policy.straggler_reports and worker not in state.told_slow:
            state.told_slow.add(worker)
            where = f"{worker} on {state.worker_records[worker].node} is a straggler"
            text = f"{where}: {told}, and no spare can take its place"
            commands.append(Warned(state.generation, event.step, "straggler", text))
    return commands


def shortened(state: CoreState, event: ComputeTimed) -> ComputeTimed:
    """The same event with only the stragglers in it: the core decides the same by it, and of a
    thousand members it takes some bytes of the journal instead of 20,000."""
    held = state.held
    if held is None or len(held.assignment.members) != len(event.compute_s):
        return event
    slow = _slow_ranks(state, held.assignment.layout, event)
    return replace(event, compute_s=(), slow=tuple(slow.items()))


def _slow_ranks(state: CoreState, layout: Layout, event: ComputeTimed) -> dict[int, float]:
    if not event.compute_s:
        return dict(event.slow)
    factor = state.policy.straggler_factor
    return slowness(event.compute_s, layout, state.job.num_microbatches, factor)


def _takes_its_place(state: CoreState, worker: str) -> bool:
    """Whether a spare does, under the same layout; then the worker is about to leave."""
    assert state.held is not None
    standbys = state.warm - state.draining - set(state.members())
    has_enough = state.num_staying() > state.policy.min_workers
    if not standbys or not has_enough or worker in state.draining or state.ending:
        return False
    state.draining.add(worker)
    proposal = next_assignment(state, state.held.assignment)
    layout = None if isinstance(proposal, Infeasible) else proposal.assignment.layout
    if layout == state.held.assignment.layout:
        return True
    state.draining.discard(worker)
    return False
