"""Phases of a run, each with its own data, and the legal transitions between them."""

from __future__ import annotations

from dataclasses import dataclass, field

from elastic.geometry.assignment import Assignment
from elastic.protocol.events import Quiesced, StateReady
from elastic.protocol.votes import Vote
from elastic.reshard.reshard_plan import ReshardPlan


@dataclass(frozen=True, slots=True)
class Ending:
    """How the run will end, as soon as it can."""

    outcome: str
    reason: str = ""
    traceback: str = ""


@dataclass(slots=True)
class Waiting:
    """The run does not train; `reason` says what it waits for."""

    reason: str
    since: float
    until: float | None = None
    """When to continue with the available workers, if no more arrive."""
    is_short: bool = False
    """Whether the run waits only for answers of snapshot servers, and starts no worker."""


@dataclass(frozen=True, slots=True)
class Attempt:
    """One attempt at a new generation: its assignment, its plan and the source of the state."""

    assignment: Assignment
    plan: ReshardPlan
    source: str
    path: str
    started: float


@dataclass(slots=True)
class Forming:
    """Workers form the process groups and build the program on them."""

    attempt: Attempt
    pending: set[str]
    deadline: float


@dataclass(slots=True)
class Resharding:
    """The state moves to the workers that hold it under the new assignment."""

    attempt: Attempt
    pending: set[str]
    deadline: float
    ready: dict[str, StateReady] = field(default_factory=dict)


@dataclass(slots=True)
class Running:
    """Workers train; the controller is not involved in a step."""

    since: float
    last_progress: float
    num_commits: int = 0


@dataclass(slots=True)
class Pausing:
    """Workers will stop at the next step boundary; a hang counts from `last_progress`."""

    cause: str
    pending: set[str]
    last_progress: float
    is_whole: bool = False
    """Whether all have paused, and the controller only lacks records of earlier steps."""


@dataclass(slots=True)
class Aborting:
    """Workers unwind; then all of them roll forward to the step that a vote decided.

    At `deadline` the controller ends the pending suspects, or after a hang one worker. At
    `patience` it ends all pending workers.
    """

    cause: str
    pending: set[str]
    deadline: float
    patience: float
    began: float
    on_gpu: bool = False
    """Whether any survivor has a GPU, which takes longer to abort."""
    is_hang: bool = False
    """Whether a hang is the cause: some worker is stalled, and it is not known which."""
    suspects: set[str] = field(default_factory=set)
    """Workers that do not answer probes."""
    suspected_at: float = 0.0
    changed_at: float = 0.0
    """When a worker last unwound, or was lost before it had unwound."""
    has_lost_pending: bool = False
    """Whether a worker was lost before it had unwound: after a hang, it may be the stalled one."""
    last_unwound_s: float = 0.0
    """How long the latest survivor to unwind took."""
    reports: dict[str, Quiesced] = field(default_factory=dict)
    rolling_forward: Vote | None = None
    num_lost: int = 0
    raised: Ending | None = None
    """The exception that ends the run, if no worker was lost before it."""
    newcomers: set[str] = field(default_factory=set)
    """Of the attempt that broke; see `newcomers_of`."""
    failed: set[str] = field(default_factory=set)
    """Newcomers whose program raised an exception."""
    excuses_newcomers: bool = False
    """Whether the attempt broke for lack of memory or time, not because of a worker."""


@dataclass(slots=True)
class Saving:
    """Workers write the last checkpoint, under `generation`; a failed write is retried at
    `retry_at`."""

    generation: int
    deadline: float
    retry_at: float | None = None
    is_extended: bool = False
    """Whether the deadline was moved once because only the publication was missing."""


@dataclass(slots=True)
class Ended:
    """The run has ended."""

    outcome: str


Phase = Waiting | Forming | Resharding | Running | Pausing | Aborting | Saving | Ended

Breakable = Forming | Resharding | Running | Pausing
"""The phases in which workers act together, so that the failure of one aborts all."""


def newcomers_of(phase: Phase) -> set[str]:
    """The workers of an attempt to form a generation, or of one that broke, that hold no state,
    while others do."""
    if isinstance(phase, Aborting):
        return phase.newcomers
    if not isinstance(phase, Forming | Resharding) or phase.attempt.plan.old is None:
        return set()
    return set(phase.attempt.plan.participants).difference(phase.attempt.plan.holders)


TRANSITIONS: dict[type, tuple[tuple[type, str], ...]] = {
    Waiting: (
        (Forming, "enough workers are ready"),
        (Saving, "stop requested, workers hold state"),
        (Ended, "stop requested, no worker holds state"),
    ),
    Forming: (
        (Resharding, "all groups formed"),
        (Aborting, "a worker lost, or timeout"),
    ),
    Resharding: (
        (Running, "all state in place"),
        (Saving, "all state in place, the run ends"),
        (Ended, "all state in place, already saved"),
        (Aborting, "a worker lost, or timeout"),
    ),
    Running: (
        (Pausing, "growth, drain, new layout, rollback, stop, last step"),
        (Aborting, "a worker lost, or a hang"),
    ),
    Pausing: (
        (Forming, "all paused"),
        (Waiting, "all paused, too few workers remain"),
        (Saving, "all paused, the run ends"),
        (Ended, "all paused, already saved"),
        (Aborting, "a worker lost, or a hang"),
    ),
    Aborting: (
        (Forming, "all survivors at one step"),
        (Waiting, "too few workers remain"),
        (Saving, "the run has failed or was stopped"),
        (Ended, "no state left to save"),
    ),
    Saving: (
        (Saving, "a writer lost, the others cover the state"),
        (Forming, "run complete, but state lost before it was saved"),
        (Waiting, "the same, and too few workers remain"),
        (Ended, "saved, or saving failed"),
    ),
    Ended: (),
}
"""By phase, the phases that may follow and why; the diagram in docs/phases.md is drawn from it."""


def may_follow(phase: Phase, successor: Phase) -> bool:
    return type(successor) in (kind for kind, _ in TRANSITIONS[type(phase)])
