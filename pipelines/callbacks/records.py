"""What the methods of callbacks get: frozen records. Times are in seconds since the epoch."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any


@dataclass(frozen=True)
class StartedRun:
    """A run, or the part of a resumed one, whose first workers are about to train."""

    name: str
    folder: str
    """The path of the run's folder, or its URL."""
    began: float
    """When the run began first; a resumed run keeps this time."""
    step: int
    """The last step before: 0, or the step from which a resumed run continues."""
    num_steps: int
    """The last step of the run."""
    generation: int
    layout: str
    """Such as `dp=2,fsdp=2`; empty if the run ended before any worker trained."""
    workers: tuple[str, ...]
    """In world-rank order."""
    recipe: str
    settings: Mapping[str, Any]
    """All settings, nested, as in `recipe.json`."""


@dataclass(frozen=True)
class CommittedStep:
    """A committed step."""

    number: int
    """From 1."""
    loss: float | None
    """None if the step was skipped, or if its record was lost with the workers."""
    metrics: Mapping[str, Any]
    """The line of `metrics.jsonl`, with the numbers that the script reports among its keys."""
    reported: Mapping[str, float | None]
    """Only the numbers that the script reports."""
    generation: int
    world_size: int
    time: float


@dataclass(frozen=True)
class HeldOutResult:
    """The held-out loss after a step; a value is None if it was not finite or nothing counted."""

    step: int
    loss: float | None
    metrics: Mapping[str, float | None]
    """Other metrics of the held-out samples, by name."""
    time: float


@dataclass(frozen=True)
class CompletedReshard:
    """A generation, other than the first, that continues the training."""

    generation: int
    step: int
    """The generation continues with the step after this one."""
    rolled_back_from: int | None
    """The last step before a rollback to `step`; None if no step is undone."""
    layout: str
    workers: tuple[str, ...]
    """In world-rank order."""
    source: str
    """Where the state comes from: live, snapshot, checkpoint or initial."""
    bytes_moved: int
    seconds: float
    """From the decision to the state in place."""
    time: float


@dataclass(frozen=True)
class ReceivedNotice:
    """The announced end of a worker or a node."""

    kind: str
    """`worker draining`, `node draining`, or `node at risk`: the cloud may take it."""
    node: str
    """Empty if only a worker drains whose node is not known."""
    workers: tuple[str, ...]
    """The worker, or those on the node."""
    deadline: float | None
    """When a draining node ends."""
    cause: str
    time: float


@dataclass(frozen=True)
class SavedCheckpoint:
    """A complete checkpoint."""

    step: int
    generation: int
    path: str
    """The path of its folder, or its URL."""
    time: float


@dataclass(frozen=True)
class EndedRun:
    """The end of a run."""

    outcome: str
    """completed, failed, interrupted or user_error."""
    step: int
    """The last committed step."""
    reason: str
    traceback: str
    """Of the user's code, if that ended the run."""
    metrics: Mapping[str, Any]
    """Those of the last step that was reported to callbacks; may be empty."""
    failed_callbacks: tuple[str, ...]
    """A line about each callback that has raised."""


Record = (
    StartedRun
    | CommittedStep
    | HeldOutResult
    | CompletedReshard
    | ReceivedNotice
    | SavedCheckpoint
    | EndedRun
)
