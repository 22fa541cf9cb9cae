"""A simulated snapshot server: like `actors/snapshots/server.py`, with whole snapshots only."""

from __future__ import annotations

from dataclasses import dataclass, field

from sim.lineage import Part
from sim.parity import SimParity

from elastic.reshard.snapshot_placement import ParitySlot, Slot, SnapshotServer

NUM_VERSIONS = 2


@dataclass
class SimSnapshotServer:
    """The snapshots of one node: each worker's two newest ones of a generation, and parities of
    sets."""

    snapshot_server: SnapshotServer
    kept: dict[tuple[str, int], list[Part]] = field(default_factory=dict)
    parities: dict[tuple[tuple[str, ...], str, int], SimParity] = field(default_factory=dict)
    is_frozen: bool = False
    """It neither answers nor accepts anything, and keeps what it has."""

    def put(self, worker: str, part: Part) -> None:
        key = (worker, part.assignment.generation)
        self.kept[key] = [*self.kept.get(key, []), part][-NUM_VERSIONS:]

    def begin(self, worker: str, generation: int, safe_step: int) -> None:
        """The older of two versions is overwritten from now on, but not the safe one."""
        key = (worker, generation)
        kept = self.kept.get(key, [])
        if len(kept) == NUM_VERSIONS:
            kept = [part for part in kept if part.lineage.step == safe_step] or kept[1:]
        self.kept[key] = kept[-1:]

    def parity(self, members: tuple[str, ...], at: str, generation: int) -> SimParity:
        """The parity at a member's snapshot server, which is this one."""
        others = frozenset(members) - {at}
        return self.parities.setdefault((members, at, generation), SimParity(others))

    def has(self, worker: str, part: Part) -> bool:
        """Whether this snapshot is whole here."""
        kept = self.kept.get((worker, part.assignment.generation), [])
        return any(other.lineage == part.lineage for other in kept)

    def read(self, worker: str, generation: int, step: int) -> Part:
        snapshots = [p for p in self.kept[worker, generation] if p.lineage.step == step]
        assert snapshots, "invariant 3: a snapshot is not there"
        return snapshots[0]

    def slots(self) -> tuple[Slot, ...]:
        slots = (Slot(w, g, p.lineage.step) for (w, g), kept in self.kept.items() for p in kept)
        return tuple(sorted(slots, key=str))

    def parity_slots(self) -> tuple[ParitySlot, ...]:
        slots = (ParitySlot(*key, step) for key, p in self.parities.items() for step in p.whole)
        return tuple(sorted(slots, key=str))

    def forget(self, generation: int, kept_generation: int) -> None:
        def is_kept(other: int) -> bool:
            return other >= generation or other == kept_generation

        self.kept = {key: parts for key, parts in self.kept.items() if is_kept(key[1])}
        self.parities = {key: p for key, p in self.parities.items() if is_kept(key[2])}
