"""A worker's report of what its snapshots cost, for `snapshot.every=auto`."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class SnapshotTimed:
    """The time that one snapshot adds to a step of this worker, relative to a step without.

    A worker reports it when it calls for another interval than that of its `StartSnapshots`.
    """

    worker: str
    generation: int
    share: float
