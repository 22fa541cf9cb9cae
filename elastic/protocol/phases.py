"""Phases: what the run is doing now, with the data of just that; and the legal transitions."""

from __future__ import annotations

from dataclasses import dataclass, field

from elastic.geometry.assignment import Assignment
from elastic.protocol.events import Quiesced, StateReady
from elastic.protocol.votes import Vote
from elastic.reshard.reshard_plan import ReshardPlan


@dataclass(frozen=True, slots=True)
class Ending:
    """How the run shall end, once it can."""

    outcome: str
    reason: str = ""
    traceback: str = ""


@dataclass(slots=True)
class Waiting:
    """Nothing trains, and `reason` says what for."""

    reason: str
    since: float
    until: float | None = None
    """When to go on with those who are there, if nobody else comes."""
    is_short: bool = False
    """Only until keepers have answered: nobody new is waited for or started."""


@dataclass(frozen=True, slots=True)
class Attempt:
    """One try at a new generation: who shall hold what, and from where the state comes."""

    assignment: Assignment
    plan: ReshardPlan
    source: str
    path: str
    started: float


@dataclass(slots=True)
class Forming:
    """Process groups are being formed and the program is being built on them."""

    attempt: Attempt
    pending: set[str]
    deadline: float


@dataclass(slots=True)
class Resharding:
    """The state moves to where the new assignment wants it."""

    attempt: Attempt
    pending: set[str]
    deadline: float
    ready: dict[str, StateReady] = field(default_factory=dict)


@dataclass(slots=True)
class Running:
    """Workers train on their own."""

    since: float
    last_progress: float
    num_commits: int = 0


@dataclass(slots=True)
class Pausing:
    """The wish to stop at the next boundary is under way; `last_progress` bounds how long."""

    cause: str
    pending: set[str]
    last_progress: float
    is_whole: bool = False
    """All have paused: the controller only lacks records of steps before the boundary."""


@dataclass(slots=True)
class Aborting:
    """Workers unwind; then `settling` brings all of them to the step that a vote decided.

    At `deadline` pending suspects are ended, or after a hang one worker; at `patience` all of them.
    """

    cause: str
    pending: set[str]
    deadline: float
    patience: float
    began: float
    on_gpu: bool = False
    """Whether any survivor has a GPU, which is slower to break off."""
    is_hang: bool = False
    """One worker stands still, and nobody knows which."""
    suspects: set[str] = field(default_factory=set)
    """Workers that do not answer probes."""
    suspected_at: float = 0.0
    changed_at: float = 0.0
    """When a worker last unwound, or was lost before it had."""
    has_lost_pending: bool = False
    """A worker is gone that had not unwound: after a hang, it may have been the one."""
    last_unwound_s: float = 0.0
    """How long the last survivor to unwind took."""
    reports: dict[str, Quiesced] = field(default_factory=dict)
    rolling_forward: Vote | None = None
    num_lost: int = 0
    raised: Ending | None = None
    """The exception that ends the run: no worker was lost before it."""


@dataclass(slots=True)
class Saving:
    """The last checkpoint is being written, under this number; tried again at `retry_at`."""

    generation: int
    deadline: float
    retry_at: float | None = None


@dataclass(slots=True)
class Ended:
    """The run has ended."""

    outcome: str


Phase = Waiting | Forming | Resharding | Running | Pausing | Aborting | Saving | Ended

Breakable = Forming | Resharding | Running | Pausing
"""The phases in which workers act together, so that one who fails fails all."""

TRANSITIONS: dict[type, tuple[tuple[type, str], ...]] = {
    Waiting: (
        (Forming, "enough workers are ready"),
        (Saving, "stop asked for, state held"),
        (Ended, "stop asked for, nothing held"),
    ),
    Forming: (
        (Resharding, "all groups formed"),
        (Aborting, "a loss, or too late"),
    ),
    Resharding: (
        (Running, "all state in place"),
        (Saving, "all state in place, the run ends"),
        (Ended, "all state in place, already saved"),
        (Aborting, "a loss, or too late"),
    ),
    Running: (
        (Pausing, "growth, leavers, another layout, rewind, stop, last step"),
        (Aborting, "a loss or a hang"),
    ),
    Pausing: (
        (Forming, "all paused"),
        (Waiting, "all paused, too few stay"),
        (Saving, "all paused, the run ends"),
        (Ended, "all paused, already saved"),
        (Aborting, "a loss or a hang"),
    ),
    Aborting: (
        (Forming, "all stand at one step"),
        (Waiting, "too few are left"),
        (Saving, "the run has failed or shall end"),
        (Ended, "nothing is left to save"),
    ),
    Saving: (
        (Saving, "a writer was lost, the others cover"),
        (Forming, "complete, but lost before it was saved"),
        (Waiting, "the same, and too few are left"),
        (Ended, "saved, or cannot be"),
    ),
    Ended: (),
}
"""From each phase, where it may lead and why; the diagram in docs/ is drawn from this."""


def may_follow(phase: Phase, successor: Phase) -> bool:
    return type(successor) in (kind for kind, _ in TRANSITIONS[type(phase)])
