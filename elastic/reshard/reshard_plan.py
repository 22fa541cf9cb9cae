"""A re-layout: the blob of one generation, from which every worker derives its own part."""

from __future__ import annotations

from dataclasses import dataclass

from elastic.geometry.assignment import Assignment
from elastic.geometry.errors import InvalidReshard

Keepings = tuple[tuple[str, str], ...]
"""A set's members in order, each with the node where its part and its keeper's parity are; where
the member is lost the node is empty."""


@dataclass(frozen=True, slots=True)
class Carried:
    """An old member's part, which `carrier` reads from its snapshot at a node's keeper, or makes
    again of what `others` keep."""

    member: str
    carrier: str
    snapshot_server: str
    others: Keepings = ()

    @property
    def nodes(self) -> tuple[str, ...]:
        """Those whose keepers are read."""
        return tuple(node for _, node in self.others if node) or (self.snapshot_server,)


@dataclass(frozen=True, slots=True)
class ReshardPlan:
    """The blob of one generation: state of (history, step) goes from `old` to `new`.

    `holders` are the living workers whose part under `old` is whole, `carried` the parts that
    come out of snapshots. With `old=None` or neither of them nothing moves between workers: each
    reads its regions from storage.

    Raises `InvalidReshard` if a part is of nobody in `old`, or comes from two places.
    """

    lineage: int
    step: int
    old: Assignment | None
    new: Assignment
    holders: tuple[str, ...] = ()
    carried: tuple[Carried, ...] = ()

    def __post_init__(self) -> None:
        known = set(self.old.members) if self.old else set()
        named = [*self.holders, *(part.member for part in self.carried)]
        strangers = sorted(set(named) - known)
        if strangers:
            raise InvalidReshard(
                f"{', '.join(strangers)}: named as holders, but no members of the old assignment"
            )
        if len(set(named)) < len(named):
            raise InvalidReshard("a part of the old assignment comes from two places")

    @property
    def participants(self) -> tuple[str, ...]:
        """The transfer group: new members by world rank, then who else has parts, sorted."""
        members = set(self.new.members)
        having = {*self.holders, *(part.carrier for part in self.carried)}
        return self.new.members + tuple(sorted(having - members))

    def transfer_rank(self, worker: str) -> int:
        return self.participants.index(worker)
