"""Reshard plan: the blob of one generation from which every worker derives its own transfers."""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass

from elastic.geometry.assignment import Assignment
from elastic.geometry.errors import InvalidReshard

ParityMembers = tuple[tuple[str, str], ...]
"""The members of a parity set in order, each with the node that has its part and parity; the node
is empty for the lost member."""


@dataclass(frozen=True, slots=True)
class CarriedPart:
    """The part of an old member, which `carrier` reads from a snapshot server or rebuilds.

    It reads the snapshot on the node `snapshot_server`, or rebuilds the part from `others`.
    """

    member: str
    carrier: str
    snapshot_server: str
    others: ParityMembers = ()

    @property
    def nodes(self) -> tuple[str, ...]:
        """The nodes whose snapshot servers are read."""
        return tuple(node for _, node in self.others if node) or (self.snapshot_server,)


@dataclass(frozen=True, slots=True)
class ReshardPlan:
    """The blob of one generation: the state of (lineage, step) moves from `old` to `new`.

    `holders` are the live workers whose part under `old` is complete; `carried` are the parts that
    come from snapshots. If `old` is None, or if both are empty, no state moves between workers:
    each reads its regions from storage.

    Raises `InvalidReshard` if a part belongs to no member of `old` or has two sources.
    """

    lineage: int
    step: int
    old: Assignment | None
    new: Assignment
    holders: tuple[str, ...] = ()
    carried: tuple[CarriedPart, ...] = ()

    def __post_init__(self) -> None:
        known = set(self.old.members) if self.old else set()
        named = [*self.holders, *(part.member for part in self.carried)]
        members = set(named)
        strangers = sorted(members - known)
        if strangers:
            raise InvalidReshard(
                f"{', '.join(strangers)}: named as holders, but not members of the old assignment"
            )
        if len(members) < len(named):
            doubled = sorted(member for member, number in Counter(named).items() if number > 1)
            raise InvalidReshard(f"{', '.join(doubled)}: the part of this member has two sources")

    @property
    def participants(self) -> tuple[str, ...]:
        """The transfer group: new members by world rank, then other workers with parts, sorted."""
        members = set(self.new.members)
        sources = {*self.holders, *(part.carrier for part in self.carried)}
        return self.new.members + tuple(sorted(sources - members))

    def transfer_rank(self, worker: str) -> int:
        return self.participants.index(worker)
