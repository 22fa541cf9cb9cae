"""Events: the only inputs of the core; each says in the past tense what has happened."""

from __future__ import annotations

from dataclasses import dataclass, field

from elastic.geometry.machine_report import MachineReport
from elastic.geometry.target_layout import TargetLayout
from elastic.geometry.training_job import Job
from elastic.protocol.controller_events import ControllerEvent
from elastic.protocol.policy import Policy
from elastic.protocol.snapshot_events import SnapshotEvent
from elastic.protocol.step_records import RecordsSent
from elastic.protocol.votes import StepRecord, Vote


@dataclass(frozen=True, slots=True)
class Saved:
    """A complete checkpoint, with the generation that wrote it."""

    step: int
    generation: int
    path: str


@dataclass(frozen=True, slots=True)
class PartFile:
    """A file of a checkpoint, with the checksum of its header and the header's length, if known."""

    name: str
    num_bytes: int
    checksum: int
    header_bytes: int = 0


@dataclass(frozen=True, slots=True)
class RunOpened:
    """A controller has opened the run; the workers of an earlier session are gone.

    `saved` are the complete checkpoints in storage, oldest first. `newest_generation` is the newest
    that a file of the run names; a damaged journal may lack it.
    """

    incarnation: int
    policy: Policy
    target_layout: TargetLayout
    job: Job
    saved: tuple[Saved, ...] = ()
    newest_generation: int = 0


@dataclass(frozen=True, slots=True)
class StoreReady:
    """The store listens, so groups can form through it."""

    host: str
    port: int


@dataclass(frozen=True, slots=True)
class StoreLost:
    cause: str


@dataclass(frozen=True, slots=True)
class WorkerReady:
    """A worker has warmed up and waits for its first assignment.

    `memory_bytes` is the memory of its `device` (`cpu` or `cuda`), `digest` that of its sources and
    tensor specs, equal on all workers of a run, `node_type` the cluster's name for this type of
    node, `market` its label `spot` or `on-demand`, `step_flops` the floating-point operations of a
    whole step of the run, `peak_flops` the most that the device can do a second. None or empty: not
    known.
    """

    worker: str
    node: str
    pid: int
    rack: str = ""
    memory_bytes: int | None = None
    digest: str = ""
    node_type: str = ""
    device: str = "cpu"
    device_name: str = ""
    step_flops: float | None = None
    peak_flops: float | None = None
    machine: MachineReport = field(default_factory=MachineReport)
    market: str = ""


@dataclass(frozen=True, slots=True)
class WorkerLost:
    """A worker's process is gone for good."""

    worker: str
    cause: str
    node: str = ""
    """Its node, if known: a worker that was never ready has not reported its node."""
    is_crash: bool = False
    """Whether the process is known to have ended by itself (a fault signal, an exit code), not by
    SIGKILL, the out-of-memory killer or a preemption. On Ray this is mostly unknown: False."""


@dataclass(frozen=True, slots=True)
class WorkerSuspected:
    """There is reason to believe that a worker no longer answers."""

    worker: str
    cause: str


@dataclass(frozen=True, slots=True)
class WorkerDraining:
    """A worker is to leave at the next step boundary, by plan, or since its device degrades."""

    worker: str
    cause: str
    is_degraded: bool = False


@dataclass(frozen=True, slots=True)
class NodeDraining:
    """A node has announced that it will be gone at `deadline` (seconds since the epoch)."""

    node: str
    deadline: float
    cause: str = ""
    """The source of the notice."""


@dataclass(frozen=True, slots=True)
class NodeAtRisk:
    """A node may be preempted soon, at an unknown time."""

    node: str
    cause: str


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
    """World rank 0 reports a committed step; no worker waits for the report."""

    generation: int
    record: StepRecord
    vote: Vote


@dataclass(frozen=True, slots=True)
class Progressed:
    """No step has committed for a while, but some training thread makes progress."""

    generation: int


@dataclass(frozen=True, slots=True)
class ComputeTimed:
    """The compute time of each member for a step, without its waits for other members.

    `compute_s` are means over the latest steps up to `step`, in world-rank order; 0: not measured.
    In the journal of a large run `slow` mostly replaces it: the world ranks of the stragglers, and
    the time of each relative to the median of its peers."""

    generation: int
    step: int
    compute_s: tuple[float, ...]
    slow: tuple[tuple[int, float], ...] = ()


@dataclass(frozen=True, slots=True)
class Evaluated:
    """The held-out loss after `step`, and other metrics of the held-out data by name.

    A value is None if the evaluation counted nothing or the value was not finite. In the second
    case `not_finite` has its name: `loss` or the name of a metric.
    """

    generation: int
    step: int
    loss: float | None
    metrics: tuple[tuple[str, float | None], ...] = ()
    not_finite: tuple[str, ...] = ()


@dataclass(frozen=True, slots=True)
class Audited:
    """The replicas have been compared bit by bit after `step`.

    `num_replicas` workers at least held each part of the state; 1: nothing to compare.
    `splits` has the holders of each part whose copies differ, grouped by equal copies.
    """

    generation: int
    step: int
    num_replicas: int
    splits: tuple[tuple[tuple[str, ...], ...], ...] = ()


@dataclass(frozen=True, slots=True)
class Paused:
    """A worker has stopped at a step boundary: the vote agreed, or the program ends (`is_last`)."""

    worker: str
    generation: int
    step: int
    is_last: bool = False


@dataclass(frozen=True, slots=True)
class Quiesced:
    """A worker's training thread has unwound after an abort.

    `vote` is the latest that it has read. `gradients_complete`: it can still apply the step after
    `committed_step`. `torn`: an apply raised half-way. `records`: of the steps after
    `Abort.committed_step`, if they are few. `saving_step`: the newest it has begun to save, or 0.
    """

    worker: str
    generation: int
    committed_step: int
    vote: Vote | None = None
    gradients_complete: bool = False
    torn: bool = False
    records: tuple[StepRecord, ...] = ()
    saving_step: int = 0


@dataclass(frozen=True, slots=True)
class GroupProgress:
    """How many collectives of a group (`axis`, world `ranks`) a worker has begun and ended.
    `operation` is the last that it has begun."""

    axis: str
    ranks: tuple[int, ...]
    begun: int
    ended: int
    operation: str


@dataclass(frozen=True, slots=True)
class HangObserved:
    """Where a worker was when a hang aborted its generation; `position` is that of its code."""

    worker: str
    generation: int
    groups: tuple[GroupProgress, ...]
    position: str


@dataclass(frozen=True, slots=True)
class RolledForward:
    """A worker has rolled forward to the step that the vote of `RollForward` decided."""

    worker: str
    generation: int
    record: StepRecord


@dataclass(frozen=True, slots=True)
class WorkerRaised:
    """A worker's training thread raised an exception.

    `kind` is `peer` (a collective failed: a peer may be gone), `device`, `memory`, `machine` (the
    machine lacks something, such as a route to the data), `health` (the machine failed a check on
    `node`), `holding` (the worker's holding is not of the plan's step), `mistake` (of the user's
    code, explained by the message) or `program` (the user's code). For `memory`, `held_bytes` is
    the worker's peak and `wanted_bytes` the size of the failed allocation, if reported.
    """

    worker: str
    generation: int
    kind: str
    message: str
    traceback: str = ""
    held_bytes: int = 0
    wanted_bytes: int = 0
    node: str = ""


@dataclass(frozen=True, slots=True)
class PartWritten:
    """A worker's part of a checkpoint is durable; readers see it once it is published."""

    worker: str
    generation: int
    step: int
    file: PartFile
    others: tuple[tuple[str, PartFile], ...] = ()
    """Further files of a large part, and other workers' parts of the step that came with it."""

    @property
    def parts(self) -> tuple[tuple[str, PartFile], ...]:
        """All of them."""
        return ((self.worker, self.file), *self.others)


@dataclass(frozen=True, slots=True)
class PartFailed:
    """A worker could not write its part: training continues, without this checkpoint."""

    worker: str
    generation: int
    step: int
    cause: str


@dataclass(frozen=True, slots=True)
class CheckpointDamaged:
    """A worker has found a checkpoint damaged; `cause` names the file."""

    worker: str
    generation: int
    path: str
    cause: str


@dataclass(frozen=True, slots=True)
class Checkpointed:
    """A checkpoint is complete and visible."""

    step: int
    generation: int
    path: str


@dataclass(frozen=True, slots=True)
class LayoutRequested:
    """A user requests another target layout from the next step boundary on, for the same number of
    workers; `request` identifies the answer."""

    request: str
    target_layout: TargetLayout


@dataclass(frozen=True, slots=True)
class StopRequested:
    """The driver, a signal or a user requests that the run ends at the next step boundary."""

    cause: str


@dataclass(frozen=True, slots=True)
class Woke:
    """The time that `next_deadline` returned has come."""


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
    | SnapshotEvent
    | GroupFormed
    | StateReady
    | StepCommitted
    | Progressed
    | ComputeTimed
    | Evaluated
    | Audited
    | Paused
    | Quiesced
    | HangObserved
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
