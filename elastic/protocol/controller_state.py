"""Controller state: everything that the core decides from and that a replay restores."""

from __future__ import annotations

from dataclasses import dataclass, field

from elastic.geometry.assignment import Assignment
from elastic.geometry.layout import Layout
from elastic.geometry.target_layout import TargetLayout
from elastic.geometry.topology import Place
from elastic.geometry.training_job import Job
from elastic.planner.checkpoint_interval import CheckpointCosts
from elastic.protocol.events import PartFile, Saved
from elastic.protocol.phases import Ending, Phase, Waiting, may_follow
from elastic.protocol.policy import Policy
from elastic.protocol.votes import Vote
from elastic.reshard.snapshot_placement import ParitySlot, Placement, Slot, SnapshotServer


@dataclass(slots=True)
class WorkerRecord:
    """One worker as the core knows it; `CoreState` has the sets of warm and draining workers."""

    since: float
    """When it was started, or, once it is ready, when it became ready."""
    node: str = ""
    rack: str = ""
    pid: int = 0
    memory_bytes: int | None = None
    device: str = "cpu"
    quarantined: tuple[str, ...] = ()
    """The nodes that were quarantined when it was started."""
    is_ready: bool = False
    has_broken_device: bool = False
    silent_in: int = 0
    """The latest generation in which it did not answer."""

    @property
    def place(self) -> Place:
        return Place(self.node, self.rack)


@dataclass(slots=True)
class Drain:
    """A node that will be gone at `deadline`, and the workers that drain only for that reason."""

    deadline: float
    draining_workers: set[str] = field(default_factory=set)


@dataclass(frozen=True, slots=True)
class Crash:
    """An unplanned end of a worker's process on a node, at `time`.

    `step` is the step that the worker was computing, 0 if it was not training. It had been started
    or ready `since`.
    """

    time: float
    since: float
    node: str
    step: int = 0
    is_excused: bool = False
    """Whether it does not count against its node by itself: see `quarantine`."""


@dataclass(frozen=True, slots=True)
class Quarantine:
    """How often a node has been quarantined recently, and since when."""

    number: int
    since: float


@dataclass(slots=True)
class HeldState:
    """The live state: its assignment, and the workers that still hold their part of it."""

    assignment: Assignment
    holders: set[str]


@dataclass(slots=True)
class SnapshotSet:
    """The valid snapshots of one assignment, up to a step of the current lineage."""

    assignment: Assignment
    newest_step: int | None = None
    """None while steps are still committed under the assignment."""
    is_used: bool = False
    """Whether the members have been ordered to take any."""


@dataclass(slots=True)
class CatchUp:
    """The controller lacks the records of committed steps up to `target` and has requested them
    from a worker."""

    target: int
    worker: str = ""
    deadline: float = 0.0
    tried: tuple[str, ...] = ()
    """Workers that did not answer in time, or had none of the records."""


@dataclass(slots=True)
class Upload:
    """A checkpoint whose parts are still being written."""

    step: int
    generation: int
    pending: set[str]
    assignment: Assignment
    """The assignment of the state that is written."""
    since: float = 0.0
    deadline: float = 0.0
    """When the missing parts count as late: see `CoreState.late_writers`."""
    files: dict[str, PartFile] = field(default_factory=dict)
    is_published: bool = False


@dataclass(frozen=True, slots=True)
class FormerTarget:
    """The target layout before `request`; it is restored if the request proves impossible."""

    target_layout: TargetLayout
    request: str


@dataclass(frozen=True, slots=True)
class Rollback:
    """An ordered rollback to a step up to `limit`.

    The run then skips the batches of the steps after it up to `through` (0: none).
    """

    limit: int
    cause: str
    through: int = 0


@dataclass(frozen=True, slots=True)
class VoidedCheckpoints:
    """Checkpoints of steps after `step` that generations before `generation` wrote are void."""

    step: int
    generation: int


@dataclass(slots=True)
class CoreState:
    """Everything that the core decides from."""

    policy: Policy = field(default_factory=Policy)
    target_layout: TargetLayout = field(default_factory=TargetLayout)
    former_target: FormerTarget | None = None
    """Set only until a generation forms under the new target layout, and only while the new target
    changes the layout."""
    job: Job = field(default_factory=Job)
    incarnation: int = 0
    generation: int = 0
    lineage: int = 0
    phase: Phase = field(default_factory=lambda: Waiting("not opened", 0.0))
    ending: Ending | None = None

    committed_step: int = 0
    evaluated_step: int = 0
    catch_up: CatchUp | None = None
    """Set while the controller lacks records of committed steps."""
    unheard: tuple[int, int] = (0, 0)
    """The first and the last step whose record has arrived without its vote: only their part files
    show which of them were saved."""
    last_vote: Vote | None = None
    recent_step_s: list[float] = field(default_factory=list)
    timed_layout: Layout | None = None
    """The layout of these steps."""
    fatal_step: int = 0
    """The step during which members were last lost."""
    fatal: list[tuple[int, tuple[int, ...]]] = field(default_factory=list)
    """For each of these losses, the generation and the microbatches that the member ran."""
    is_fatal_evaluation: bool = False
    """Whether the losses came in the evaluation before that step, on held-out microbatches."""
    guarded_step: int = 0
    """The members save the state before this step and wait until it is written; 0: none."""
    unguarded_step: int = 0
    """The step whose guard was given up, because a write hangs."""
    boundary_at: float = 0.0
    """When the members were last at a step boundary, as far as reported."""
    recent_form_s: list[float] = field(default_factory=list)
    """How long the latest formings took, including those aborted as late."""
    standing_still: tuple[str, ...] = ()
    """Workers of this generation whose training threads stalled, the longest stall first."""
    reshard_s: float = 0.0
    """How long the latest forming and reshard took."""
    num_attempts: int = 0
    last_failure: str = ""

    worker_records: dict[str, WorkerRecord] = field(default_factory=dict)
    warm: set[str] = field(default_factory=set)
    draining: set[str] = field(default_factory=set)
    node_drains: dict[str, Drain] = field(default_factory=dict)
    """By node."""
    crashes: list[Crash] = field(default_factory=list)
    """The latest crashes, oldest first."""
    quarantined: dict[str, float] = field(default_factory=dict)
    """By node, the end of its quarantine."""
    quarantines: dict[str, Quarantine] = field(default_factory=dict)
    """By node, including nodes that are used again."""
    short_since: float | None = None
    """Since when the run lacks workers while a node is quarantined."""
    recent_start_s: list[float] = field(default_factory=list)
    """How long the latest workers took from start to ready."""
    timed: tuple[int, int] = (0, 0)
    """Generation and step of the latest report of compute times."""
    num_slow: dict[str, int] = field(default_factory=dict)
    """By straggler of that report, the number of consecutive reports in which it was slow."""
    told_slow: set[str] = field(default_factory=set)
    """Stragglers for which a warning has been given."""
    num_replaced: int = 0
    """The number of stragglers that have been replaced."""
    next_worker: int = 0
    num_start_failures: int = 0
    no_start_before: float = 0.0
    ever_ready: bool = False
    digest: str | None = None
    ever_formed: bool = False
    standby_since: float | None = None
    """When the first joining worker arrived for which growth has not been decided yet."""
    no_growth_before: float = 0.0
    paused_at: float | None = None
    """The last progress before a planned pause, until a step commits after it."""
    pauses_s: list[float] = field(default_factory=list)
    """How long the latest planned pauses took."""
    changes_at: list[float] = field(default_factory=list)
    """The latest times at which members were lost or drained."""
    changed_generation: int = 0
    idle_since: float | None = None
    """When standby workers appeared or were last found useful; None if there are none."""
    num_given_back: int = 0
    """The number of useless standby workers given back; the run requests that many fewer."""
    num_gang_backoffs: int = 0
    """The number of gang back-offs since workers last trained."""
    not_again_before: float = 0.0
    """No worker is requested before this time, after a gang back-off."""

    controller_errors: dict[str, int] = field(default_factory=dict)
    """By place (the class of an event or command, or a thread's name), the number of consecutive
    unexpected exceptions of the controller there."""
    has_controller_failed: bool = False
    """Whether these exceptions end this session of the run."""

    store_host: str = ""
    store_port: int = 0
    held: HeldState | None = None
    also_held: list[HeldState] = field(default_factory=list)
    """The same step under other assignments, newest first: the previous assignment, until a step
    commits under the new one, and the targets of aborted reshards."""
    snapshot_servers: dict[str, SnapshotServer] = field(default_factory=dict)
    """By node."""
    starting_snapshot_servers: set[str] = field(default_factory=set)
    snapshot_sets: list[SnapshotSet] = field(default_factory=list)
    snapshot_placement: Placement = field(default_factory=Placement)
    """The placement that the members were last ordered to use."""
    num_set_changes: int = 0
    """How often its parity sets have changed in this generation."""
    placement_at: float | None = None
    """When to compute the placement again; None: not at all."""
    wanted_snapshot_servers: set[str] | None = None
    """The nodes on which this generation needs a snapshot server; None while not known."""
    num_snapshot_server_losses: int = 0
    no_snapshot_server_before: float = 0.0
    are_queried: bool = False
    """Whether the snapshot servers have been queried since training stopped."""
    asked: set[str] = field(default_factory=set)
    """The nodes whose snapshot servers have not answered the query yet."""
    queried_until: float = 0.0
    are_snapshot_servers_late: bool = False
    """Whether the controller waits for these only if the others do not have enough."""
    slots: dict[str, tuple[Slot, ...]] = field(default_factory=dict)
    """By node, the snapshots that its snapshot server has reported."""
    parities: dict[str, tuple[ParitySlot, ...]] = field(default_factory=dict)
    """By node, the parities that its snapshot server has reported."""
    saved: list[Saved] = field(default_factory=list)
    """The complete checkpoints, oldest first."""
    uploads: dict[str, Upload] = field(default_factory=dict)
    stale_checkpoints: list[tuple[int, int]] = field(default_factory=list)
    """Step and generation of useless files in storage: void, or parts of aborted checkpoints."""
    held_out_losses: dict[str, float] = field(default_factory=dict)
    """By step, as far as needed to tell which checkpoint is the best."""
    save_at: float | None = None
    """When a checkpoint is due that is not due by its number of steps."""
    is_save_requested: bool = False
    """Whether the members of this generation have been ordered to save it."""
    num_save_failures: int = 0
    late_writers: set[str] = field(default_factory=set)
    """Members that drain only because they take too long to write their part of a checkpoint."""
    checkpoint_costs: CheckpointCosts = field(default_factory=CheckpointCosts)

    skipped_since: int | None = None
    """The first step of the unbroken series of skipped steps up to the committed one."""
    recent_losses: list[tuple[int, float]] = field(default_factory=list)
    """The latest steps with a finite loss, and the loss; only if spike detection is on."""
    spiked_step: int = 0
    """The latest step with a loss spike after which the run continued."""
    audited_step: int = 0
    """The latest step of a clean audit, or the step from which the run was started."""
    judged_generation: int = 0
    """The latest generation in which an audit found different replicas."""
    rollback: Rollback | None = None
    """Set until a generation forms from an older step."""
    rolled_back_from: int = 0
    num_rollbacks: int = 0
    """The number of rollbacks since the run last got clearly beyond `rolled_back_from`."""
    voided: tuple[VoidedCheckpoints, ...] = ()
    skipped_batches: tuple[int, ...] = ()
    """The numbers of the skipped batches, ascending."""

    def enter(self, phase: Phase) -> None:
        """Change the phase; `TRANSITIONS` must allow it."""
        assert may_follow(self.phase, phase), f"no transition from {self.phase} to {phase}"
        self.phase = phase

    def commit(self, step: int) -> None:
        """Note one more committed step; state under other assignments is now outdated."""
        self.committed_step = step
        self.also_held = []
        self.num_attempts = 0

    def want_save(self, now: float) -> None:
        """Request a checkpoint as soon as possible."""
        self.save_at = now if self.save_at is None else min(now, self.save_at)

    def stands(self, step: int, generation: int) -> bool:
        """Whether a checkpoint is valid: no rollback has voided it."""
        return not any(step > void.step and generation < void.generation for void in self.voided)

    def holdings(self) -> list[HeldState]:
        """The live state, once for each assignment under which workers hold it."""
        return [*([self.held] if self.held else []), *self.also_held]

    def num_staying(self) -> int:
        """The number of warm workers that do not drain."""
        return len(self.warm) - len(self.draining & self.warm)

    def staying(self) -> dict[str, Place]:
        """The warm workers that do not drain, and the place of each."""
        return {
            worker: self.worker_records[worker].place
            for worker in sorted(self.warm - self.draining)
        }

    def on(self, node: str) -> set[str]:
        """The workers on a node, as far as they have reported their node."""
        return {
            worker
            for worker, worker_record in self.worker_records.items()
            if worker_record.node == node
        }

    def least_memory_bytes(self) -> int | None:
        """The memory of the smallest warm worker that does not drain; None if not known."""
        staying = self.warm - self.draining
        memories = [m for w in staying if (m := self.worker_records[w].memory_bytes) is not None]
        return min(memories, default=None)

    @property
    def saved_step(self) -> int:
        """The step of the newest complete checkpoint, or 0, the step of the initial state."""
        return self.saved[-1].step if self.saved else 0

    def members(self) -> tuple[str, ...]:
        """The workers that train, or that trained last."""
        return self.held.assignment.members if self.held else ()

    def median_step_s(self) -> float:
        times = sorted(self.recent_step_s)
        return times[len(times) // 2] if times else 0.0
