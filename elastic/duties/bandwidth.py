"""Measured bandwidths between workers, and the compute time of a microbatch derived from them."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import replace

from elastic.geometry.layout import Layout
from elastic.geometry.topology import Place, Topology
from elastic.geometry.training_job import Bandwidths, Capacity, Job, TimeFacts
from elastic.planner.models.step_cost import cost_of
from elastic.planner.proposal import capacity_of
from elastic.protocol.controller_state import ControllerState

NUM_TRIES = 6
PRECISION = 1e-6
LEAST_COMPUTE = 0.1
"""Smallest compute share of a step: traffic that overlaps with compute may seem to leave less."""


def median_speeds(bandwidths: Iterable[tuple[str, str, float]], topology: Topology) -> Bandwidths:
    """The median bandwidth of each class of node pair, from (receiver, sender, bytes per
    second)."""
    by_class: dict[str, list[float]] = {}
    for receiver, sender, speed in bandwidths:
        here, there = topology.get(receiver, Place()), topology.get(sender, Place())
        by_class.setdefault(link_class(here, there), []).append(speed)
    medians = {name: sorted(speeds)[len(speeds) // 2] for name, speeds in by_class.items()}
    return Bandwidths(**medians)


def capacity_now(state: ControllerState) -> Capacity:
    """The combined capacity of the workers that stay."""
    available = state.membership.staying()
    return capacity_of(
        tuple(available), available, state.job, state.membership.least_memory_bytes()
    )


def known_job(state: ControllerState) -> Job:
    """The job with the microbatch time that the steps so far show."""
    if state.job.bandwidths == Bandwidths():
        return state.job
    measured = state.steps.measured
    return with_microbatch_time(
        state.job, measured.layout, measured.median_s(), capacity_now(state)
    )


def corrected_job(state: ControllerState) -> Job:
    """The job of `known_job`, with what earlier predictions teach about the choice of a layout.

    Whether to grow is decided without it: a layout that was once slow, because of one of its
    workers, would otherwise never be tried again.
    """
    job = known_job(state)
    if not job.microbatch_s:
        return job
    times = replace(job.times, corrections=state.steps.measured.corrections())
    return replace(job, times=times)


def with_microbatch_time(
    job: Job, layout: Layout | None, median_step_s: float, capacity: Capacity
) -> Job:
    """The job with the compute time of a microbatch for which the model predicts the median step
    under a layout, but at least `LEAST_COMPUTE` of what it would be without communication."""
    if layout is None or not median_step_s or job.bandwidths == Bandwidths():
        return job
    silent = replace(job, bandwidths=Bandwidths(), microbatch_s=1.0, times=TimeFacts())
    most = median_step_s / cost_of(layout, silent, capacity)
    low, high = LEAST_COMPUTE * most, most
    low_s, high_s = (cost_of(layout, replace(job, microbatch_s=m), capacity) for m in (low, high))
    for _ in range(NUM_TRIES):  # the prediction is nearly a line
        if low_s >= median_step_s or high_s <= low_s:
            break
        middle = low + (high - low) * (median_step_s - low_s) / (high_s - low_s)
        middle_s = cost_of(layout, replace(job, microbatch_s=middle), capacity)
        if middle_s <= median_step_s:
            low, low_s = middle, middle_s
        else:
            high, high_s = middle, middle_s
        if abs(middle_s - median_step_s) <= PRECISION * median_step_s:
            return replace(job, microbatch_s=middle)
    return replace(job, microbatch_s=low)


def link_class(here: Place, there: Place) -> str:
    """Whether two workers share the node, the rack, or neither."""
    if here.node and here.node == there.node:
        return "node"
    return "rack" if here.rack and here.rack == there.rack else "far"
