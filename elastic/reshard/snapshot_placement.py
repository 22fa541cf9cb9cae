"""Where snapshots lie, and who brings them back: keepers are one a node, outside the workers.

No snapshots are needed while the state outlives the loss of any failure domain (a node; a worker
where there is one node). Otherwise each worker's own node's keeper has one, which survives the
worker; and of what a node has alone, the keeper of another one has a second, which survives the
node, or several keepers have the parity of it and of others (`parity`). All parts are kept, not
only those in danger, since only parts of one step combine.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from types import MappingProxyType

from elastic.geometry.assignment import Assignment
from elastic.geometry.shard_map import sharding_of
from elastic.geometry.topology import Place, Topology
from elastic.reshard.holdings import any_state
from elastic.reshard.parity import make_sets
from elastic.reshard.reshard_plan import Carried, Keepings


@dataclass(frozen=True, slots=True)
class SnapshotServer:
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


@dataclass(frozen=True, slots=True)
class ParitySlot:
    """A whole parity: that of a set's members but one, at this one's keeper."""

    members: tuple[str, ...]
    member: str
    generation: int
    step: int


@dataclass(frozen=True, slots=True)
class Placement:
    """Where snapshots are brought to."""

    copies: dict[str, tuple[str, ...]] = field(default_factory=dict)
    """On which nodes each member's lie, nearest first."""
    sets: tuple[tuple[str, ...], ...] = ()
    """Members whose parity lies where their own snapshots do."""


def place_snapshots(
    assignment: Assignment,
    topology: Topology,
    snapshot_servers: Sequence[Place],
    num_chunks: int = 0,
) -> Placement:
    """Where snapshots lie with these keepers (sorted); nowhere if none are needed, or possible.

    With `num_chunks`, what a node has alone is coded in sets with parts of other racks, if there
    are racks enough, else nodes. What is left over, and all without, has a second copy: those of
    a rack's nodes go round the nodes of the other racks, or, if there is one, each to the next.
    """
    places = {worker: topology.get(worker, Place()) for worker in assignment.members}
    by_domain: dict[str, list[int]] = {}
    single = len({place.node for place in places.values()}) == 1
    for rank, worker in enumerate(assignment.members):
        by_domain.setdefault(worker if single else places[worker].node, []).append(rank)
    alone = [ranks for ranks in by_domain.values() if not _is_covered_without(assignment, ranks)]
    found: dict[str, tuple[str, ...]] = {}
    if not alone:
        return Placement()
    nodes = {snapshot_server.node for snapshot_server in snapshot_servers}
    for worker, place in places.items():
        found[worker] = (place.node,) if place.node in nodes else ()
    members = [assignment.members[rank] for ranks in alone for rank in ranks]
    sets = () if single else _sets([w for w in members if found[w]], places, num_chunks)
    coded = {worker for workers in sets for worker in workers}
    for worker in members:
        if worker not in coded:
            found[worker] += _elsewhere(places[worker], snapshot_servers)
    return Placement(found, sets) if any(found.values()) else Placement()


def shortfall(placement: Placement, num_chunks: int) -> str:
    """What of `xor:k` cannot be had, and what comes instead; empty if all can."""
    copied = sum(len(nodes) > 1 for nodes in placement.copies.values())
    short = [len(workers) for workers in placement.sets if len(workers) <= num_chunks]
    if not num_chunks or not (copied or short or not placement.sets):
        return ""
    told = [f"{sum(short)} parts in smaller sets"] if short else []
    told += [f"{copied} parts copied whole"] if copied else []
    told += [] if told else ["nothing is kept elsewhere"]
    return f"xor:{num_chunks} wants {num_chunks + 1} nodes a set: {', '.join(told)}"


def carry(
    old: Assignment,
    snapshots: Mapping[str, Sequence[str]],
    new: Assignment,
    topology: Topology,
    remade: Mapping[str, Keepings] = MappingProxyType({}),
) -> tuple[Carried, ...]:
    """Who reads the snapshots: for each of these old members, of which the keepers on some nodes
    have one, or have of what it is remade, a worker, on such a node if there is any.

    The member itself, or the one that takes its rank, else the members there in turn, or a spare.
    """
    beside: dict[str, list[str]] = {}
    for worker in (*new.members, *new.standbys):
        beside.setdefault(topology.get(worker, Place()).node, []).append(worker)
    carried: list[Carried] = []
    for rank, member in enumerate(old.members):
        others = remade.get(member, ())
        nodes = snapshots.get(member) or [node for _, node in others if node]
        if not nodes:
            continue
        heir = new.members[rank % len(new.members)]
        node = next((node for node in nodes if node in beside), "")
        near = [n for w in (member, heir) for n in nodes if w in beside.get(n, ())]
        if near:
            node = near[0]
        able = beside.get(node, [heir])
        carrier = next((w for w in (member, heir) if w in able), able[rank % len(able)])
        carried.append(Carried(member, carrier, "" if others else node or nodes[0], others))
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


def _sets(
    members: Sequence[str], places: Mapping[str, Place], num_chunks: int
) -> tuple[tuple[str, ...], ...]:
    """Each member on another rack, or if there are not so many, on another node."""
    has_racks = len({places[worker].rack for worker in members}) > num_chunks
    by_domain: dict[str, list[str]] = {}
    for worker in members:
        place = places[worker]
        by_domain.setdefault(place.rack if has_racks else place.node, []).append(worker)
    return make_sets(by_domain, num_chunks)


def _elsewhere(place: Place, snapshot_servers: Sequence[Place]) -> tuple[str, ...]:
    """The node of the second copy; none if there is no other."""
    others = [
        snapshot_server
        for snapshot_server in snapshot_servers
        if snapshot_server.node != place.node
    ]
    able = [
        snapshot_server for snapshot_server in others if snapshot_server.rack != place.rack
    ] or others
    if not able:
        return ()
    beside = [
        snapshot_server.node
        for snapshot_server in snapshot_servers
        if snapshot_server.rack == place.rack
    ]
    turn = beside.index(place.node) if place.node in beside else 0
    return (able[turn % len(able)].node,)
