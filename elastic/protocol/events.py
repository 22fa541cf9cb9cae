"""Events: what has happened, in the past tense. They are all that the core ever learns."""

from __future__ import annotations

from dataclasses import dataclass

from elastic.geometry.target_layout import TargetLayout
from elastic.geometry.training_job import Job
from elastic.protocol.controller_events import ControllerEvent
from elastic.protocol.policy import Policy
from elastic.protocol.step_records import RecordsSent
from elastic.protocol.votes import StepRecord, Vote
from elastic.reshard.snapshot_placement import ParitySlot, Slot, SnapshotServer


@dataclass(frozen=True, slots=True)
class Saved:
    """A whole checkpoint, with the generation that wrote it."""

    step: int
    generation: int
    path: str


@dataclass(frozen=True, slots=True)
class PartFile:
    """A file of a checkpoint; `checksum` is of its header, `header_bytes` its length, if known."""

    name: str
    num_bytes: int
    checksum: int
    header_bytes: int = 0


@dataclass(frozen=True, slots=True)
class RunOpened:
    """A controller has taken the run; whatever an earlier one drove is gone.

    `saved` are the whole checkpoints in storage, the oldest first. Files of the run name
    generations up to `newest_generation`, of which a damaged journal may know nothing.
    """

    incarnation: int
    policy: Policy
    target_layout: TargetLayout
    job: Job
    saved: tuple[Saved, ...] = ()
    newest_generation: int = 0


@dataclass(frozen=True, slots=True)
class StoreReady:
    """The store listens; groups can be formed through it."""

    host: str
    port: int


@dataclass(frozen=True, slots=True)
class StoreLost:
    cause: str


@dataclass(frozen=True, slots=True)
class WorkerReady:
    """A worker has warmed up and waits for its first assignment. `device` is cpu or cuda."""

    worker: str
    node: str
    pid: int
    rack: str = ""
    memory_bytes: int | None = None
    """What its device can hold, or None where nobody can say."""
    digest: str = ""
    """Of its sources and tensor specs: all workers of a run must agree on them."""
    node_type: str = ""
    """The cluster's name for machines like its node, where it has one."""
    device: str = "cpu"


@dataclass(frozen=True, slots=True)
class WorkerLost:
    """A worker's process is gone for good."""

    worker: str
    cause: str
    node: str = ""
    """Where it ran, as far as anybody knows: one that has never been ready could not tell."""
    is_crash: bool = False
    """Whether the process is known to have ended by itself (a fault signal, an exit code), not by
    SIGKILL, the out-of-memory killer or a preemption. On Ray this is mostly unknown: False."""


@dataclass(frozen=True, slots=True)
class WorkerSuspected:
    """Somebody has reason to believe that a worker no longer answers."""

    worker: str
    cause: str


@dataclass(frozen=True, slots=True)
class WorkerDraining:
    """A worker shall go at the next step boundary, by plan."""

    worker: str
    cause: str


@dataclass(frozen=True, slots=True)
class NodeDraining:
    """A node has announced that it will be gone at `deadline` (seconds since the epoch)."""

    node: str
    deadline: float
    cause: str = ""
    """Who says so."""


@dataclass(frozen=True, slots=True)
class NodeAtRisk:
    """A node may be taken before long, and nobody says when."""

    node: str
    cause: str


@dataclass(frozen=True, slots=True)
class SnapshotServerReady:
    """A node's keeper takes snapshots."""

    snapshot_server: SnapshotServer


@dataclass(frozen=True, slots=True)
class SnapshotServerSuspected:
    """A keeper does not answer."""

    node: str
    cause: str


@dataclass(frozen=True, slots=True)
class SnapshotServerLost:
    """A keeper's process is gone, and with it all that it had."""

    node: str
    cause: str


@dataclass(frozen=True, slots=True)
class SnapshotServerReported:
    """What a keeper has, answering the question that was asked in a generation.

    Since it started it has got `taken_bytes` from workers beside it and `received_bytes` from
    elsewhere; its memory has `memory_bytes` now.
    """

    node: str
    generation: int
    slots: tuple[Slot, ...]
    taken_bytes: int = 0
    received_bytes: int = 0
    memory_bytes: int = 0
    parities: tuple[ParitySlot, ...] = ()


@dataclass(frozen=True, slots=True)
class GroupFormed:
    worker: str
    generation: int


@dataclass(frozen=True, slots=True)
class StateReady:
    """A worker's part of the state is complete under the new assignment."""

    worker: str
    generation: int
    bytes_moved: int
    bytes_needed: int
    seconds: float
    param_bytes: int
    grad_bytes: int
    optimizer_bytes: int
    bandwidths: tuple[tuple[str, float], ...] = ()
    """Bytes a second from other workers to this one, measured when a run begins."""


@dataclass(frozen=True, slots=True)
class StepCommitted:
    """World rank 0 tells of a committed step; awaited by nobody."""

    generation: int
    record: StepRecord
    vote: Vote


@dataclass(frozen=True, slots=True)
class Progressed:
    """No step has committed for a while, but some worker's training thread gets on."""

    generation: int


@dataclass(frozen=True, slots=True)
class ComputeTimed:
    """How long each member has computed for a step, without its waits for others: the mean of the
    latest steps up to `step`, in seconds and in world-rank order; 0 where nothing was timed.

    In a large run's journal `slow` mostly stands for `compute_s`: the stragglers' world ranks, and
    how many times as long as the median of its equals each took."""

    generation: int
    step: int
    compute_s: tuple[float, ...]
    slow: tuple[tuple[int, float], ...] = ()


@dataclass(frozen=True, slots=True)
class Evaluated:
    """The held-out loss after `step`, and other metrics of the held-out data by name.

    A value is None if it was not finite, in which case `not_finite` has its name (`loss` or that of
    a metric), or if the evaluation counted nothing.
    """

    generation: int
    step: int
    loss: float | None
    metrics: tuple[tuple[str, float | None], ...] = ()
    not_finite: tuple[str, ...] = ()


@dataclass(frozen=True, slots=True)
class Audited:
    """Replicas have been compared bit by bit after `step`.

    `num_replicas` workers at least held each part of the state; 1: nothing to compare.
    `splits` has the holders of each part with unequal copies, grouped by what they hold.
    """

    generation: int
    step: int
    num_replicas: int
    splits: tuple[tuple[tuple[str, ...], ...], ...] = ()


@dataclass(frozen=True, slots=True)
class Paused:
    """A worker has stopped at a step boundary, as all agreed in the vote."""

    worker: str
    generation: int
    step: int


@dataclass(frozen=True, slots=True)
class Quiesced:
    """A worker's training thread has unwound after an abort.

    `vote` is the latest vote it has read, `gradients_complete` whether it could still apply
    the step after `committed_step`, `torn` whether an apply broke half-way. `records` are those
    that the controller lacks, by `Abort.committed_step`; empty if there are too many for a report.
    """

    worker: str
    generation: int
    committed_step: int
    vote: Vote | None = None
    gradients_complete: bool = False
    torn: bool = False
    records: tuple[StepRecord, ...] = ()


@dataclass(frozen=True, slots=True)
class RolledForward:
    """A worker has rolled forward to the step that a seen vote had decided."""

    worker: str
    generation: int
    record: StepRecord


@dataclass(frozen=True, slots=True)
class WorkerRaised:
    """An exception came out of a worker's training thread.

    `kind` is `peer` (a collective broke: a peer may be gone), `device`, `memory`, `machine` (the
    machine lacks something, such as a route to the data), `holding` (what the worker holds is not
    of the plan's step) or `program` (the user's code). For `memory`, `held_bytes` is the worker's
    peak and `wanted_bytes` what the allocator was asked for, if it says so.
    """

    worker: str
    generation: int
    kind: str
    message: str
    traceback: str = ""
    held_bytes: int = 0
    wanted_bytes: int = 0


@dataclass(frozen=True, slots=True)
class PartWritten:
    """A worker's part of a checkpoint is durable; readers see it once it is published."""

    worker: str
    generation: int
    step: int
    file: PartFile


@dataclass(frozen=True, slots=True)
class PartFailed:
    """A worker could not write its part; training goes on, this checkpoint never appears."""

    worker: str
    generation: int
    step: int
    cause: str


@dataclass(frozen=True, slots=True)
class CheckpointDamaged:
    """A worker has found that a checkpoint is not what was written; `cause` names the file."""

    worker: str
    generation: int
    path: str
    cause: str


@dataclass(frozen=True, slots=True)
class Checkpointed:
    """A checkpoint is whole and visible."""

    step: int
    generation: int
    path: str


@dataclass(frozen=True, slots=True)
class LayoutRequested:
    """A person wishes for another layout from the next step boundary on.

    `request` is by what the answer is known; the run's number of workers stays.
    """

    request: str
    target_layout: TargetLayout


@dataclass(frozen=True, slots=True)
class StopRequested:
    """The driver, a signal or a person asks the run to end at the next boundary."""

    cause: str


@dataclass(frozen=True, slots=True)
class Woke:
    """The time that `next_deadline` named has come."""


Event = (
    RunOpened
    | ControllerEvent
    | StoreReady
    | StoreLost
    | WorkerReady
    | WorkerLost
    | WorkerSuspected
    | WorkerDraining
    | NodeDraining
    | NodeAtRisk
    | SnapshotServerReady
    | SnapshotServerSuspected
    | SnapshotServerLost
    | SnapshotServerReported
    | GroupFormed
    | StateReady
    | StepCommitted
    | Progressed
    | ComputeTimed
    | Evaluated
    | Audited
    | Paused
    | Quiesced
    | RolledForward
    | RecordsSent
    | WorkerRaised
    | PartWritten
    | PartFailed
    | Checkpointed
    | CheckpointDamaged
    | LayoutRequested
    | StopRequested
    | Woke
)
