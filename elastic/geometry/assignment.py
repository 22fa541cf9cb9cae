"""Assignment: the layout of one generation and the worker of each world rank."""

from __future__ import annotations

from dataclasses import dataclass

from elastic.geometry.layout import Coordinates, Layout


@dataclass(frozen=True, slots=True)
class Assignment:
    """The membership of one generation: `members` in world-rank order, and warm `standbys`.

    `shares` are the numbers of microbatches that the data ranks compute in a step; empty: as even
    as possible. Raises `ValueError` if the layout needs another number of members or shares, or if
    a member occurs twice.
    """

    generation: int
    layout: Layout
    members: tuple[str, ...]
    standbys: tuple[str, ...] = ()
    shares: tuple[int, ...] = ()

    def __post_init__(self) -> None:
        if len(self.members) != self.layout.num_workers:
            raise ValueError(
                f"{self.layout} needs {self.layout.num_workers} members, not {len(self.members)}"
            )
        if len(set(self.members)) != len(self.members):
            raise ValueError(f"a worker occurs twice in the members {self.members}")
        if self.shares and len(self.shares) != self.layout.num_data_ranks:
            raise ValueError(
                f"{self.layout} has {self.layout.num_data_ranks} data ranks, not the "
                f"{len(self.shares)} of the shares {self.shares}"
            )

    def world_rank(self, worker: str) -> int:
        return self.members.index(worker)

    def coordinates(self, worker: str) -> Coordinates:
        return self.layout.coordinates(self.world_rank(worker))
