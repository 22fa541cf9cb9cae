"""What readers of a journal remember of a run: its events, members, places and sessions."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Happening:
    """One thing that a person wants to know of; `time` is in seconds since the epoch.

    `kind` is ready, joined, lost, left, leaving, draining, resumed, rolled back, skipped, spike,
    audit, straggler, avoided, used again, checkpoint, failed checkpoint, evaluated, starting,
    waiting, layout, refused layout, controller restarted, controller error, controller recovered,
    not finite, nothing counted, stopping or stopped;
    `short` says what it is about in a word or two; `value` is the held-out loss, or how many
    seconds a recovery took; `metrics` are the held-out data's other numbers.
    """

    time: float
    kind: str
    step: int
    generation: int
    world_size: int
    text: str
    short: str = ""
    worker: str = ""
    node: str = ""
    cause: str = ""
    value: float | None = None
    metrics: tuple[tuple[str, float | None], ...] = ()


@dataclass(frozen=True, slots=True)
class Stretch:
    """From `time` on, `world_size` workers were members, and trained or did not."""

    time: float
    world_size: int
    generation: int
    training: bool


@dataclass(frozen=True, slots=True)
class Place:
    """Where a worker's process is, and since when it has been warm (seconds since the epoch)."""

    node: str
    pid: int
    since: float


@dataclass(slots=True)
class Session:
    """The run was being driven from `start` to `end`."""

    start: float
    end: float
