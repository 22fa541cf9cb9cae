"""Commands: what is to be done, in the imperative. They never return; events tell the outcome.

Those that go to workers carry the generation; the shell adds the controller's incarnation.
The last group tells the world something that has been decided: they are carried out by
being journalled.
"""

from __future__ import annotations

from dataclasses import dataclass, field

from elastic.geometry.assignment import Assignment
from elastic.geometry.layout import Layout
from elastic.protocol.events import PartFile
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
    """Not on these nodes; rather nowhere."""


@dataclass(frozen=True, slots=True)
class StartSnapshotServer:
    node: str


@dataclass(frozen=True, slots=True)
class StopSnapshotServer:
    """End a keeper's process for good; another is started when there is need."""

    node: str
    cause: str


@dataclass(frozen=True, slots=True)
class StartSnapshots:
    """Bring snapshots to these keepers from now on, each worker to its own, the nearest first."""

    generation: int
    workers: tuple[str, ...]
    snapshot_servers: tuple[tuple[SnapshotServer, ...], ...]
    """In the order of `workers`."""
    sets: tuple[tuple[str, ...], ...] = ()
    """Workers whose first keepers have the parity of the others' parts."""
    num_changes: int = 0
    """How often the sets have changed in this generation."""
    reason: str = ""
    """Why not all that is wanted is in full sets."""


@dataclass(frozen=True, slots=True)
class QuerySnapshotServers:
    """Have these nodes' keepers say what they have."""

    generation: int
    nodes: tuple[str, ...]


@dataclass(frozen=True, slots=True)
class ForgetSnapshots:
    """Free what was taken before this generation."""

    generation: int
    nodes: tuple[str, ...]


@dataclass(frozen=True, slots=True)
class StopWorker:
    """End a worker's process for good: by signal, since it may be half-dead."""

    worker: str
    cause: str


@dataclass(frozen=True, slots=True)
class Abort:
    """Break off whatever these workers do for the generation, but never an apply."""

    generation: int
    workers: tuple[str, ...]
    cause: str
    is_hang: bool = False
    """Somebody stands still: where everybody does is to be kept."""
    committed_step: int = 0
    """The newest step whose record the controller has: workers report later ones."""


@dataclass(frozen=True, slots=True)
class RollForward:
    """Apply the step that this vote has decided, if not yet done."""

    generation: int
    workers: tuple[str, ...]
    vote: Vote


@dataclass(frozen=True, slots=True)
class SendRecords:
    """Send the records of the steps after `committed_step`; one worker is asked."""

    generation: int
    workers: tuple[str, ...]
    committed_step: int


@dataclass(frozen=True, slots=True)
class Form:
    """Form the groups of a generation and build the program on them, without values yet.

    `reason` says why this layout, `refusals` why not others, for whoever reads the journal.
    """

    generation: int
    assignment: Assignment
    plan: ReshardPlan
    store_host: str
    store_port: int
    snapshot_servers: tuple[SnapshotServer, ...] = ()
    """Of whom parts are to be read."""
    reason: str = ""
    refusals: tuple[str, ...] = ()


@dataclass(frozen=True, slots=True)
class Reshard:
    """Move the state of the formed generation's plan into place.

    `source` is `live`, `snapshot`, `initial` or `checkpoint` (then `path` is its folder).
    """

    generation: int
    workers: tuple[str, ...]
    source: str
    path: str = ""


@dataclass(frozen=True, slots=True)
class WorkerBytes:
    """What one worker holds on its device."""

    param_bytes: int
    grad_bytes: int
    optimizer_bytes: int


@dataclass(frozen=True, slots=True)
class Resume:
    """Train on from `step`; `workers` in world-rank order, `state` in the same order."""

    generation: int
    step: int
    layout: str
    workers: tuple[str, ...]
    state: tuple[WorkerBytes, ...]
    evaluated_step: int
    released: tuple[str, ...] = ()
    """Took part in the transfers only, and may forget what they held."""
    skipped_batches: tuple[int, ...] = ()
    """The numbers of the batches that no step reads, ascending."""
    guarded_step: int = 0
    """Before this step the members save the state, and wait until it is written; 0: none."""


@dataclass(frozen=True, slots=True)
class Pause:
    """Carry the wish to stop at the next boundary into the vote."""

    generation: int
    workers: tuple[str, ...]
    cause: str


@dataclass(frozen=True, slots=True)
class RequestCheckpoint:
    """Carry the wish to save into the vote, unless a step after `step` has been saved already."""

    generation: int
    workers: tuple[str, ...]
    step: int


@dataclass(frozen=True, slots=True)
class SaveCheckpoint:
    """Write this step's state, each its part, at the boundary where all stand.

    The state is the one held under the assignment of `held_generation`.
    """

    generation: int
    workers: tuple[str, ...]
    step: int
    held_generation: int


@dataclass(frozen=True, slots=True)
class PublishCheckpoint:
    """All parts are durable: make the checkpoint visible.

    `members` are in world-rank order: with `layout` they say which file has which region, so that
    a reader opens only the files that it needs.
    """

    step: int
    generation: int
    files: tuple[PartFile, ...]
    layout: Layout = field(default_factory=Layout)
    members: tuple[str, ...] = ()


@dataclass(frozen=True, slots=True)
class DropCheckpoints:
    """Remove these from storage: of which step each is, and which generation wrote it."""

    dropped: tuple[tuple[int, int], ...]


@dataclass(frozen=True, slots=True)
class SetAside:
    """Make a damaged checkpoint invisible, without removing what is left of it."""

    step: int
    generation: int


@dataclass(frozen=True, slots=True)
class RecordStep:
    """One more committed step: the next line of `metrics.jsonl`."""

    record: StepRecord


@dataclass(frozen=True, slots=True)
class Resharded:
    """The state stands under the new assignment."""

    generation: int
    step: int
    source: str
    bytes_moved: int
    bytes_needed: int
    seconds: float


@dataclass(frozen=True, slots=True)
class RolledBack:
    """The run goes on from an older step: no living holdings covered a newer one, or for `cause`;
    then the batches with the numbers `skipped_batches` are skipped from now on."""

    generation: int
    step: int
    from_step: int
    source: str
    cause: str = ""
    skipped_batches: tuple[int, ...] = ()


@dataclass(frozen=True, slots=True)
class Warned:
    """Something that a person should know of: `kind` is `skipped`, `spike`, `audit`, `notice`,
    `machine`, `straggler` or `checkpoint`."""

    generation: int
    step: int
    kind: str
    text: str


@dataclass(frozen=True, slots=True)
class Replaced:
    """A worker leaves at the next step boundary, and a spare takes its place."""

    worker: str
    cause: str


@dataclass(frozen=True, slots=True)
class NodeQuarantined:
    """No worker is started on a node any more until then (seconds since the epoch)."""

    node: str
    until: float
    cause: str


@dataclass(frozen=True, slots=True)
class NodeReleased:
    node: str
    cause: str


@dataclass(frozen=True, slots=True)
class Waited:
    """Nothing trains, for this reason."""

    reason: str


@dataclass(frozen=True, slots=True)
class LayoutAnswered:
    """A wish for a layout is refused, or `planned` is what comes of it with those who are there.

    `present` is under what the run trains in `generation`, or shall at once; empty if it waits.
    If the two differ a higher generation brings the change.
    """

    generation: int
    request: str
    planned: str
    present: str
    refusal: str = ""


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
"""What goes to workers."""

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
    | Resharded
    | RolledBack
    | Warned
    | Replaced
    | NodeQuarantined
    | NodeReleased
    | Waited
    | LayoutAnswered
    | Stopped
)
