"""How many microbatches of a step each member computes, while they are dealt by speed."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

from elastic.geometry.assignment import Assignment
from elastic.protocol.wire import decode


@dataclass(slots=True)
class DealtMicrobatches:
    """The microbatches of each member, as of the last `Form` of the journal."""

    by_worker: dict[str, int] = field(default_factory=dict)
    """Empty while they are dealt evenly."""

    def take(self, line: dict[str, Any]) -> None:
        """Add one journal line."""
        if line.get("command") != "Form":
            return
        self.by_worker = {}
        if line["assignment"].get("shares"):
            assignment: Assignment = decode(Assignment, line["assignment"])
            layout, shares = assignment.layout, assignment.shares
            self.by_worker = {
                worker: shares[layout.data_rank(world_rank)]
                for world_rank, worker in enumerate(assignment.members)
            }
