"""Simulated reshards: the values really move, as `transfers` says (invariant 3)."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from sim.lineage import SPECS, Lineage, Part, cut, places, regions_under
from sim.parity import made_again
from sim.snapshot_server import SimSnapshotServer
from sim.storage import Checkpoint
from sim.timeline import GroupBroken

from elastic.geometry.assignment import Assignment
from elastic.geometry.regions import Region
from elastic.reshard.reshard_plan import CarriedPart, ReshardPlan
from elastic.reshard.transfers import Transfers, derive

Shipment = list[tuple[int, Region, list[int]]]
"""What one worker sends to another: tensor, region, values."""


@dataclass
class Moving:
    """One worker's side of a live reshard."""

    plan: ReshardPlan
    transfers: Transfers
    parts: dict[int, Part]
    """The parts of the old assignment that it has, by old world rank."""

    @classmethod
    def of(
        cls,
        plan: ReshardPlan,
        worker: str,
        held: Part | None,
        snapshot_servers: dict[str, SimSnapshotServer],
    ) -> Moving:
        """Raises `GroupBroken` if a snapshot server is gone."""
        assert plan.old
        parts: dict[int, Part] = {}
        if worker in plan.holders:
            assert held, "invariant 3: a source holds nothing"
            parts[plan.old.world_rank(worker)] = held
        for part in plan.carried:
            if part.carrier == worker:
                if not snapshot_servers.keys() >= set(part.nodes):
                    raise GroupBroken("a snapshot server is gone")
                parts[plan.old.world_rank(part.member)] = _read(
                    part, plan.old, plan.step, snapshot_servers
                )
        return cls(plan, derive(SPECS, plan, worker), parts)

    @property
    def sources(self) -> frozenset[str]:
        """The workers from which something will arrive."""
        return frozenset(self.plan.participants[piece.peer] for piece in self.transfers.receives)

    def outgoing(self) -> tuple[Lineage | None, dict[str, Shipment]]:
        """What this worker sends, by receiver."""
        shipments: dict[str, Shipment] = {}
        for tensor, region, peer, rank in self.transfers.sends:
            values = cut(self.parts[rank].pieces[tensor], self.parts[rank].regions[tensor], region)
            receiver = self.plan.participants[peer]
            shipments.setdefault(receiver, []).append((tensor, region, values))
        return next((part.lineage for part in self.parts.values()), None), shipments

    def assemble(self, worker: str, brought: dict[str, Any]) -> Part:
        """The new part: each element comes from exactly one source, all of one lineage."""
        regions = self.transfers.new_regions
        pieces: dict[int, list[int]] = {}
        lineages = [part.lineage for part in self.parts.values()]
        for tensor, region in regions.items():
            if tensor in self.transfers.kept:
                assert self.transfers.own_part is not None
                pieces[tensor] = self.parts[self.transfers.own_part].pieces[tensor]
            else:
                pieces[tensor] = [-1] * region.num_elements
        for tensor, region, rank in self.transfers.copies:
            source = self.parts[rank]
            values = cut(source.pieces[tensor], source.regions[tensor], region)
            _fill(pieces[tensor], regions[tensor], region, values)
        for peer in sorted(self.sources):
            lineage, shipments = brought[peer]
            lineages.append(lineage)
            for tensor, region, values in shipments[worker]:
                _fill(pieces[tensor], regions[tensor], region, values)
        same = {lineage.generations for lineage in lineages}
        assert len(same) <= 1, "invariant 3: sources of different steps"
        lineage = lineages[0] if lineages else Lineage()
        return Part(self.plan.new, lineage, dict(regions), pieces)


def from_checkpoint(checkpoint: Checkpoint | None, assignment: Assignment, worker: str) -> Part:
    """A worker's part from storage, or, without a checkpoint, the initial state."""
    regions = regions_under(assignment, worker)
    if checkpoint is None:
        lineage = Lineage()
        pieces = {i: lineage.values(i, region) for i, region in regions.items()}
        return Part(assignment, lineage, regions, pieces)
    pieces = {i: checkpoint.read(i, region) for i, region in regions.items()}
    return Part(assignment, checkpoint.lineage, regions, pieces)


def _read(
    part: CarriedPart, old: Assignment, step: int, snapshot_servers: dict[str, SimSnapshotServer]
) -> Part:
    if not part.others:
        return snapshot_servers[part.snapshot_server].read(part.member, old.generation, step)
    members = tuple(worker for worker, _ in part.others)
    parts: dict[str, Part] = {}
    parities: dict[str, list[int]] = {}
    for worker, node in part.others:
        if node:
            parts[worker] = snapshot_servers[node].read(worker, old.generation, step)
            parity = snapshot_servers[node].parity(members, worker, old.generation).whole
            assert step in parity, "invariant 3: a parity is not there"
            parities[worker] = parity[step]
    return made_again(part.member, parts, parities, members, old)


def _fill(piece: list[int], whole: Region, part: Region, values: list[int]) -> None:
    for place, value in zip(places(whole, part), values, strict=True):
        assert piece[place] == -1, "invariant 3: an element comes twice"
        piece[place] = value
