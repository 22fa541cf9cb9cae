"""The core's whole state: what replaying the journal brings back."""

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
    """One worker as the core knows it; `warm` and `leaving` workers are sets of the state."""

    since: float
    """When it was started; once it is ready, since when it is."""
    node: str = ""
    rack: str = ""
    pid: int = 0
    memory_bytes: int | None = None
    device: str = "cpu"
    quarantined: tuple[str, ...] = ()
    """Where it was not to be started."""
    is_ready: bool = False
    has_broken_device: bool = False
    silent_in: int = 0
    """The latest generation in which it did not answer."""

    @property
    def place(self) -> Place:
        return Place(self.node, self.rack)


@dataclass(slots=True)
class Drain:
    """A node that will be gone at `deadline`; who leaves it only for that reason."""

    deadline: float
    draining_workers: set[str] = field(default_factory=set)


@dataclass(frozen=True, slots=True)
class Crash:
    """A worker's process ended on a node, at `time`, by nobody's plan; amid `step`, if it was a
    member at work, else 0. It had been started or ready `since`."""

    time: float
    since: float
    node: str
    step: int = 0
    is_excused: bool = False
    """Whether it says nothing against its node by itself: see `avoiding`."""


@dataclass(frozen=True, slots=True)
class Quarantine:
    """How often a node has been quarantined lately, and when last."""

    number: int
    since: float


@dataclass(slots=True)
class HeldState:
    """The live state: under which assignment it lies, and who still holds his part of it."""

    assignment: Assignment
    holders: set[str]


@dataclass(slots=True)
class SnapshotSet:
    """Snapshots that are of this run's history: those of an assignment, up to a step."""

    assignment: Assignment
    newest_step: int | None = None
    """None while steps are committed under it."""
    is_used: bool = False
    """Whether the members have been told to take any."""


@dataclass(slots=True)
class CatchUp:
    """The controller lacks the records of committed steps up to `target`, and has asked a worker
    for them."""

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
    """Under which the state lies that is written."""
    since: float = 0.0
    deadline: float = 0.0
    """When the missing parts are late: see `late_writers`."""
    files: dict[str, PartFile] = field(default_factory=dict)
    is_published: bool = False


@dataclass(frozen=True, slots=True)
class FormerTarget:
    """What was wished for before `request`; it comes back if that turns out to be impossible."""

    target_layout: TargetLayout
    request: str


@dataclass(frozen=True, slots=True)
class Rollback:
    """The run shall go on from a step up to `limit`, and leave the batches of the steps from there
    up to `through` out (0: of none)."""

    limit: int
    cause: str
    through: int = 0


@dataclass(frozen=True, slots=True)
class VoidedCheckpoints:
    """Checkpoints of steps beyond `step` that generations before this one wrote do not count."""

    step: int
    generation: int


@dataclass(slots=True)
class CoreState:
    """Everything that the core decides from."""

    policy: Policy = field(default_factory=Policy)
    target_layout: TargetLayout = field(default_factory=TargetLayout)
    former_target: FormerTarget | None = None
    """Only while nothing has been formed under the new one, nor would be another by it."""
    job: Job = field(default_factory=Job)
    incarnation: int = 0
    generation: int = 0
    lineage: int = 0
    phase: Phase = field(default_factory=lambda: Waiting("not opened", 0.0))
    ending: Ending | None = None

    committed_step: int = 0
    evaluated_step: int = 0
    catch_up: CatchUp | None = None
    """While the controller lacks records of steps that have committed."""
    unheard: tuple[int, int] = (0, 0)
    """The first and the last of the steps of which only the records were heard of, not the votes:
    which of them were saved is known by their parts."""
    last_vote: Vote | None = None
    recent_step_s: list[float] = field(default_factory=list)
    timed_layout: Layout | None = None
    """Under which these steps were."""
    fatal_step: int = 0
    """The step amid which members were last lost."""
    fatal: list[tuple[int, tuple[int, ...]]] = field(default_factory=list)
    """Of each of them the generation, and the microbatches that it ran."""
    is_fatal_evaluation: bool = False
    """Whether it was the evaluation before that step, and the microbatches are held-out data."""
    guarded_step: int = 0
    """The members save the state before this step, and wait until it is written; 0: none."""
    unguarded_step: int = 0
    """Before this one they waited in vain: a write hangs, and the run goes on without the guard."""
    boundary_at: float = 0.0
    """When the members last stood at a step boundary, as far as it has been told."""
    recent_form_s: list[float] = field(default_factory=list)
    """How long the latest formings took, also those that were aborted as late."""
    standing_still: tuple[str, ...] = ()
    """Workers of this generation whose training threads stood still, the longest first."""
    reshard_s: float = 0.0
    """How long the latest forming and re-layout took."""
    num_attempts: int = 0
    last_failure: str = ""

    worker_records: dict[str, WorkerRecord] = field(default_factory=dict)
    warm: set[str] = field(default_factory=set)
    draining: set[str] = field(default_factory=set)
    node_drains: dict[str, Drain] = field(default_factory=dict)
    """By node."""
    crashes: list[Crash] = field(default_factory=list)
    """The latest, the oldest first."""
    quarantined: dict[str, float] = field(default_factory=dict)
    """By node, until when."""
    quarantines: dict[str, Quarantine] = field(default_factory=dict)
    """By node, also of nodes that are used again."""
    short_since: float | None = None
    """Since when the run lacks workers while a node is quarantined."""
    recent_start_s: list[float] = field(default_factory=list)
    """How long the latest workers took from being started to being ready."""
    timed: tuple[int, int] = (0, 0)
    """Generation and step of the latest report of how long members computed."""
    num_slow: dict[str, int] = field(default_factory=dict)
    """Of the members that were stragglers in it: in how many reports in a row."""
    told_slow: set[str] = field(default_factory=set)
    num_replaced: int = 0
    """So many stragglers have been replaced."""
    next_worker: int = 0
    num_start_failures: int = 0
    no_start_before: float = 0.0
    ever_ready: bool = False
    digest: str | None = None
    ever_formed: bool = False
    standby_since: float | None = None
    """When the first of the joiners came about whom it has not been decided yet."""
    no_growth_before: float = 0.0
    paused_at: float | None = None
    """The last progress before a planned pause, until a step commits after it."""
    pauses_s: list[float] = field(default_factory=list)
    """How long the latest ones were."""
    changes_at: list[float] = field(default_factory=list)
    """When members were lost or left, at last."""
    changed_generation: int = 0
    idle_since: float | None = None
    """When spares were last seen, or found to be of use; None: nobody is spare."""
    num_given_back: int = 0
    """So many spares were of no use: that many fewer are wanted."""
    num_gang_backoffs: int = 0
    """Since workers last trained."""
    not_again_before: float = 0.0
    """No worker is asked for, since all have been given back."""

    controller_errors: dict[str, int] = field(default_factory=dict)
    """By place (the class of an event or command, or a thread's name): how many unexpected
    exceptions in a row the controller had there."""
    has_controller_failed: bool = False
    """They end this session of the run."""

    store_host: str = ""
    store_port: int = 0
    held: HeldState | None = None
    also_held: list[HeldState] = field(default_factory=list)
    """The same step under other assignments, the newest first: the one before, until a step commits
    under the new one; and those to which broken re-layouts were going."""
    snapshot_servers: dict[str, SnapshotServer] = field(default_factory=dict)
    """By node."""
    starting_snapshot_servers: set[str] = field(default_factory=set)
    snapshot_sets: list[SnapshotSet] = field(default_factory=list)
    snapshot_placement: Placement = field(default_factory=Placement)
    """Where the members were last told to bring their snapshots."""
    num_set_changes: int = 0
    """How often the sets in it have changed in this generation."""
    placement_at: float | None = None
    """When that is to be worked out anew, if at all."""
    wanted_snapshot_servers: set[str] | None = None
    """The nodes where this generation needs one; None while that is not known."""
    num_snapshot_server_losses: int = 0
    no_snapshot_server_before: float = 0.0
    are_queried: bool = False
    """Whether the keepers have been asked what they have since training stopped."""
    asked: set[str] = field(default_factory=set)
    """The keepers that have not said yet what they have."""
    queried_until: float = 0.0
    are_snapshot_servers_late: bool = False
    """Those that have not said it are waited for only if the others do not have enough."""
    slots: dict[str, tuple[Slot, ...]] = field(default_factory=dict)
    """What they have said, by node."""
    parities: dict[str, tuple[ParitySlot, ...]] = field(default_factory=dict)
    """Likewise."""
    saved: list[Saved] = field(default_factory=list)
    """The whole checkpoints, the oldest first."""
    uploads: dict[str, Upload] = field(default_factory=dict)
    stale_checkpoints: list[tuple[int, int]] = field(default_factory=list)
    """Step and generation of what lies in storage and is of no use: void, or never to be whole."""
    held_out_losses: dict[str, float] = field(default_factory=dict)
    """By step, as far as they say which checkpoint is the best."""
    save_at: float | None = None
    """When a checkpoint is wanted that no multiple of steps brings."""
    is_save_requested: bool = False
    """Whether the members of this generation have been told so."""
    num_save_failures: int = 0
    late_writers: set[str] = field(default_factory=set)
    """Members that leave only because they write their part of a checkpoint for too long."""
    checkpoint_costs: CheckpointCosts = field(default_factory=CheckpointCosts)

    skipped_since: int | None = None
    """The first of the steps up to the committed one that were all skipped."""
    recent_losses: list[tuple[int, float]] = field(default_factory=list)
    """The latest steps that have one, with it; only where spikes are watched for."""
    spiked_step: int = 0
    """The latest whose loss spiked, and the run went on."""
    audited_step: int = 0
    """Up to here all replicas were found equal, or the run was begun from here."""
    judged_generation: int = 0
    """In which replicas were found to differ."""
    rollback: Rollback | None = None
    """Until a generation is formed from an older step."""
    rolled_back_from: int = 0
    num_rollbacks: int = 0
    """Since the run last came clearly beyond the step that it was taken back from."""
    voided: tuple[VoidedCheckpoints, ...] = ()
    skipped_batches: tuple[int, ...] = ()
    """The numbers of the batches that are skipped on purpose, ascending."""

    def enter(self, phase: Phase) -> None:
        """Change the phase; the table of transitions must allow it."""
        assert may_follow(self.phase, phase), f"{self.phase} may not lead to {phase}"
        self.phase = phase

    def commit(self, step: int) -> None:
        """One more step stands; what still lies elsewhere is of the step before."""
        self.committed_step = step
        self.also_held = []
        self.num_attempts = 0

    def want_save(self, now: float) -> None:
        """A checkpoint as soon as the members can be told so."""
        self.save_at = now if self.save_at is None else min(now, self.save_at)

    def stands(self, step: int, generation: int) -> bool:
        """Whether a checkpoint counts: no rewind has taken its step back."""
        return not any(step > void.step and generation < void.generation for void in self.voided)

    def holdings(self) -> list[HeldState]:
        """The live state under each assignment under which some of it lies."""
        return [*([self.held] if self.held else []), *self.also_held]

    def num_staying(self) -> int:
        """Warm workers that are not about to leave."""
        return len(self.warm) - len(self.draining & self.warm)

    def staying(self) -> dict[str, Place]:
        """Where these are."""
        return {
            worker: self.worker_records[worker].place
            for worker in sorted(self.warm - self.draining)
        }

    def on(self, node: str) -> set[str]:
        """The workers there, as far as they have said where they are."""
        return {
            worker
            for worker, worker_record in self.worker_records.items()
            if worker_record.node == node
        }

    def least_memory_bytes(self) -> int | None:
        """What the smallest of them can hold, or None where nobody can say."""
        staying = self.warm - self.draining
        memories = [m for w in staying if (m := self.worker_records[w].memory_bytes) is not None]
        return min(memories, default=None)

    @property
    def saved_step(self) -> int:
        """Of the newest whole checkpoint; 0, the initial state's, if there is none."""
        return self.saved[-1].step if self.saved else 0

    def members(self) -> tuple[str, ...]:
        """Who trains, or last did."""
        return self.held.assignment.members if self.held else ()

    def median_step_s(self) -> float:
        times = sorted(self.recent_step_s)
        return times[len(times) // 2] if times else 0.0
