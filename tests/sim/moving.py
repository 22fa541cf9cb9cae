"""Simulated re-layouts: the values really move, as `elastic.transfers` says (invariant 3)."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from sim.lineage import SPECS, Lineage, Part, cut, places, regions_under
from sim.storage import Checkpoint

from elastic.assignment import Assignment
from elastic.regions import Region
from elastic.transfers import Relayout as RelayoutPlan
from elastic.transfers import Transfers, derive

Shipment = list[tuple[int, Region, list[int]]]
"""What goes from one worker to another: tensor, region, values."""


@dataclass
class Moving:
    """One worker's side of a live re-layout."""

    plan: RelayoutPlan
    transfers: Transfers
    held: Part | None

    @classmethod
    def of(cls, plan: RelayoutPlan, worker: str, held: Part | None) -> Moving:
        assert held or worker not in plan.holders, "invariant 3: a source holds nothing"
        return cls(plan, derive(SPECS, plan, worker), held if worker in plan.holders else None)

    @property
    def sources(self) -> frozenset[str]:
        """From whom something is to come."""
        return frozenset(self.plan.participants[piece.peer] for piece in self.transfers.receives)

    def outgoing(self) -> tuple[Lineage | None, dict[str, Shipment]]:
        """What this worker brings, by receiver."""
        shipments: dict[str, Shipment] = {}
        for tensor, region, peer in self.transfers.sends:
            assert self.held
            values = cut(self.held.pieces[tensor], self.held.regions[tensor], region)
            receiver = self.plan.participants[peer]
            shipments.setdefault(receiver, []).append((tensor, region, values))
        return self.held and self.held.lineage, shipments

    def assemble(self, worker: str, brought: dict[str, Any]) -> Part:
        """The new part: each element comes from exactly one place, all of one lineage."""
        regions, held = self.transfers.new_regions, self.held
        pieces: dict[int, list[int]] = {}
        lineages = [held.lineage] if held else []
        for tensor, region in regions.items():
            if tensor in self.transfers.kept:
                assert held
                pieces[tensor] = held.pieces[tensor]
            else:
                pieces[tensor] = [-1] * region.num_elements
        for tensor, region in self.transfers.copies:
            assert held
            _fill(
                pieces[tensor],
                regions[tensor],
                region,
                cut(held.pieces[tensor], held.regions[tensor], region),
            )
        for source in sorted(self.sources):
            lineage, shipments = brought[source]
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


def _fill(piece: list[int], whole: Region, part: Region, values: list[int]) -> None:
    for place, value in zip(places(whole, part), values, strict=True):
        assert piece[place] == -1, "invariant 3: an element comes twice"
        piece[place] = value
