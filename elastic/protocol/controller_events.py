"""Events in which the controller reports on itself."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class ControllerRestarted:
    """The controller had died alone, its last journal line is of `stopped_at`, and is back: what it
    drove may live, and goes on."""

    incarnation: int
    stopped_at: float


@dataclass(frozen=True, slots=True)
class ControllerRaised:
    """An unexpected exception came out of the controller.

    `place` is what it handled: the class of an event or of a command, or one of its threads. The
    third such event in a row for one place ends the run.
    """

    place: str
    message: str
    traceback: str = ""


@dataclass(frozen=True, slots=True)
class ControllerRecovered:
    """What had raised at `place` has succeeded since."""

    place: str


@dataclass(frozen=True, slots=True)
class CheckpointsRemoved:
    """Storage has no manifests of these any more: of which step each was, and which generation
    wrote it."""

    removed: tuple[tuple[int, int], ...]


@dataclass(frozen=True, slots=True)
class WorkerAnswered:
    """A worker that was suspected answers probes again."""

    worker: str


@dataclass(frozen=True, slots=True)
class WorkersStalled:
    """No worker's training thread has got on for a while; the one that has stood still for the
    longest is the first."""

    generation: int
    workers: tuple[str, ...]


ControllerEvent = (
    ControllerRestarted
    | ControllerRaised
    | ControllerRecovered
    | CheckpointsRemoved
    | WorkerAnswered
    | WorkersStalled
)
