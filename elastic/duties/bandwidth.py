"""What the links between workers were measured to be, and what a microbatch was seen to take."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import replace

from elastic.geometry.layout import Layout
from elastic.geometry.topology import Place, Topology
from elastic.geometry.training_job import Bandwidths, Capacity, Job
from elastic.planner.proposal import capacity_of
from elastic.planner.step_cost import cost_of
from elastic.protocol.controller_state import CoreState

LEAST_COMPUTE = 0.1
"""Of a step: traffic that hides behind compute may seem to leave less than nothing."""


def median_speeds(bandwidths: Iterable[tuple[str, str, float]], topology: Topology) -> Bandwidths:
    """From (receiver, sender, bytes a second): the median of each class of node pair."""
    by_class: dict[str, list[float]] = {}
    for receiver, sender, speed in bandwidths:
        here, there = topology.get(receiver, Place()), topology.get(sender, Place())
        by_class.setdefault(_class(here, there), []).append(speed)
    return Bandwidths(**{name: sorted(found)[len(found) // 2] for name, found in by_class.items()})


def capacity_now(state: CoreState) -> Capacity:
    """What those who are there and stay are together."""
    staying = state.staying()
    return capacity_of(tuple(staying), staying, state.job, state.least_memory_bytes())


def known_job(state: CoreState) -> Job:
    """The job with what the steps so far tell of it."""
    if state.job.bandwidths == Bandwidths():
        return state.job
    return informed(state.job, state.timed_layout, state.median_step_s(), capacity_now(state))


def informed(job: Job, layout: Layout | None, median_step_s: float, capacity: Capacity) -> Job:
    """The job with the time that a microbatch takes, by the steps seen under a layout: what is
    left of them without the traffic, which is estimated, but at least `LEAST_COMPUTE`."""
    if layout is None or not median_step_s or job.bandwidths == Bandwidths():
        return job
    num_microbatches = cost_of(layout, replace(job, bandwidths=Bandwidths()), capacity)
    with_seconds = cost_of(layout, replace(job, microbatch_s=1.0), capacity)
    traffic_s = with_seconds - num_microbatches
    compute_s = max(median_step_s - traffic_s, LEAST_COMPUTE * median_step_s)
    return replace(job, microbatch_s=compute_s / num_microbatches)


def _class(here: Place, there: Place) -> str:
    if here.node and here.node == there.node:
        return "node"
    return "rack" if here.rack and here.rack == there.rack else "far"
