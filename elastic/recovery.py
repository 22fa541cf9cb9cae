"""Recovery is one rule: the newest step whose holdings cover everything (DESIGN: holdings)."""

from __future__ import annotations

from dataclasses import dataclass

from elastic.assignment import Assignment
from elastic.state import CoreState


@dataclass(frozen=True, slots=True)
class Source:
    """Where the next generation's state comes from: `live`, `checkpoint` or `initial`."""

    kind: str
    step: int
    old: Assignment | None = None
    holders: frozenset[str] = frozenset()
    path: str = ""
