"""A refusal of the core as data: what was asked for cannot be had, and why."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Infeasible:
    """No answer exists; `reason` is one line that says what is missing."""

    reason: str
