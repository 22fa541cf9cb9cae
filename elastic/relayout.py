"""A re-layout: the blob of one generation, from which every worker derives its own part."""

from __future__ import annotations

from dataclasses import dataclass

from elastic.assignment import Assignment
from elastic.errors import InvalidRelayout


@dataclass(frozen=True, slots=True)
class Relayout:
    """The blob of one generation: state of (history, step) goes from `old` to `new`.

    `holders` are the living workers whose part under `old` is whole. With `old=None` or no
    holders nothing moves between workers: each reads its regions from storage.

    Raises `InvalidRelayout` if a holder was no member of `old`.
    """

    history: int
    step: int
    old: Assignment | None
    new: Assignment
    holders: tuple[str, ...] = ()

    def __post_init__(self) -> None:
        known = set(self.old.members) if self.old else set()
        strangers = sorted(set(self.holders) - known)
        if strangers:
            raise InvalidRelayout(
                f"{', '.join(strangers)}: named as holders, but no members of the old assignment"
            )

    @property
    def participants(self) -> tuple[str, ...]:
        """The transfer group: new members by world rank, then the other holders, sorted."""
        members = set(self.new.members)
        return self.new.members + tuple(sorted(w for w in self.holders if w not in members))

    def transfer_rank(self, worker: str) -> int:
        return self.participants.index(worker)
