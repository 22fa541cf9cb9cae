"""An assignment: which worker has which world rank of which layout, in one generation."""

from __future__ import annotations

from dataclasses import dataclass

from elastic.geometry.layout import Coordinates, Layout


@dataclass(frozen=True, slots=True)
class Assignment:
    """One generation's membership: `members` in world-rank order, and the warm `spares`."""

    generation: int
    layout: Layout
    members: tuple[str, ...]
    standbys: tuple[str, ...] = ()

    def __post_init__(self) -> None:
        if len(self.members) != self.layout.num_workers:
            raise ValueError(f"{self.layout} wants {self.layout.num_workers} members")
        if len(set(self.members)) != len(self.members):
            raise ValueError("a worker stands twice in an assignment")

    def world_rank(self, worker: str) -> int:
        return self.members.index(worker)

    def coordinates(self, worker: str) -> Coordinates:
        return self.layout.coordinates(self.world_rank(worker))
