"""Commands: the outputs of the core, in the imperative. They return nothing; events report the
outcome.

Commands to workers carry the generation; the shell adds the controller's incarnation. A note
(`notes`) only records a decision: it is carried out by writing it to the journal.
"""

from __future__ import annotations

from dataclasses import dataclass, field

from elastic.geometry.assignment import Assignment
from elastic.geometry.layout import Layout
from elastic.geometry.machine_report import Peer
from elastic.protocol.events import PartFile
from elastic.protocol.notes import Note
from elastic.protocol.votes import StepRecord, Vote
from elastic.reshard.reshard_plan import ReshardPlan
from elastic.reshard.snapshot_placement import SnapshotServer


@dataclass(frozen=True, slots=True)
class StartStore:
    pass


@dataclass(frozen=True, slots=True)
class StartWorkers:
    workers: tuple[str, ...]
    quarantined: tuple[str, ...] = ()
    """Nodes on which no worker may start, even if no other node is free."""
    peers: tuple[Peer, ...] = ()
    """Members on different nodes, with which a new worker measures its links."""
    market: str = ""
    """`spot` or `on-demand`: the market of their machines; empty: any."""


@dataclass(frozen=True, slots=True)
class StartSnapshotServer:
    node: str


@dataclass(frozen=True, slots=True)
class StopSnapshotServer:
    """End the process of a snapshot server for good; another starts when one is needed."""

    node: str
    cause: str


@dataclass(frozen=True, slots=True)
class StartSnapshots:
    """From now on store the snapshots of each worker on its snapshot servers, nearest first."""

    generation: int
    workers: tuple[str, ...]
    snapshot_servers: tuple[tuple[SnapshotServer, ...], ...]
    """In the order of `workers`."""
    sets: tuple[tuple[str, ...], ...] = ()
    """Parity sets: the first snapshot server of each worker also holds a parity of the others."""
    num_changes: int = 0
    """How often the sets or `every` have changed in this generation."""
    reason: str = ""
    """Why the requested redundancy is not possible in full; empty if it is."""
    every: int = 0
    """Steps between two snapshots, as their cost requires; 0: as the worker's options say."""


@dataclass(frozen=True, slots=True)
class QuerySnapshotServers:
    """Ask the snapshot servers of these nodes which snapshots they hold."""

    generation: int
    nodes: tuple[str, ...]


@dataclass(frozen=True, slots=True)
class ForgetSnapshots:
    """Free all snapshots that were taken before this generation, except those of another."""

    generation: int
    nodes: tuple[str, ...]
    kept_generation: int = 0
    """0: none is kept."""


@dataclass(frozen=True, slots=True)
class StopWorker:
    """End a worker's process for good: by signal, because it may not respond."""

    worker: str
    cause: str


@dataclass(frozen=True, slots=True)
class Abort:
    """Abort all that these workers do for the generation, except an apply."""

    generation: int
    workers: tuple[str, ...]
    cause: str
    is_hang: bool = False
    """Whether a hang is the cause: then each worker saves the stacks of its threads."""
    committed_step: int = 0
    """The newest step whose record the controller has: workers report later records."""


@dataclass(frozen=True, slots=True)
class RollForward:
    """Apply the step that this vote has decided, if the worker has not applied it yet."""

    generation: int
    workers: tuple[str, ...]
    vote: Vote


@dataclass(frozen=True, slots=True)
class SendRecords:
    """Send the records of the steps after `committed_step`; goes to one worker."""

    generation: int
    workers: tuple[str, ...]
    committed_step: int


@dataclass(frozen=True, slots=True)
class Form:
    """Form the groups of a generation and build the program on them, without values yet.

    For readers of the journal, `reason` explains the layout and `refusals` why others were refused.
    """

    generation: int
    assignment: Assignment
    plan: ReshardPlan
    store_host: str
    store_port: int
    snapshot_servers: tuple[SnapshotServer, ...] = ()
    """The snapshot servers from which workers read parts."""
    reason: str = ""
    refusals: tuple[str, ...] = ()


@dataclass(frozen=True, slots=True)
class Reshard:
    """Move the state into place, as the plan of the formed generation says.

    `source` is `live`, `snapshot`, `initial` or `checkpoint` (then `path` is its folder).
    """

    generation: int
    workers: tuple[str, ...]
    source: str
    path: str = ""


@dataclass(frozen=True, slots=True)
class WorkerBytes:
    """The bytes that one worker holds on its device."""

    param_bytes: int
    grad_bytes: int
    optimizer_bytes: int


@dataclass(frozen=True, slots=True)
class Resume:
    """Continue training from `step`; `workers` and `state` are in world-rank order."""

    generation: int
    step: int
    layout: str
    workers: tuple[str, ...]
    state: tuple[WorkerBytes, ...]
    evaluated_step: int
    released: tuple[str, ...] = ()
    """Workers that took part only in the transfers, and may drop what they held."""
    skipped_batches: tuple[int, ...] = ()
    """The numbers of the batches that no step reads, ascending."""
    guarded_step: int = 0
    """Before this step the members save the state and wait until it is written; 0: none."""


@dataclass(frozen=True, slots=True)
class Pause:
    """Put a pause request into the vote, so that all stop at the next step boundary."""

    generation: int
    workers: tuple[str, ...]
    cause: str


@dataclass(frozen=True, slots=True)
class RequestCheckpoint:
    """Put a save request into the vote, unless a step after `step` has been saved already."""

    generation: int
    workers: tuple[str, ...]
    step: int


@dataclass(frozen=True, slots=True)
class SaveCheckpoint:
    """Write the state of this step, each worker its part, at the boundary where all have paused.

    The state is the one held under the assignment of `held_generation`.
    """

    generation: int
    workers: tuple[str, ...]
    step: int
    held_generation: int


@dataclass(frozen=True, slots=True)
class PublishCheckpoint:
    """Make a checkpoint visible, because all its parts are durable.

    `members` are in world-rank order. With `layout` they determine which file has which region, so
    that a reader opens only the files that it needs.
    """

    step: int
    generation: int
    files: tuple[PartFile, ...]
    layout: Layout = field(default_factory=Layout)
    members: tuple[str, ...] = ()


@dataclass(frozen=True, slots=True)
class DropCheckpoints:
    """Remove checkpoints from storage, each given as its step and the generation that wrote it."""

    dropped: tuple[tuple[int, int], ...]


@dataclass(frozen=True, slots=True)
class SetAside:
    """Make a damaged checkpoint invisible without removing its files."""

    step: int
    generation: int


@dataclass(frozen=True, slots=True)
class RecordStep:
    """Write the next line of `metrics.jsonl`: one more committed step."""

    record: StepRecord


@dataclass(frozen=True, slots=True)
class Stopped:
    """The run has ended: `completed`, `failed`, `interrupted` or `user_error`."""

    outcome: str
    step: int
    reason: str = ""
    traceback: str = ""


Order = (
    Abort
    | Form
    | Reshard
    | Resume
    | Pause
    | StartSnapshots
    | SendRecords
    | RollForward
    | RequestCheckpoint
    | SaveCheckpoint
)
"""The commands that go to workers."""

Command = (
    StartStore
    | StartWorkers
    | StartSnapshotServer
    | StopSnapshotServer
    | StartSnapshots
    | QuerySnapshotServers
    | ForgetSnapshots
    | StopWorker
    | Abort
    | RollForward
    | SendRecords
    | Form
    | Reshard
    | Resume
    | Pause
    | RequestCheckpoint
    | SaveCheckpoint
    | PublishCheckpoint
    | DropCheckpoints
    | SetAside
    | RecordStep
    | Stopped
    | Note
)
