"""Controller events: reports of the controller about itself, its probes and its fleet."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class ControllerRestarted:
    """The controller has restarted after it died alone; its workers may live and continue.

    `stopped_at` is the time of its last journal line.
    """

    incarnation: int
    stopped_at: float


@dataclass(frozen=True, slots=True)
class ControllerRaised:
    """The controller raised an unexpected exception.

    `place` is what it was handling: the class of an event or of a command, or one of its threads.
    The third such event in a row for one place ends the run.
    """

    place: str
    message: str
    traceback: str = ""


@dataclass(frozen=True, slots=True)
class ControllerRecovered:
    """The operation that had raised at `place` has succeeded."""

    place: str


@dataclass(frozen=True, slots=True)
class CheckpointsRemoved:
    """The manifests of checkpoints are removed from storage, each given as its step and the
    generation that wrote it."""

    removed: tuple[tuple[int, int], ...]


@dataclass(frozen=True, slots=True)
class WorkerAnswered:
    """A suspected worker answers probes again."""

    worker: str


@dataclass(frozen=True, slots=True)
class WorkersStalled:
    """No training thread of any worker has made progress for a while; the longest stall first."""

    generation: int
    workers: tuple[str, ...]


@dataclass(frozen=True, slots=True)
class WorkerPlaced:
    """A worker requested on a market has got a machine: its process has started to warm up."""

    worker: str
    node: str


ControllerEvent = (
    ControllerRestarted
    | ControllerRaised
    | ControllerRecovered
    | CheckpointsRemoved
    | WorkerAnswered
    | WorkersStalled
    | WorkerPlaced
)
