"""Stragglers: detection and replacement of workers that slow down the whole run.

In synchronous training all workers wait for the slowest. Members regularly report their compute
time, without waits for others. A member that takes far longer than the others with equal work, in
several reports in a row, is replaced at the next step boundary if a standby worker can take its
place. Otherwise the controller warns once, and gives it fewer microbatches (`shares`).
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from statistics import median

from elastic.controller.capacity.next_assignment import next_assignment
from elastic.controller.shares import comparable_ratios, least_ratio, plan_shares
from elastic.geometry.assignment import Assignment
from elastic.geometry.errors import Infeasible
from elastic.geometry.layout import Layout
from elastic.geometry.sample_order import deal
from elastic.protocol.commands import Command
from elastic.protocol.controller_state import ControllerState
from elastic.protocol.events import ComputeTimed
from elastic.protocol.notes import Replaced, Warned
from elastic.protocol.phases import Running

MAX_DOUBLINGS = 16


def slowness(
    compute_s: Sequence[float], layout: Layout, num_microbatches: int, factor: float
) -> dict[int, float]:
    """World ranks that took over `factor` times the median of the others with equal work, slowest
    first, each with its ratio to that median.

    Work is equal on the same pipeline stage with as many microbatches. A time of 0 means not
    measured.
    """
    groups: dict[tuple[int, int], list[int]] = {}
    dealt = deal(num_microbatches, layout.num_data_ranks)
    for world_rank, compute_time_s in enumerate(compute_s):
        coordinates = layout.coordinates(world_rank)
        if compute_time_s > 0:
            share = dealt[coordinates.dp * layout.fsdp + coordinates.fsdp]
            groups.setdefault((coordinates.pp, len(share)), []).append(world_rank)
    ratios: dict[int, float] = {}
    for group in groups.values():
        times = sorted(compute_s[world_rank] for world_rank in group)
        for world_rank in group if len(group) > 1 else ():
            compute_time_s = compute_s[world_rank]
            if compute_time_s > factor * times[0]:
                place_in_order = times.index(compute_time_s)
                median_s = median(times[:place_in_order] + times[place_in_order + 1 :])
                if compute_time_s > factor * median_s:
                    ratios[world_rank] = compute_time_s / median_s
    return dict(sorted(ratios.items(), key=lambda item: (-item[1], item[0])))


def on_timed(state: ControllerState, now: float, event: ComputeTimed) -> list[Command]:
    """Count the consecutive reports in which a member was a straggler, and act on them."""
    held, policy = state.live.held, state.policy
    report_id = (event.generation, event.step)
    if event.generation != state.generation or report_id <= state.stragglers.timed or held is None:
        return []
    if not isinstance(state.phase, Running):
        return []
    is_first = event.generation != state.stragglers.timed[0]
    state.stragglers.timed = report_id
    members = held.assignment.members
    slow_ranks = _find_slow_ranks(state, held.assignment, event)
    ratios = {members[world_rank]: ratio for world_rank, ratio in slow_ranks.items()}
    ratios = comparable_ratios(state, held.assignment, ratios, is_first)
    state.stragglers.reported &= state.membership.records.keys()
    state.stragglers.num_slow = {
        worker: state.stragglers.num_slow.get(worker, 0) + 1 for worker in ratios
    }
    # After each replacement, wait twice as long: a standby worker may be as slow.
    patience = policy.straggler_reports * 2 ** min(state.stragglers.num_replaced, MAX_DOUBLINGS)
    commands: list[Command] = []
    stragglers = [(w, ratio) for w, ratio in ratios.items() if ratio > policy.straggler_factor]
    for worker, ratio in stragglers:
        text = f"it computes {ratio:.1f} times as long as the others that do the same work"
        if state.stragglers.num_slow[worker] >= patience and _drain_for_standby(state, worker):
            state.stragglers.num_replaced += 1
            state.stragglers.num_slow.pop(worker)
            commands.append(Replaced(worker, text))
        elif (
            state.stragglers.num_slow[worker] >= policy.straggler_reports
            and worker not in state.stragglers.reported
        ):
            state.stragglers.reported.add(worker)
            straggler = f"{worker} on {state.membership.records[worker].node} is a straggler"
            warning = f"{straggler}: {text}, and no standby worker can replace it"
            commands.append(Warned(state.generation, event.step, "straggler", warning))
    if any(isinstance(command, Replaced) for command in commands):
        return commands
    return commands + plan_shares(state, now, event.step, ratios)


def shortened(state: ControllerState, event: ComputeTimed) -> ComputeTimed:
    """The same event with only the stragglers in it. The core decides the same from it. For a
    thousand members it takes a few bytes of the journal instead of 20,000."""
    held = state.live.held
    if held is None or len(held.assignment.members) != len(event.compute_s):
        return event
    slow = _find_slow_ranks(state, held.assignment, event)
    return replace(event, compute_s=(), slow=tuple(slow.items()))


def _find_slow_ranks(
    state: ControllerState, assignment: Assignment, event: ComputeTimed
) -> dict[int, float]:
    """The world ranks that are slow, each with its ratio to the others.

    Where shares differ, the times of a microbatch are compared; a GPU reports the time of the same
    work for any share. There a lower ratio is enough, so that a worker whose ratio is close to the
    factor does not alternate.
    """
    if not event.compute_s:
        return dict(event.slow)
    layout, factor, compute_s = assignment.layout, state.policy.straggler_factor, event.compute_s
    if not assignment.shares:
        return slowness(compute_s, layout, state.job.num_microbatches, factor)
    if not _has_gpus(state, assignment):
        shares = [assignment.shares[layout.data_rank(rank)] for rank in range(len(compute_s))]
        compute_s = tuple(t / n if n else 0.0 for t, n in zip(compute_s, shares, strict=True))
    return slowness(compute_s, layout, layout.num_data_ranks, least_ratio(factor))


def _has_gpus(state: ControllerState, assignment: Assignment) -> bool:
    records = state.membership.records
    return any(records[w].device == "cuda" for w in assignment.members if w in records)


def _drain_for_standby(state: ControllerState, worker: str) -> bool:
    """Drain the worker if a standby worker can replace it under the same layout; return whether it
    can."""
    assert state.live.held is not None
    standbys = state.membership.warm - state.membership.draining - set(state.live.members())
    has_enough = state.membership.num_staying() > state.policy.min_workers
    if not standbys or not has_enough or worker in state.membership.draining or state.ending:
        return False
    state.membership.draining.add(worker)
    proposal = next_assignment(state, state.live.held.assignment)
    layout = None if isinstance(proposal, Infeasible) else proposal.assignment.layout
    if layout == state.live.held.assignment.layout:
        return True
    state.membership.draining.discard(worker)
    return False
