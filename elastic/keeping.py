"""Where snapshots lie, and who brings them back: keepers are one a node, outside the workers.

A worker's part needs no snapshot while the living outside of its failure domain have all of the
state between them. Otherwise its own node's keeper has one, which survives the worker, and where
there are several nodes the keeper of another one has a second, which survives the node.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass

from elastic.assignment import Assignment
from elastic.holdings import any_state
from elastic.relayout import Carried
from elastic.seating import Place, Topology
from elastic.shards import sharding_of


@dataclass(frozen=True, slots=True)
class Keeper:
    """A keeper's node, and how it is reached: by workers beside it through a socket of that
    machine, by other keepers through host and port."""

    node: str
    rack: str
    socket: str
    host: str
    port: int

    @property
    def place(self) -> Place:
        return Place(self.node, self.rack)


@dataclass(frozen=True, slots=True)
class Slot:
    """A whole snapshot: a worker's part of a step, under the assignment of a generation."""

    worker: str
    generation: int
    step: int


def place_snapshots(
    assignment: Assignment, topology: Topology, keepers: Collection[Place]
) -> dict[str, tuple[str, ...]]:
    """The members whose part needs snapshots, and where these lie, with the keepers there are.

    The second copies of a rack's nodes go round the nodes of the other racks, or, if there is one
    rack, each to the next node.
    """
    places = {worker: topology.get(worker, Place()) for worker in assignment.members}
    by_domain: dict[str, list[int]] = {}
    single = len({place.node for place in places.values()}) == 1
    for rank, worker in enumerate(assignment.members):
        by_domain.setdefault(worker if single else places[worker].node, []).append(rank)
    found: dict[str, tuple[str, ...]] = {}
    for ranks in by_domain.values():
        if _is_covered_without(assignment, ranks):
            continue
        place = places[assignment.members[ranks[0]]]
        copies = [keeper.node for keeper in keepers if keeper.node == place.node]
        copies += _elsewhere(place, sorted(keepers))
        found.update({assignment.members[rank]: tuple(copies) for rank in ranks if copies})
    return found


def carry(
    old: Assignment,
    snapshots: Mapping[str, Sequence[str]],
    new: Assignment,
    topology: Topology,
) -> tuple[Carried, ...]:
    """Who reads the snapshots: for each of these old members, of which the keepers on some nodes
    have one, a worker, on such a node if there is any.

    The member itself, or the one that takes its rank, else the members there in turn, or a spare.
    """
    carried: list[Carried] = []
    for rank, member in enumerate(old.members):
        if member not in snapshots:
            continue
        heir = new.members[rank] if rank < len(new.members) else ""
        pairs = [(w, node) for node in snapshots[member] for w in (*new.members, *new.spares)]
        able = [(w, node) for w, node in pairs if topology.get(w, Place()).node == node] or pairs
        ranked = [pair for first in (member, heir) for pair in able if pair[0] == first]
        seated = [pair for pair in able if pair[0] in new.members] or able
        carrier, node = ranked[0] if ranked else seated[rank % len(seated)]
        carried.append(Carried(member, carrier, node))
    return tuple(carried)


def _is_covered_without(assignment: Assignment, ranks: Sequence[int]) -> bool:
    """Whether others hold all that these ranks do."""
    gone = set(ranks)
    for spec in any_state(assignment.layout):
        sharding = sharding_of(spec, assignment.layout)
        for rank in ranks:
            if rank not in sharding.stage:
                continue
            first = sharding.first_holder(rank)
            holders = (sharding.holder(first, i) for i in range(sharding.num_copies))
            if all(holder in gone for holder in holders):
                return False
    return True


def _elsewhere(place: Place, keepers: Sequence[Place]) -> list[str]:
    """The node of the second copy; none if there is no other."""
    others = [keeper for keeper in keepers if keeper.node != place.node]
    far = [keeper for keeper in others if keeper.rack != place.rack]
    able = far or others
    if not able:
        return []
    beside = [keeper.node for keeper in keepers if keeper.rack == place.rack]
    turn = beside.index(place.node) if place.node in beside else 0
    return [able[turn % len(able)].node]
