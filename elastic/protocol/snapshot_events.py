"""Snapshot events: reports of and about the snapshot servers."""

from __future__ import annotations

from dataclasses import dataclass

from elastic.reshard.snapshot_placement import ParitySlot, Slot, SnapshotServer


@dataclass(frozen=True, slots=True)
class SnapshotServerReady:
    """The snapshot server of a node is ready to take snapshots."""

    snapshot_server: SnapshotServer


@dataclass(frozen=True, slots=True)
class SnapshotServerSuspected:
    """A snapshot server does not answer."""

    node: str
    cause: str


@dataclass(frozen=True, slots=True)
class SnapshotServerLost:
    """The process of a snapshot server is gone, with all its snapshots."""

    node: str
    cause: str


@dataclass(frozen=True, slots=True)
class SnapshotServerReported:
    """The contents of a snapshot server, in answer to the query of a generation.

    Since its start it has received `taken_bytes` from workers on its node and `received_bytes` from
    other nodes. It now holds `memory_bytes` in memory.
    """

    node: str
    generation: int
    slots: tuple[Slot, ...]
    taken_bytes: int = 0
    received_bytes: int = 0
    memory_bytes: int = 0
    parities: tuple[ParitySlot, ...] = ()


@dataclass(frozen=True, slots=True)
class SnapshotTimed:
    """The time that one snapshot adds to a step of this worker, relative to a step without.

    A worker reports it when it calls for another interval than that of its `StartSnapshots`.
    """

    worker: str
    generation: int
    share: float
    num_steps: float = 0.0
    """How many steps a snapshot takes until it is complete; 0 if the next vote can wait for it."""


SnapshotEvent = (
    SnapshotServerReady
    | SnapshotServerSuspected
    | SnapshotServerLost
    | SnapshotServerReported
    | SnapshotTimed
)
