"""Proposal of an assignment: a layout (`layout_choice`) and the world ranks (`placement`).

It is a pure function of the previous assignment, the set of members and the topology; the order
in which workers arrived does not matter (invariant 2). A survivor keeps its coordinates if
possible. Workers without a rank become standby workers, sorted by name.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Collection, Sequence
from dataclasses import dataclass

from elastic.geometry.assignment import Assignment
from elastic.geometry.errors import Infeasible
from elastic.geometry.target_layout import TargetLayout
from elastic.geometry.topology import Place, Topology
from elastic.geometry.training_job import Bandwidths, Capacity, Job
from elastic.planner.layout_choice import plan_layout
from elastic.planner.placement import place_workers

__all__ = ["Job", "Place", "Proposal", "TargetLayout", "Topology", "assign", "propose"]


@dataclass(frozen=True, slots=True)
class Proposal:
    """An assignment, the reason for its layout, why other layouts were refused, and the predicted
    seconds of a step (0: not known)."""

    assignment: Assignment
    reason: str
    refusals: tuple[str, ...] = ()
    step_s: float = 0.0


def propose(
    previous: Assignment | None,
    members: Collection[str],
    *,
    generation: int,
    target_layout: TargetLayout,
    topology: Topology,
    job: Job,
    memory_bytes: int | None = None,
    snapshots_cover: bool = False,
) -> Proposal | Infeasible:
    """Assign world ranks to the available workers, or say why that is impossible.

    `previous` is the assignment under which the live state lies, if any. `memory_bytes` is the
    memory of the smallest member (None: unknown, so everything fits).
    """
    unique = sorted(set(members))
    choice = plan_layout(
        previous.layout if previous else None,
        capacity_of(unique, topology, job, memory_bytes),
        target_layout,
        job,
        snapshots_cover,
    )
    if isinstance(choice, Infeasible):
        return choice
    ranks = place_workers(choice.layout, previous, unique, topology)
    placed = set(ranks)
    standbys = tuple(worker for worker in unique if worker not in placed)
    assignment = Assignment(generation, choice.layout, ranks, standbys)
    return Proposal(assignment, choice.reason, choice.refusals, choice.step_s)


def assign(
    previous: Assignment | None,
    members: Collection[str],
    *,
    generation: int,
    target_layout: TargetLayout,
    topology: Topology,
    job: Job,
    memory_bytes: int | None = None,
    snapshots_cover: bool = False,
) -> Assignment | Infeasible:
    """The assignment of `propose`, without its reasons."""
    proposal = propose(
        previous,
        members,
        generation=generation,
        target_layout=target_layout,
        topology=topology,
        job=job,
        memory_bytes=memory_bytes,
        snapshots_cover=snapshots_cover,
    )
    return proposal if isinstance(proposal, Infeasible) else proposal.assignment


def capacity_of(
    workers: Sequence[str], topology: Topology, job: Job, memory_bytes: int | None
) -> Capacity:
    """The capacity of these workers; shared nodes matter only if bandwidths are known."""
    if job.bandwidths == Bandwidths():
        return Capacity(len(workers), memory_bytes)
    places = [topology.get(worker, Place()) for worker in workers]
    nodes = Counter(place for place in places if place.node)
    racks = Counter(place.rack for place in places if place.rack)
    node_size, rack_size = max(nodes.values(), default=1), max(racks.values(), default=1)
    return Capacity(len(workers), memory_bytes, node_size, rack_size)
