"""Assignment: the layout of one generation and the worker of each world rank."""

from __future__ import annotations

from dataclasses import dataclass

from elastic.geometry.layout import Coordinates, Layout


@dataclass(frozen=True, slots=True)
class Assignment:
    """The membership of one generation: `members` in world-rank order, and warm `standbys`.

    Raises `ValueError` if the layout needs another number of members or a member occurs twice.
    """

    generation: int
    layout: Layout
    members: tuple[str, ...]
    standbys: tuple[str, ...] = ()

    def __post_init__(self) -> None:
        if len(self.members) != self.layout.num_workers:
            raise ValueError(
                f"{self.layout} needs {self.layout.num_workers} members, not {len(self.members)}"
            )
        if len(set(self.members)) != len(self.members):
            raise ValueError(f"a worker occurs twice in the members {self.members}")

    def world_rank(self, worker: str) -> int:
        return self.members.index(worker)

    def coordinates(self, worker: str) -> Coordinates:
        return self.layout.coordinates(self.world_rank(worker))
