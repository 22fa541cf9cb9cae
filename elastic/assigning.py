"""An assignment from who is there: a layout (`planning`), then who sits where (`placing`).

It is a pure function of the previous assignment, the set of members and the topology, blind
to the order in which workers arrived (invariant 2). A survivor keeps its coordinates where it
can; those who get no rank are warm spares, sorted by name.
"""

from __future__ import annotations

from collections.abc import Collection

from elastic.assignment import Assignment
from elastic.infeasible import Infeasible
from elastic.placing import seat
from elastic.planning import Capacity, Job, Wish, plan_layout
from elastic.seating import Place, Topology

__all__ = ["Job", "Place", "Topology", "Wish", "assign"]


def assign(
    previous: Assignment | None,
    members: Collection[str],
    *,
    generation: int,
    wish: Wish,
    topology: Topology,
    job: Job,
    memory_bytes: int | None = None,
    snapshots_cover: bool = False,
) -> Assignment | Infeasible:
    """Give world ranks to the workers that are there, or say why that cannot be.

    `previous` is where the state lies now, if anywhere; `memory_bytes` is what the smallest
    member can hold (None: nobody can say, so everything fits).
    """
    unique = sorted(set(members))
    layout = plan_layout(
        previous.layout if previous else None,
        Capacity(len(unique), memory_bytes),
        wish,
        job,
        snapshots_cover,
    )
    if isinstance(layout, Infeasible):
        return layout
    ranks = seat(layout, previous, unique, topology)
    seated = set(ranks)
    spares = tuple(worker for worker in unique if worker not in seated)
    return Assignment(generation, layout, ranks, spares)
