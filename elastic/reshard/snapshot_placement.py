"""Snapshot placement: which snapshot servers hold which snapshots, and which workers read them.

Each node has one snapshot server, a process apart from the workers. No snapshots are needed while
the state survives the loss of any failure domain: a node, or a worker if there is only one node.
Otherwise the snapshot server of each worker's node holds a snapshot, which survives the worker.
Regions that only one node holds need more, to survive the node: the snapshot server of another
node holds a second copy, or several servers hold the parity of them and of others (`parity`).
Snapshots are taken of all parts, not only of those at risk, because only parts of one step combine.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from types import MappingProxyType

from elastic.geometry.assignment import Assignment
from elastic.geometry.shard_map import sharding_of
from elastic.geometry.topology import Place, Topology
from elastic.reshard.holdings import substitute_specs
from elastic.reshard.parity import make_sets
from elastic.reshard.reshard_plan import CarriedPart, ParityMembers


@dataclass(frozen=True, slots=True)
class SnapshotServer:
    """The node of a snapshot server and its addresses: `socket` for workers on the same machine,
    `host` and `port` for other snapshot servers."""

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
    """A complete snapshot: a worker's part of a step, under the assignment of a generation."""

    worker: str
    generation: int
    step: int


@dataclass(frozen=True, slots=True)
class ParitySlot:
    """A complete parity at the snapshot server of `member`: of all other members of its set."""

    members: tuple[str, ...]
    member: str
    generation: int
    step: int


@dataclass(frozen=True, slots=True)
class Placement:
    """Where snapshots are stored."""

    copies: dict[str, tuple[str, ...]] = field(default_factory=dict)
    """By member: the nodes that hold its snapshot, nearest first."""
    sets: tuple[tuple[str, ...], ...] = ()
    """Parity sets: each member's node also holds a parity of the others."""


def place_snapshots(
    assignment: Assignment,
    topology: Topology,
    snapshot_servers: Sequence[Place],
    num_chunks: int = 0,
) -> Placement:
    """The placement on these snapshot servers (sorted); empty if none is needed or possible.

    With `num_chunks`, parts that only one node holds form parity sets over racks, if there are
    enough racks, else over nodes. Parts in no set, and all parts without `num_chunks`, get a second
    copy: the nodes of a rack use the nodes of the other racks in turn. If there is only one rack,
    they use the other nodes.
    """
    places = {worker: topology.get(worker, Place()) for worker in assignment.members}
    by_domain: dict[str, list[int]] = {}
    is_single = len({place.node for place in places.values()}) == 1
    for rank, worker in enumerate(assignment.members):
        by_domain.setdefault(worker if is_single else places[worker].node, []).append(rank)
    at_risk = [ranks for ranks in by_domain.values() if not _is_covered_without(assignment, ranks)]
    copies: dict[str, tuple[str, ...]] = {}
    if not at_risk:
        return Placement()
    nodes = {snapshot_server.node for snapshot_server in snapshot_servers}
    for worker, place in places.items():
        copies[worker] = (place.node,) if place.node in nodes else ()
    members = [assignment.members[rank] for ranks in at_risk for rank in ranks]
    sets = () if is_single else _sets([w for w in members if copies[w]], places, num_chunks)
    in_sets = {worker for workers in sets for worker in workers}
    for worker in members:
        if worker not in in_sets:
            copies[worker] += _second_node(places[worker], snapshot_servers)
    return Placement(copies, sets) if any(copies.values()) else Placement()


def shortfall(placement: Placement, num_chunks: int) -> str:
    """Why `xor:k` is not possible in full, and what replaces it; empty if it is possible."""
    num_copied = sum(len(nodes) > 1 for nodes in placement.copies.values())
    small_sets = [len(workers) for workers in placement.sets if len(workers) <= num_chunks]
    if not num_chunks or not (num_copied or small_sets or not placement.sets):
        return ""
    notes = [f"{sum(small_sets)} parts in smaller sets"] if small_sets else []
    notes += [f"{num_copied} parts copied whole"] if num_copied else []
    notes += [] if notes else ["no snapshot on another node"]
    return f"xor:{num_chunks} needs {num_chunks + 1} nodes in a set: {', '.join(notes)}"


def choose_carriers(
    old: Assignment,
    snapshots: Mapping[str, Sequence[str]],
    new: Assignment,
    topology: Topology,
    remade: Mapping[str, ParityMembers] = MappingProxyType({}),
) -> tuple[CarriedPart, ...]:
    """Choose the worker that reads the snapshot of each old member, if some node has one.

    `snapshots` are the nodes with a snapshot by member; `remade` are the sources from which a lost
    part is rebuilt. A worker on such a node is preferred: the member itself, then the worker that
    takes its rank, then the members on that node in turn, then a standby worker.
    """
    workers_on: dict[str, list[str]] = {}
    for worker in (*new.members, *new.standbys):
        workers_on.setdefault(topology.get(worker, Place()).node, []).append(worker)
    carried: list[CarriedPart] = []
    for rank, member in enumerate(old.members):
        others = remade.get(member, ())
        nodes = snapshots.get(member) or [node for _, node in others if node]
        if not nodes:
            continue
        successor = new.members[rank % len(new.members)]
        node = next((node for node in nodes if node in workers_on), "")
        preferred = [n for w in (member, successor) for n in nodes if w in workers_on.get(n, ())]
        if preferred:
            node = preferred[0]
        on_node = workers_on.get(node, [successor])
        carrier = next(
            (w for w in (member, successor) if w in on_node), on_node[rank % len(on_node)]
        )
        carried.append(CarriedPart(member, carrier, "" if others else node or nodes[0], others))
    return tuple(carried)


def _is_covered_without(assignment: Assignment, ranks: Sequence[int]) -> bool:
    """Whether the other ranks hold every region that these ranks hold."""
    lost = set(ranks)
    for spec in substitute_specs(assignment.layout):
        sharding = sharding_of(spec, assignment.layout)
        for rank in ranks:
            if not sharding.is_held_by(rank):
                continue
            first = sharding.first_holder(rank)
            holders = (sharding.holder(first, i) for i in range(sharding.num_copies))
            if all(holder in lost for holder in holders):
                return False
    return True


def _sets(
    members: Sequence[str], places: Mapping[str, Place], num_chunks: int
) -> tuple[tuple[str, ...], ...]:
    """Parity sets with members on different racks, or on different nodes if racks are too few."""
    has_racks = len({places[worker].rack for worker in members}) > num_chunks
    by_domain: dict[str, list[str]] = {}
    for worker in members:
        place = places[worker]
        by_domain.setdefault(place.rack if has_racks else place.node, []).append(worker)
    return make_sets(by_domain, num_chunks)


def _second_node(place: Place, snapshot_servers: Sequence[Place]) -> tuple[str, ...]:
    """The node of the second copy; empty if there is no other node."""
    others = [server for server in snapshot_servers if server.node != place.node]
    candidates = [server for server in others if server.rack != place.rack] or others
    if not candidates:
        return ()
    same_rack = [server.node for server in snapshot_servers if server.rack == place.rack]
    turn = same_rack.index(place.node) if place.node in same_rack else 0
    return (candidates[turn % len(candidates)].node,)
